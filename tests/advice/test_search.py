"""The search: what it measures next, what it keeps, and what it says; over simulated cells."""

from __future__ import annotations

import pytest
from advice import simulated
from advice.simulated import Simulation, toggle

from lorabench.advice.result import recommendation
from lorabench.contract.settings import Settings
from lorabench.run.runner import record_of


@pytest.fixture
def run(monkeypatch):
    def run(*toggles, **options):
        return Simulation(*toggles, monkeypatch=monkeypatch, **options)

    return run


def fail_where(monkeypatch, wrong):
    """The gate refuses the cells of which `wrong` says so."""
    honest = simulated.simulated

    def gated(cell, number, **options):
        if wrong(cell):
            return record_of(cell, "s", status="wrong_numerics", reason="together")
        return honest(cell, number, **options)

    monkeypatch.setattr(simulated, "simulated", gated)


def answer(simulation):
    return recommendation(simulation.search, "a machine", "float32", "lorabench recommend")


def outcomes(simulation):
    return {t.toggles.partition("(")[0]: (t.outcome, t.why) for t in answer(simulation).tried}


def test_solo_first_then_the_best_of_each_slot_one_by_one_then_the_whole(run):
    done = run(toggle("little", 1.2), toggle("much", 2.0), toggle("nothing"), toggle("some", 1.5))
    assert done.titles == [
        "", "little", "much", "nothing", "some",
        "some | much", "little | much | some", "much+some+little",
    ]  # fmt: skip
    assert done.stack == ["much", "some", "little"]
    said = answer(done)
    assert said.switch_on == ["much(by=2.0)", "some(by=1.5)", "little(by=1.2)"]
    assert said.paragraph.startswith(
        "Switch on much(by=2.0) + some(by=1.5) + little(by=1.2): a step of tiny-llama takes"
    )
    assert "3.6" in said.paragraph and "30.0 % less memory" in said.paragraph
    assert "nothing beyond rounding" in said.paragraph
    assert outcomes(done)["nothing"][0] == "same"


def test_one_winner_is_measured_once(run):
    done = run(toggle("much", 2.0), toggle("nothing"))
    assert done.titles == ["", "much", "nothing"] and done.stack == ["much"]


def test_at_most_one_winner_a_slot_goes_on(run):
    done = run(toggle("second", 1.5, slot="same"), toggle("first", 2.0, slot="same"), toggle("other", 1.3))
    assert done.stack == ["first", "other"]
    assert "second | first" not in done.titles
    assert outcomes(done)["second"] == ("helps alone", "first(by=2.0), which fills the same slot, was better")


def test_what_excludes_the_stack_is_passed_over_with_the_reason(run):
    done = run(toggle("first", 2.0), toggle("alone", 1.5, excludes={"first": "it wants to be alone"}))
    assert done.stack == ["first"] and len(done.order) == 3
    assert outcomes(done)["alone"] == ("helps alone", "alone excludes first: it wants to be alone")


def test_what_no_trainer_can_have_with_the_stack_is_passed_over_with_the_reason(run, monkeypatch):
    first, second = toggle("first", 2.0), toggle("second", 1.5)
    monkeypatch.setattr(type(first), "settings", lambda self: Settings(code=("capture(trainer)",)))
    done = run(first, second)
    assert done.stack == ["first"] and len(done.order) == 3
    assert outcomes(done)["second"][1].startswith("first(by=2.0) needs a trainer of transformers or TRL")


def test_what_does_not_help_on_top_is_left_and_the_search_goes_on(run):
    done = run(toggle("first", 2.0), toggle("overlaps", 1.5, together=1.0), toggle("third", 1.2))
    assert done.stack == ["first", "third"]
    outcome, why = outcomes(done)["overlaps"]
    assert outcome == "helps alone" and why.startswith("on top of first(by=2.0): same, 1.00")


def test_a_whole_that_fails_falls_back_to_the_best_alone(run, monkeypatch):
    fail_where(monkeypatch, lambda cell: len(cell.toggles) == 2)
    done = run(toggle("first", 2.0), toggle("second", 1.5))
    assert done.titles[-2:] == ["second | first", "first+second"] and done.stack == ["first"]
    why = "it helped on top, but the whole, first(by=2.0) + second(by=1.5), is not clearly faster than the reference"
    assert outcomes(done)["second"] == ("helps alone", why)


def test_nothing_helps(run):
    done = run(toggle("nothing"), toggle("slower", 0.8))
    said = answer(done)
    assert done.stack == [] and said.switch_on == []
    assert said.paragraph.startswith("Leave sdpa, adamw_foreach, padding as it is: nothing that was tried is clearly")
    assert "Same: nothing" in said.paragraph and "Slower: slower" in said.paragraph


def test_what_is_too_noisy_gets_no_number(run):
    done = run(toggle("perhaps", 1.5), noise=3.0)
    said = answer(done)
    assert done.stack == [] and outcomes(done)["perhaps"] == ("unclear", "too noisy to say")
    assert said.paragraph.startswith("Nothing can be said: the reference is up to ")
    assert "with another output=" in said.paragraph and "× as fast" not in said.paragraph


def test_an_interval_that_is_only_wide_is_shown(run):
    (outcome, why) = outcomes(run(toggle("perhaps", 1.02), noise=0.2))["perhaps"]
    assert outcome == "unclear" and why.startswith("[0.") and why.endswith("× as fast")


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        ("wrong_numerics", "refused by the gate"),
        ("untrusted", "not trusted"),
        ("crash", "crashed"),
        ("timeout", "ended by its time limit"),
        ("not_applied", "nothing to do here"),
    ],
)
def test_what_did_not_pass_is_never_recommended(run, status, outcome):
    done = run(toggle("cheat", 9.0, status=status), toggle("honest", 1.5))
    assert done.stack == ["honest"]
    assert outcomes(done)["cheat"] == (outcome, "went wrong")
    assert f"{outcome.capitalize()}: cheat(by=9.0, status={status}) (went wrong)" in answer(done).paragraph


def test_what_passes_alone_and_not_together_is_never_recommended(run, monkeypatch):
    fail_where(monkeypatch, lambda cell: {"first", "second"} <= {t.name for t in cell.candidate})
    done = run(toggle("first", 2.0), toggle("second", 1.5))
    assert done.stack == ["first"]
    assert outcomes(done)["second"] == ("helps alone", "on top of first(by=2.0): refused by the gate, together")


def test_the_install_command_is_said(run):
    done = run(toggle("absent", status="unsupported"))
    assert "Unsupported here: absent(status=unsupported) (needs the package x: pip install x)" in (
        answer(done).paragraph
    )


def test_a_budget_that_runs_out_says_what_was_left_out(run):
    toggles = [toggle(f"t{i}", 1.0) for i in range(8)]
    done = run(*toggles, minutes=1)
    assert [len(done.order), len(done.search.left_out)] == [5, 4]  # the margin forbids a sixth
    said = answer(done)
    assert len(said.left_out) == 4 and said.left_out[0].startswith("t4: it would take about 12 s")
    assert "Left out, for the budget is 1 minute: t4" in said.paragraph
    assert outcomes(done)["t7"][0] == "not measured"


def test_a_budget_too_small_for_anything(run):
    done = run(toggle("much", 2.0), minutes=0.1)
    assert done.order == [] and done.stack == []
    assert "too small to measure even the reference" in answer(done).paragraph


def test_time_is_kept_to_put_winners_together(run):
    """Of 2 minutes: the reference and four toggles alone, then the stack and the whole, in place of more toggles."""
    winners = [toggle(f"w{i}", 2 - i / 10) for i in range(2)]
    done = run(*winners, *[toggle(f"t{i}") for i in range(10)], minutes=2)
    assert done.stack == ["w0", "w1"]
    assert done.titles[-2:] == ["w1 | w0", "w0+w1"]
    assert done.search.left_out and all(c.toggles[0].name.startswith("t") for c, _ in done.search.left_out)


def test_a_slow_toggle_is_expected_to_be_slow_in_a_stack_too(run):
    done = run(toggle("quick", 2.0), toggle("slow", 1.5), minutes=2, takes={"slow": 60})
    assert done.stack == ["quick"]  # slow alone took a minute, and so would the two together
    assert any(c.reference != done.search.itself.reference for c, _ in done.search.left_out)
    assert outcomes(done)["slow"] == ("helps alone", "there was no time to put it on top")


def test_the_same_command_goes_on(run):
    toggles = [toggle("first", 2.0), toggle("second", 1.5), toggle("third")]
    cut = run(*toggles, minutes=0.5)
    assert cut.titles == ["", "first"]
    more = run(*toggles, records=cut.records)
    assert more.titles == ["second", "third", "second | first", "first+second"]
    assert more.stack == ["first", "second"]
    again = run(*toggles, records=more.records)
    assert again.order == [] and again.stack == ["first", "second"]
    assert answer(again).switch_on == answer(more).switch_on


def test_a_reference_that_does_not_fit(run):
    memory = toggle("small_checkpoints", 0.6)
    options = {"large": True, "in_need": [memory]}
    done = run(toggle("much", 2.0), memory, toggle("small_kernels", 0.9, slot="kernels"), **options)
    assert done.titles == [
        "", "much", "small_checkpoints", "small_kernels", " | small_kernels",
        "small_checkpoints | small_kernels", "much | small_kernels", "small_kernels+much",
    ]  # fmt: skip
    assert done.stack == ["small_kernels", "much"]
    said = answer(done).paragraph
    assert "does not fit this machine, and with it a step does, in" in said
    assert outcomes(done)["small_kernels"] == ("switch on", "it makes it fit")


def test_what_does_not_fit_on_top_either_is_left(run):
    done = run(toggle("bloat", 2.0, status="oom"), toggle("small", 0.9), large=True)
    assert done.titles[-1] == "bloat | small" and done.stack == ["small"]
    assert outcomes(done)["bloat"] == ("does not fit", "went wrong")


def test_nothing_makes_it_fit(run):
    done = run(toggle("much", 2.0), large=True)
    assert done.stack == [] and "nothing that was tried makes it fit" in answer(done).paragraph


def test_what_saves_memory_alone_is_not_tried_where_the_reference_fits(run):
    memory = toggle("small_checkpoints", 0.6)
    done = run(toggle("much", 2.0), memory, in_need=[memory])
    assert done.titles == ["", "much"]
    assert outcomes(done)["small_checkpoints"][0] == "not tried"
