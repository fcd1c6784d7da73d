"""Slot `parallel`: every rank holds a part of each sequence. Here: `ulysses` and `context_parallel`.

python -m lorabench.sweep world_size=2 'ablations=[ulysses]' workload=1x8192
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.ablation import Evidence, NotApplied, Requires, Unsupported
from lorabench.contract.batch import IGNORE, Batch
from lorabench.contract.machine import Machine
from lorabench.contract.model import ModelSpec
from lorabench.contract.step import Step, Wrapped
from lorabench_ablations.parallel import CAPTURED, COMPILED, InGroups, Summed, alike, sent

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from lorabench.contract.arm import Arm

IN_ROWS = "a row of several samples needs a mask of the whole row, and each rank holds a piece of it"
ALL_TO_ALL = "c10d::alltoall_base_"


@dataclass(frozen=True, kw_only=True)
class SequenceParallel(InGroups):
    """Base: the ranks of a group hold a piece each of the same samples.

    Batches are padded on the right, so a causal attention needs no mask: no token sees what comes after it. Labels are
    shifted before they are cut, for the last token of a piece predicts the first one of the next.
    """

    excludes: ClassVar[dict[str, str]] = {
        "capture": CAPTURED,
        "compilation": COMPILED,
        "packing": IN_ROWS,
        "padding_free": IN_ROWS,
    }
    pieces_a_rank: ClassVar[int] = 1

    def collate(self, batch: Batch) -> Batch:
        import torch
        from torch.nn.functional import pad

        size, inputs = self.together, batch.inputs
        short = -inputs["input_ids"].shape[1] % (size * self.pieces_a_rank)
        ids = pad(inputs["input_ids"], (0, short))
        labels = pad(inputs["labels"], (0, short), value=IGNORE)
        there = pad(inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])), (0, short))
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        all_of = {"input_ids": ids, "labels": labels, "shift_labels": pad(labels[:, 1:], (0, 1), value=IGNORE)}
        mine = self.places(ids.shape[1], size, self.place)
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

    def group(self, kind: str, n: int) -> int:
        """All of them add up the gradients."""
        return n if kind == "all_reduce" else self.together

    def attend(self, model: Any, around: Callable[[Callable[..., Any], int], Callable[..., Any]]) -> int:
        """Give the model what `around(SDPA, number of ranks)` returns for its attention, under a name of its own: the
        mask that transformers makes for a name that it does not know is none. Returns the number of layers."""
        from transformers import AttentionInterface

        config: Any = model.config
        size, inner = self.together, config._attn_implementation
        if inner != "sdpa":
            raise Unsupported(f"{self.name} leaves the mask to SDPA's causal path; the attention here is {inner}")
        if getattr(config, "sliding_window", None):
            raise Unsupported(f"{self.name} leaves the mask out, and this model has a sliding window")
        name = f"{self.name}_{size}"
        AttentionInterface.register(name, around(AttentionInterface()[inner], size))
        for part in {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values():
            if getattr(part, "_attn_implementation", None) == inner:
                part._attn_implementation = name
        return int(config.num_hidden_layers)


def _heads(config: Any) -> tuple[int, int]:
    """(of queries, of keys)"""
    return config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)


def _bytes_of_heads(arm: Arm, heads: int) -> int:
    """So many heads of every layer, over the positions of this rank."""
    config: Any = arm.model.config
    width = heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    positions = sum(batch.inputs["input_ids"].numel() for batch in arm.step.batches)
    return config.num_hidden_layers * positions * width * arm.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Ulysses(SequenceParallel):
    """DeepSpeed-Ulysses (Jacobs et al. 2023): before attention an all-to-all gives every rank whole sequences of some
    heads, and one after it gives every rank its piece of all heads back. The attention itself is transformers'."""

    name: ClassVar[str] = "ulysses"
    summary: ClassVar[str] = "Ulysses: sequences cut in pieces, all-to-all to heads around attention"

    def patch(self, model: nn.Module) -> int:
        heads = _heads(model.config)

        def all_to_all(attention: Callable[..., Any], size: int) -> Callable[..., Any]:
            if any(number % size for number in heads):
                raise Unsupported(
                    f"ulysses divides {heads[0]} heads and {heads[1]} of keys among {size} ranks: no multiples"
                )
            return around(attention, self.mesh("sequence")["sequence"].get_group())

        return self.attend(model, all_to_all)

    def least(self, arm: Arm, n: int) -> float:
        """q, k, v and the output of every layer, forward and backward, and the gradients."""
        handed = 2 * _bytes_of_heads(arm, 2 * sum(_heads(arm.model.config)))
        return sent("all_to_all", handed, self.together) + super().least(arm, n)

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


RING = [f"aten::_scaled_dot_product_{backend}_attention" for backend in ("flash", "efficient", "cudnn")]


@dataclass(frozen=True, kw_only=True)
class RequiresRing(Requires):
    """What torch's ring has handlers for: the operators behind SDPA on CUDA."""

    def unmet(self, machine: Machine, model: ModelSpec | None = None) -> str | None:
        if machine.device != "cuda":
            where = machine.device.upper()
            return f"needs a GPU, for torch's ring has CUDA's operators alone; this machine measures on its {where}"
        return super().unmet(machine, model)


@dataclass(frozen=True, kw_only=True)
class ContextParallel(SequenceParallel):
    """torch's context parallel, a prototype of it: keys and values go round the ranks, and each rank attends from its
    own queries (Liu et al., "Ring Attention", 2023). The row is cut in 2 n pieces of which a rank has one of the first
    and one of the last half, for later tokens see more than earlier ones."""

    name: ClassVar[str] = "context_parallel"
    summary: ClassVar[str] = "torch's context parallel: sequences cut in pieces, keys and values go round the ranks"
    requires: ClassVar[Requires] = RequiresRing(device="cuda", capability=(8, 0), dtypes=("bfloat16", "float16"))
    pieces_a_rank: ClassVar[int] = 2

    def places(self, width: int, size: int, piece: int) -> Any:
        import torch

        chunks = torch.arange(width).chunk(2 * size)
        return torch.cat((chunks[piece], chunks[2 * size - 1 - piece]))

    def patch(self, model: nn.Module) -> int:
        def without_mask(attention: Callable[..., Any], size: int) -> Callable[..., Any]:
            def ring(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
                return attention(module, q, k, v, None, **kwargs)

            return ring

        return self.attend(model, without_mask)

    def step(self, step: Step) -> Step:
        return _InRing(super().step(step), self.mesh("sequence")["sequence"])

    def least(self, arm: Arm, n: int) -> float:
        """K and V of every layer in forward and again in backward, their gradients once in float32, in which torch adds
        them up, and the adapters'."""
        keys = _bytes_of_heads(arm, 2 * _heads(arm.model.config)[1])
        passed = 2 * keys + keys / arm.dtype.itemsize * 4
        return (self.together - 1) * passed + super().least(arm, n)

    def audit(self, evidence: Evidence) -> int:
        """Each rank attends n times a layer: from its queries to each rank's keys."""
        expected = self.together * (evidence.patched or 0) * len(evidence.arm.micro_batches)
        if (ran := sum(evidence.ops[operator] for operator in RING)) < expected:
            raise NotApplied(f"attention to one rank's keys ran {ran} times in a step; expected {expected}")
        return evidence.patched or 0


class _InRing(Wrapped):
    """Around a step whose forward and backward are to find SDPA replaced by torch's ring over the mesh."""

    def __init__(self, inner: Step, mesh: DeviceMesh) -> None:
        super().__init__(inner)
        self.mesh = mesh

    def forward(self, batch: Batch) -> Tensor:
        with ring(self.mesh):
            return self.inner.forward(batch)

    def backward(self, loss: Tensor) -> None:
        with ring(self.mesh):
            self.inner.backward(loss)


@contextmanager
def ring(mesh: DeviceMesh, row: Tensor | None = None) -> Iterator[None]:
    """Inside, SDPA of pieces of sequences (B, H, s, D) is that of the whole sequences. `row` (positions,): cut in place
    as torch cuts. The batches are cut already; torch asks for something to cut all the same, and takes from its length
    that pieces are of the first and of the last half."""
    import torch
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    row = torch.zeros(2 * mesh.size(), device=mesh.device_type) if row is None else row
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    with sdpa_kernel(backends), context_parallel(mesh, buffers=[row], buffer_seq_dims=[0], no_restore_buffers={row}):
        yield
