"""Slot `parallel`: DeepSpeed's ZeRO. A row with the reason why it is not measured, for each of the stages.

python -m lorabench.sweep world_size=2 'ablations=[{deepspeed_zero: {stage: 3}}]' workload=4x2048
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lorabench.contract.ablation import Excluded, Requires
from lorabench_ablations.parallel import Parallel

# Seen in DeepSpeed 0.19.8, whose three stages step on a CPU: after `engine.backward` each trained parameter's `.grad`
# is None in stages 1 and 2, and `engine.step` writes the parameter from a float32 copy that the engine owns.
NOT_MEASURED = (
    "is not measured: DeepSpeed's engine keeps gradients and float32 weights where the gate cannot look, and a trial "
    "that starts from the weights of the first would step from the engine's copy of them; fsdp2 divides the same things"
)


@dataclass(frozen=True, kw_only=True)
class DeepspeedZero(Parallel):
    """ZeRO (Rajbhandari et al. 2020) divides AdamW's state among the ranks (stage 1), the gradients, too (2), and the
    weights (3)."""

    name: ClassVar[str] = "deepspeed_zero"
    summary: ClassVar[str] = "DeepSpeed's ZeRO-1, 2 or 3: a row with the reason why it is not measured"
    requires: ClassVar[Requires] = Excluded(packages={"deepspeed": "pip install deepspeed"}, reason=NOT_MEASURED)
    stage: int = 2

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise ValueError(f"stage={self.stage!r}; expected 1, 2 or 3")
