"""Slot `parallel`: every rank holds a part of each sequence. Here: `ulysses`.

python -m lorabench.sweep world_size=2 'ablations=[ulysses]' workload=1x8192
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.ablation import Evidence, NotApplied, Unsupported
from lorabench.contract.batch import IGNORE, Batch, Sample
from lorabench.contract.ranks import Ranks
from lorabench.contract.step import Step
from lorabench_ablations.parallel import (
    CAPTURED,
    COMPILED,
    Parallel,
    Summed,
    alike,
    divided,
    mesh,
    pieces,
    sent,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lorabench.contract.arm import Arm

IN_ROWS = "a row of several samples needs a mask of the whole row, and each rank holds a piece of it"
ALL_TO_ALL = "c10d::alltoall_base_"


@dataclass(frozen=True, kw_only=True)
class SequenceParallel(Parallel):
    """Base: `ranks` ranks (None: all) hold a piece each of the same samples; the ranks beyond that divide the samples.

    Batches are padded on the right, so a causal attention needs no mask: no token sees what comes after it. Labels are
    shifted before they are cut, for the last token of a piece predicts the first one of the next.
    """

    excludes: ClassVar[dict[str, str]] = {
        "capture": CAPTURED,
        "compilation": COMPILED,
        "packing": IN_ROWS,
        "padding_free": IN_ROWS,
    }
    own_dropout_masks: ClassVar[bool] = True  # of a piece, where plain PEFT draws those of a sample
    ranks: int | None = None

    def shard(self, samples: Sequence[Sample], ranks: Ranks) -> list[Sample]:
        size = pieces(self.name, self.ranks, ranks.size)
        return divided(self.name, samples, ranks.rank // size, ranks.size // size)

    def collate(self, batch: Batch) -> Batch:
        import torch
        import torch.distributed as dist
        from torch.nn.functional import pad

        size = pieces(self.name, self.ranks, dist.get_world_size())
        inputs = batch.inputs
        short = -inputs["input_ids"].shape[1] % size
        ids = pad(inputs["input_ids"], (0, short))
        labels = pad(inputs["labels"], (0, short), value=IGNORE)
        there = pad(inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])), (0, short))
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        all_of = {"input_ids": ids, "labels": labels, "shift_labels": pad(labels[:, 1:], (0, 1), value=IGNORE)}
        mine = self.places(ids.shape[1], size, dist.get_rank() % size)
        cut = {name: x[:, mine].contiguous() for name, x in (all_of | {"position_ids": positions}).items()}
        real = int(there[:, mine].sum())
        trained = int((cut["shift_labels"] != IGNORE).sum())
        return replace(batch, inputs=cut, real=real, padded=cut["input_ids"].numel() - real, trained=trained)

    def places(self, width: int, size: int, piece: int) -> Any:
        """The places of a row that a rank holds."""
        return slice(piece * width // size, (piece + 1) * width // size)

    def step(self, step: Step) -> Step:
        alike(self.name, step)
        return Summed(step)


@dataclass(frozen=True, kw_only=True)
class Ulysses(SequenceParallel):
    """DeepSpeed-Ulysses (Jacobs et al. 2023): before attention an all-to-all gives every rank whole sequences of some
    heads, and one after it gives every rank its piece of all heads back. The attention itself is transformers'."""

    name: ClassVar[str] = "ulysses"
    summary: ClassVar[str] = "Ulysses: sequences cut in pieces, all-to-all to heads around attention"

    def patch(self, model: nn.Module) -> int:
        import torch.distributed as dist
        from transformers import AttentionInterface

        config: Any = model.config
        size, inner = pieces(self.name, self.ranks, dist.get_world_size()), config._attn_implementation
        if inner != "sdpa":
            raise Unsupported(f"ulysses leaves the mask to SDPA's causal path; the attention here is {inner}")
        heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
        if any(number % size for number in heads):
            raise Unsupported(
                f"ulysses divides {heads[0]} heads and {heads[1]} of keys among {size} ranks: no multiples"
            )
        if getattr(config, "sliding_window", None):
            raise Unsupported("ulysses leaves the mask out, and this model has a sliding window")
        name = f"ulysses_{size}"
        AttentionInterface.register(
            name, around(AttentionInterface()[inner], mesh(size, "sequence")["sequence"].get_group())
        )
        for part in {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values():
            if getattr(part, "_attn_implementation", None) == inner:
                part._attn_implementation = name
        return int(config.num_hidden_layers)

    def least(self, arm: Arm, n: int) -> float:
        """q, k, v and the output of every layer, forward and backward, and the gradients."""
        config: Any = arm.model.config
        heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
        width = heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        positions = sum(batch.inputs["input_ids"].numel() for batch in arm.step.batches)
        handed = 2 * config.num_hidden_layers * positions * width * arm.dtype.itemsize
        return sent("all_to_all", handed, n) + super().least(arm, n)

    def audit(self, evidence: Evidence) -> int:
        expected = 8 * (evidence.patched or 0) * len(evidence.arm.micro_batches)
        if (ran := evidence.ops[ALL_TO_ALL]) < expected:
            raise NotApplied(f"{ran} all-to-alls ran in a step; expected {expected}")
        return evidence.patched or 0


def around(attention: Callable[..., Any], group: Any) -> Callable[..., Any]:
    """`attention` of whole sequences and a share of the heads, for tensors of a piece of them and all heads.

    Shapes: q, k, v (B, H, s, D) with s = S / n of this rank; (B, H / n, S, D) inside; the output (B, s, H, D).
    """
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    n = group.size()

    def swapped(x: Tensor) -> Tensor:
        return all_to_all_single_autograd(x.contiguous(), None, None, group)

    def whole(x: Tensor) -> Tensor:
        b, h, s, d = x.shape
        return swapped(x.view(b, n, h // n, s, d).transpose(0, 1)).permute(1, 2, 0, 3, 4).reshape(b, h // n, n * s, d)

    def ulysses(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
        out, _ = attention(module, whole(q), whole(k), whole(v), None, **kwargs)
        b, s, h, d = out.shape
        pieces = swapped(out.reshape(b, n, s // n, h, d).transpose(0, 1))
        return pieces.permute(1, 2, 0, 3, 4).reshape(b, s // n, n * h, d), None

    return ulysses
