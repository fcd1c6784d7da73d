"""Which trials count as disturbed, from made-up samples of clock and throttle reasons."""

from lorabench.measure.telemetry import Sampler
from lorabench.measure.trial import Trial


def trial(began):
    return Trial({}, {}, 0.0, began, began + 0.9)


def disturbed(samples, trials):
    """samples: (time, MHz, throttle reasons)."""
    sampler = Sampler(None, list)
    sampler._samples = [(at, mhz, 600.0, 50.0, reasons) for at, mhz, reasons in samples]
    return sampler.summary(trials).disturbed_trials


def test_an_arm_is_compared_with_itself():
    """The denser arm has the lower clock under the power cap, in every round; a dip of its own is a disturbance."""
    reference, denser = ([trial(2.0 * i + after) for i in range(10)] for after in (0, 1))
    samples = [(2.0 * i + 0.5, 1980, 0) for i in range(10)] + [(2.0 * i + 1.5, 1500, 0x4) for i in range(10)]
    assert disturbed(samples, reference) == disturbed(samples, denser) == []
    samples[15] = (2.0 * 5 + 1.5, 1300, 0x4)
    samples[3] = (2.0 * 3 + 0.5, 1700, 0)
    assert disturbed(samples, reference) == [3] and disturbed(samples, denser) == [5]


def test_heat_disturbs_at_any_clock():
    trials = [trial(1.0 * i) for i in range(3)]
    assert disturbed([(0.5, 1980, 0), (1.5, 1980, 0x40), (2.5, 1980, 0x4)], trials) == [1]


def test_trials_between_two_samples_are_not_judged():
    assert disturbed([(5.0, 100, 0)], [trial(0.0), trial(1.0)]) == []
