"""Jobs that train together for their adapters: each as if it were alone, whatever happens to the others."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import own_models
import pytest
import torch

from lorabench import jobs as command
from lorabench.advice.expected import published
from lorabench.measure.machine import describe
from lorabench.plan.jobs_file import JobsFile, toggles
from lorabench.train import state
from lorabench.train.crew import Crew
from lorabench.train.setup import Setup

WAYS = ["sequential", "batched", "batched_packed", "fused_multi_lora"]
QUICK = {
    "name": "quick",
    "lora": {"r": 4, "lora_alpha": 8},
    "learning_rate": 1e-2,
    "batch_size": 2,
    "epochs": 2,
    "steps": 5,
}
SLOW = {"name": "slow", "lora": {"r": 2}, "learning_rate": 1e-3, "batch_size": 4, "epochs": 2, "seed": 3}
BENT = {
    "name": "bent",
    "lora": {"r": 8},
    "schedule": "cosine",
    "warmup_steps": 2,
    "micro_batch_size": 1,
    "batch_size": 3,
}


@cache
def model() -> Path:
    return own_models.saved(Path(mkdtemp()) / "tiny", num_hidden_layers=1)


@pytest.fixture
def texts(tmp_path):
    return written_texts(tmp_path)


def written_texts(folder):
    """Three texts: rows of many lengths, the same again, and rows that are all of one length."""
    for name in ("mixed", "other", "even"):
        rows = [
            {"prompt": f"What is {i % 8} and {name[0]}? ", "completion": "It is" + " so" * (2 if name == "even" else i)}
            for i in range(8)
        ]
        own_models.jsonl(folder / f"{name}.jsonl", rows)
    return folder


def file(folder, *entries, text="mixed", output="out", **keys):
    jobs = [{"data": str(folder / f"{text}.jsonl")} | entry for entry in entries]
    wanted = {"model": str(model()), "dtype": "float32", "output": folder / output, "way": "fused_multi_lora"}
    return JobsFile.model_validate(wanted | keys | {"jobs": jobs})


def trainer(wanted, told=None):
    made = Setup(wanted, describe()).trainer(toggles(wanted, wanted.way), (told if told is not None else []).append)
    wanted.output.mkdir(exist_ok=True)
    return made


# In make test; in the way `sequential` jobs share nothing.
SPOILT = [("mixed", "batched"), ("mixed", "batched_packed"), ("even", "batched_packed"), ("mixed", "fused_multi_lora")]


def losses(folder) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for line in (folder / state.LOSSES).read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["job"], []).append(row["loss"])
        assert row["step"] == len(found[row["job"]])
    return found


def nothing(_):
    pass


def trained(wanted, show=nothing, told=None):
    made = trainer(wanted, told)
    made.run(show)
    return made, losses(wanted.output)


@cache
def alone_of(name):
    """What the entry of this name, on rows of many lengths, comes to as the only one: tests of all ways ask for it."""
    folder = Path(mkdtemp())
    written_texts(folder)
    (entry,) = [entry for entry in (QUICK, SLOW, BENT) if entry["name"] == name]
    return trained(file(folder, entry, way="sequential"))


@pytest.mark.parametrize("way", WAYS)
def test_every_job_has_the_losses_that_it_has_alone(texts, way):
    together, found = trained(file(texts, QUICK, SLOW, BENT, way=way))
    assert [job.progress.step for job in together.jobs] == [5, 4, 3]
    for entry in (QUICK, SLOW, BENT):
        name = entry["name"]
        alone, own = alone_of(name)
        assert found[name] == pytest.approx(own[name], rel=1e-5)
        (job,) = [job for job in together.jobs if job.name == name]
        for mine, theirs in zip(job.parameters, alone.jobs[0].parameters, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-4)
        assert found[name][-1] != found[name][0]


@pytest.mark.parametrize("names", [("quick", "slow"), ("a", "lora")], ids=" ".join)
def test_an_adapter_is_loaded_by_plain_peft_bit_for_bit(texts, names, recwarn):
    """Also one whose name is in PEFT's own `lora_`, of which PEFT warns for nothing."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    made, _ = trained(file(texts, *(job | {"name": name} for job, name in zip((QUICK, SLOW), names, strict=True))))
    assert not [w for w in recwarn if "prefix" in str(w.message)]
    ids = torch.arange(4, 16)[None]
    for job in made.jobs:
        folder = texts / "out" / "adapters" / job.name
        told = json.loads((folder / "adapter_config.json").read_text())
        assert (told["r"], told["base_model_name_or_path"]) == (job.entry.lora["r"], str(model()))
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model()), folder)
        own = {n.replace(".default.", f".{job.name}."): p for n, p in plain.named_parameters() if "lora_" in n}
        ours = {n: p for n, p in made.model.named_parameters() if f".{job.name}." in n}
        assert own.keys() == ours.keys() and all(torch.equal(own[n], p) for n, p in ours.items())
        assert any(p.abs().sum() > 0 for n, p in own.items() if "lora_B" in n)
        assert plain(input_ids=ids).logits.isfinite().all()


@pytest.mark.parametrize("name", ["q_proj", "layers", "lora_A", "model", "weight"])
def test_a_job_that_is_named_as_a_part_of_the_model_is_refused(texts, name):
    """PEFT would leave that part out of the other job's adapter, and say nothing."""
    with pytest.raises(ValueError, match=f"job {name}: a part of the model has this name, .* expected another name"):
        Setup(file(texts, QUICK, SLOW | {"name": name}), describe())


@pytest.mark.parametrize(
    ("text", "way"),  # rows of one length lie side by side where others are packed, which is the only way that changes
    [
        pytest.param(text, way, marks=[] if (text, way) in SPOILT else [pytest.mark.exhaustive])
        for text in ("mixed", "even")
        for way in WAYS
    ],
)
def test_a_job_that_is_no_number_ends_alone(texts, way, text):
    """The others are, bit for bit, what they are where it has ended a step before; in packed rows too, in which
    attention hands a NaN on to every sample."""
    told: list[str] = []

    def spoil(trainer):
        if trainer.tick == 2:
            with torch.no_grad():
                trainer.jobs[0].parameters[1].fill_(float("nan"))

    made, found = trained(file(texts, QUICK, SLOW, BENT, way=way, text=text), spoil, told)
    wanted, usual = trained(file(texts, QUICK | {"steps": 2}, SLOW, BENT, way=way, text=text, output="usual"))
    assert [job.progress.status for job in made.jobs] == ["not a number", "done", "done"]
    assert found == usual and len(found["quick"]) == 2 and len(found["slow"]) == 4
    for job, other in zip(made.jobs[1:], wanted.jobs[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(job.parameters, other.parameters, strict=True))
    assert "quick ends at step 3: its loss is no number; the others go on" in told
    assert sorted(p.name for p in (texts / "out" / "adapters").iterdir()) == ["bent", "slow"]


def stop_at(tick):
    def stop(trainer):
        if trainer.tick == tick:
            raise KeyboardInterrupt

    return stop


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.exhaustive), 0.2])
def test_a_killed_training_goes_on_where_it_was_saved(texts, dropout):
    entries = [own | {"lora": {**own["lora"], "lora_dropout": dropout}} for own in (QUICK, SLOW, BENT)]
    whole, usual = trained(file(texts, *entries, output="usual"))
    wanted = file(texts, *entries, save_every=2)
    with pytest.raises(KeyboardInterrupt):
        trained(wanted, stop_at(3))
    with open(wanted.output / state.LOSSES, "a") as cut_off:
        cut_off.write('{"tick": 4, "jo')
    again, found = trained(wanted)
    assert found == usual
    for job, other in zip(again.jobs, whole.jobs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(job.parameters, other.parameters, strict=True))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch_size": 9}, "batch_size 9: expected at most 8, the number of rows that it is trained on"),
        (
            {"batch_size": 7, "early_stop": {"held_out": 0.25}},
            "batch_size 7: expected at most 6, the number of rows that it is trained on",
        ),
        ({"micro_batch_size": 3}, "micro_batch_size 3: expected at most 2, its batch_size"),
        ({"warmup_steps": 6}, "warmup_steps 6: expected at most 5, the number of its steps"),
        (
            {"data": {"mixed.jsonl": {"samples": 4}}},
            "data with samples is for a sweep's step; expected the job's own batch_size, steps and epochs",
        ),
        (
            {"data": {"mixed.jsonl": {"samples": 0}}},
            "the workload mixed.jsonl: samples: of a text expected 1 or more",
        ),
    ],
    ids=str,
)
def test_numbers_of_an_entry_that_do_not_go_together_are_one_line(texts, change, says, capsys, monkeypatch):
    monkeypatch.chdir(texts)
    path = written(texts / "jobs.yaml", SLOW, QUICK | change)
    capsys.readouterr()
    assert command.main([str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"job quick: {says}" in said
    assert not (texts / "out").exists()


@pytest.mark.parametrize(
    "keys",
    [
        {"scheduler": {"fast_fit": {"tokens": 3}}, "way": "auto"},
        {"scheduler": {"fast_fit": {"tokens": 120, "multiple": 128}}},
        {"way": {"batched": {"tokens": 3}}},
        {"ablations": ["sdpa", {"token_budget": {"tokens": 3}}]},
    ],
    ids=str,
)
def test_a_budget_that_the_longest_sample_does_not_fit_is_one_line(texts, keys, capsys):
    own_models.jsonl(texts / "short.jsonl", [{"prompt": "What?", "completion": " It"}] * 4)
    path = written(texts / "jobs.yaml", QUICK | {"data": str(texts / "short.jsonl")}, SLOW, **keys)
    longest = Setup(file(texts, SLOW), describe()).longest
    capsys.readouterr()
    assert command.main([str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"job slow: its longest sample has {longest} tokens; expected tokens of " in said
    assert not (texts / "out").exists()


def test_a_budget_of_just_the_longest_sample_is_right(texts):
    longest = Setup(file(texts, QUICK, SLOW), describe()).longest
    trained(file(texts, QUICK, SLOW, scheduler={"fast_fit": {"tokens": longest}}))


def test_the_folder_of_a_sweep_is_refused(texts, capsys):
    path, out = written(texts / "jobs.yaml", QUICK), texts / "out"
    out.mkdir()
    (out / "records.jsonl").write_text("{}\n")
    capsys.readouterr()
    assert command.main([str(path)]) == 2
    assert capsys.readouterr().err == f"lorabench: {out} has the records.jsonl of a sweep; expected another output\n"
    assert tree(out) == {Path("records.jsonl"): b"{}\n"}


def tree(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_results_without_their_state_are_not_written_over(texts, capsys):
    path, out = written(texts / "jobs.yaml", QUICK), texts / "out"
    assert command.main([str(path)]) == 0
    (out / state.STATE).unlink()
    before = tree(out)
    for left in (out / state.ADAPTERS / "quick", out / state.LOSSES):
        capsys.readouterr()
        assert command.main([str(path)]) == 2
        wanted = f"of a run whose state is not in {out / state.STATE}; expected that state, or another output"
        assert capsys.readouterr().err == f"lorabench: {left} is {wanted}\n"
        assert tree(out) == before
        before = {name: content for name, content in before.items() if state.ADAPTERS not in name.parts}
        shutil.rmtree(out / state.ADAPTERS, ignore_errors=True)


def test_a_training_that_is_killed_before_its_first_save_goes_on(texts):
    with pytest.raises(KeyboardInterrupt):
        trained(file(texts, QUICK), stop_at(2))
    _, found = trained(file(texts, QUICK))
    _, alone = alone_of("quick")
    assert found["quick"] == pytest.approx(alone["quick"], rel=1e-5)


def test_a_lost_adapter_is_written_again_from_the_state(texts):
    trained(file(texts, QUICK, SLOW))
    before = tree(texts / "out")
    shutil.rmtree(texts / "out" / state.ADAPTERS / "quick")
    told: list[str] = []
    trained(file(texts, QUICK, SLOW), told=told)
    assert tree(texts / "out") == before
    assert told == ["quick: done after 5 steps, in adapters/quick"]


def test_a_job_that_the_file_leaves_out_for_a_while_goes_on(texts):
    with pytest.raises(KeyboardInterrupt):
        trained(file(texts, QUICK, SLOW, save_every=1), stop_at(2))
    made, _ = trained(file(texts, SLOW))
    assert made.tick == 4
    _, found = trained(file(texts, QUICK, SLOW))
    for name in ("quick", "slow"):
        _, alone = alone_of(name)
        assert found[name] == pytest.approx(alone[name], rel=1e-4)


def test_a_job_may_be_called_as_what_else_the_state_holds(texts):
    trained(file(texts, QUICK | {"name": "random"}))
    saved = state.read(texts / "out")
    assert saved is not None and [n for n in saved.tensors if n.startswith(state.RANDOM)] == [".random.0"]


def test_jobs_join_while_others_run_and_in_a_second_start(texts):
    told: list[str] = []
    late = BENT | {"arrives_after": 2}
    with pytest.raises(KeyboardInterrupt):
        trained(file(texts, SLOW, late, save_every=1), stop_at(3), told)
    assert [line.split()[0] for line in told if "begins" in line] == ["slow", "bent"]
    made, found = trained(file(texts, SLOW, late, QUICK, save_every=1))
    assert [job.progress.step for job in made.jobs] == [4, 3, 5]
    for entry in (SLOW, BENT, QUICK):
        _, own = alone_of(entry["name"])
        assert found[entry["name"]] == pytest.approx(own[entry["name"]], rel=1e-4)


def test_a_job_that_would_wait_for_nobody_begins(texts):
    made, _ = trained(file(texts, QUICK | {"steps": 1}, BENT | {"arrives_after": 100}))
    assert [job.progress.step for job in made.jobs] == [1, 3] and made.tick == 4


def test_a_job_stops_early_and_the_others_go_on(texts):
    """Its learning rate is as good as none, so what is held out never becomes better."""
    stop = {"held_out": 0.25, "every": 1, "patience": 2, "min_delta": 0.01}
    made, found = trained(file(texts, QUICK | {"learning_rate": 1e-12, "early_stop": stop}, SLOW))
    quick, slow = made.jobs
    assert (quick.progress.status, quick.progress.step, slow.progress.step) == ("stopped early", 3, 4)
    assert len(quick.held_out) == 2 and len(quick.samples) == 6
    assert not {tuple(s.tokens) for s in quick.held_out} & {tuple(s.tokens) for s in quick.samples}
    _, alone = alone_of("slow")
    assert found["slow"] == pytest.approx(alone["slow"], rel=1e-5)


def test_out_of_memory_lowers_the_budget_and_the_losses_stay(texts, monkeypatch):
    _, usual = trained(file(texts, QUICK, SLOW, scheduler={"fast_fit": {"tokens": 400}}, output="usual"))
    most, run, told = 200, Crew.losses, list[str]()

    def small(crew, backward=True):
        for turn in crew.turns:
            together = turn.innermost
            if any(together.micro_batch(n).real > most for n in range(together.count)):
                raise torch.OutOfMemoryError("CUDA out of memory")
        return run(crew, backward)

    monkeypatch.setattr(Crew, "losses", small)
    made, found = trained(file(texts, QUICK, SLOW, scheduler={"fast_fit": {"tokens": 400}}), told=told)
    assert [line for line in told if line.startswith("out of memory")]
    assert made.toggles[-1].tokens < 400
    assert {name: pytest.approx(own, rel=1e-5) for name, own in usual.items()} == found
    # and a budget that was found by trying, which was too much all the same
    made, found = trained(
        file(texts, QUICK, SLOW, scheduler={"fast_fit": {"tokens": "auto"}}, output="auto"), told=told
    )
    assert isinstance(made.toggles[-1].tokens, int) and made.toggles[-1].tokens <= 200
    assert {name: pytest.approx(own, rel=1e-5) for name, own in usual.items()} == found


def test_out_of_memory_without_a_smaller_micro_batch_is_said(texts, monkeypatch):
    def none(crew, backward=True):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Crew, "losses", none)
    with pytest.raises(torch.OutOfMemoryError, match="smallest micro-batch"):
        trained(file(texts, QUICK, way="sequential"))


@pytest.mark.parametrize(
    ("change", "says"),
    [({"learning_rate": 1.0}, "with learning_rate 0.01, not 1.0"), ({"lora": {"r": 5}}, "with lora")],
    ids=str,
)
def test_a_job_that_has_begun_keeps_its_entry(texts, change, says):
    trained(file(texts, QUICK, SLOW))
    with pytest.raises(state.StateError, match=says):
        trainer(file(texts, QUICK | change, SLOW))
    trainer(file(texts, QUICK, SLOW | {"arrives_after": 3}))


@pytest.mark.parametrize("change", ["fewer", "another order", "another answer"])
def test_a_job_that_has_begun_keeps_its_rows(texts, change):
    """Which rows a step has follows from its number: over others some would be trained twice, and others never."""
    path = texts / "mixed.jsonl"
    rows = path.read_text().splitlines()
    trained(file(texts, QUICK, SLOW | {"data": str(texts / "other.jsonl")}))
    new = {"fewer": rows[:3], "another order": rows[::-1], "another answer": [*rows[:-1], rows[-1].replace("so", "no")]}
    path.write_text("\n".join(new[change]))
    with pytest.raises(state.StateError, match=r"quick has made 5 steps with other rows than .*mixed.jsonl has now"):
        trainer(file(texts, QUICK, SLOW | {"data": str(texts / "other.jsonl")}))
    trainer(file(texts, SLOW | {"data": str(texts / "other.jsonl")}))


def test_rows_without_anything_to_train_on_are_counted(texts):
    with open(texts / "mixed.jsonl", "a", encoding="utf-8") as text:
        text.write(json.dumps({"prompt": "What " * 3000, "completion": "It is"}) + "\n")
    trained(file(texts, QUICK), told=(told := []))
    assert "quick begins: 5 steps over 8 rows, without 1 that have nothing to train on" in told


def test_the_state_of_another_model_is_refused(texts):
    trained(file(texts, QUICK))
    with pytest.raises(state.StateError, match="trained with dtype float32, not bfloat16; expected another output"):
        trainer(file(texts, QUICK, dtype="bfloat16"))


def test_two_processes_do_not_write_into_one_folder(texts):
    from lorabench.record.store import StoreError, locked

    refused = pytest.raises(StoreError, match="another process is writing")
    with locked(texts / "out"), refused, locked(texts / "out"):
        pass


def written(path, *entries, **keys) -> Path:
    path.write_text(file(path.parent, *entries, **keys).model_dump_json())  # JSON is YAML
    return path


def test_the_command_trains_says_so_and_goes_on(texts, capsys):
    path = written(texts / "jobs.yaml", QUICK, SLOW, way="auto")
    assert command.main([str(path)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].endswith(f"reading {path}")
    assert "fused_multi_lora" in said
    assert "quick 1/5 loss" in said and "slow: done after 4 steps, in adapters/slow" in said
    assert command.main([str(path)]) == 0
    again = capsys.readouterr().out
    assert "going on after step 5" in again and "begins" not in again
    assert sorted(p.name for p in (texts / "out").iterdir()) == [
        ".lock",
        "adapters",
        "losses.jsonl",
        "state.safetensors",
    ]


def test_the_gain_that_is_said_is_the_published_one_of_the_way_alone_and_of_gpus(texts):
    setup = Setup(file(texts, QUICK, SLOW, way="auto"), describe())
    made = toggles(setup.file, "fused_multi_lora")
    row = published(made[-1], 0)
    setup.machine = setup.machine.model_copy(update={"device": "cpu"})
    assert command._way(setup, made) == "sdpa + adamw_foreach + fused_multi_lora"
    setup.machine = setup.machine.model_copy(update={"device": "cuda"})
    assert row["from"].startswith("h200/") and command._way(setup, made) == (
        "sdpa + adamw_foreach + fused_multi_lora "
        f"(fused_multi_lora was on average {row['speedup']:.2f} × as fast as one job after the other, with "
        f"{row['model']} on H200 in results/{row['from'].replace(', ', ', results/')})"
    )
    assert command._way(setup, toggles(setup.file, "sequential")) == "sdpa + adamw_foreach + sequential"


def test_the_command_s_exit_code_says_that_a_job_has_no_adapter(texts, capsys, monkeypatch):
    def spoil(progress, trainer):
        with torch.no_grad():
            trainer.jobs[0].parameters[0].fill_(float("nan"))

    monkeypatch.setattr(command._Progress, "__call__", spoil)
    path = written(texts / "jobs.yaml", QUICK, SLOW)
    assert command.main([str(path), f"output={texts / 'elsewhere'}"]) == 1
    assert "quick ends at step" in capsys.readouterr().out
    assert [p.name for p in (texts / "elsewhere" / "adapters").iterdir()] == ["slow"]
