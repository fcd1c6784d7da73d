"""The arm: one model, one workload and a set of toggles, built and ready to be measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lorabench.contract.batch import Batch, Sample
from lorabench.contract.job import ADAPTER
from lorabench.contract.joint import Joint
from lorabench.contract.parts import gradients
from lorabench.contract.ranks import ONE, Ranks, local, whole
from lorabench.contract.rehearsal import Sizing
from lorabench.contract.step import Step

if TYPE_CHECKING:  # as in step.py
    import torch
    from torch import Tensor, nn


@dataclass
class Arm:
    """An arm, built. `ablations` are its toggles, `patched` is what each one's `patch` returned.

    `steps` holds one Step a job. `turns` are what a trial steps, in order: these, or a Joint of several; empty: these.
    A kind whose trial is no optimizer step subclasses this and leaves both empty.
    """

    name: str
    ablations: tuple[Any, ...]
    model: nn.Module
    steps: list[Step]
    dtype: torch.dtype
    device: torch.device
    kind: Any  # measure/kind.py's Kind: what a trial of it does
    patched: dict[str, int | None] = field(default_factory=dict)
    touched: set[str] | None = None  # the toggles of which some hook changed something; None: nobody looked
    ranks: Ranks = ONE
    sizings: list[Sizing | None] = field(default_factory=list)  # by step: what a toggle's `size` found
    feeds: list[Callable[[int], None]] = field(default_factory=list)  # by step: puts a trial's tokens into its batches
    outs: Any = None  # what the last trial returned, until it is cleared
    turns: list[Step] = field(default_factory=list)
    witnesses: list[Any] = field(default_factory=list)  # measure/judging/witness.py's, by step

    @property
    def step(self) -> Step:
        """The step of the only job; of several, the first one's."""
        return self.steps[0]

    @property
    def stepped(self) -> list[Step]:
        """What a trial steps, in order."""
        return self.turns or self.steps

    @property
    def samples(self) -> list[Sample]:
        """The samples of all jobs, before batching."""
        return [sample for step in self.steps for sample in step.samples]

    @property
    def real(self) -> int:
        return sum(b.real for step in self.steps for b in step.batches)

    @property
    def padded(self) -> int:
        return sum(b.padded for step in self.steps for b in step.batches)

    def adapters(self, step: Step | None = None) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of every trained tensor of a job (None: of the only one), by the names that PEFT gives to
        an adapter which is alone."""
        return iter(next(self.adapters_of([step or self.step])))

    def adapters_of(self, steps: Sequence[Step]) -> Iterator[list[tuple[str, nn.Parameter]]]:
        """`adapters` of each of these. A model of sixteen jobs has 7000 tensors, which are walked once."""
        every = [*self.model.named_parameters()]
        for step in steps:
            mine = f".{step.adapter}."  # PEFT trains what belongs to the active adapter, which another job's may be now
            if step.name:
                yield [(own_name(n, step.adapter), p) for n, p in every if mine in n]
            else:
                yield [(n, p) for n, p in every if p.requires_grad]

    @property
    def micro_batches(self) -> list[Batch]:
        """What the forwards of a trial are given, one each."""
        made = []
        for turn in self.stepped:
            inner = turn.innermost
            made += map(inner.micro_batch, range(inner.count)) if isinstance(inner, Joint) else turn.batches
        return made

    def parameter_bytes(self) -> dict[str, int]:
        """Bytes of the frozen weights and of every job's adapter, by these names."""
        trained = [p for step in self.steps for _, p in self.adapters(step)]
        ours = {id(p) for p in trained}
        frozen = [p for p in self.model.parameters() if id(p) not in ours]
        return {"weights": bytes_of(frozen), "adapters": bytes_of(trained)}

    def gradients(self, step: Step | None = None) -> dict[str, Tensor]:
        """A float32 copy of every adapter gradient between backward and update. A missing one is zeros: the gate will
        see it."""
        import torch

        step = step or self.step
        params = dict(self.adapters(step))
        return {
            n: whole(torch.zeros_like(p) if grad is None else grad.detach()).float() / step.loss_scale
            for (n, p), grad in zip(params.items(), gradients(step.innermost.parts, [*params.values()]), strict=True)
        }


def own_name(name: str, adapter: str) -> str:
    """A parameter's name as it would be if its adapter were the model's only one."""
    return name.replace(f".{adapter}.", f".{ADAPTER}.")


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of the distinct storages: tied weights and views into one buffer count once; of a DTensor this rank's
    part."""
    held = [part.untyped_storage() for tensor in tensors for part in inside(tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def inside(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold its numbers: itself, or those inside a wrapper, which has no storage (a quantized weight of
    torchao's, a DTensor)."""
    tensor = local(tensor)
    if not tensor.numel():  # where DeepSpeed has divided it, its part is an attribute
        tensor = getattr(tensor, "ds_tensor", tensor)
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # pyright: ignore[reportAttributeAccessIssue]
        yield from inside(getattr(tensor, name))
