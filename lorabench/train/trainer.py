"""The training of several jobs on one base: in every tick each job that is there makes one optimizer step.

A job that is no number ends alone: the tick is made again without it, from the same random numbers, before anything
was updated. So the others' losses are, bit for bit, what they are where it had ended a step before. Out of memory,
likewise: the tick is made again with smaller micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lorabench.contract.ablation import Ablation
from lorabench.contract.hooks import first_line
from lorabench.contract.names import counted
from lorabench.measure.hooks import Hooks
from lorabench.measure.memory import out_of_memory
from lorabench.measure.trial import put_back, random_states
from lorabench.train import state
from lorabench.train.base import save_adapter
from lorabench.train.crew import Crew
from lorabench.train.job import NAN, RUNNING, Training
from lorabench.train.state import ADAPTERS

LESS = 0.75  # of a budget of tokens that was too much
Told = Callable[[str], None]


class Trainer:
    """`tell` gets one line for whatever happens to a job. `base` says which model the state is of."""

    def __init__(
        self, model: Any, jobs: Sequence[Training], toggles: Sequence[Ablation], device: torch.device, folder: Path,
        base: dict[str, Any], save_every: int, tell: Told,
    ) -> None:  # fmt: skip
        self.model, self.jobs, self.toggles, self.device = model, list(jobs), list(toggles), device
        self.folder, self.base, self.save_every, self.tell = folder, base, save_every, tell
        self.tick, self.tokens = 0, 0
        self._crew: Crew | None = None
        self._others: state.Saved | None = None

    def resume(self, saved: state.Saved | None) -> None:
        """Go on from a state. Raises StoreError."""
        if saved is None:
            return
        self.tick, self._others = saved.tick, saved.others(self.jobs)
        for job in self.jobs:
            state.restore(saved, job)
        kept = [saved.tensors[name] for name in sorted(n for n in saved.tensors if n.startswith(state.RANDOM))]
        put_back(kept, self.device)
        state.cut(self.folder, self.tick)

    def run(self, show: Callable[[Trainer], None]) -> None:
        """Until every job has ended; `show` is called after every tick. Raises StoreError, Unsupported, and
        OutOfMemoryError where no micro-batch is small enough."""
        self.save()  # before there is a loss or an adapter, so that none is ever without its state
        for job in self.jobs:
            if job.ended and not (self.folder / ADAPTERS / job.name).exists():
                self._end(job)
        while here := self._here():
            before = [job for job in here if not job.ended]
            self._tick(here)
            ended = [job for job in before if job.ended]
            for job in ended:
                self._end(job)
            if ended or self.tick % self.save_every == 0:
                self.save()
            show(self)
            if ended:  # the others go on in a crew of their own
                self._say(self._crew)

    def _say(self, crew: Crew | None) -> None:
        names = ", ".join(job.name for job in crew.jobs) if crew else ""
        for toggle, words in (crew.said() if crew else {}).items():
            self.tell(f"{toggle}, {names}: {words}")

    def save(self) -> None:
        state.save(self.folder, self.tick, self.base, self.jobs, random_states(self.device), self._others)

    def _here(self) -> list[Training]:
        """The jobs of the next tick. Where all that are there have ended, the next ones need not wait any longer."""
        left = [job for job in self.jobs if not job.ended]
        here = [j for j in left if j.progress.status == RUNNING or j.entry.arrives_after <= self.tick]
        if left and not here:
            soonest = min(job.entry.arrives_after for job in left)
            here = [job for job in left if job.entry.arrives_after == soonest]
        for job in here:
            if job.progress.status != RUNNING:
                job.progress.status = RUNNING
                rows = counted(len(job.samples), "row")
                left = f", without {job.left_out} that have nothing to train on" if job.left_out else ""
                self.tell(f"{job.name} begins: {counted(job.steps, 'step')} over {rows}{left}")
        return here

    def _tick(self, here: list[Training]) -> None:
        samples = {job.name: job.batch() for job in here}
        losses = self._losses(here, samples)
        going_on = [job for job in here if not job.ended]
        if going_on:
            self.joined(going_on).update()
        self.joined(going_on or here).clear()
        self.tick += 1
        self.tokens += sum(len(s.tokens) for job in going_on for s in samples[job.name])
        rows = []
        for job in going_on:
            rate = job.rate.get_last_lr()[0]
            job.stepped(losses[job.name])
            rows.append({
                "tick": self.tick, "job": job.name, "step": job.progress.step, "loss": losses[job.name],
                "learning_rate": rate,
            })  # fmt: skip
            if job.asks:
                job.evaluated(held_out := self._held_out(job))
                rows[-1]["held_out_loss"] = held_out
        state.append(self.folder, rows)

    def _losses(self, here: list[Training], samples: dict[str, Any]) -> dict[str, float]:
        """The losses of this tick, gradients included, of the jobs that are numbers; the others end."""
        before = random_states(self.device)
        while True:
            crew = self.joined(here)
            losses = self._tried(crew, samples, before)
            if losses is None:
                continue
            wrong = [job for job in here if not math.isfinite(losses[job.name])]
            if not wrong:
                return losses
            crew.clear()
            for job in self._culprits(wrong, samples, before):
                job.progress.status = NAN
                self.tell(f"{job.name} ends at step {job.progress.step + 1}: its loss is no number; the others go on")
            here = [job for job in here if not job.ended]
            if not here:
                return {}
            put_back(before, self.device)

    def _tried(self, crew: Crew, samples: dict[str, Any], before: Sequence[torch.Tensor]) -> dict[str, float] | None:
        """None where memory ran out, and the budget is lower now."""
        try:
            crew.fill(samples)
            return crew.losses()
        except Exception as error:
            if not out_of_memory(error):
                raise
            words = first_line(error)
        crew.clear()  # only here, where no frame of the tick is left that holds what it saved
        self._lower(max(len(s.tokens) for own in samples.values() for s in own), words)
        put_back(before, self.device)
        return None

    def _culprits(
        self, wrong: list[Training], samples: dict[str, Any], before: Sequence[torch.Tensor]
    ) -> list[Training]:
        """Those of these jobs that are no number alone, too: in a packed row attention may hand a NaN on. All of them
        where none is."""
        found = []
        for job in wrong if len(wrong) > 1 else []:
            put_back(before, self.device)
            alone = Crew(Hooks(self.toggles), self.model, [job], self.device)
            alone.fill({job.name: samples[job.name]})
            with torch.no_grad():
                if not math.isfinite(alone.losses(backward=False)[job.name]):
                    found.append(job)
        return found or wrong

    def _lower(self, longest: int, words: str) -> None:
        """Smaller micro-batches: a lower budget of tokens where a scheduler has one, else fewer samples. Raises
        OutOfMemoryError where neither is left."""
        found, self._crew = self._crew and self._crew.capacity, None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        place = next((i for i, t in enumerate(self.toggles) if type(t).schedule is not Ablation.schedule), None)
        tokens: int = found or (getattr(self.toggles[place], "tokens", 0) if place is not None else 0)
        if place is not None and tokens > longest:
            fewer = max(longest, int(LESS * tokens))
            changed: Any = self.toggles[place]
            self.toggles[place] = replace(changed, tokens=fewer)
            self.tell(f"out of memory: micro-batches of {fewer} tokens at most from here on, not {tokens}")
            return
        largest = max(self.jobs, key=lambda job: job.micro_batch_size if not job.ended else 0)
        if place is not None or largest.micro_batch_size == 1:
            raise torch.OutOfMemoryError(f"out of memory with the smallest micro-batch, {longest} tokens: {words}")
        for job in self.jobs:
            job.micro_batch_size = max(1, min(job.micro_batch_size, largest.micro_batch_size // 2))
        self.tell(f"out of memory: micro-batches of {largest.micro_batch_size} samples at most from here on")

    def joined(self, jobs: list[Training]) -> Crew:
        """These jobs as the toggles join them. Raises Unsupported where they cannot."""
        if self._crew is None or self._crew.jobs != jobs:
            self._crew = Crew(Hooks(self.toggles), self.model, jobs, self.device)
        return self._crew

    def _held_out(self, job: Training) -> float:
        """The loss on what a job holds out; no random number of the training is spent on it."""
        before = random_states(self.device)
        crew = Crew(Hooks(self.toggles), self.model, [job], self.device)
        self.model.eval()
        try:
            with torch.no_grad():
                crew.fill({job.name: job.held_out})
                return crew.losses(backward=False)[job.name]
        finally:
            self.model.train()
            put_back(before, self.device)

    def _end(self, job: Training) -> None:
        if job.progress.status == NAN:
            return
        save_adapter(self.model, job.name, self.folder / ADAPTERS)
        self.tell(
            f"{job.name}: {job.progress.status} after {counted(job.progress.step, 'step')}, in {ADAPTERS}/{job.name}"
        )
