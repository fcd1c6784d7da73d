"""From the file of `lorabench jobs` to a trainer: everything that can be wrong is said here, before a step is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lorabench.contract.ablation import Ablation, Unsupported
from lorabench.contract.batch import Sample
from lorabench.contract.hooks import asked_requires
from lorabench.contract.job import Job
from lorabench.contract.machine import Machine
from lorabench.contract.model import ModelSpec
from lorabench.measure.hooks import Hooks
from lorabench.plan import architecture, samples, weights
from lorabench.plan.jobs_file import AUTO, Entry, JobsFile, JobsFileError, budgets, text_of
from lorabench.plan.jobs_file import toggles as toggles_of
from lorabench.train import base, state
from lorabench.train.job import Training, check, fingerprint, parted
from lorabench.train.trainer import Told, Trainer


class Text(NamedTuple):
    """A job's rows: what is trained on, what is held out, how many have nothing to train on, and a fingerprint."""

    samples: list[Sample]
    held_out: list[Sample]
    left_out: int
    rows: str


class Setup:
    """A file, read and checked. Raises ValueError, each error in one line."""

    def __init__(self, file: JobsFile, machine: Machine) -> None:
        self.file, self.machine, self.spec = file, machine, file.spec
        self.adapted = {entry.name: file.adapted(entry) for entry in file.jobs}
        architecture.check(self.spec, [own.lora for own in self.adapted.values()])
        weights.check(self.spec)
        base.check_names(self.adapted, architecture.skeleton(self.spec, layers=1))
        self.texts = {entry.name: self._text(entry) for entry in file.jobs}
        self._check_budgets()
        self.dtype = machine.dtype(file.dtype)
        self.base = {
            "model": self.spec.name, "weights": self.spec.weights, "files": self.spec.fingerprint, "dtype": self.dtype,
        }  # fmt: skip
        self.saved = state.read(file.output)
        entries = {entry.name: entry.model_dump(mode="json") for entry in file.jobs}
        state.check(file.output, self.saved, self.base, entries, {name: text.rows for name, text in self.texts.items()})

    def _text(self, entry: Entry) -> Text:
        try:
            torch.nn.ModuleDict({entry.name: torch.nn.Identity()})  # by which PEFT holds an adapter
            every, left_out = samples.every(text_of(entry), self.spec)
            own, held_out = parted(every, entry)
            check(entry, len(own))
            return Text(own, held_out, left_out, fingerprint(own, held_out))
        except (KeyError, ValueError) as error:
            what = f"the name is one of torch's own: {error}" if isinstance(error, KeyError) else error
            raise JobsFileError(f"job {entry.name}: {what}") from None

    def _check_budgets(self) -> None:
        """Raises JobsFileError where the longest sample fits no micro-batch that the file allows."""
        longest, name = self._longest
        for toggle, tokens in budgets(toggles_of(self.file, None if self.file.way == AUTO else self.file.way)):
            multiple = getattr(toggle, "multiple", 1)
            if tokens < (least := -(-longest // multiple) * multiple):
                raise JobsFileError(
                    f"job {name}: its longest sample has {longest} tokens; expected tokens of {toggle.name} of {least} "
                    f"or more, not {tokens}"
                )

    @property
    def longest(self) -> int:
        """Tokens of the longest sample of any job."""
        return self._longest[0]

    @property
    def _longest(self) -> tuple[int, str]:
        """The same, and the name of the job that has it."""
        return max((len(s.tokens), name) for name, own in self.texts.items() for s in (*own.samples, *own.held_out))

    def unmet(self, toggles: Sequence[Ablation]) -> str | None:
        """Why this machine or model cannot have one of these toggles, or None."""
        found = ((toggle, asked_requires(toggle, self.machine, self.spec)) for toggle in toggles)
        return next((f"{toggle.name} {reason}" for toggle, reason in found if reason), None)

    def trainer(self, toggles: Sequence[Ablation], tell: Told) -> Trainer:
        """Raises Unsupported where the toggles cannot train these jobs, WeightsError, out-of-memory errors."""
        device, hooks, file = torch.device(self.machine.device), Hooks(toggles), self.file
        seeds = {entry.name: entry.seed for entry in file.jobs}
        model = base.with_adapters(
            self.spec, self.adapted, seeds, hooks, getattr(torch, self.dtype), device, file.seed
        )  # fmt: skip
        jobs = [self._training(model, hooks, entry, self.adapted[entry.name]) for entry in file.jobs]
        made = Trainer(model, jobs, toggles, device, file.output, self.base, file.save_every, tell)
        made.resume(self.saved)
        made.joined(jobs)  # toggles that cannot join them say so now, before anything starts
        return made

    def _training(self, model: Any, hooks: Hooks, entry: Entry, spec: ModelSpec) -> Training:
        parameters = list(base.parameters(model, entry.name).values())
        optimizer = hooks.first(Ablation.optimize, parameters, entry.learning_rate)
        if optimizer is None:
            optimizer = torch.optim.AdamW(parameters, lr=entry.learning_rate)
        job = Job(entry.name, entry.name, text_of(entry), spec.lora, entry.learning_rate, entry.seed)
        text, size = self.texts[entry.name], entry.micro_batch_size or entry.batch_size
        return Training(
            entry, job, text.samples, text.held_out, parameters, optimizer, size, text.rows, text.left_out
        )  # fmt: skip


def first_that_can(
    setup: Setup, tries: Sequence[tuple[Ablation, ...]], tell: Told
) -> tuple[Trainer, Mapping[str, str]]:
    """(a trainer with the first of these lists of toggles that can train the jobs, why those before it cannot). Raises
    Unsupported where none can."""
    refused: dict[str, str] = {}
    for toggles in tries:
        named = " + ".join(toggle.label for toggle in toggles)
        try:
            if reason := setup.unmet(toggles):
                raise Unsupported(reason)
            return setup.trainer(toggles, tell), refused
        except Unsupported as error:
            refused[named] = str(error)
    raise Unsupported("; ".join(refused.values()))
