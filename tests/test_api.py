"""lorabench from Python: two variants of a user's own step measured in pairs, and results as a frame."""

from __future__ import annotations

import copy
import inspect
import pydoc
import re
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path

import pytest
import torch
from helpers import random_samples
from torch import nn

import lorabench
import lorabench.measure.seat  # sets the attribute `measure` of the package to the module
from lorabench import Measured, Phases, Tolerance, WrongNumerics, measure
from lorabench.contract.batch import pad
from lorabench.contract.step import Step
from lorabench.record.contrast import contrast

QUICK = {"trials": 6, "warmup": 1}
ROOT = Path(__file__).resolve().parents[1]
RATE = 1e-3


def net(scale: float = 1.0, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, 32), nn.Dropout(dropout), nn.Tanh(), nn.Linear(32, 1))
    with torch.no_grad():
        made[0].weight.mul_(scale)
    return made


X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def phases(model: nn.Module, *, times: int = 1, rate: float = RATE, error: float = 1.0, **changed) -> Phases:
    """A step of a model on X, its forward done `times` times, its loss's gradient multiplied by `error`."""

    def forward() -> torch.Tensor:
        for _ in range(times - 1):
            model(X)
        loss = model(X.to(next(model.parameters()).dtype)).float().square().mean()
        return loss * error - (loss * (error - 1)).detach()  # the same number, whatever its gradient

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    return Phases(**{"forward": forward, "model": model, "optimizer": optimizer, **changed})


def whole(parts: Phases):
    """The same as one function."""
    optimizer = parts.optimizer
    assert optimizer is not None

    def step() -> float:
        optimizer.zero_grad()
        loss = parts.forward()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


@pytest.mark.exhaustive
def test_twenty_times_the_forward_is_slower():
    found = measure(reference=phases(net()), candidate=phases(net(), times=60), **QUICK)
    low, high = found.speedup.speedup[1:]  # six rounds on a busy machine may leave it wide
    assert low <= found.speedup.centre <= high and found.speedup.centre < 0.7 and found.phases["forward"].centre < 0.2
    assert list(found.phases) == list(found.reference_ms) == ["forward", "backward", "step", "total"]
    assert all(len(ms) == 6 for times in (found.reference_ms, found.candidate_ms) for ms in times.values())
    parts = [sum(found.candidate_ms[phase][i] for phase in ("forward", "backward", "step")) for i in range(6)]
    assert found.candidate_ms["total"] == pytest.approx(parts)
    assert found.numerics is None and set(found.memory) == set(found.losses) == {"reference", "candidate"}
    text = str(found)
    assert "\n" not in text and "6 rounds" in text and "forward 0." in text and "no gold" in text
    assert text.startswith(f"{found.verdict}: ") and "the reference against itself" in text


def result(ratio: float, spread: float, off: float = 0.002, rounds: int = 30) -> Measured:
    """Of made-up times: the reference's 1234.5 ms, the candidate so many times as fast; each round is off by `spread`,
    and the reference again by `off` from itself."""
    wave = [(-1) ** n * (1 + n % 3) for n in range(rounds)]
    before = [1234.5 * (1 + spread * w) for w in wave]
    after, again = [1234.5 / ratio * (1 - spread * w) for w in wave], [1234.5 * (1 - off * w) for w in wave]
    found, same = (contrast(before, other, paired=True) for other in (after, again))
    assert found and same
    phases = {"forward": found, "total": found}
    return Measured(phases, same, {"total": before}, {"total": after}, {"candidate": [0.0] * rounds}, {}, None)


def test_what_is_printed_has_as_many_digits_as_a_table():
    found = result(0.8, 0.001)
    centre, low, high = found.speedup.speedup
    assert str(found).startswith(
        f"slower: speed-up {centre:.3f} [{low:.3f}, {high:.3f}] (95 %, 30 rounds); the reference against itself "
        "±1.0 %; 1234 → 1543 ms; forward 0.800; "
    )


@pytest.mark.parametrize(
    "words, found",
    [
        ("faster: speed-up 1.20", result(1.2, 0.01)),
        ("same: speed-up 1.00", result(1.0, 0.001)),
        ("unclear: speed-up 1.20 [", result(1.2, 0.2)),
        ("unclear: speed-up 1.05", result(1.05, 0.001, off=0.2)),  # within what the reference is off itself
        ("; the reference against itself too noisy, stop what else runs on this machine", result(1.2, 0.01, off=0.33)),
    ],
)  # fmt: skip
def test_the_answer_has_a_verdict_and_the_noise_floor_that_it_was_held_against(words, found):
    assert words in str(found)


@pytest.mark.exhaustive
def test_whole_steps_and_the_order_of_the_ratio():
    slow, quick = whole(phases(net(), times=100)), whole(phases(net()))
    found = measure(reference=slow, candidate=quick, **QUICK)
    assert found.speedup.centre > 1.5 and found.speedup is found.phases["total"]
    assert list(found.phases) == ["total"] and found.losses["candidate"][-1] < found.losses["candidate"][0]
    assert found.memory["candidate"].static is None


def test_the_same_step_is_not_faster_than_itself_and_the_reference_runs_twice_a_round(monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr("lorabench.measure.trial.trials_a_turn", lambda ms: 3)

    def step(name: str):
        def one() -> float:
            calls.append(name)
            time.sleep(0.001)  # of a step of a microsecond the clock is what would be compared
            return 1.0

        return one

    found = measure(reference=step("r"), candidate=step("c"), trials=30, warmup=1)
    assert len(found.candidate_ms["total"]) == found.rounds == 30
    timed = "".join(calls[-30 * 9 :])
    orders = {timed[n : n + 9 : 3] for n in range(0, len(timed), 9)}
    assert orders == {"rrc", "rcr", "crr"} and len(found.losses["candidate"]) == 90
    assert found.verdict in ("same", "unclear") and found.noise_floor >= 0.01


def test_a_loss_with_its_graph_is_read_without_a_warning(recwarn):
    model, batch = net(), X
    measure(reference=lambda: model(batch).square().mean(), candidate=lambda: model(batch).square().mean(), **QUICK)
    assert not [w for w in recwarn if "requires_grad" in str(w.message)]


def test_a_gold_lets_the_same_mathematics_pass():
    found = measure(reference=phases(net()), candidate=phases(net()), gold=phases(net()), **QUICK)
    assert found.numerics and found.numerics.passed and found.numerics.tensors == 4
    assert found.numerics.update_error == pytest.approx(0, abs=1e-5) and "numerics passed" in str(found)
    assert found.memory["reference"].weights == 0 and found.memory["reference"].adapters == 4 * (32 * 32 + 32 + 33)


@pytest.mark.parametrize(
    "candidate, words",
    [
        ({"error": 1.05}, "the gradient of"),
        ({"rate": 2 * RATE}, "first update is off by 1 from the gold's"),
        ({"backward": lambda loss: None}, "the gradient of"),
    ],
)
def test_wrong_numerics_have_no_speed(candidate, words, monkeypatch):
    monkeypatch.setattr("lorabench.measure.trial.run_rounds", lambda *_: pytest.fail("was timed"))
    wrong = phases(net(), **candidate)
    with pytest.raises(WrongNumerics, match=words) as caught:
        measure(reference=phases(net()), candidate=wrong, gold=phases(net()), **QUICK)
    assert not caught.value.numerics.passed and "PEFT" not in str(caught.value) and "Adam" not in str(caught.value)


def test_a_wrong_loss_and_other_tensors_are_wrong_numerics():
    right = net()
    off = phases(right, forward=lambda: right(X).square().mean() + 0.1)
    with pytest.raises(WrongNumerics, match="the loss is off"):
        measure(reference=phases(net()), candidate=off, gold=phases(net()), **QUICK)
    fewer = net()
    fewer[0].weight.requires_grad_(False)
    with pytest.raises(WrongNumerics, match=r"trained tensors differ .*0\.weight"):
        measure(reference=phases(net()), candidate=phases(fewer), gold=phases(net()), **QUICK)


def test_a_tolerance_is_declared_and_shown():
    kind = {"reference": phases(net()), "gold": phases(net()), **QUICK}
    declared = Tolerance(words="gradients to 5 %", grad=0.1)
    model = net()

    def rounding(loss: torch.Tensor) -> None:
        loss.backward()
        generator = torch.Generator().manual_seed(0)
        for p in model.parameters():
            assert p.grad is not None
            noise = torch.randn(p.shape, generator=generator)
            across = noise - p.grad * (noise * p.grad).sum() / p.grad.square().sum()
            if float(across.norm()) > 1e-3 * float(noise.norm()):  # what has one element has nothing across it
                p.grad += 0.05 * p.grad.norm() * across / across.norm()

    found = measure(candidate=phases(model, backward=rounding), tolerance=declared, **kind)
    assert found.numerics and found.numerics.tolerance == "gradients to 5 %"
    assert found.numerics.grad_error == pytest.approx(0.05, rel=0.05)
    with pytest.raises(WrongNumerics, match=r"is scaled: its projection on the gold's is off by 0\.05"):
        scaled = phases(net(), error=1.05)
        measure(reference=phases(net()), candidate=scaled, gold=phases(net()), tolerance=declared, **QUICK)


def test_a_reference_that_is_nothing_like_the_gold_measures_nothing():
    with pytest.raises(WrongNumerics, match=r"reference's gradient is off by .* same weights"):
        measure(reference=phases(net(scale=-2)), candidate=phases(net(scale=-2)), gold=phases(net()), **QUICK)


def test_low_precision_is_allowed_what_the_reference_is_off_by():
    rounded = net().bfloat16()
    three = [phases(m) for m in (copy.deepcopy(rounded), copy.deepcopy(rounded), copy.deepcopy(rounded).float())]
    found = measure(reference=three[0], candidate=three[1], gold=three[2], **QUICK)
    assert found.numerics and 0 < (found.numerics.grad_error or 0) < (found.numerics.grad_allowed or 0) < 0.2


def test_dropout_is_compared_under_shared_masks_and_then_given_back():
    models = [net(dropout=0.5) for _ in range(3)]
    drops = [m[1] for m in models]
    found = measure(reference=phases(models[0]), candidate=phases(models[1]), gold=phases(models[2]), **QUICK)
    assert found.numerics and found.numerics.passed
    assert [m[1] for m in models] == drops and type(drops[0]) is nn.Dropout


def peft_model() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    base = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, use_cache=False, **sizes))
    made = get_peft_model(base, LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return made.train()


def test_a_peft_model_with_gold_as_phases_and_as_our_step():
    model = peft_model()
    batches = pad(random_samples([16, 12], vocabulary=64), 2)

    def as_phases(model: nn.Module) -> Phases:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
        return Phases(model=model, optimizer=optimizer, forward=lambda: model(**batches[0].inputs).loss)

    def as_step(model: nn.Module) -> Step:
        return Step(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE), batches)

    mine, steps, gold = (copy.deepcopy(model) for _ in range(3))
    found = measure(reference=as_phases(mine), candidate=as_step(steps), gold=as_phases(gold), **QUICK)
    assert found.numerics and found.numerics.passed and found.numerics.tensors == 14
    assert list(found.phases) == ["forward", "backward", "step", "total"]
    assert found.memory["candidate"].adapters == found.memory["reference"].adapters > 0


def meta() -> Phases:
    return Phases(forward=lambda: torch.zeros(()), model=nn.Linear(2, 2, device="meta"))


def with_conv_dropout() -> Phases:
    return phases(nn.Sequential(net(), nn.Dropout1d(0.5)))


@pytest.mark.parametrize(
    "given, words",
    [
        ({"reference": None}, "reference= is NoneType; expected a function"),
        ({"candidate": net()}, "candidate= is a model"),
        ({"trials": 2}, "trials=2: expected a whole number of at least 3"),
        ({"trials": "30"}, "trials='30'"),
        ({"warmup": 0}, "warmup=0"),
        ({"device": "mps"}, "one device|device mps"),
        ({"device": "gpu"}, "device 'gpu'"),
        ({"device": "cuda:77"}, "device cuda:77: torch sees"),
        ({"reference": lambda: None, "candidate": lambda: 1.0}, "the reference returned NoneType; expected its loss"),
        ({"reference": lambda: 1.0, "candidate": lambda: X}, r"candidate returned a tensor of shape \(64, 32\)"),
        ({"reference": lambda: 1.0, "candidate": lambda: float("nan")}, "the candidate's loss is nan"),
        ({"candidate": lambda: 1.0}, "one variant is a whole step and another Phases"),
        ({"candidate": phases(net(), forward=lambda: 1.0)}, "Phases.forward returned float"),
        ({"candidate": meta()}, "on one device: reference cpu, candidate meta"),
        ({"reference": lambda: 1.0, "candidate": lambda: 1.0, "gold": lambda: 1.0}, "names no model"),
        ({"gold": phases(net().bfloat16())}, "holds bfloat16"),
        ({"gold": phases(net(), optimizer=None)}, "reference updates its parameters and the gold does not"),
        ({"gold": with_conv_dropout()}, "masks that cannot be shared"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(given, words):
    with pytest.raises(ValueError, match=words) as caught:
        measure(**{"reference": phases(net()), "candidate": phases(net()), **QUICK, **given})
    assert "\n" not in str(caught.value)


def test_a_loss_that_is_lost_later_is_no_speed():
    losses = iter([1.0] * 10 + [float("inf")] * 90)
    with pytest.raises(ValueError, match="loss of the candidate is inf in round"):
        measure(reference=lambda: 1.0, candidate=lambda: next(losses), **{**QUICK, "trials": 30})


@pytest.mark.parametrize("wrong", [{"forward": 1}, {"backward": 1}, {"forward": None}, {}])
def test_phases_say_what_they_lack(wrong):
    with pytest.raises(ValueError, match=r"has to be a function|needs clear="):
        Phases(**{"forward": lambda: None, **wrong})


def test_phases_by_hand_are_called_in_order_and_without_gradients():
    model, calls = net(), []

    def clear() -> None:
        calls.append("clear")
        model.zero_grad()

    def forward() -> torch.Tensor:
        assert all(p.grad is None for p in model.parameters())
        calls.append("forward")
        return model(X).square().mean()

    def backward(loss: torch.Tensor) -> None:
        calls.append("backward")
        loss.backward()

    by_hand = Phases(forward=forward, backward=backward, step=lambda: calls.append("step"), clear=clear)
    measure(reference=by_hand, candidate=phases(net()), **QUICK)
    without_repeats = [call for call, _ in groupby(calls)]
    assert without_repeats[:8] == ["clear", "forward", "backward", "step"] * 2


HEAVY = "not {'torch', 'pandas', 'transformers', 'scipy'} & set(sys.modules)"
CHEAP = f"""
import sys, lorabench
assert {HEAVY} and 'pydantic' not in sys.modules
assert lorabench.Ablation and lorabench.__version__[0].isdigit() and 'Phases' in dir(lorabench)
import lorabench.measure as package
assert lorabench.measure is package is sys.modules['lorabench.measure'] and callable(package) and {HEAVY}
"""
FUNCTION_FIRST = """
from lorabench import measure
import lorabench.measure.flops as flops
import lorabench
assert measure is lorabench.measure and lorabench.measure.flops is flops and callable(measure)
"""
PACKAGE_FIRST = """
import lorabench.measure.trial
from lorabench import measure
assert measure is lorabench.measure
found = lorabench.measure(reference=lambda: 1.0, candidate=lambda: 1.0, trials=3, warmup=1)
from lorabench import *
assert isinstance(found, Measured) and Phases and load_results and measure is lorabench.measure
"""


@pytest.mark.parametrize("code", [CHEAP, FUNCTION_FIRST, PACKAGE_FIRST])
def test_the_names_come_cheaply_and_both_ways_round(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_package_is_the_function_with_its_help_and_signature():
    shown = inspect.signature(lorabench.measure)
    assert [*shown.parameters][:3] == ["reference", "candidate", "gold"]
    assert shown.return_annotation == "Measured" and lorabench.measure.seat.Seat
    text = pydoc.plain(pydoc.render_doc(lorabench.measure))
    assert "Time two variants of a training step" in text and "PACKAGE CONTENTS" not in text
    with pytest.raises(AttributeError, match="no attribute 'mesure'"):
        lorabench.mesure  # noqa: B018


def test_load_results_is_a_frame_a_row_a_record():
    published = ROOT.glob("results/*/*/records.jsonl")
    folder = min(published, key=lambda file: file.stat().st_size).parent
    frame = lorabench.load_results(folder)
    assert len(frame) and {"model", "toggles", "status", "total_speedup"} <= set(frame.columns)
    with pytest.raises(ValueError, match="no such file"):
        lorabench.load_results(folder / "nowhere")


def test_load_results_warns_of_a_folder_that_gives_an_empty_table(tmp_path):
    (tmp_path / "records.jsonl").touch()
    with pytest.warns(UserWarning, match=f"the table of {tmp_path} is empty") as told:
        assert lorabench.load_results(tmp_path).empty
    assert [warning.filename for warning in told] == [__file__]


def test_the_page_on_python_runs_from_top_to_bottom(tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL))
    (tmp_path / "page.py").write_text(code)
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", tmp_path / "page.py"], cwd=ROOT, text=True,
                          capture_output=True)  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert re.search(r"^(faster|slower|same|unclear): speed-up .* numerics passed", done.stdout, re.MULTILINE)
    assert "the gradient of" in done.stdout and "total_speedup" in done.stdout


@pytest.mark.gpu
def test_on_a_gpu_the_device_is_found_and_memory_has_peaks():
    def on_gpu(*, width: int = 4096) -> Phases:
        torch.manual_seed(0)
        model = nn.Linear(width, 1024, device="cuda")
        batch = torch.randn(512, width, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        return Phases(model=model, optimizer=optimizer, forward=lambda: model(batch).square().mean())

    found = measure(reference=on_gpu(), candidate=on_gpu(), gold=on_gpu(), **QUICK)
    assert found.numerics and found.numerics.passed
    held = found.memory["candidate"]
    assert held.peaks and set(held.peaks) == {"forward", "backward", "step"}
    assert held.static == (held.adapters or 0) + (held.optimizer or 0) <= (held.peak or 0)
    slow = measure(reference=on_gpu(), candidate=on_gpu(width=4096 * 16), device="cuda", **QUICK)
    assert slow.speedup.speedup.high < 1
    with pytest.raises(ValueError, match="on one device: device cpu, reference cuda:0"):
        measure(reference=on_gpu(), candidate=on_gpu(), device="cpu", **QUICK)
    with pytest.raises(ValueError, match="losses are on different devices: reference cuda:0, candidate cpu"):
        measure(reference=lambda: torch.ones((), device="cuda"), candidate=lambda: torch.ones(()), **QUICK)
