"""Memory of an arm is its own, whatever the other arm has left behind."""

import pytest
from helpers import cells

from lorabench.run.worker import ArmResult, Job, Measurement


@pytest.mark.gpu
def test_both_arms_of_one_kind_reserve_alike():
    """Else the second arm lives on what the first has freed, and seems to reserve nothing."""
    from lorabench.measure.machine import describe

    cell = cells("models=[smollm2-135m]", "workload=2x256", "ablations=[eager]")[0]
    assert not cell.toggles
    job = Job(
        cell, describe(), ("reference", "candidate"), rounds=1, gate=False, ceiling_tflops=None, log="", twins="",
        spawned=0.0, sweep=0,
    )  # fmt: skip
    measurement = Measurement(job, tell=lambda text: None)
    measurement.result.arms = {name: ArmResult() for name in job.arms}
    for name in job.arms:
        measurement.prepare(name)
    one, two = (measurement.result.arms[name].memory for name in job.arms)
    assert two.reserved == pytest.approx(one.reserved, rel=0.15)
    assert two.reserved >= two.peak * 0.95  # what was in use at once had to be reserved
    assert two.static == pytest.approx(one.static, rel=0.15)
