"""Slot `parallel`: how one step is divided among several processes, one a GPU. Here: `ddp`, and what every toggle that
divides the samples has in common.

python -m lorabench.sweep world_size=2 'ablations=[ddp]' workload=4x2048
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.ablation import Ablation, Evidence, Unsupported
from lorabench.contract.batch import Batch, Sample
from lorabench.contract.ranks import Ranks, local
from lorabench.contract.step import Step, Wrapped

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from lorabench.contract.arm import Arm

COMPILED = "torch.compile splits the graph at every collective, and no rank may compile while another one waits"
CAPTURED = "a collective in a captured stream has to be captured and replayed by all ranks alike, which is not written"


@dataclass(frozen=True, kw_only=True)
class Parallel(Ablation):
    """Base of the toggles that divide a step. Without more, every rank takes its share of the samples.

    Each rank's loss is its sum over the trained tokens of the whole step, so gradients are added over ranks. Where a
    library averages them, backward starts from the loss times the number of ranks.
    """

    slot: ClassVar[str] = "parallel"
    excludes: ClassVar[dict[str, str]] = {"capture": CAPTURED}
    parallel: ClassVar[bool] = True
    own_dropout_masks: ClassVar[bool] = True  # of a rank's part of the samples, where plain PEFT draws those of all
    rank: ClassVar[int] = -10  # innermost, and first to change the model: other toggles see what it has made of it

    def shard(self, samples: Sequence[Sample], ranks: Ranks) -> list[Sample]:
        return divided(self.name, samples, ranks.rank, ranks.size)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        import torch.distributed as dist

        n = dist.get_world_size()
        found: dict[str, Any] = {"world_size": n, "backend": dist.get_backend()}
        if evidence.handed:
            found |= {
                "sent_bytes": round(self.sends(evidence, n)),
                "least_bytes": round(self.least(evidence.arm, n)),
                "handed_bytes": dict(evidence.handed),
            }
        return {self.name: found | {"held_bytes": evidence.arm.parameter_bytes()}}

    def sends(self, evidence: Evidence, n: int) -> float:
        """The bytes that a ring sends from this rank for what it gave to its collectives."""
        return sum(sent(kind, b, self.group(kind, n)) for kind, b in evidence.handed.items())

    def group(self, kind: str, n: int) -> int:
        """How many of `n` ranks are together in a collective of this kind."""
        return n

    def least(self, arm: Arm, n: int) -> float:
        """The bytes that a rank has to send in a step. Here: the trained parameters' gradients, added up once."""
        return sent("all_reduce", trained_bytes(arm), n)


def sent(kind: str, handed: float, n: int) -> float:
    """The bytes that a rank sends, at least, in a collective of `n` ranks to which it gives so many."""
    share = (n - 1) / n
    return handed * {"all_reduce": 2 * share, "all_gather": n - 1, "reduce_scatter": share, "all_to_all": share}.get(
        kind, 1
    )


def trained_bytes(arm: Arm) -> int:
    """Of the trained parameters' gradients, all ranks' parts together."""
    return sum(p.numel() * p.element_size() for step in arm.steps for _, p in arm.adapters(step))


def divided(name: str, samples: Sequence[Sample], rank: int, size: int, whom: str = "ranks") -> list[Sample]:
    """Every `size`-th sample. Raises Unsupported where some rank would get fewer."""
    if len(samples) % size:
        raise Unsupported(f"{name} divides {len(samples)} samples among {size} {whom}: give a multiple of {size}")
    return list(samples[rank::size])


def mesh(size: int, name: str, options: Callable[[], Any] | None = None) -> DeviceMesh:
    """All ranks as a mesh of (data, `name`): `size` ranks in a row share their samples. Made once. options: what makes
    those of a process group of NCCL's that these ranks have to themselves."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if (size, name, options) not in _MESHES:
        world = dist.get_world_size()
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        own: Any = {name: (dist.get_backend(), options())} if options else None
        shape = world // size, size
        made = init_device_mesh(device, shape, mesh_dim_names=("data", name), backend_override=own)
        _MESHES[size, name, options] = made
    return _MESHES[size, name, options]


_MESHES: dict[tuple[int, str, Any], DeviceMesh] = {}  # a group that is made stays for the life of its process


def pieces(name: str, size: int | None, world: int) -> int:
    """How many ranks work on one sample. Raises Unsupported where the ranks do not divide so."""
    size = world if size is None else size
    if size < 2 or world % size:
        raise Unsupported(f"{name} with ranks={size} needs a multiple of that, two at least; there are {world} ranks")
    return size


def divided_among_groups(name: str, samples: Sequence[Sample], size: int | None, ranks: Ranks) -> list[Sample]:
    """Those of this rank's group, where `size` ranks in a row (None: all) work on the same samples."""
    size = pieces(name, size, ranks.size)
    return divided(name, samples, ranks.rank // size, ranks.size // size, f"groups of {size} ranks")


@dataclass(frozen=True, kw_only=True)
class InGroups(Parallel):
    """Base: `ranks` ranks in a row (None: all) work on the same samples; the ranks beyond that divide the samples."""

    ranks: int | None = None

    @property
    def together(self) -> int:
        """How many ranks work on one sample. Raises Unsupported where the ranks do not divide so."""
        import torch.distributed as dist

        return pieces(self.name, self.ranks, dist.get_world_size())

    @property
    def place(self) -> int:
        """Of this rank, among those that work on one sample."""
        import torch.distributed as dist

        return dist.get_rank() % self.together

    def mesh(self, name: str) -> DeviceMesh:
        """All ranks, of which those that work on one sample are `name`."""
        return mesh(self.together, name)

    def shard(self, samples: Sequence[Sample], ranks: Ranks) -> list[Sample]:
        return divided_among_groups(self.name, samples, self.ranks, ranks)


def alike(name: str, step: Step) -> None:
    """Raises Unsupported, on every rank, where the ranks would not call their collectives equally often."""
    import torch.distributed as dist

    if step.name:
        raise Unsupported(f"{name} knows one job a model")
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(step.batches))
    if len({*counts}) > 1:
        numbers = ", ".join(map(str, counts))
        raise Unsupported(f"{name} needs as many micro-batches on every rank, and the ranks have {numbers}")


@dataclass(frozen=True, kw_only=True)
class Ddp(Parallel):
    """torch's DistributedDataParallel: every rank holds the model, takes its share of the samples, and the adapters'
    gradients are averaged while backward runs."""

    name: ClassVar[str] = "ddp"
    summary: ClassVar[str] = "DistributedDataParallel: samples divided among the ranks, gradients all-reduced"

    def step(self, step: Step) -> Step:
        from torch.nn.parallel import DistributedDataParallel

        alike(self.name, step)
        # No broadcast of all weights: the ranks have drawn or read the same ones, and the base is not to be written to.
        step.innermost.call = DistributedDataParallel(step.model, gradient_as_bucket_view=True, init_sync=False)
        return _Reduced(step)

    def audit(self, evidence: Evidence) -> int:
        return evidence.arm.ranks.size if hasattr(evidence.arm.step.innermost.call, "reducer") else 0


class Averaged(Wrapped):
    """Around a step whose gradients a library averages over `size` ranks (None: over all)."""

    def __init__(self, inner: Step, size: int | None = None) -> None:
        import torch.distributed as dist

        super().__init__(inner)
        self.size = size or dist.get_world_size()

    def backward(self, loss: Tensor) -> None:
        self.inner.backward(loss * self.size)


class _Reduced(Averaged):
    """DDP reduces what the micro-batches added up, once: in the last one's backward."""

    def __init__(self, inner: Step) -> None:
        super().__init__(inner)
        self.done = 0

    def forward(self, batch: Batch) -> Tensor:
        self.done = (self.done + 1) % len(self.batches)
        if not self.done:
            return self.inner.forward(batch)
        with self.innermost.call.no_sync():
            return self.inner.forward(batch)


class Summed(Wrapped):
    """Around a step whose trained parameters no library reduces: after the last backward one all-reduce of all of
    their gradients, in the group (None: of all ranks)."""

    def __init__(self, inner: Step, group: Any = None) -> None:
        super().__init__(inner)
        self.group, self.done = group, 0

    def backward(self, loss: Tensor) -> None:
        self.inner.backward(loss)
        self.done = (self.done + 1) % len(self.batches)
        if not self.done:
            self.reduce()

    def reduce(self) -> None:
        add_up(self.optimizer, self.group)


def add_up(optimizer: Optimizer, group: Any = None) -> int:
    """One all-reduce, in the group (None: of all ranks), of the gradients of all that an optimizer trains; the bytes
    that this rank gave to it."""
    import torch
    import torch.distributed as dist
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

    held = (p.grad for of_group in optimizer.param_groups for p in of_group["params"])
    gradients = [local(grad) for grad in held if grad is not None]
    if not gradients:
        return 0
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat, group=group)
    torch._foreach_copy_(gradients, list(_unflatten_dense_tensors(flat, gradients)))
    return flat.nbytes


def layers_of(base: Any) -> list[nn.Module]:
    """The decoder layers, by the names of classes that transformers says not to split."""
    names = set(base._no_split_modules or ())
    found = [m for m in base.modules() if any(base.__name__ in names for base in type(m).__mro__)]
    if not found:
        raise Unsupported("transformers does not say which modules of this model are its layers")
    return found
