"""The step of a pipeline: all micro-batches of one job, or of several, through torch's schedule, and what one rank
knows of the others afterwards.

A module of its own because it is torch throughout.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lorabench.contract.ablation import Unsupported
from lorabench.contract.arm import own_name
from lorabench.contract.batch import Batch
from lorabench.contract.joint import Place
from lorabench.contract.step import Step
from lorabench.schedule import Sample as Planned
from lorabench.schedule import fill, verify
from lorabench.schedule.pipeline import pipeline
from lorabench_ablations import segments
from lorabench_ablations.joint_batches import end_to_end, halved, in_a_row, samples_of
from lorabench_ablations.joint_step import JointStep, Part, Router, all_finite
from lorabench_ablations.lora_kernels import on_kernels
from lorabench_ablations.parallel import add_up, sent
from lorabench_ablations.pipeline_rows import Rows
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
NUMBER = "number"  # of a joint micro-batch, among its inputs
RUNS = 32  # of which the times are kept


def alike(batches: Sequence[Batch]) -> list[Batch]:
    """The batches with one shape: a stage has one buffer for what it receives. Rows that are added have no labels; what
    is added to a packed row is a sample of its own. All of it is counted as padding."""
    shapes = [b.inputs["input_ids"].shape for b in batches]
    rows, width = map(max, zip(*shapes, strict=True))
    packed = any("position_ids" in b.inputs for b in batches)
    masked = not packed and any("attention_mask" in b.inputs for b in batches) | any(s != (rows, width) for s in shapes)
    return [segments.filled(batch, rows, width, masked) for batch in batches]


def counted_once(batches: Sequence[Batch], line: Line) -> list[Batch]:
    """Every rank of a pipeline has all of its samples, and counts none but on the first one."""
    return [b if line.rank == 0 else replace(b, real=0, padded=0) for b in batches]


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
        self.mine = [Stage(parts, spans[n], n == 0, n == last) for n in range(line.rank, len(spans), ranks)]
        parts.keep(self.mine)
        if on_kernels(model):
            import lorakernels

            lorakernels.forget(model)  # the layers that were given back, whose weights would stay
            gc.collect()  # they hold themselves in circles
        self.owners = Owners(model, line)
        self.kind, self.counts = kind, list(parts_of) or [len(shapes)]
        self.clock = Clock(self.device.type == "cuda", deque(maxlen=RUNS), deque(maxlen=RUNS))
        self.begins = [sum(self.counts[:n]) for n in range(len(self.counts))]
        self.pipelines = [
            Pipeline(
                self.mine,
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

    def add_up(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients of what it trains here, over the pipelines."""
        if self.line.data is not None:
            with self.clock.wait():
                self.clock.given += add_up(optimizer, self.line.data)

    def own(self, optimizer: torch.optim.Optimizer) -> None:
        """Take from an optimizer what is of other ranks."""
        mine = {id(p) for p in self.model.parameters()}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in mine]

    def run(self, batches: Sequence[Batch], items: Sequence[int], scales: Sequence[float]) -> Tensor:
        """(micro-batches,) losses without the scale; on ranks without the last stage zeros."""
        names = {n for n, x in batches[0].inputs.items() if isinstance(x, Tensor)} - {"input_ids", *segments.ARGUMENTS}
        kwargs = {name: torch.cat([b.inputs[name] for b in batches]) for name in sorted(names)}
        if (own := segments.alike(batches)) is not None:
            kwargs["segments"], longest = own
            for stage in self.mine:
                stage.longest = longest
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
        bytes_ = torch.zeros(2, ranks, dtype=torch.int64, device=self.device)
        bytes_[:, rank] = torch.tensor([clock.sent, round(sent("all_reduce", clock.given, self.line.pipelines))])
        dist.all_reduce(bytes_, group=self.line.group)
        between, added = bytes_.tolist()
        forward, backward = times.tolist()
        count = len(every[0][FORWARD, rank])
        ends = [begin - 1 for begin in self.begins[1:]]
        predicted = pipeline([forward] * count, [backward] * count, flush_after=ends, order=self.kind, ranks=ranks)
        return {
            "bubble_pct_by_rank": [100 * one for one in idle.tolist()], "bubble_pct": 100 * fmean(idle.tolist()),
            "predicted_bubble_pct": 100 * predicted.ratio, "sent_bytes_by_rank": between, "micro_batches": count,
            "forward_ms_by_stage": forward, "backward_ms_by_stage": backward, "layers_by_stage": self.split,
        } | ({"added_up_bytes_by_rank": added} if self.line.pipelines > 1 else {})  # fmt: skip


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
            self.machinery.add_up(self.optimizer)
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


class PipelineJoint(JointStep):
    """Several jobs, whose micro-batches follow each other, without a flush unless it is asked for. A stage takes a
    job's optimizer step as soon as the backward of the last micro-batch that holds the job has left it. So a backward
    reads the adapters that its forward read.

    Without a scheduler a micro-batch has the rows of one job, one job comes after the other, and a number that is not
    finite stays with its job. In lorakernels' slots as well: those of adapters not known to be finite are empty where
    they have no rows. The others stay until their own update, since to bring them in and out costs the host time.

    A scheduler's micro-batches are packed rows, in which several jobs may lie end to end. There such a number gets into
    the other jobs' rows, by attention's masked products and by the slots. `KernelStep` searches for the job, and tries
    the others without it; here the other stages would have to go back as well. So the step ends with a
    FloatingPointError that names the jobs whose loss or gradient is not finite; some may have it from another. The last
    stage looks at the losses before any backward of the micro-batch, and each stage at the gradients of a job that
    shares micro-batches before it is updated. So no stage has trained an adapter on wrong numbers, though some may have
    taken a step that others have not."""

    def __init__(
        self, steps: Sequence[Step], line: Line, router: Router, kind: str, layers: Sequence[int] | None, flush: bool,
        rows: Callable[[Sequence[Sequence[int]]], list[Rows]] | None = None,
    ) -> None:  # fmt: skip
        """rows: of the lengths of each job's samples, the samples of each row; None: as their batches have them."""
        super().__init__(steps, router, packed=True)
        self.rows = rows
        self.line, self.flush, self.kind, self.layers = line, flush, kind, layers
        self.machinery: Machinery | None = None
        self.halved = 0  # how many more micro-batches there are than the scheduler made, so that each rank has one
        self.empties = 0  # that an endless run needs between two rounds
        self._parts: list[Sequence[Part]] = []  # of each micro-batch
        self._mixed: dict[int, dict[int, Tensor]] = {}  # by micro-batch of several jobs and by job: the losses
        self._losses = torch.zeros(0)  # (micro-batches, jobs) of the run
        self._left = [1.0] * len(steps)  # by job: the scale that its gradients still have
        self._kept: list[int] = []  # the jobs whose adapters are known to be finite

    # ---- the layout --------------------------------------------------------------------------------------------------
    def lay_out(self, batches: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
        return self.line.agreed(partial(self._laid_out, batches))

    def _laid_out(self, batches: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
        shared = self._shared(batches)
        made = self._one_by_one(batches) if shared is None else self._in_rows(shared)
        if self.count < self.line.ranks:
            raise Unsupported(
                f"pipeline_multi_adapter needs at least a micro-batch a rank; the jobs have {self.count} together, "
                f"and there are {self.line.ranks} ranks"
            )
        self.empties = _empties(self.places, self.line.ranks)
        return [counted_once(own, self.line) for own in made]

    def _one_by_one(self, batches: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
        if self.rows:
            samples = [[sample for batch in own for sample in samples_of(batch)] for own in batches]
            found = self.rows([[sample.real for sample in own] for own in samples])
            batches = [
                [end_to_end([own[n] for n in fit]) for fit in rows] for own, rows in zip(samples, found, strict=True)
            ]
        every = iter(enumerate(alike([batch for own in batches for batch in own])))
        numbered = [[next(every) for _ in own] for own in batches]
        self.places = [[number for number, _ in own] for own in numbered]
        return [[batch for _, batch in own] for own in numbered]

    def _in_rows(self, shared: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
        """Each micro-batch as one row, of which the last job's part is filled up to the longest micro-batch."""
        held = Counter[int]()
        for places, own in zip(self.places, shared, strict=True):
            held.update({number: batch.real for number, batch in zip(places, own, strict=True)})
        longest = max(held.values())

        def row(batches: Sequence[Batch]) -> list[Batch]:
            *rows, last = map(in_a_row, batches)
            return [*rows, segments.filled(last, 1, longest - sum(batch.real for batch in rows))]

        return self._beside(shared, row)

    def _schedule(self, lengths: Sequence[Sequence[int]]) -> list[list[Place]] | None:
        """The first rank's answer on every rank, because a programme with a time limit need not answer twice alike. Of
        several pipelines each has a sample in each place, and the longest of them is asked for. So all of them have
        the same micro-batches, and a job's step comes behind the same one: in other orders the pipelines' stages could
        wait for each other's gradients for ever."""
        every = self.line.of_each(lengths)
        lengths = [[max(place) for place in zip(*own, strict=True)] for own in zip(*every, strict=True)]
        found = super()._schedule(lengths)
        if found is None:
            return None
        answer = [[held for held in found if held]]
        dist.broadcast_object_list(answer, src=0)
        made = halved(answer[0], lengths, self.line.ranks)
        self.halved = len(made) - len(answer[0])
        return made

    def micro_batch(self, number: int) -> Batch:
        made = super().micro_batch(number)
        return replace(made, inputs=made.inputs | {NUMBER: number})

    # ---- a run of the schedule ---------------------------------------------------------------------------------------
    def forward(self, batch: Batch) -> Tensor:
        """(jobs,) losses of one micro-batch; of the jobs that are not in it 0."""
        number = batch.inputs[NUMBER]
        if number == (0 if self.by_job is None else self.places[self.by_job][0]):
            self._run()
        return self._losses[number]

    def _run(self) -> None:
        every = [self.micro_batch(number) for number in range(self.count)]
        self._parts = [batch.inputs["parts"] for batch in every]
        # Of what `collate` has added the segments of attention alone: other things are no tensors of rows.
        names = [n for n in every[0].inputs if n in segments.ARGUMENTS or n in self.steps[0].batches[0].inputs]
        batches = [replace(batch, inputs={name: batch.inputs[name] for name in names}) for batch in every]
        if self.machinery is None:  # the batches are on their device only now
            self._route(0)  # so that what is measured is as in the schedule
            parts_of = [len(places) for places in self.places] if self.flush else []
            self.machinery = Machinery(self.model, self.line, self.kind, 1, self.layers, batches, parts_of)
            for step in self.steps:
                self.machinery.own(step.optimizer)
            self.machinery.before, self.machinery.after = self._before, self._after
        self._mixed.clear()
        with torch.no_grad():
            self._kept = [job for job in range(len(self.steps)) if all_finite(self.trained(job))]
        self._keep()
        self._route(0)  # torch's first run learns the shapes by it
        self._left = [step.loss_scale for step in self.steps]
        owners = [self.steps[parts[0].job] if len(parts) == 1 else None for parts in self._parts]
        found = self.machinery.run(
            batches, [o.items if o else 1 for o in owners], [o.loss_scale if o else 1.0 for o in owners]
        )
        self._losses = found.new_zeros(len(every), len(self.steps))
        for number, parts in enumerate(self._parts):
            for job, loss in (self._mixed.get(number) or {parts[0].job: found[number]}).items():
                self._losses[number, job] = loss

    def _before(self, phase: str, number: int) -> None:
        if self.begin:
            self.begin(phase)
        self._route(number)
        if phase == BACKWARD and number in self._mixed:
            self._check_losses(self._mixed[number])

    def _route(self, number: int) -> None:
        """Tell the linears, and the last stage, whose rows a micro-batch has. In a backward only a layer that runs
        again asks: any other has the rows and the adapters of its own forward."""
        parts = self._parts[number]
        self.router.set(parts)
        for stage in self.machinery.mine if self.machinery else ():
            stage.mixed = partial(self._sum, stage, number) if len(parts) > 1 else None

    def _sum(self, stage: Stage, number: int, hidden: Tensor, labels: Tensor) -> Tensor:
        """What the backward of a micro-batch of several jobs begins with: their losses, each times its own scale."""
        parts = self._parts[number]
        sizes = [part.positions for part in parts]
        losses = {
            part.job: stage.loss(own, target, self.steps[part.job].items)
            for part, own, target in zip(parts, hidden.split(sizes, 1), labels.split(sizes, 1), strict=True)
        }
        self._mixed[number] = {job: loss.detach() for job, loss in losses.items()}
        return torch.stack([loss * self.steps[job].loss_scale for job, loss in losses.items()]).sum()

    def _after(self, number: int) -> None:
        for job in (part.job for part in self._parts[number]):
            if number != self.places[job][-1] or self.by_job not in (None, job):
                continue
            assert self.machinery is not None
            self.machinery.add_up(self.steps[job].optimizer)
            if self.by_job is None:
                if self.begin:
                    self.begin(STEP)
                self._check_gradients(job)
                self.steps[job].update()
                self._left[job] = 1.0
                self._kept = [other for other in self._kept if other != job]  # nobody has looked at what it is now
                self._keep()

    def _keep(self) -> None:
        self.router.keep([self.steps[job].adapter for job in self._kept])

    def _check_losses(self, losses: dict[int, Tensor]) -> None:
        finite = torch.stack(list(losses.values())).isfinite().tolist()  # here the host waits for the device
        if not all(finite):
            raise self._not_finite("the loss", [job for job, one in zip(losses, finite, strict=True) if not one])

    def _check_gradients(self, job: int) -> None:
        shares = any(len(self._parts[number]) > 1 for number in self.places[job])
        if shares and not all_finite([p.grad for p in self.trained(job) if p.grad is not None]):
            raise self._not_finite("a gradient", [job])

    def _not_finite(self, what: str, jobs: Sequence[int]) -> FloatingPointError:
        names = ", ".join(self.steps[job].name for job in jobs)
        return FloatingPointError(
            f"{what} of {names} is not finite, in micro-batches of several jobs, where it reaches the others; the step "
            "ends here, before these are trained on it"
        )

    def backward(self, loss: Tensor) -> None:
        pass  # done in the schedule

    def update(self) -> None:
        """Taken already, job by job."""

    def compared_of(self, index: int, out: Tensor) -> dict[str, Tensor]:
        assert self.machinery is not None
        if out.storage_offset() // len(self.steps) != self.places[index][-1]:
            return {}
        adapter = self.steps[index].adapter
        found = self.machinery.gradients(self._left[index], adapter)
        return {own_name(name, adapter): x for name, x in found.items()}

    def said(self) -> dict[str, Any]:
        return {"pipeline": self.machinery.said()} if self.machinery else {}


def _empties(places: Sequence[Sequence[int]], stages: int) -> int:
    """Hold two rounds of these micro-batches, which are said of each job, against the bubble lemma; how many empty ones
    it needs between them. Raises ScheduleError."""
    held: dict[int, list[Place]] = {}
    for job, own in enumerate(places):
        for place, number in enumerate(own):
            held.setdefault(number, []).append((job, place))
    rounds = [
        tuple(Planned(job, n, place, 1) for job, place in held[number]) for n in range(2) for number in sorted(held)
    ]
    filled = fill(rounds, stages)
    verify(filled, [[[1] * len(own)] * 2 for own in places], None, stages)
    return len(filled) - len(rounds)


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
