"""A toggle that answers nonsense: its own cell ends, with the names of toggle and hook, and the sweep goes on."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import odd_toggles
import pytest
from helpers import MACHINE as SMALL
from helpers import arm, cells, sweep
from run.scripted import PHASES, Script

from lorabench.contract.ablation import Ablation, NotApplied, Unsupported
from lorabench.contract.family import families
from lorabench.contract.hooks import Faulty, HookError, asked, described, noted
from lorabench.contract.names import NameUnknown
from lorabench.plan import registry
from lorabench.plan.design import refusal
from lorabench.record.store import read_records
from lorabench.run.messages import HEAD, LONGEST, MARK, Garbled, Inbox, send
from lorabench.run.runner import Runner

# What each way comes to: status and reason.
PLANNED = {
    "constructor": ("crash", "the toggle odd's constructor raised LookupError: while it was made"),
    "constructor_exit": ("crash", "the toggle odd's constructor raised SystemExit: 0"),
    "content": ("crash", "the toggle odd's content raised LookupError: what I am"),
    "content_object": ("crash", "the toggle odd's content is {'way': <object"),
    "label_time": ("crash", "expected words, the same each time"),
    "label": ("crash", "the toggle odd's label raised LookupError: who am I"),
    "label_number": ("crash", "the toggle odd's label is 7; expected words"),
    "excludes": ("crash", "the toggle odd's excludes raised LookupError: whom"),
    "excludes_empty": ("conflict", "odd excludes sdpa: it does not say why"),
    "requires": ("crash", "the toggle odd's requires.unmet raised LookupError: of its needs"),
    "effect": ("crash", "the toggle odd's without_effect raised LookupError: on what"),
    "effect_exit": ("crash", "the toggle odd's without_effect raised SystemExit: 0"),
    "effect_silent": (
        "crash",
        "the toggle odd's without_effect raised Silent: no message: asked for its words it raised",
    ),
    "effect_empty": ("crash", "the toggle odd's without_effect returned ''; expected a reason in words, or None"),
    "effect_number": ("crash", "the toggle odd's without_effect returned 3; expected a reason in words, or None"),
}
MEASURED = {
    "patch": ("crash", "the toggle odd's patch raised LookupError: nothing like it"),
    "patch_exit": ("crash", "the toggle odd's patch raised SystemExit: 0"),
    "patch_silent": ("crash", "the toggle odd's patch raised Silent: no message"),
    "patch_float": ("crash", "the toggle odd's patch returned 2.5; expected a number of sites, or None"),
    "audit_words": ("crash", "the toggle odd's audit returned 'many'; expected a number of sites"),
    "notes_dtype": ("crash", "the toggle odd's notes returned {'x': torch.float32}; expected what JSON can hold"),
    "unsupported_empty": ("unsupported", "the toggle odd's patch gave no reason"),
    "not_applied_empty": ("not_applied", "the toggle odd's audit gave no reason"),
    "clock": ("untrusted", "a toggle changed time.perf_counter"),
    "garbage": ("crash", "the worker sent b'Segmentat'…, which is no message while numerics gate"),
    "descriptors": ("crash", "the worker sent b'garbage"),
    "half": ("crash", "the worker sent half a message (25 bytes), and no more while numerics gate"),
    "other": ("crash", "the worker sent a dict in place of a message while numerics gate"),
    "closed": ("crash", "the worker closed its connection without a word while numerics gate"),
}


WAYS = ("batch", "collate", "step", "patch")
MACHINE: Any = SimpleNamespace(device="cpu", gpus=0, capability=None, dtype=lambda wanted: "float32")


def odd(way: str) -> odd_toggles.Odd:
    return odd_toggles.Odd(way=way)


# One of each kind of fault; of the others the same faults are shown below without a sweep, by `asked` and by messages.
FAST = (*PLANNED, "patch", "patch_exit", "unsupported_empty", "clock", "garbage", "closed")
REST = tuple(way for way in MEASURED if way not in FAST)


@pytest.fixture(scope="module")
def outcomes(plugin, tmp_path_factory):
    """One sweep over FAST and one over REST, each when it is first asked for: (process, records by way)."""

    @functools.cache
    def look_up(ways):
        folder = tmp_path_factory.mktemp("odd")
        toggles = ",".join(f"{{odd:{{way:{way}}}}}" for way in ways)
        done = sweep(
            "models=[tiny-llama]", "workload=2x16", "trials=2", "warmup=1", "timeout_s=60", "reference=[sdpa]",
            f"ablations=[{toggles},adamw]", "report=false", f"output={folder}", cwd=folder, env=plugin,
        )  # fmt: skip
        return done, {" + ".join(r.ablations): r for r in read_records(folder)}

    return look_up


@pytest.mark.parametrize("ways", [FAST, pytest.param(REST, marks=pytest.mark.exhaustive)], ids=["fast", "rest"])
def test_the_other_cells_go_on(outcomes, ways):
    done, records = outcomes(ways)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert len(records) == 2 + len(ways)
    assert records["adamw"].status == records[""].status == "ok"


@pytest.mark.parametrize("way", [*FAST, *(pytest.param(way, marks=pytest.mark.exhaustive) for way in REST)])
def test_each_way_is_a_record_that_names_toggle_and_hook(outcomes, way):
    record = outcomes(FAST if way in FAST else REST)[1][f"odd(way={way})"]
    status, reason = {**PLANNED, **MEASURED}[way]
    assert record.status == status and reason in record.reason, record.reason
    assert record.cost is None or record.cost.wall < 55


@pytest.mark.parametrize(
    ("hook", "way"),
    [("patch", way) for way in odd_toggles.PATCHES] + [("audit", way) for way in odd_toggles.AUDITS],
)  # fmt: skip
def test_an_answer_of_the_wrong_type_names_toggle_hook_and_what_was_expected(hook, way):
    with pytest.raises(HookError, match=f"the toggle odd's {hook} returned .*; expected a number of sites"):
        asked(odd(way), getattr(Ablation, hook), None)


@pytest.mark.parametrize("way", odd_toggles.NOTES)
def test_notes_are_refused_where_json_cannot_hold_them(way):
    with pytest.raises(HookError, match="the toggle odd's notes returned"):
        noted(odd(way), None)


def test_notes_come_as_the_record_will_hold_them():
    made = odd("none")
    object.__setattr__(made, "notes", lambda evidence: {"a": (1, 2), "b": float("nan"), "c": {"d": None}})
    assert noted(made, None) == {"a": [1, 2], "b": "NaN", "c": {"d": None}}


@pytest.mark.parametrize("hook", ["batch", "collate", "step"])
def test_building_an_arm_asks_in_the_same_way(hook, monkeypatch):
    monkeypatch.setattr(
        registry, "ablation", lambda item, real=registry.ablation: odd(item) if item in WAYS else real(item)
    )
    with pytest.raises(HookError, match=f"the toggle odd's {hook} returned"):
        arm(hook)
    with pytest.raises(LookupError) as raised:
        arm("patch")
    assert described(raised.value) == "the toggle odd's patch raised LookupError: nothing like it"


def test_a_refusal_keeps_its_type_and_needs_a_reason():
    with pytest.raises(Unsupported, match="the toggle odd's patch gave no reason"):
        asked(odd("unsupported_empty"), Ablation.patch, None)
    with pytest.raises(NotApplied, match="the toggle odd's audit gave no reason"):
        asked(odd("not_applied_empty"), Ablation.audit, None)


def test_a_faulty_toggle_keeps_the_key_of_the_cell():
    """So the toggle, mended, is what resume=failed measures under that key."""
    faulty, mended = Faulty.of(odd_toggles.Odd, {"way": "x"}, "why"), odd("x")
    base = cells("ablations=[eager]")[1]
    assert len({replace(base, toggles=(t,), candidate=(t,)).key for t in (faulty, mended)}) == 1
    assert (faulty.label, faulty.slot) == (mended.label, mended.slot)
    assert refusal(replace(base, toggles=(faulty,)), MACHINE) == ("crash", "why")


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (print, "is <built-in function print>; expected a subclass of lorabench.Ablation"),
        (
            type("Odd", (odd_toggles.Odd,), {"global_patch": property(sys.exit)}),
            "has the global_patch <property obj",
        ),
        (type("Odd", (odd_toggles.Odd,), {"summary": None}), "has the summary None; expected a str"),
    ],
)
def test_a_class_that_is_not_as_the_contract_has_it_is_refused_by_name(held, says, monkeypatch):
    point = SimpleNamespace(value="somebody:Odd", load=lambda: held)
    monkeypatch.setattr(registry, "registered", lambda: {"odd": point})
    with pytest.raises(NameUnknown, match=r"the ablation odd \(somebody:Odd\) ") as raised:
        registry.ablation("odd")
    assert says in str(raised.value)


@pytest.mark.parametrize("time_ms", [-1.0, 0.0, 0.00001, 1e11, float("nan"), float("inf")])
def test_a_time_that_no_clock_gives_is_a_crash_of_its_arm(tmp_path, time_ms):
    script = Script()
    script.phase_ms["eager", "backward"] = time_ms
    (family,) = families(cells("trials=6", "ablations=[eager,adamw]"))
    with Runner(script, SMALL, None, "session", 9.0, tmp_path) as runner:  # type: ignore[arg-type]
        found = {record.arm: record for record in runner.family(family)}
    assert (found["eager"].status, found["adamw"].status) == ("crash", "ok")
    assert "ms; expected a time between zero and some months" in found["eager"].reason


def test_a_trial_without_a_phase_that_its_arm_had_is_not_believed(tmp_path):
    script = Script(ms=dict.fromkeys(("reference", "eager", "adamw"), 150.0))  # a turn of one trial
    turns = iter(range(100))
    for name in ("reference", "eager", "adamw"):
        less = lambda name=name: name == "eager" and next(turns) == 3  # noqa: E731
        script.fails["turn", name] = lambda less=less: setattr(script, "phases", PHASES[1:] if less() else PHASES)
    (family,) = families(cells("trials=6", "ablations=[eager,adamw]"))
    with Runner(script, SMALL, None, "session", 9.0, tmp_path) as runner:  # type: ignore[arg-type]
        found = {record.arm: record for record in runner.family(family)}
    assert (found["eager"].status, found["adamw"].status) == ("untrusted", "ok")
    assert "has the phases ['backward', 'step'], its first one ['forward', 'backward', 'step']" in found["eager"].reason


def test_whatever_else_goes_wrong_around_a_family_is_its_crash(tmp_path):
    class Broken(Script):
        def open(self, *_):
            raise ZeroDivisionError("in between")

    with Runner(Broken(), SMALL, None, "session", 9.0, tmp_path) as runner:  # type: ignore[arg-type]
        record = runner.measure(cells("ablations=[eager]")[0])
    assert (record.status, record.reason) == ("crash", "in the harness: ZeroDivisionError: in between")
    assert "in between" in record.log


@pytest.fixture
def ends():
    ours, theirs = multiprocessing.Pipe(duplex=False)
    yield Inbox(ours), theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order(ends):
    inbox, theirs = ends
    assert list(inbox.messages()) == []
    for i in range(3):
        send(theirs, {"n": i, "long": "x" * 5000})
    assert [m["n"] for m in inbox.messages()] == [0, 1, 2]
    theirs.close()
    with pytest.raises(EOFError):
        list(inbox.messages())


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"x", "no message"),
        (b"\x00\x00\x10\x00", "no message"),
        (HEAD.pack(MARK, LONGEST + 1), "which none can have"),
        (HEAD.pack(MARK, 4) + b"abcd", "cannot be read"),
        (HEAD.pack(MARK, 0), "cannot be read"),
    ],
)
def test_what_is_no_message_is_said_at_once(ends, sent, says):
    inbox, theirs = ends
    os.write(theirs.fileno(), sent)
    with pytest.raises(Garbled, match=says):
        list(inbox.messages())


def test_the_end_in_the_middle_of_a_message_is_no_end(ends):
    inbox, theirs = ends
    os.write(theirs.fileno(), HEAD.pack(MARK, 100) + b"abcd")
    assert list(inbox.messages()) == []
    theirs.close()
    with pytest.raises(Garbled, match="half a message"):
        list(inbox.messages())
