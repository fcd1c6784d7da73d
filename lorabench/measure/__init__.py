"""Measuring the arms of a family in their process: gate, trials, evidence, memory, telemetry, roofline.

`lorabench.measure` is a function too, which measures two training steps of a user's own. Package and function want the
same name, and `import lorabench.measure.trial` sets the attribute `measure` of lorabench to whatever stands in
sys.modules, in whichever order things are imported. So the function stands there, with the path that a package has.

Belongs here: what runs in the process that measures. May import: contract, plan, record.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lorabench.contract.ablation import Tolerance
    from lorabench.measure.user_pair import Measured
    from lorabench.measure.user_step import Variant


def measure(
    *,
    reference: Variant,
    candidate: Variant,
    gold: Variant | None = None,
    trials: int = 30,
    warmup: int = 5,
    device: torch.device | str | None = None,
    seed: int = 0,
    tolerance: Tolerance | None = None,
) -> Measured:
    """Time two variants of a training step against each other, in `trials` rounds; in each the reference, the reference
    again and the candidate have a turn, in random order. A turn is as many steps as a tenth of a second holds, one at
    least, of which the first does not count.

    A variant is a function that does one whole step and returns its loss, or `Phases`, or the contract's `Step`, of
    which forward, backward and update are timed apart. All train on as they are measured: hand in copies. Each call
    has to do the same work. On a GPU the times are between events on the current stream.

    gold: the same step in float32 on the same weights and batch. Then every trained tensor's gradient, the loss and the
    first update are compared before anything is timed, with the limits of a sweep's gate; what the reference is off by
    is what the candidate may be off by a small multiple of. `tolerance` declares more, for a candidate that changes the
    mathematics on purpose. Dropout is compared under shared masks.

    warmup: trials of each arm before the first that counts; up to four times as many while they still get faster.
    device: where the work runs; None: where the models are, else a GPU if there is one. seed: of the rounds' order.

    Raises ValueError in one line for what cannot be measured, WrongNumerics where the gate does not pass, and whatever
    the user's functions raise.
    """
    from lorabench.measure.user_pair import measured

    return measured(reference, candidate, gold, trials, warmup, device, seed, tolerance)


_package: Any = measure
_package.__path__, _package.__spec__, _package.__file__ = __path__, __spec__, __file__
_package.__package__ = _package.__name__ = __name__
sys.modules[__name__] = _package
