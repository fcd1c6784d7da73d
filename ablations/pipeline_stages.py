"""A PEFT model cut into the stages of a pipeline, and torch's own schedules over them.

A module of its own because it is torch throughout. Nothing is renamed: what belongs to another rank is replaced by a
module that hands its input on, so every tensor keeps the name that it has in the whole model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from lorabench.contract.ablation import Unsupported
from lorabench.schedule.stage_times import balanced
from lorabench_ablations.parallel import mesh, pieces
from lorabench_ablations.segments import by_segments

T = TypeVar("T")
FORWARD, BACKWARD = "forward", "backward"
MARGIN = 2  # layers by which a measured stage may begin or end beside the estimated one
SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


@dataclass(frozen=True)
class Line:
    """One pipeline, of which this process is rank `rank` of `ranks`, in `group`; `data` are the processes that have the
    same stages for other samples, None where there are none."""

    rank: int
    ranks: int
    group: Any = None
    data: Any = None

    @classmethod
    def of(cls, name: str, ranks: int | None) -> Line:
        """This process's, of `ranks` ranks in a row (None: of all). Raises Unsupported where they do not divide so."""
        world, rank = dist.get_world_size(), dist.get_rank()
        if ranks in (None, world):
            return cls(rank, world)
        size = pieces(name, ranks, world)
        grid = mesh(size, "pipeline")
        return cls(rank % size, size, grid["pipeline"].get_group(), grid["data"].get_group())

    @property
    def pipelines(self) -> int:
        return dist.get_world_size() // self.ranks

    def of_each(self, own: T) -> list[T]:
        """What each pipeline has of this; every rank asks."""
        if self.data is None:
            return [own]
        every: list[Any] = [None] * self.pipelines
        dist.all_gather_object(every, own, group=self.data)
        return every

    def agreed(self, make: Callable[[], T]) -> T:
        """What this makes. Raises Unsupported, on every rank, where it cannot be made in one of the pipelines: else the
        others would wait for that one."""
        made, why = None, None
        try:
            made = make()
        except Unsupported as error:
            why = str(error)
        if reasons := [reason for reason in self.of_each(why) if reason is not None]:
            raise Unsupported(reasons[0])
        return cast("T", made)


class Elsewhere(nn.Module):
    """In place of a decoder layer of another stage: hands the hidden states on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", None)  # by which some families choose a mask

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def leave_out(base: Any, line: Line, each: int, layers: Sequence[int] | None) -> int | None:
    """Replace the decoder layers of a model without weights that cannot be of this rank; how many. What stays is each
    of its `each` stages: as `layers` says, else as the numbers of parameters let expect, and MARGIN layers on both
    sides. None: this model's layers cannot be divided so, and it stays whole."""
    backbone = getattr(base, base.base_model_prefix)
    count, ranks = len(backbone.layers), line.ranks
    if count < each * ranks or (layers and (len(layers), sum(layers)) != (each * ranks, count)):
        return None
    margin = 0 if layers else MARGIN
    split = layers or balanced(count, each * ranks, _parameters(backbone.layers[0]), _parameters(base.lm_head))
    spans = [range(span.start - margin, span.stop + margin) for span in spans_of(split)[line.rank :: ranks]]
    others = [n for n in range(count) if not any(n in span for span in spans)]
    for n in others:
        backbone.layers[n] = Elsewhere(backbone.layers[n])
    backbone.estimated_split = list(split)  # on every rank, also on one that keeps all layers
    return len(others)


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def spans_of(split: Sequence[int]) -> list[range]:
    """The layers of each stage, of so many layers each."""
    return [range(begin, end) for begin, end in pairwise(accumulate(split, initial=0))]


class _Contiguous(torch.autograd.Function):
    """The identity at a stage's entry: a gradient that is a view with spare columns could not be sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.contiguous()


class Parts:
    """What a causal model of transformers is cut along: its decoder layers, its last norm, its head."""

    def __init__(self, model: Any) -> None:
        self.model = model  # with its adapters
        self.base = model.get_base_model()
        self.backbone = getattr(self.base, self.base.base_model_prefix)
        self.layers = list(self.backbone.layers)
        self.norm = self.backbone.norm

    @contextlib.contextmanager
    def only(self, layers: Sequence[int], last: bool = True) -> Iterator[None]:
        """The backbone with these layers alone, and without its norm unless it is the last stage's."""
        before = self.backbone.layers, self.backbone.norm
        kept = [layer if n in layers else Elsewhere(layer) for n, layer in enumerate(self.layers)]
        self.backbone.layers = nn.ModuleList(kept)
        self.backbone.norm = self.norm if last else nn.Identity()
        try:
            yield
        finally:
            self.backbone.layers, self.backbone.norm = before

    def keep(self, stages: Sequence[Stage]) -> None:
        """Give back what is of no stage of this rank: layers, embedding, norm and head."""
        mine = [n for stage in stages for n in stage.layers]
        self.layers = [layer if n in mine else Elsewhere(layer) for n, layer in enumerate(self.layers)]
        self.backbone.layers = nn.ModuleList(self.layers)
        if not any(stage.first for stage in stages):
            self.backbone.embed_tokens = nn.Identity()
        if not any(stage.last for stage in stages):
            self.norm = self.backbone.norm = nn.Identity()
            self.base.lm_head = nn.Identity()


class Stage(nn.Module):
    """One stage: some decoder layers, behind the embedding in the first, before norm, head and loss in the last.

    x is (B, S) token ids in the first stage and (B, S, H) hidden states in the others; what comes back is hidden
    states, or in the last one the loss over `items` trained tokens, times `scale`; both (1,). `mixed`: what makes the
    loss instead, of (hidden states behind the norm, labels), where the next micro-batch has rows of several jobs.
    segments: (1, N + 1) where attention goes by these, of which none is longer than `longest`."""

    mixed: Callable[[Tensor, Tensor], Tensor] | None = None
    longest = 0

    def __init__(self, parts: Parts, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        self._parts, self.layers, self.first, self.last = [parts], layers, first, last  # a list: not a submodule

    def forward(
        self, x: Tensor, *, labels: Tensor, items: Tensor, scale: Tensor, segments: Tensor | None = None, **kwargs: Any
    ) -> Tensor:  # fmt: skip
        parts = self._parts[0]
        if segments is not None:
            kwargs |= by_segments(segments[0], self.longest)
        inputs: dict[str, Any] = {"input_ids": x} if self.first else {"inputs_embeds": _Contiguous.apply(x)}
        inputs |= kwargs | {"use_cache": False}
        with parts.only(self.layers, self.last):
            if self.last and self.mixed is None:
                return parts.model(**inputs, labels=labels, num_items_in_batch=items[0]).loss * scale[0]
            hidden = parts.backbone(**inputs).last_hidden_state
        return self.mixed(hidden, labels) if self.last and self.mixed else hidden.contiguous()

    def loss(self, hidden: Tensor, labels: Tensor, items: int) -> Tensor:
        """Of hidden states (B, S, H) behind the norm, by the model's own forward, in which only head and loss are left:
        so they are as they are for the rows of one job, whatever a toggle has made of them."""
        parts = self._parts[0]
        with parts.only((), last=False):
            return parts.model(inputs_embeds=hidden, labels=labels, num_items_in_batch=items, use_cache=False).loss


@dataclass
class Clock:
    """How long this rank computed: of each run of the schedule the milliseconds of its forwards and of its backwards,
    with what follows them, by stage, without what it waited for other pipelines meanwhile. On a GPU they are read from
    events afterwards."""

    cuda: bool = False
    runs: MutableSequence[dict[tuple[str, int], list[Any]]] = field(default_factory=list)
    walls: MutableSequence[Any] = field(default_factory=list)  # milliseconds of each run, of this rank
    sent: int = 0  # bytes that this rank sent to other stages in the last run
    given: int = 0  # bytes of gradients that it gave to be added up over the pipelines, in the last run
    _waits: list[Any] = field(default_factory=list)  # of the piece of work that it is in

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        self.runs.append({})
        self.sent = self.given = 0
        began = self._now()
        yield
        self.walls.append(self._since(began))

    @contextlib.contextmanager
    def work(self, what: str, stage: int) -> Iterator[None]:
        began, self._waits = self._now(), []
        yield
        self.runs[-1].setdefault((what, stage), []).append((self._since(began), self._waits))
        self._waits = []

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Within a piece of work, what is none of it."""
        began = self._now()
        yield
        self._waits.append(self._since(began))

    def _now(self) -> Any:
        if not self.cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, began: Any) -> Any:
        return (began, self._now()) if self.cuda else 1000 * (perf_counter() - began)

    def milliseconds(self, run: int) -> dict[tuple[str, int], list[float]]:
        """Of one run, by phase and stage: each piece of work."""
        return {
            key: [_read(span) - sum(map(_read, waits)) for span, waits in each] for key, each in self.runs[run].items()
        }

    def wall_ms(self, run: int) -> float:
        return _read(self.walls[run])


def _read(span: Any) -> float:
    if isinstance(span, float):
        return span
    began, ended = span
    ended.synchronize()
    return began.elapsed_time(ended)


class ClockedStage(PipelineStage):
    """torch's stage, which says of each piece of work what it is and how long it took. `before` is called with the
    phase and the micro-batch, `after` when a micro-batch's backward is done, still within its time."""

    clock: Clock
    before: Callable[[str, int], None]
    after: Callable[[int], None]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.before(FORWARD, fwd_chunk_id)
        with self.clock.work(FORWARD, self.stage_index):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.before(BACKWARD, bwd_chunk_id)
        with self.clock.work(BACKWARD, self.stage_index):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
            self.after(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        self.clock.sent += sum(send.tensor.nbytes for send in sends)
        return sends


class Pipeline:
    """This rank's stages under one of torch's schedules, for `count` micro-batches of one shape."""

    def __init__(
        self, modules: Sequence[nn.Module], line: Line, kind: str, count: int, device: torch.device,
        before: Callable[..., None], after: Callable[[int], None], clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """`modules`: stage r, r + ranks, … of rank r. `clock`: in whose `run` the schedule is called."""
        self.clock = clock or Clock(device.type == "cuda")
        self.stages = [
            ClockedStage(module, line.rank + n * line.ranks, line.ranks * len(modules), device, group=line.group)
            for n, module in enumerate(modules)
        ]
        for stage in self.stages:
            stage.clock, stage.before, stage.after = self.clock, before, after
        what = self.stages if kind == "interleaved" else self.stages[0]
        # The loss is the last stage's output; it is normalized by the tokens of the whole step, not by micro-batches.
        self.schedule = SCHEDULES[kind](what, count, loss_fn=lambda out, target: out, scale_grads=False)

    def __call__(self, ids: Tensor, kwargs: dict[str, Tensor]) -> list[Tensor]:
        """Forward and backward of all micro-batches, which lie one behind the other in each tensor's first dimension;
        the loss of each on the rank that has the last stage, elsewhere nothing."""
        losses: list[Tensor] = []
        entries = [ids] if self.stages[0].is_first else []
        if self.stages[-1].is_last:
            self.schedule.step(*entries, target=ids, losses=losses, return_outputs=False, **kwargs)
        else:
            self.schedule.step(*entries, return_outputs=False, **kwargs)
        return losses


def measured_split(parts: Parts, inputs: dict[str, Any], stages: int) -> list[int]:
    """How many layers each stage has, so that the slowest is as fast as can be; the same on every rank. One layer's
    forward and backward are measured on a micro-batch, and what stands outside of the layers, which the last stage has
    as well. Where `leave_out` has left layers out, no stage gets one that its rank has not."""
    count = len(parts.layers)
    if count < stages:
        raise Unsupported(f"{stages} stages need as many layers at least; the model has {count}")
    if count == stages:
        return [1] * count
    device = inputs["input_ids"].device
    here = [n for n, layer in enumerate(parts.layers) if not isinstance(layer, Elsewhere)]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        one, two = (min(_ms(parts, inputs, here[:n]) for _ in range(4)) for n in (1, 2))
    layer = max(two - one, 1e-3 * two)
    times = torch.tensor([layer, max(one - layer, 0.0)], dtype=torch.float64, device=device)
    dist.all_reduce(times)
    found = balanced(count, stages, *times.tolist())
    return _within(found, getattr(parts.backbone, "estimated_split", found))


def _within(split: Sequence[int], estimate: Sequence[int]) -> list[int]:
    """The split, each boundary of which is moved to at most MARGIN layers from the estimate's. All boundaries of both
    ascend, so the moved ones do, and no stage is left empty."""
    both = zip(accumulate(split, initial=0), accumulate(estimate, initial=0), strict=True)
    ends = [min(max(end, guess - MARGIN), guess + MARGIN) for end, guess in both]
    return [end - begin for begin, end in pairwise(ends)]


def _ms(parts: Parts, inputs: dict[str, Any], layers: Sequence[int]) -> float:
    """Milliseconds of one forward and backward of the model with these layers alone. No gradient stays."""
    device = inputs["input_ids"].device
    trained = [p for p in parts.model.parameters() if p.requires_grad]
    with parts.only(layers):
        clock = Clock(device.type == "cuda")
        with clock.run():
            parts.model(**inputs, use_cache=False).loss.backward()
    for p in trained:
        p.grad = None
    return clock.wall_ms(0)
