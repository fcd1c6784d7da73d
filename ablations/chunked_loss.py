"""Slot `loss`: head and cross-entropy together, so that the logits are never there as a whole; from other packages.

    python -m lorabench.sweep 'models=[tiny-llama]' 'ablations=[tiled_loss,trl_fused_lm_head]'

`lora_kernels.py` has ours, `fused_linear_cross_entropy`. transformers holds 6 bytes for each token and each entry of
the vocabulary, and 4 more at the peak of backward. Each of these returns the sum over the trained tokens, which is
divided by those of the whole step: a mean of means would be another gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PositiveInt

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Requires, Tolerance
from lorabench.contract.settings import Settings

from .liger import FAMILIES, NO_CAPTURE

if TYPE_CHECKING:
    from torch import nn

    from .head_loss import HeadLoss

CALLS = "_lorabench_head_loss"  # on the model: what its forward calls in place of head and loss


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss(Ablation):
    """Base: the model's forward in training gets its loss from `loss_of()`, which sees hidden states, head and targets.

    The head has to be frozen: what these packages do for its own gradient is not looked at.
    """

    slot: ClassVar[str] = "loss"
    requires: ClassVar[Requires] = Requires(families=frozenset(FAMILIES))
    excludes: ClassVar[dict[str, str]] = {"limit": "the limit has no loss"}
    distribution: ClassVar[str | None] = None

    def loss_of(self) -> HeadLoss:
        raise NotImplementedError

    def patch(self, model: nn.Module) -> int:
        from .head_loss import bind

        setattr(model, CALLS, bind(model, self.loss_of()))
        return 1

    def audit(self, evidence: Evidence) -> int:
        calls = getattr(evidence.arm.model, CALLS)
        if not calls.count:
            raise NotApplied("no loss of a training step was asked of it")
        return 1

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        package = {self.distribution: version(self.distribution)} if self.distribution else {}
        return {self.name: {"calls": getattr(evidence.arm.model, CALLS).count} | package}


@dataclass(frozen=True, kw_only=True)
class TiledLoss(ChunkedLoss):
    """ALST's tiled logits (arXiv 2506.13996, section 3.1): the logits of so many rows at a time, and their gradient at
    once, in forward. What is kept is the gradient of the hidden states. Compare totals, not phases."""

    name: ClassVar[str] = "tiled_loss"
    summary: ClassVar[str] = "head and loss by tiles of rows, their gradient in forward (ALST's tiled logits)"

    rows: PositiveInt = 1024

    def loss_of(self) -> HeadLoss:
        from .head_loss import Tiled

        return Tiled(self.rows)

    def audit(self, evidence: Evidence) -> int:
        super().audit(evidence)
        calls = getattr(evidence.arm.model, CALLS)
        if calls.most_rows <= self.rows:
            raise NotApplied(f"a tile of {self.rows} rows divides nothing: no micro-batch has more than that")
        return 1


@dataclass(frozen=True, kw_only=True)
class TrlFusedLmHead(ChunkedLoss):
    """What SFTTrainer trains with: `trl.trainer.utils.add_fused_lm_head`, for log-probabilities alone. Its accuracy,
    which SFTTrainer has computed beside them, is left out."""

    name: ClassVar[str] = "trl_fused_lm_head"
    summary: ClassVar[str] = "TRL's fused head: log-probabilities in chunks, no logits"
    requires: ClassVar[Requires] = Requires(packages={"trl": "pip install 'trl>=1.16'"}, families=frozenset(FAMILIES))
    distribution: ClassVar[str | None] = "trl"

    def patch(self, model: nn.Module) -> int:
        from .head_loss import fuse_trl_head

        setattr(model, CALLS, fuse_trl_head(model))
        return 1

    def settings(self) -> Settings:
        return Settings(note="SFTTrainer of TRL 1.16 and newer has it without being asked")


@dataclass(frozen=True, kw_only=True)
class LigerFusedLinearCrossEntropy(ChunkedLoss):
    """`LigerFusedLinearCrossEntropyLoss` alone, without Liger's other kernels. It computes the head's gradient in
    forward."""

    name: ClassVar[str] = "liger_fused_linear_cross_entropy"
    summary: ClassVar[str] = "Liger's fused linear cross-entropy alone"
    requires: ClassVar[Requires] = Requires(
        device="cuda", packages={"liger_kernel": "pip install 'lorabench[gpu]'"}, families=frozenset(FAMILIES)
    )
    excludes: ClassVar[dict[str, str]] = ChunkedLoss.excludes | {"cuda_graph": NO_CAPTURE}
    distribution: ClassVar[str | None] = "liger-kernel"

    def loss_of(self) -> HeadLoss:
        from .head_loss import liger

        return liger

    def settings(self) -> Settings:
        keys = {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_fused_linear_cross_entropy": True}
        return Settings(axolotl=keys)


@dataclass(frozen=True, kw_only=True)
class CutCrossEntropy(ChunkedLoss):
    """Apple's Cut Cross Entropy (arXiv 2411.09009). Its backward leaves entries of the softmax out that are below what
    bfloat16 can add, so its gradient is held to a tolerance of that format. `filter_eps` is its own: null leaves none
    out."""

    name: ClassVar[str] = "cut_cross_entropy"
    summary: ClassVar[str] = "Cut Cross Entropy: no logits in memory, small softmax entries left out of backward"
    requires: ClassVar[Requires] = Requires(
        device="cuda", packages={"cut_cross_entropy": "pip install 'lorabench[cce]'"},
        dtypes=("bfloat16", "float16"), families=frozenset(FAMILIES),
    )  # fmt: skip
    tolerance: ClassVar[Tolerance] = Tolerance(words="softmax entries below 2⁻¹² left out of backward", grad=0.03)
    distribution: ClassVar[str | None] = "cut-cross-entropy"

    filter_eps: Literal["high", "auto"] | None = "high"

    def loss_of(self) -> HeadLoss:
        from .head_loss import cut

        return cut(self.filter_eps)

    def settings(self) -> Settings | None:
        keys = {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"], "cut_cross_entropy": True}
        return Settings(axolotl=keys) if self.filter_eps == "high" else None


@dataclass(frozen=True, kw_only=True)
class TransformersLoss(Ablation):
    """Takes the place of what a reference has in this slot: the loss is again the model's own, over whole logits, or
    that of the kernels beside it."""

    name: ClassVar[str] = "transformers_loss"
    slot: ClassVar[str] = "loss"
    clears: ClassVar[bool] = True
    summary: ClassVar[str] = "switch the reference's chunked loss off: whole logits, as transformers makes them"

    def audit(self, evidence: Evidence) -> int:
        if hasattr(evidence.arm.model, CALLS):
            raise NotApplied("another toggle computes the loss")
        return 1

    def without_effect(self, reference: Sequence[Ablation], dtype: str) -> str | None:
        if any(a.slot == self.slot and a.name != self.name for a in reference):
            return None
        return "the reference has transformers' loss already; put tiled_loss into reference="
