"""What earlier sweeps took on this machine: by arm, and in older records by pair."""

from __future__ import annotations

from helpers import MACHINE
from record.arms import BASE, Simulated, written

from lorabench.plan.estimate import Seen
from lorabench.record.costs import seen_on
from lorabench.record.pairs import pairs

HERE = {"id": "s1", "machine": MACHINE.model_dump(mode="json")}


def test_each_arm_that_was_measured_here_and_the_older_pairs(tmp_path):
    made = Simulated()
    arms = [made.arm(), made.arm(["a"], rounds=range(12)), made.arm(["b"], alone=True), made.arm(["c"], status="oom")]
    elsewhere = Simulated(session="s2").arm(["a"])
    (older,) = pairs([made.arm(), made.arm(["a"])])
    folder = written(tmp_path, [*arms, elsewhere, older], HERE)
    common = {"kind": "train", "model": "smollm2-135m", "workload": "alpaca", "wall_s": 4.0, "trials_s": 3.0}

    def seen(*own, separate=False, trials=30, **more):
        return Seen(**common | more, candidate=frozenset([*BASE, *own]), separate=separate, trials=trials)

    assert list(seen_on(MACHINE, [folder])) == [
        seen(), seen("a", trials=12), seen("b", separate=True), seen("a", wall_s=8.0, trials_s=6.0),
    ]  # fmt: skip
