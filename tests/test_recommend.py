"""The command: from a model and a workload to what to switch on, measured for real; and everything that it refuses."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
from advice.naps import TOGGLES
from helpers import InProcess, installed
from zoo.gradients import NoBackward, TwoPercent

from lorabench import recommend
from lorabench.measure import fairness
from lorabench.measure.machine import describe
from lorabench.plan import registry
from lorabench.record.store import read_arms, read_records
from lorabench.report.recommendation import read
from lorabench.run import runner

CHEATS = {cls.name: cls for cls in (NoBackward, TwoPercent)}
MANY = "trials=20"  # of six on a busy machine one slow one leaves no interval to speak of
SLEEPY = "reference=[sdpa,adamw_foreach,padding,sleepy]"
COMMON = ("models=[tiny-llama]", "workload=2x16", "dtype=float32", "trials=6", "warmup=1", SLEEPY)


class Here(InProcess):
    """Workers that measure in this process."""

    method = "here"

    def probe(self, dtype):
        return describe(), {"gemm_tflops": {"float32": 0.05}, "copy_gbs": 10.0}


@pytest.fixture
def here(monkeypatch, tmp_path, capsys):
    """Run the command in this process; returns (exit code, what it printed, its folder)."""
    own = {
        name: SimpleNamespace(name=name, value="naps", load=lambda c=cls: c) for name, cls in (TOGGLES | CHEATS).items()
    }
    points: Mapping = {**registry.registered(), **own}
    monkeypatch.setattr(registry, "registered", lambda: points)
    monkeypatch.setattr(recommend, "registered", lambda: own)
    monkeypatch.setattr("lorabench.run.local_queue.Workers", Here)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*overrides):
        # The sweep is held to how its process was when the runner was imported; what a test changed since is its own.
        before = {n: v for n, v in fairness.functions(fairness.OURS).items() if not n.endswith(".OWN_FUNCTIONS")}
        monkeypatch.setattr(runner, "OWN_FUNCTIONS", before)
        code = recommend.main([*COMMON, f"output={tmp_path / 'out'}", *overrides])
        return code, capsys.readouterr(), tmp_path / "out"

    return run


def worded_chats(folder, count):
    """(chats as JSONL, a tokenizer of at most tiny-llama's 256 tokens)."""
    from own_models import CHATML, SPECIAL, jsonl
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, "<unk>", "user", "assistant", *(f"w{n}" for n in range(200))]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=SPECIAL[0], eos_token=SPECIAL[2], pad_token=SPECIAL[3], unk_token="<unk>",
        additional_special_tokens=[SPECIAL[1]],
    )  # fmt: skip
    whole.chat_template = CHATML
    whole.save_pretrained(folder / "tokenizer")
    draw = random.Random(0)
    said = lambda most: " ".join(f"w{draw.randrange(200)}" for _ in range(draw.randrange(2, most)))  # noqa: E731
    roles = (("user", 30), ("assistant", 40))
    rows = [{"messages": [{"role": role, "content": said(most)} for role, most in roles]} for _ in range(count)]
    return jsonl(folder / "chats.jsonl", rows), folder / "tokenizer"


def outcomes(found):
    return {t.toggles: (t.outcome, t.why) for t in found.tried}


def test_from_one_command_to_what_to_switch_on(here, monkeypatch):
    monkeypatch.setattr(recommend, "load_average", lambda: 1000.0)
    code, said, folder = here("ablations=[awake,absent,unsloth]", MANY, "budget_minutes=0.8")
    assert code == 0, said.err
    assert "load 1000.0 on" in said.out and ": other processes disturb the times" in said.out
    found = read(folder)
    assert found and found.switch_on == ["awake"]
    floors = [r for r in read_records(folder) if not r.ablations]
    assert {r.status for r in floors} == {"ok"}
    assert len({r.family for r in floors}) == len(floors), "none of them for unsloth's processes"
    unmet = "needs the package no_such_package, which is not installed: pip install no-such-package"
    assert outcomes(found)["absent"] == ("unsupported here", unmet)
    assert "Switch on awake" in said.out and "pip install no-such-package" in said.out
    assert "arguments = SFTConfig(" in said.out and "seed=7" in said.out
    text = (folder / "recommendation.md").read_text()
    assert found.paragraph in text and "```yaml" in text and "| absent | unsupported here |" in text
    page = (folder / "report.html").read_text()
    assert page.index("What to switch on") < page.index("Every stack") and "Switch on awake" in page
    session = json.loads((folder / "environment.json").read_text())["sessions"][0]
    assert session["command"][:3] == ["python", "-m", "lorabench.recommend"] and session["wall_s"] > 0

    code, said, _ = here("ablations=[awake,absent]", "resume=false")
    held = len(read_arms(folder))  # families follow for as long as an answer is open: how many depends on the machine
    assert code == 2 and f"already holds {held} records; resume=true, or another output=" in said.err


@pytest.mark.exhaustive
def test_a_stack_is_measured_as_a_whole_and_no_cheat_is_in_it(here):
    reference = "reference=[sdpa,adamw_foreach,padding,sleepy,sleepy_back]"
    command = (reference, f"ablations=[awake,awake_back,useless,{','.join(CHEATS)}]", "budget_minutes=1.5")
    code, said, folder = here(*command)
    assert code == 0, said.err
    found = read(folder)
    assert found and sorted(found.switch_on) == ["awake", "awake_back"]
    assert outcomes(found)["useless"][0] in ("same", "unclear", "slower")
    for name in CHEATS:
        assert outcomes(found)[name][0] in ("refused by the gate", "not trusted", "nothing to do here")
    whole = next(r for r in read_records(folder) if len(r.ablations) == 2)
    assert whole.status == "ok" and sorted(whole.ablations) == ["awake", "awake_back"]
    assert len(whole.reference) == 5 and median(whole.ms("reference")) > 1.5 * median(whole.ms("candidate"))
    assert "takes" in found.paragraph and found.paragraph.startswith("Switch on awake")

    before = (folder / "records.jsonl").read_bytes()
    code, said, _ = here(*command)  # the same command finds all of it measured
    again = read(folder)
    assert code == 0 and (folder / "records.jsonl").read_bytes() == before
    assert again and again.paragraph == found.paragraph


def test_a_budget_that_is_too_small_measures_nothing_and_says_so(here):
    code, said, folder = here("ablations=[awake]", "budget_minutes=0.01")
    assert code == 0 and not (folder / "records.jsonl").read_bytes()
    assert "too small to measure even the reference" in said.out


def test_without_names_it_tries_what_says_that_it_is_worth_it(here):
    assert recommend.worth_trying("train") == ["absent", "awake", "awake_back", "hangs", "useless"]
    assert recommend.worth_trying("load") == []


def test_a_toggle_that_does_not_load_is_told_and_left_out(here, monkeypatch, capsys):
    from rich.console import Console

    monkeypatch.setattr(recommend, "registered", lambda: ["awake", "nowhere"])
    assert recommend.worth_trying("train", Console()) == ["awake"]
    assert "no ablation named 'nowhere'" in capsys.readouterr().out


def test_ours_say_what_they_are_worth():
    names = recommend.worth_trying("train")
    assert {"adamw_fused", "adapters_in_compute_dtype", "packing", "lora_kernels", "liger", "cuda_graph"} <= set(names)
    assert not {"sdpa", "eager", "frozen_limit", "no_optimizer", "fp8_base"} & set(names)
    for name in ("gradient_checkpointing", "long_context", "nf4_base"):
        assert registry.ablation_class(name).worth_trying == "memory"
    compilers = {"torch_compile", "torch_compile_layers"}
    assert compilers <= set(names)
    assert {registry.ablation_class(name).slot for name in compilers} == {"compilation"}, "one of them goes on at most"


def test_it_says_for_what_it_answers_where_nobody_did(capsys):
    assert recommend.main(["dry_run=true", "ablations=[]", "reference=[peft,peft_low]"]) == 2
    assert "not yours but the default: models=['smollm2-135m'], workload=auto" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("models=[tiny-lama]", "no model named 'tiny-lama'; did you mean tiny-llama?"),
        ("models=[tiny-llama,tiny-mistral]", "recommend takes one model, for which it answers; models= has 2"),
        ("reference=[peft,peft_low]", "recommend takes one reference, on which it puts others; reference= has 2"),
        ("ablations=[awak]", "no ablation named 'awak'; did you mean awake?"),
        ("workload=two_jobs", "recommend answers for one job; the workload two_jobs has several"),
        ("budget_minutes=0", "budget_minutes: should be greater than 0"),
        ("budget_minutes=soon", "budget_minutes: should be a valid number"),
        ("budget=3", "no key named 'budget'; did you mean budget_minutes?"),
        *(
            (f"{key}=1", f"{key} is a key of lorabench sweep and not of recommend")
            for key in ("part", "repeat", "design", "suite", "queue")
        ),
        ("dry_run=maybe", "dry_run: should be a valid boolean"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(here, override, message):
    code, said, folder = here(override)
    assert code == 2 and said.err.startswith("lorabench: ") and said.err.count("\n") == 1
    assert message in said.err and not folder.exists()


def test_a_dry_run_shows_what_it_would_try_and_measures_nothing(here, monkeypatch):
    monkeypatch.setattr(TOGGLES["useless"], "worth_trying", "memory")
    code, said, folder = here("dry_run=true", "budget_minutes=3")
    assert code == 0 and not folder.exists(), said.err
    first, *_, third, last = said.out.splitlines()
    assert first.endswith(": planning …") and "not given" not in said.out
    rows = {line.split("│")[3].strip(): line for line in said.out.splitlines() if line.count("│") == 5}
    assert "(computed, rough)" in rows["awake"] and "(computed, rough)" in rows["reference against itself"]
    assert "unsupported: absent needs the package no_such_package" in rows["absent"]
    assert "useless" not in rows and last == "tried only where memory asks for it: useless"
    assert third.startswith("all of these in one family") and third.endswith("budget_minutes=3")

    code, said, folder = here("dry_run=true", "ablations=[useless]")
    assert code == 0 and "useless" in said.out and "only where" not in said.out and not folder.exists()


@pytest.mark.exhaustive
def test_in_processes_of_its_own_what_hangs_ends_with_its_share_of_the_budget(tmp_path):
    (tmp_path / "plugin").mkdir()
    files = {"naps.py": Path(__file__).parent / "advice" / "naps.py"}
    env = installed(tmp_path / "plugin", "naps", files, {n: f"naps:{c.__name__}" for n, c in TOGGLES.items()})
    command = [
        sys.executable,
        "-m",
        "lorabench",
        "recommend",
        *COMMON,
        MANY,
        "ablations=[awake,hangs]",
        "budget_minutes=1.5",
    ]
    done = subprocess.run(
        [*command, f"output={tmp_path / 'out'}"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = read(tmp_path / "out")
    assert found and found.switch_on == ["awake"] and found.left_out == ["hangs"]
    assert outcomes(found)["hangs"][0] == "not measured" and "no answer after 22.5 s" in outcomes(found)["hangs"][1]
    assert "A larger budget_minutes= would give hangs longer than its share" in found.paragraph
    assert {" + ".join(r.ablations) for r in read_records(tmp_path / "out")} == {"", "awake"}  # to be tried again


@pytest.mark.exhaustive
def test_sixty_chats_in_a_minute(tmp_path):
    """All contenders in the first family, the budget used, and a batch size: on a busy machine too."""
    chats, tokenizer = worded_chats(tmp_path, 60)
    workload = f"workload={{{chats}:{{tokenizer:{tokenizer},samples:8,batch_size:2}}}}"
    command = [sys.executable, "-m", "lorabench", "recommend", "models=[tiny-llama]", workload, "budget_minutes=1"]
    done = subprocess.run(
        [*command, f"output={tmp_path / 'out'}"], cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, arms = read(tmp_path / "out"), read_arms(tmp_path / "out")
    assert found
    assert (
        "Measured on 8 of 60 rows, chosen by their length; padding" in found.paragraph and "of 60 rows" in done.stdout
    )
    assert all("of 60 rows" in arm.notes["rows"] for arm in arms if arm.status == "ok")
    first = {" + ".join(arm.toggles) for arm in arms if arm.family == arms[0].family}
    later = [arm for arm in arms if arm.family != arms[0].family and arm.role != "candidate" and arm.status == "ok"]
    # Who sat in the family before stays, unless an arm of this one ended their process: a compiler that takes too long.
    stayed = {arm.family for arm in later if arm.cost.build == arm.cost.gate == 0}
    compilers = {"torch_compile", "torch_compile_layers"}
    assert len(stayed) >= len({arm.family for arm in later}) - len(compilers & {*found.left_out})
    names = {t.toggles for t in found.tried if t.outcome not in ("not measured", "not tried")}
    assert {"auto_batch_size", "packing", "lora_kernels", "adamw_fused", "adapters_in_compute_dtype"} <= names
    assert all(any(name in stack.split(" + ") for stack in first) for name in names)
    assert set(found.left_out) <= compilers, "what starts slowly, and nothing else"
    # Nine tenths of three minutes: what a family's opening and end leave unused is seconds, whatever the budget.
    assert found.spent_s >= 60 - 0.1 * 180 or not found.more
    assert found.spent_s < 1.5 * 60
    size = re.search(r"A micro-batch has (\d) samples: per_device_train_batch_size=(\d)", found.paragraph)
    assert size and size[1] == size[2]
    for title, _, text in found.code:
        assert ("micro_batch_size: " if title == "Axolotl" else "per_device_train_batch_size=") + size[1] in text
