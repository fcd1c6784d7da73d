"""Minutes per epoch, extrapolated from measured steps: a training set's tokens / a step's real tokens · its time.

It is of the steps alone: no loading, no evaluation, no waiting for data. Sizes of training sets: datasets.yaml.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field

from lorabench.contract.names import NameUnknown
from lorabench.contract.workload import WorkloadError, length_tables
from lorabench.plan.compose import workload
from lorabench.record.schema import Record
from lorabench.report.attribution import Rung

MINUTE_MS = 60_000.0


class DataSet(BaseModel):
    """A training set: its samples, and the distribution of lengths that stands for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    distribution: str
    samples: int = Field(ge=1)
    source: str

    @property
    def measured(self) -> bool:
        """Whether its lengths were counted, and are no approximation."""
        return self.distribution in length_tables()["measured"]

    @property
    def tokens(self) -> float:
        tables = length_tables()
        return self.samples * (tables["measured"] | tables["approximate"])[self.distribution]["mean"]


class Epoch(NamedTuple):
    """Minutes of one epoch at the start of a ladder and at its last rung that has a time."""

    data: DataSet
    start: float
    end: float


@cache
def data_sets() -> tuple[DataSet, ...]:
    """Raises pydantic.ValidationError for a file that is not as described here."""
    text = (files("lorabench.report") / "datasets.yaml").read_text(encoding="utf-8")
    return tuple(map(DataSet.model_validate, yaml.safe_load(text)))


def epochs(rungs: Sequence[Rung]) -> list[Epoch]:
    """Of every data set whose lengths the ladder's workload has; [] without times."""
    timed = [(rung, real) for rung in rungs if rung.cumulative and (real := rung.record.real_tokens)]
    if not timed:
        return []
    last, real = timed[-1]
    steps = {d: d.tokens / real / MINUTE_MS for d in _of(last.record)}
    return [Epoch(d, each * last.start, each * last.after) for d, each in steps.items()]


def _of(record: Record) -> list[DataSet]:
    try:
        distribution = workload(record.workload.partition("(")[0]).distribution
    except (NameUnknown, WorkloadError):  # a user's own, whose file need not be here
        return []
    return [d for d in data_sets() if d.distribution == distribution]
