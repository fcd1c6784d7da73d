"""How long a sweep will take: by this machine's records, else computed, in units that can be imagined."""

from __future__ import annotations

import pytest
from helpers import MACHINE, cells, config, refused
from own_models import jsonl, saved

from lorabench.contract.family import Family
from lorabench.plan.compose import plan
from lorabench.plan.estimate import FIXED_S, Seen, by_records, computed, duration, longest
from lorabench.record.costs import seen_on
from lorabench.record.store import RecordError, Store
from lorabench.run.runner import record_of


@pytest.mark.parametrize(
    "seconds, words",
    [
        (0.4, "0 s"), (40, "40 s"), (89, "89 s"), (90, "1.5 minutes"), (1_200, "20 minutes"), (5_400, "1.5 hours"),
        (86_400, "24 hours"), (18_567_588, "215 days"),
    ],
)  # fmt: skip
def test_a_duration_is_in_a_unit_that_can_be_imagined(seconds, words):
    assert duration(seconds) == words


def seen(cell, wall_s, trials=3, **other):
    own = {
        "kind": cell.kind, "model": cell.model.name, "workload": cell.workload.name,
        "candidate": frozenset(a.label for a in cell.candidate), "separate": cell.separate,
    }  # fmt: skip
    return Seen(**own | {"wall_s": wall_s, "trials_s": wall_s / 2, "trials": trials} | other)


def test_the_same_candidate_comes_before_others_of_its_model_and_workload():
    own, eager, packing = cells("ablations=[eager,packing]")
    records = [seen(eager, 10.0), seen(eager, 14.0), seen(own, 100.0)]
    assert by_records(eager, records) == (12.0, "as it took here before")
    assert by_records(packing, records) == (14.0, "as others of its model and workload took here")
    assert by_records(packing, [seen(own, 100.0, workload="8x2048"), seen(own, 100.0, model="other")]) is None
    assert by_records(packing, [seen(own, 100.0, separate=True)]) is None


def test_another_number_of_trials_takes_as_much_longer():
    eager = cells("ablations=[eager]", "trials=30")[1]
    assert by_records(eager, [seen(eager, 10.0, trials=3)]).seconds == pytest.approx(10 + 27 * 5 / 3)


def test_without_records_it_is_computed_and_more_for_separate_processes():
    rates = {"gemm_tflops": {"float32": 0.1}, "copy_gbs": 10.0}
    plain, separate = (cells(f"ablations=[{name}]")[-1] for name in ("eager", "liger"))
    assert 8 < computed(plain, rates).seconds < computed(separate, rates).seconds
    assert computed(plain, rates).basis == "computed, rough"
    assert longest(separate, 900.0) == 4 * longest(plain, 900.0) == 7200.0


def test_a_text_is_computed_by_the_lengths_of_its_rows(tmp_path):
    model, rates = saved(tmp_path / "mine"), {"gemm_tflops": {"float32": 1e-5}, "copy_gbs": 10.0}

    def seconds(workload):
        made = plan(config(f"models=[{model}]", f"workload={workload}", "ablations=[]"), "cpu").cells[0]
        return computed(made, rates).seconds - FIXED_S

    short = seconds(jsonl(tmp_path / "short.jsonl", [{"text": "a"}] * 2))
    assert short == pytest.approx(seconds("2x2")) and short < seconds("2x256") / 50


def measured(cell, session):
    family, ms = Family((cell,)), {phase: [1.0, 1.0] for phase in ("forward", "backward", "step")}
    return record_of(
        family, family.stacks[-1], session, status="ok", rounds=[0, 1], seats=[0, 0], phases=ms, applied={},
        cost={"wall": 20.0, "trials": 4.0}, tokens={"real": 1, "trained": 1, "padded": 0},
        numerics={"passed": True, "worst": "", "tensors": 1},
    )  # fmt: skip


def test_only_this_machine_s_records_count(tmp_path):
    eager = cells("ablations=[eager]")[1]
    with Store(tmp_path) as store:
        for name, changes in (("here", {}), ("elsewhere", {"name": "another"}), ("smaller", {"cores": 1})):
            store.add_session({"id": name, "machine": MACHINE.model_dump(mode="json") | changes})
            store.append(measured(eager, name))
        store.append(refused(eager, "here", "crash", "why"))
    assert list(seen_on(MACHINE, [tmp_path])) == [
        Seen("train", "tiny-llama", "2x16", frozenset(("eager", "adamw_foreach", "padding")), False, 20.0, 4.0, 2)
    ]
    with pytest.raises(RecordError, match="no such file"):
        list(seen_on(MACHINE, [tmp_path / "nowhere"]))
