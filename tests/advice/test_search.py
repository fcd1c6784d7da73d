"""The search: what it measures next, what it keeps, and what it says; over simulated families."""

from __future__ import annotations

import re

import pytest
from advice.simulated import OPENING_S, Simulation, own, toggle

from lorabench.advice.result import recommendation
from lorabench.advice.search import FEWEST, MOST, more
from lorabench.contract.settings import Settings
from lorabench.plan.compose import load_recommend_config


def answer(done, *overrides):
    config = load_recommend_config(list(overrides))
    return recommendation(done.known, config, "a machine", done.now, "lorabench recommend")


def outcomes(done):
    return {t.toggles.partition("(")[0]: (t.outcome, t.why) for t in answer(done).tried}


BUDGETS = [(2, 10), (5, 0.7), (5, 3), (12, 1)]  # in make test


def test_all_alone_in_one_family_then_the_stacks_in_another():
    done = Simulation(toggle("little", 1.2), toggle("much", 2.0), toggle("nothing"), toggle("some", 1.5))
    assert done.titles[0] == ["little", "much", "nothing", "some"]
    assert done.titles[1] == [
        "much", "much+some+little", "some+little", "much+little", "much+some",
    ]  # fmt: skip
    assert len(done.steps) == 2 and done.stack == ["much", "some", "little"]
    said = answer(done)
    assert said.switch_on == ["much(by=2.0)", "some(by=1.5)", "little(by=1.2)"]
    assert said.paragraph.startswith(
        "Switch on much(by=2.0) + some(by=1.5) + little(by=1.2): a step of tiny-llama takes"
    )
    assert "against peft: 3." in said.paragraph and "30.0 % less memory" in said.paragraph
    assert "nothing beyond rounding" in said.paragraph and "sdpa" not in said.paragraph
    assert outcomes(done)["nothing"][0] == "same"
    outcome, why = outcomes(done)["some"]
    assert outcome == "switch on" and re.match(r"alone 1\.(49|50)\d? .* on top of much\(by=2\.0\) \+ little", why)


def test_what_may_well_help_is_put_together_too_and_recommended_only_where_it_then_does():
    done = Simulation(toggle("much", 3.0), toggle("perhaps", 1.2), noise=0.04)
    first, labels = done.known.families[0], done.question.labels(done.question.contenders[1])
    record = first.record(labels)
    assert record and first.row(record)["verdict"] == "unclear"
    assert done.titles[1] == ["much", "much+perhaps", "perhaps"] and done.stack == ["much", "perhaps"]


def test_one_winner_needs_no_stacks_and_every_question_has_its_answer():
    done = Simulation(toggle("much", 2.0), toggle("nothing"))
    assert done.titles == [["much", "nothing"]] and done.stack == ["much"]
    assert answer(done).more == "" and answer(done).paragraph.endswith("every question has its answer.")


def test_at_most_one_winner_a_slot_is_put_together():
    done = Simulation(toggle("second", 1.5, slot="same"), toggle("first", 2.0, slot="same"), toggle("other", 1.3))
    assert done.titles[1] == ["first", "first+other", "other"] and done.stack == ["first", "other"]
    assert outcomes(done)["second"] == ("helps alone", "first(by=2.0), which fills the same slot, was better")


def test_what_excludes_a_better_one_is_passed_over_with_the_reason():
    done = Simulation(toggle("first", 2.0), toggle("alone", 1.5, excludes={"first": "it wants to be alone"}))
    assert done.stack == ["first"] and len(done.steps) == 1
    assert outcomes(done)["alone"] == ("helps alone", "alone excludes first: it wants to be alone")


def test_what_no_trainer_can_have_with_a_better_one_is_passed_over_with_the_reason(monkeypatch):
    first, second = toggle("first", 2.0), toggle("second", 1.5)
    monkeypatch.setattr(type(first), "settings", lambda self: Settings(code=("capture(trainer)",)))
    done = Simulation(first, second)
    assert done.stack == ["first"] and len(done.steps) == 1
    assert outcomes(done)["second"][1].startswith("first(by=2.0) needs a trainer of transformers or TRL")


def test_what_adds_nothing_to_the_others_is_left():
    done = Simulation(toggle("first", 2.0), toggle("overlaps", 1.5, together=1.0), toggle("third", 1.2))
    assert sorted(done.stack) == ["first", "third"]
    outcome, why = outcomes(done)["overlaps"]
    assert outcome == "helps alone" and why.startswith("on top of first(by=2.0) + third(by=1.2) ") and "1.00" in why


def test_what_passes_alone_and_not_together_is_never_recommended():
    both = {"first", "second"}
    done = Simulation(
        toggle("first", 2.0), toggle("second", 1.5),
        fails=lambda stack: "wrong_numerics" if both <= {t.name for t in own(stack.ablations)} else None,
    )  # fmt: skip
    assert done.stack == ["first"] and len(done.steps) == 2
    why = "together with first(by=2.0): refused by the gate, it went wrong"
    assert outcomes(done)["second"] == ("helps alone", why)


def test_nothing_helps():
    done = Simulation(toggle("nothing"), toggle("slower", 0.8), noise=0.001)
    said = answer(done)
    assert done.stack == [] and said.switch_on == [] and said.code == []
    assert said.paragraph.startswith("Leave peft as it is: nothing that was tried is clearly faster")
    assert "Others that were considered: 1 same, 1 slower." in said.paragraph
    named = answer(done, "ablations=[packing,lora_kernels]").paragraph
    assert re.search(r"Same: nothing \((1\.0|0\.99)", named) and "Slower: slower(by=0.8) (0." in named


def test_what_is_too_noisy_gets_no_number():
    done = Simulation(toggle("perhaps", 1.5), noise=3.0, minutes=1)
    said = answer(done)
    assert said.paragraph.startswith("Nothing can be said: the reference is far off itself") and done.stack == []
    assert outcomes(done)["perhaps"] == ("unclear", "too noisy to say")


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        ("wrong_numerics", "refused by the gate"), ("untrusted", "not trusted"), ("crash", "crashed"),
        ("timeout", "ended by its time limit"), ("not_applied", "nothing to do here"),
    ],
)  # fmt: skip
def test_what_did_not_pass_is_never_recommended(status, outcome):
    done = Simulation(toggle("cheat", 9.0, status=status), toggle("honest", 1.5))
    assert done.stack == ["honest"] and outcomes(done)["cheat"] == (outcome, "it went wrong")


@pytest.mark.parametrize(
    ("count", "minutes"),
    [
        pytest.param(count, minutes, marks=[] if (count, minutes) in BUDGETS else [pytest.mark.exhaustive])
        for count in (2, 5, 12)
        for minutes in (0.7, 1, 3, 10)
    ],
)
def test_nine_tenths_of_the_budget_are_used_or_every_question_has_its_answer(minutes, count):
    """Whatever the budget, nothing begins after it."""
    done = Simulation(*[toggle(f"t{i}", 1 + i / 20) for i in range(count)], minutes=minutes)
    assert done.now <= done.seconds + OPENING_S + count + 3
    assert done.now >= 0.9 * done.seconds or not more(done.known)[0]
    assert all(FEWEST <= rounds <= MOST for rounds in done.rounds)


def test_what_there_is_no_time_for_is_left_out_and_said():
    done = Simulation(*[toggle(f"t{i}", 1.0) for i in range(40)], minutes=0.5)
    said = answer(done)
    assert said.left_out and set(said.left_out) == {
        name for name, (what, _) in outcomes(done).items() if what == "not measured"
    }
    assert done.titles[0][:2] == ["t0", "t1"] and said.left_out[-1] == "t39" and "t0" not in said.left_out
    assert f"would measure {', '.join(said.left_out)}" in said.paragraph and said.more.startswith("measure t")


def test_a_budget_too_small_for_anything():
    done = Simulation(toggle("much", 2.0), minutes=0.01)
    assert done.steps == [] and done.stack == []
    assert "too small to measure even the reference" in answer(done).paragraph


def test_what_starts_slowly_comes_last_and_where_there_is_time(monkeypatch):
    slow, quick = toggle("slow", 3.0, start_s=60.0), [toggle("a", 1.5), toggle("b", 1.3)]
    monkeypatch.setattr("lorabench.advice.search.slow", lambda toggles, size: toggles[0].name == "slow")
    monkeypatch.setattr(
        "lorabench.advice.budget.expected",
        lambda toggles, size: type("E", (), {"start_s": 60.0 if toggles[0].name == "slow" else 0.0}),
    )
    short = Simulation(slow, *quick, minutes=1)
    assert short.titles[0] == ["a", "b"] and answer(short).left_out == ["slow(by=3.0)"]
    assert "more would measure slow(by=3.0)" in answer(short).paragraph
    long = Simulation(slow, *quick, minutes=10)
    assert "slow" in long.titles[0] and sorted(long.stack) == ["a", "b", "slow"]
    between = Simulation(slow, *quick, minutes=4.5)
    assert between.titles[0] == ["a", "b"] and between.titles[1] == ["slow"]
    assert between.titles[2][0] == "slow" and sorted(between.stack) == ["a", "b", "slow"]


def test_a_slow_start_leaves_time_for_stacks_which_start_quickly(monkeypatch):
    """Axolotl in processes of its own took a third of the budget to sit, on a GPU. Stacks were thought to take as long,
    and what was left went to more rounds of what decides nothing."""
    monkeypatch.setattr("lorabench.advice.search.slow", lambda toggles, size: False)
    monkeypatch.setattr(
        "lorabench.advice.budget.expected",
        lambda toggles, size: type("E", (), {"start_s": max((t.start_s for t in own(toggles)), default=0.0)}),
    )
    slow = [toggle(f"slow{n}", 1.0, start_s=24.0) for n in range(2)]
    done = Simulation(toggle("a", 1.5), toggle("b", 1.3), *slow, minutes=1.9)
    assert done.rounds[0] == 12 and done.titles[1][:2] == ["a", "a+b"] and done.stack == ["a", "b"]


def test_more_rounds_where_the_two_best_are_not_told_apart():
    done = Simulation(toggle("one", 2.0, slot="same"), toggle("other", 2.02, slot="same"), noise=0.15, minutes=10)
    assert len(done.steps) > 1 and set(done.titles[1]) == {"one", "other"}
    assert done.rounds[1] > done.rounds[0]


def test_what_is_left_goes_to_contenders_that_may_help_and_do_not_show_it():
    """Twelve rounds do not tell 4 % from nothing here; some hundred do, and then it is put on top of the best."""
    done = Simulation(toggle("much", 2.0), toggle("little", 1.04), toggle("slower", 0.7), noise=0.06)
    first, labels = done.known.families[0], done.question.labels(done.question.contenders[1])
    record = first.record(labels)
    assert record and first.row(record)["verdict"] == "unclear"
    assert done.titles[0] == ["much", "little", "slower"] and done.titles[1] == ["much", "much+little"]
    assert sorted(done.stack) == ["little", "much"]


def test_what_is_unclear_alone_is_tried_on_top_of_the_whole():
    """As a fused optimizer in a step that waits for its host, and in captured steps."""
    toggles = [toggle("much", 2.0), toggle("more", 1.5), toggle("hidden", 1.03, together=1.3), toggle("slower", 0.7)]
    done = Simulation(*toggles, noise=0.06)
    assert done.titles[1][:2] == ["much", "much+more+hidden"]
    assert sorted(done.stack) == ["hidden", "more", "much"]
    outcome, why = outcomes(done)["hidden"]
    assert outcome == "switch on" and re.search(r"on top of much\(by=2.0\) \+ more\(by=1.5\) 1\.[23]", why)
    assert Simulation(*toggles, noise=0.06, arms=done.arms).steps == []


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 12), marks=pytest.mark.exhaustive)])
def test_what_is_unclear_alone_and_not_clearly_faster_on_top_is_left(seeds):
    """A stack with one more toggle that does nothing is ahead of itself in half of all runs."""
    for seed in seeds:
        done = Simulation(toggle("much", 2.0), toggle("nothing", 1.0), noise=0.06, seed=seed)
        assert done.stack == ["much"]


def test_a_contender_that_more_rounds_do_not_tell_from_nothing_is_asked_once_more_and_not_again():
    toggles = [toggle("much", 2.0), toggle("nothing", 1.0)]
    done = Simulation(*toggles, noise=0.06)
    assert done.titles.count(["nothing"]) == 1 and done.now < done.seconds and more(done.known) == ("", 0.0)
    assert Simulation(*toggles, noise=0.06, arms=done.arms).steps == []


def test_the_same_command_goes_on():
    toggles = [toggle("first", 2.0), toggle("second", 1.5), *[toggle(f"t{i}") for i in range(30)]]
    cut = Simulation(*toggles, minutes=0.5)
    left = [label.partition("(")[0] for label in answer(cut).left_out]
    assert left
    more_ = Simulation(*toggles, arms=cut.arms)
    assert more_.titles[0] == left, "what was left out comes first"
    assert more_.stack == ["first", "second"] and answer(more_).left_out == []
    again = Simulation(*toggles, arms=more_.arms)
    assert again.steps == [] and answer(again).switch_on == answer(more_).switch_on


def test_a_reference_that_does_not_fit():
    memory = toggle("small_checkpoints", 0.6)
    done = Simulation(
        toggle("much", 2.0), memory, toggle("small_kernels", 0.9, slot="kernels"), large=True, in_need=[memory]
    )
    assert done.titles[0] == ["much", "small_kernels"]
    assert done.titles[1][0] == "small_kernels+much" and done.stack == ["small_kernels", "much"]
    said = answer(done).paragraph
    assert "peft does not fit this machine, and with it a step does, in" in said
    assert outcomes(done)["small_kernels"][0] == "switch on"
    assert outcomes(done)["small_kernels"][1].startswith("it makes it fit")


def test_what_saves_memory_is_tried_where_nothing_else_makes_it_fit():
    memory = toggle("small_checkpoints", 0.6)
    done = Simulation(toggle("much", 2.0), memory, large=True, in_need=[memory])
    assert ["small_checkpoints"] in done.titles and sorted(done.stack) == ["much", "small_checkpoints"]


def test_the_batch_size_that_was_found_is_a_setting():
    def size(self, rehearsal):
        raise NotImplementedError

    sizing = toggle("sizing", 3.0)
    for name, value in (("size", size), ("found", 8)):
        setattr(type(sizing), name, value)
    load = "workload={short_samples:{samples:16,batch_size:2}}"
    done = Simulation(sizing, toggle("other", 1.5), overrides=load)
    said = answer(done)
    assert sorted(done.stack) == ["other", "sizing"]
    settings = "per_device_train_batch_size=8, gradient_accumulation_steps=2"
    assert f"A micro-batch has 8 samples: {settings}." in said.paragraph
    (_, _, trl), _, (_, _, axolotl) = said.code
    assert "per_device_train_batch_size=8,\n    gradient_accumulation_steps=2,\n" in trl and "sizing" not in trl
    assert "micro_batch_size: 8\ngradient_accumulation_steps: 2\n" in axolotl

    kept = answer(Simulation(toggle("other", 1.5), overrides=load)).paragraph
    assert "A micro-batch has 2 samples: per_device_train_batch_size=2, gradient_accumulation_steps=8." in kept


@pytest.mark.parametrize(("by", "outcome"), [(1.6, "switch on"), (0.6, "slower")])
def test_where_memory_bounds_the_batch_what_saves_memory_is_tried_on_top(by, outcome):
    """Of 16 samples 8 fit; with checkpointing more do, which may be worth the work that is done again."""
    sizing, memory = toggle("sizing", 3.0), toggle("checkpoints", by)
    for name, value in (("size", lambda self, rehearsal: None), ("found", 8)):
        setattr(type(sizing), name, value)
    load = "workload={short_samples:{samples:16,batch_size:2}}"
    done = Simulation(sizing, toggle("other", 1.5), memory, in_need=[memory], overrides=load)
    assert done.titles[0] == ["sizing", "other"] and "sizing+other+checkpoints" in done.titles[1]
    assert outcomes(done)["checkpoints"][0] == outcome
    assert re.match(r"on top of sizing\(by=3.0\) \+ other\(by=1.5\) [10]\.[56]", outcomes(done)["checkpoints"][1])
    assert ("checkpoints" in done.stack) == (outcome == "switch on")

    alone = Simulation(sizing, memory, in_need=[memory], overrides=load)
    assert alone.titles[1] == ["sizing", "sizing+checkpoints"]
    assert ("checkpoints" in alone.stack) == (outcome == "switch on") and not more(alone.known)[0]


def test_nothing_makes_it_fit():
    done = Simulation(toggle("much", 2.0), large=True)
    assert done.stack == [] and "nothing that was tried makes it fit" in answer(done).paragraph


def test_what_saves_memory_alone_is_not_tried_where_the_reference_fits():
    memory = toggle("small_checkpoints", 0.6)
    done = Simulation(toggle("much", 2.0), memory, in_need=[memory])
    assert done.titles == [["much"]] and outcomes(done)["small_checkpoints"][0] == "not tried"


def rivals(first=2.0, second=1.9, **fields):
    """Two that cannot be on together, of which the second, a little slower alone, is the better with others."""
    packed = toggle("packed", first, together=1.2)
    return [
        packed,
        toggle("captured", second, excludes={"packed": "its shapes change"}, **fields),
        toggle("third", 1.5),
    ]


def test_around_one_of_two_that_cannot_be_on_together_there_is_a_whole_too():
    done = Simulation(*rivals())
    assert done.titles[1] == [
        "packed", "packed+third", "captured+third", "captured", "third",
    ]  # fmt: skip
    assert len(done.steps) == 2 and done.stack == ["captured", "third"] and not more(done.known)[0]
    outcome, why = outcomes(done)["packed"]
    assert outcome == "helps alone"
    assert re.match(r"together with third\(by=1.5\) 0\.6.* × as fast as captured\(by=1.9\) \+ third\(by=1.5\)$", why)
    assert re.match(r"alone 1\.[89].*; on top of third\(by=1.5\) 1\.[89]", outcomes(done)["captured"][1])
    assert Simulation(*rivals(), arms=done.arms).steps == []


def test_of_two_wholes_the_first_where_it_is_faster():
    done = Simulation(toggle("first", 2.0, slot="same"), toggle("second", 1.9, slot="same"), toggle("third", 1.5))
    assert done.stack == ["first", "third"]
    assert outcomes(done)["second"][1].startswith("together with third(by=1.5) 0.95")


def test_what_is_clearly_slower_alone_gets_no_whole_of_its_own_and_what_may_not_be_does():
    assert not any("captured" in title for title in Simulation(*rivals(second=1.5)).titles[1])
    unsure = Simulation(*rivals(second=1.55, noise=0.15))
    assert "captured+third" in unsure.titles[1]
    told, labels = unsure.known.families[-1], [unsure.question.labels(c) for c in unsure.question.contenders]
    beside = told.beside(*labels[:2])
    assert beside and beside.low > 1 and unsure.stack == ["captured", "third"], "more rounds take no whole back"


def test_where_time_is_short_the_best_alone_and_the_wholes_come_first_and_what_is_left_is_said():
    short = Simulation(*rivals(), minutes=0.46)
    assert short.titles[1] == ["packed", "packed+third", "captured+third", "captured"]
    assert short.stack == ["captured", "third"]
    none = Simulation(*rivals(), minutes=0.3)
    assert more(none.known)[0] == (
        "put packed(by=2.0, together=1.2), third(by=1.5) together and put captured(by=1.9), third(by=1.5) together"
    )
    one = Simulation(*rivals(), arms=none.arms, minutes=0.24)
    assert one.titles == [["packed", "packed+third"]] and one.stack == ["packed"]
    assert more(one.known)[0] == "put captured(by=1.9), third(by=1.5) together"


@pytest.mark.parametrize(("sooner", "seated"), [(0.4, 9), (1.0, 7)])
def test_stacks_are_seated_while_there_is_time_for_rounds_however_soon_they_start(sooner, seated):
    """On an H200 they started in 0.55 of what was expected, and the best was the first that had been left out."""
    toggles = [toggle(name, 2.0 - place / 10, start_s=4.0) for place, name in enumerate("abcd")]
    same = toggle("same", 1.9, start_s=4.0, together=0.9)
    done = Simulation(*toggles, same, minutes=1.2, sooner=sooner)
    stacks = [labels for labels in done.known.families[-1].arms if len(labels) > 3]
    assert len(done.titles[1]) == 9 and len(stacks) == seated and done.rounds[1] >= FEWEST
    assert done.stack == [*"abcd"]


def test_where_the_reference_does_not_fit_both_wholes_have_what_makes_it_fit():
    done = Simulation(*rivals(), toggle("small_kernels", 0.9), large=True)
    assert {"small_kernels+packed+captured", "small_kernels+captured+third"} & set(done.titles[1]) == {
        "small_kernels+captured+third"
    }
    assert done.stack == ["small_kernels", "captured", "third"]


@pytest.mark.parametrize(("together", "stack"), [(1.0, ["much"]), (1.4, ["much", "some"])])
def test_a_wide_interval_alone_is_no_reason_to_take_fewer_toggles(together, stack):
    """Of two that cannot be told apart the one with fewer toggles, where in the middle it is as fast."""
    done = Simulation(toggle("much", 3.0), toggle("some", 2.5, together=together, noise=0.5), minutes=0.42)
    much, both, labels = (*done.known.stacks[:2], done.question.labels)
    beside = done.known.deciding and done.known.deciding.beside(labels(both), labels(much))
    assert beside and beside.low < 1 < beside.high and sorted(done.stack) == stack
