"""Slot `embedding_noise`: NEFTune (arXiv 2310.05914), uniform noise on the embeddings in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PositiveFloat

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Tolerance
from lorabench.contract.settings import Settings

if TYPE_CHECKING:
    from torch import nn

MARK = "_lorabench_noisy"  # on the model: how often its embeddings ran in training


@dataclass(frozen=True, kw_only=True)
class Neftune(Ablation):
    """transformers' hook, as its Trainer puts it on: noise of at most alpha / sqrt(length of a row x hidden size).

    A packed row is longer than its samples, so they get less noise than alone. The mathematics is another on purpose;
    the gate allows a tenth of a gradient for it. Where that is too little (a small model, short rows), measure a
    smaller alpha: the time is the same.
    """

    name: ClassVar[str] = "neftune"
    slot: ClassVar[str] = "embedding_noise"
    summary: ClassVar[str] = "NEFTune: uniform noise on the embeddings in training"
    tolerance: ClassVar[Tolerance] = Tolerance(
        words="noise on the embeddings, other in every step", grad=0.1, loss=0.05
    )
    excludes: ClassVar[dict[str, str]] = {"limit": "the limit has no embeddings"}

    neftune_noise_alpha: PositiveFloat = 5.0

    def patch(self, model: nn.Module) -> int:
        from transformers.integrations.neftune import neftune_post_forward_hook

        embeddings: Any = model.get_base_model().get_input_embeddings()  # type: ignore[operator]
        embeddings.neftune_noise_alpha = self.neftune_noise_alpha
        embeddings.register_forward_hook(neftune_post_forward_hook)
        noisy: list[int] = [0]
        setattr(model, MARK, noisy)

        def count(module: Any, given: Any, out: Any) -> None:
            noisy[0] += module.training

        embeddings.register_forward_hook(count)
        return 1

    def audit(self, evidence: Evidence) -> int:
        if not getattr(evidence.arm.model, MARK)[0]:
            raise NotApplied("the embeddings were not asked in a training step")
        return super().audit(evidence)

    def settings(self) -> Settings:
        alpha = {"neftune_noise_alpha": self.neftune_noise_alpha}
        return Settings(trainer=alpha, axolotl=alpha)
