"""The step of a pipeline: all micro-batches of one job, or of several, through torch's schedule, and what one rank
knows of the others afterwards.

A module of its own because it is torch throughout.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lorabench.contract.ablation import Unsupported
from lorabench.contract.arm import own_name
from lorabench.contract.batch import IGNORE, Batch
from lorabench.contract.joint import Joint
from lorabench.contract.step import Step
from lorabench.schedule.pipeline import pipeline
from lorabench_ablations.joint_step import Part
from lorabench_ablations.pipeline_stages import (
    BACKWARD,
    FORWARD,
    Clock,
    Line,
    Parts,
    Pipeline,
    Stage,
    measured_split,
    spans_of,
)

STEP = "step"
RUNS = 32  # of which the times are kept


def alike(batches: Sequence[Batch], rows: int = 0, width: int = 0) -> list[Batch]:
    """The batches with one shape, at least rows x width: a stage has one buffer for what it receives. Rows that are
    added have no labels; what is added to a packed row is a sample of its own. All of it is counted as padding."""
    shapes = [b.inputs["input_ids"].shape for b in batches]
    rows, width = max([rows, *(r for r, _ in shapes)]), max([width, *(w for _, w in shapes)])
    packed = any("position_ids" in b.inputs for b in batches)
    masked = not packed and any("attention_mask" in b.inputs for b in batches) | any(s != (rows, width) for s in shapes)
    return [_filled(batch, rows, width, masked) for batch in batches]


def _filled(batch: Batch, rows: int, width: int, masked: bool) -> Batch:
    ids, labels = batch.inputs["input_ids"], batch.inputs["labels"]
    more = (0, width - ids.shape[1], 0, rows - ids.shape[0])
    inputs = batch.inputs | {"input_ids": F.pad(ids, more), "labels": F.pad(labels, more, value=IGNORE)}
    if (positions := batch.inputs.get("position_ids")) is not None:
        tail = torch.arange(more[1]).expand(len(positions), -1)
        inputs["position_ids"] = torch.cat([positions, tail], 1)
    if masked:
        mask = F.pad(batch.inputs.get("attention_mask", torch.ones_like(ids)), more)
        mask[ids.shape[0] :, 0] = 1  # attention of a row without any token would be a division by zero
        inputs["attention_mask"] = mask
    return Batch(inputs, batch.real, batch.padded + rows * width - ids.numel(), batch.trained)


class Owners:
    """What of the trained tensors is on which rank of a pipeline: by rank the names, in order, and their shapes."""

    def __init__(self, model: nn.Module, line: Line) -> None:
        """All its ranks ask, when each has nothing but its own stages."""
        self.line = line
        own = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
        self.shapes: list[dict[str, torch.Size]] = [{}] * line.ranks
        dist.all_gather_object(self.shapes, own, line.group)

    def others(self, own: dict[str, Tensor], adapter: str = "") -> dict[str, Tensor]:
        """What the other ranks have of tensors like these, in float32; each rank gives its own. `adapter`: of one of
        several jobs alone."""
        made: dict[str, Tensor] = {}
        device = next(iter(own.values())).device
        for rank, every in enumerate(self.shapes):
            shapes = {name: shape for name, shape in every.items() if not adapter or f".{adapter}." in name}
            if rank == self.line.rank:
                flat = torch.cat([own[name].detach().float().flatten() for name in shapes])
            else:
                flat = torch.empty(sum(shape.numel() for shape in shapes.values()), device=device)
            dist.broadcast(flat, group=self.line.group, group_src=rank)
            if rank != self.line.rank:
                pieces = flat.split([shape.numel() for shape in shapes.values()])
                made |= {name: x.view(shapes[name]) for name, x in zip(shapes, pieces, strict=True)}
        return made


class Machinery:
    """The cut model and its pipeline, for one step or for the joint one of several jobs."""

    def __init__(
        self, model: Any, line: Line, kind: str, each: int, layers: Sequence[int] | None, shapes: Sequence[Batch],
        parts_of: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`line`: its ranks. `each`: stages a rank. `layers`: of each stage; None: as measured. `shapes`: the
        micro-batches. `parts_of`: so many micro-batches each, behind which the pipeline is emptied; none: all
        together."""
        parts, ranks = Parts(model), line.ranks
        _check_checkpointing(model)
        self.model, self.line = model, line
        self.device: torch.device = shapes[0].inputs["input_ids"].device
        self.split = list(layers or measured_split(parts, shapes[0].inputs, ranks * each))
        spans = spans_of(self.split)
        last = len(spans) - 1
        mine = [Stage(parts, spans[n], n == 0, n == last) for n in range(line.rank, len(spans), ranks)]
        parts.keep(mine)
        if any("_lorakernels_state" in module.__dict__ for module in model.modules()):
            import lorakernels

            lorakernels.forget(model)  # the layers that were given back, whose weights would stay
            gc.collect()  # they hold themselves in circles
        self.owners = Owners(model, line)
        self.kind, self.counts = kind, list(parts_of) or [len(shapes)]
        self.clock = Clock(self.device.type == "cuda", deque(maxlen=RUNS), deque(maxlen=RUNS))
        self.begins = [sum(self.counts[:n]) for n in range(len(self.counts))]
        self.pipelines = [
            Pipeline(
                mine,
                line,
                kind,
                count,
                self.device,
                partial(self._before, begin),
                partial(self._after, begin),
                self.clock,
            )
            for begin, count in zip(self.begins, self.counts, strict=True)
        ]
        self.before: Any = lambda phase, number: None
        self.after: Any = lambda number: None

    def _before(self, begin: int, phase: str, number: int) -> None:
        self.before(phase, begin + number)

    def _after(self, begin: int, number: int) -> None:
        self.after(begin + number)

    def own(self, optimizer: torch.optim.Optimizer) -> None:
        """Take from an optimizer what is of other ranks."""
        mine = {id(p) for p in self.model.parameters()}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in mine]

    def run(self, batches: Sequence[Batch], items: Sequence[int], scales: Sequence[float]) -> Tensor:
        """(micro-batches,) losses without the scale; on ranks without the last stage zeros."""
        names = batches[0].inputs.keys() - {"input_ids"}
        kwargs = {name: torch.cat([b.inputs[name] for b in batches]) for name in sorted(names)}
        kwargs["items"] = torch.tensor(items, device=self.device)
        kwargs["scale"] = torch.tensor(scales, device=self.device)
        ids, found = torch.cat([b.inputs["input_ids"] for b in batches]), []
        with self.clock.run():
            for pipeline_, begin, count in zip(self.pipelines, self.begins, self.counts, strict=True):
                piece = {n: _some(x, len(batches), begin, count) for n, x in kwargs.items()}
                found += pipeline_(_some(ids, len(batches), begin, count), piece)
        if not found:
            return torch.zeros(len(batches), device=self.device)
        return torch.stack([loss.detach().float() for loss in found]) / kwargs["scale"]

    def gradients(self, scale: float, adapter: str = "") -> dict[str, Tensor]:
        """The other ranks' gradients, without the loss scale; of what has none zeros."""
        own = {n: torch.zeros_like(p) if p.grad is None else p.grad / scale for n, p in self.model.named_parameters()
               if p.requires_grad}  # fmt: skip
        return self.owners.others(own, adapter)

    def said(self) -> dict[str, Any]:
        """The bubbles as they were, by rank, in the mean over the runs, and as they follow from the stages' times. All
        ranks of the pipeline are asked."""
        clock, (rank, ranks) = self.clock, (self.line.rank, self.line.ranks)
        numbers = range(len(clock.walls))[-20:]
        every = [clock.milliseconds(n) for n in numbers]
        busy = torch.tensor([sum(map(sum, one.values())) for one in every], dtype=torch.float64)
        walls = torch.tensor([clock.wall_ms(n) for n in numbers], dtype=torch.float64)
        stages = len(self.split)
        times = torch.zeros(2, stages, dtype=torch.float64)
        for i, what in enumerate((FORWARD, BACKWARD)):
            for stage in range(rank, stages, ranks):
                times[i, stage] = median(ms for one in every for ms in one[what, stage])
        walls, times = walls.to(self.device), times.to(self.device)
        dist.all_reduce(walls, op=dist.ReduceOp.MAX, group=self.line.group)
        dist.all_reduce(times, group=self.line.group)
        idle = torch.zeros(ranks, dtype=torch.float64, device=self.device)
        idle[rank] = float((1 - busy.to(self.device) / walls).mean())
        dist.all_reduce(idle, group=self.line.group)
        sent = torch.zeros(ranks, dtype=torch.int64, device=self.device)
        sent[rank] = clock.sent
        dist.all_reduce(sent, group=self.line.group)
        forward, backward = times.tolist()
        count = len(every[0][FORWARD, rank])
        ends = [begin - 1 for begin in self.begins[1:]]
        predicted = pipeline([forward] * count, [backward] * count, flush_after=ends, order=self.kind, ranks=ranks)
        return {
            "bubble_pct_by_rank": [100 * one for one in idle.tolist()], "bubble_pct": 100 * fmean(idle.tolist()),
            "predicted_bubble_pct": 100 * predicted.ratio, "sent_bytes_by_rank": sent.tolist(), "micro_batches": count,
            "forward_ms_by_stage": forward, "backward_ms_by_stage": backward, "layers_by_stage": self.split,
        }  # fmt: skip


def _check_checkpointing(model: nn.Module) -> None:
    """Raises Unsupported where a layer is checkpointed in the reentrant way."""
    for module in model.modules():
        run_again = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(run_again, "keywords", {}).get("use_reentrant"):
            raise Unsupported(
                "a stage learns the shapes of its gradients by torch.autograd.grad, which reentrant checkpointing "
                "refuses; give gradient_checkpointing(use_reentrant=false)"
            )


class PipelineStep(Step):
    """One job. The schedule runs within the first micro-batch's forward, and holds every forward and backward."""

    def __init__(self, step: Step, line: Line, kind: str, each: int, layers: Sequence[int] | None) -> None:
        super().__init__(step.model, step.optimizer, (), step.loss_scale, job=step.job, samples=step.samples,
                         items=step.items)  # fmt: skip
        self.batches = step.batches  # the list itself, which a feed fills
        self.machinery = Machinery(step.model, line, kind, each, layers, step.batches)
        self.machinery.own(step.optimizer)
        self.machinery.before = lambda phase, number: self.begin and self.begin(phase)
        self.losses = torch.zeros(0)
        self._scale = self.loss_scale

    def forward(self, batch: Batch) -> Tensor:
        place = next(n for n, own in enumerate(self.batches) if own is batch)
        if place == 0:
            count = len(self.batches)
            self.losses = self.machinery.run(self.batches, [self.items] * count, [self.loss_scale] * count)
            self._scale = self.loss_scale
        return self.losses[place]

    def backward(self, loss: Tensor) -> None:
        pass  # done in the schedule

    def update(self) -> None:
        super().update()
        self._scale = 1.0

    def compared(self, out: Tensor) -> dict[str, Tensor]:
        """With the last micro-batch: the other ranks' gradients, so that each rank can show the whole model's."""
        last = out.storage_offset() == len(self.batches) - 1
        return self.machinery.gradients(self._scale) if last else {}

    def said(self) -> dict[str, Any]:
        return {"pipeline": self.machinery.said()}


def _some(x: Tensor, batches: int, begin: int, count: int) -> Tensor:
    """Of a tensor of so many micro-batches the rows of some of them."""
    rows = len(x) // batches
    return x[begin * rows : (begin + count) * rows]


class PipelineJoint(Joint):
    """Several jobs, whose micro-batches follow each other, without a flush unless it is asked for. A stage takes a
    job's optimizer step as soon as the backward of the job's last micro-batch has left it.

    A micro-batch has the rows of one job. So a number that is not finite stays with its job, in lorakernels' slots as
    well: the other jobs' are empty then, and `KernelStep`'s search for such a job is not needed. And a backward reads
    the adapter that its forward read, because a job's step comes behind the last backward of its own."""

    def __init__(
        self, steps: Sequence[Step], line: Line, router: Any, kind: str, layers: Sequence[int] | None, flush: bool
    ) -> None:
        super().__init__(steps)
        self.line, self.flush = line, flush
        self.router, self.kind, self.layers = router, kind, layers
        self.machinery: Machinery | None = None
        self.losses = torch.zeros(0)
        self._scales = [1.0] * len(steps)  # type: ignore[assignment]
        self._early = False

    def lay_out(self, batches: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
        every = alike([batch for own in batches for batch in own])
        made, places, at = [], [], 0
        for own in batches:
            made.append(every[at : at + len(own)])
            places.append(list(range(at, at + len(own))))
            at += len(own)
        self.places = places
        return made

    def joined(self, batches: Sequence[Batch | None]) -> Batch:
        return next(batch for batch in batches if batch is not None)

    @property
    def order(self) -> list[tuple[int, Batch]]:
        """(job, its batch) of every micro-batch, in their order."""
        return [(job, batch) for job, step in enumerate(self.steps) for batch in step.batches]

    def forward(self, batch: Batch) -> Tensor:
        """(jobs,) losses of one micro-batch; of the jobs that are not in it 0."""
        ids = batch.inputs["input_ids"]
        place = next(n for n, (_, own) in enumerate(self.order) if own.inputs["input_ids"] is ids)
        if place == 0 or (self.by_job and any(place == own[0] for own in self.places)):
            self._run()
        return self.losses[place]

    def _run(self) -> None:
        jobs, batches = zip(*self.order, strict=True)
        if self.machinery is None:  # the batches are on their device only now
            self._route(0)  # so that what is measured, and what torch learns shapes by, is as in the schedule
            parts_of = [len(step.batches) for step in self.steps] if self.flush else []
            self.machinery = Machinery(self.model, self.line, self.kind, 1, self.layers, batches, parts_of)
            for step in self.steps:
                self.machinery.own(step.optimizer)
            self.machinery.before, self.machinery.after = self._before, self._after
        self._early = not self.by_job
        owners = [self.steps[job] for job in jobs]
        self._scales = [step.loss_scale for step in self.steps]  # type: ignore[assignment]
        each = self.machinery.run(batches, [o.items for o in owners], [o.loss_scale for o in owners])
        own = F.one_hot(torch.tensor(jobs, device=each.device), len(self.steps)).bool()
        self.losses = each[:, None].where(own, 0)  # and no product, which would give a NaN to the other jobs, too

    def _before(self, phase: str, number: int) -> None:
        if self.begin:
            self.begin(phase)
        self._route(number)

    def _route(self, number: int) -> None:
        """Tell the linears whose rows a micro-batch has. In a backward only a layer that runs again asks: any other has
        the rows and the adapters of its own forward."""
        job, batch = self.order[number]
        rows, width = batch.inputs["input_ids"].shape
        self.router.set([Part(job, self.steps[job].adapter, rows, width, width)])

    def _after(self, number: int) -> None:
        job = self.order[number][0]
        if self._early and number == self.places[job][-1]:
            if self.begin:
                self.begin(STEP)
            self._update(job)

    def _update(self, job: int) -> None:
        self.steps[job].update()
        self._scales[job] = 1.0  # type: ignore[index]

    def backward(self, loss: Tensor) -> None:
        pass  # done in the schedule

    def update(self) -> None:
        """Taken already, job by job."""

    def compared_of(self, index: int, out: Tensor) -> dict[str, Tensor]:
        assert self.machinery is not None
        if out.storage_offset() // len(self.steps) != self.places[index][-1]:
            return {}
        adapter = self.steps[index].adapter
        found = self.machinery.gradients(self._scales[index], adapter)  # type: ignore[index]
        return {own_name(name, adapter): x for name, x in found.items()}

    def said(self) -> dict[str, Any]:
        return {"pipeline": self.machinery.said()} if self.machinery else {}


def save_adapter(model: Any, folder: Path, adapter: str = "default") -> None:
    """The whole adapter as PEFT saves it, of which each rank has what is in its stages. All ranks call it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    parts = [folder / f"adapter_model.rank{rank}.safetensors" for rank in range(dist.get_world_size())]
    own = get_peft_model_state_dict(model, adapter_name=adapter)
    save_file({name: x.detach().cpu().contiguous() for name, x in own.items()}, parts[dist.get_rank()])
    dist.barrier()
    if dist.get_rank() == 0:
        save_file(
            {name: x for part in parts for name, x in load_file(part).items()}, folder / "adapter_model.safetensors"
        )
        model.peft_config[adapter].save_pretrained(folder)
        for part in parts:
            part.unlink()
    dist.barrier()
