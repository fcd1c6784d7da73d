"""The workload: what is fed. Random samples of one length, random samples of a data set's lengths, real text, or
nothing but weights; for one fine-tuning job or for several. `plan/samples.py` draws the samples.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from lorabench.contract.names import nearest

LEARNING_RATE = 1e-4
MOST_JOBS = 1024
MOST_TOKENS = 1 << 26  # of one step: 67 million; a step of a large run has some four


class WorkloadError(ValueError):
    """A workload that cannot be drawn or read; the message says what was expected."""


@cache
def length_tables() -> dict[str, dict[str, Any]]:
    """The shipped token-length figures: "measured" (quantiles of real text) and "approximate" (log-normal), apart."""
    return json.loads(resources.files("lorabench.contract").joinpath("lengths.json").read_text())


class JobSpec(BaseModel):
    """One entry of a workload's `jobs`: what this job changes of the workload and of the sweep's adapter."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")  # also the adapter's name in PEFT, so a part of module names
    workload: dict[str, Any] = {}  # fields of Workload: batch_size, seq_len, samples, distribution, …
    lora: dict[str, Any] = {}  # fields of Lora: r, lora_alpha, lora_dropout, target_modules, …
    optimizer: str | dict[str, Any] | None = None  # a toggle of its own for the update; None: the arm's
    learning_rate: float = Field(default=LEARNING_RATE, gt=0)
    seed: int | None = None  # of samples and adapter; None: the sweep's


def copied(jobs: Any) -> Any:
    """A list of jobs in which each entry with `copies: N` stands for N jobs, NAME_1 to NAME_N, with seeds from its own
    on (from 0, where it has none). Raises ValueError for a number of copies that is none."""
    if not isinstance(jobs, list):
        return jobs
    made = []
    for job in jobs:
        if not isinstance(job, dict) or "copies" not in job:
            made.append(job)
            continue
        count, seed = job["copies"], job.get("seed") or 0
        if not isinstance(count, int) or not 1 <= count <= MOST_JOBS:
            raise ValueError(f"copies={count!r}: expected a number of jobs from 1 to {MOST_JOBS}")
        rest, name = {key: value for key, value in job.items() if key != "copies"}, job.get("name", "job")
        made += [rest | {"name": f"{name}_{i + 1}", "seed": seed + i} for i in range(count)]
    return made


class Drawn(BaseModel):
    """The rows of a text that a step takes, by their numbers from 0, in its order. `of`: how many the text has.
    `padding`: the share of padding in the step's micro-batches; `text_padding`: in random batches of that size."""

    model_config = ConfigDict(extra="forbid")

    rows: list[int]
    of: int
    padding: float
    text_padding: float

    @property
    def words(self) -> str:
        return (
            f"{len(self.rows)} of {self.of} rows, chosen by their length; padding {100 * self.padding:.1f} % (random "
            f"batches of all rows: {100 * self.text_padding:.1f} %)"
        )


class Workload(BaseModel):
    """What one optimizer step is fed: `samples` samples in micro-batches of `batch_size`, none above `seq_len` tokens.

    kind fixed: every sample has `seq_len` random tokens. kind lengths: random tokens, lengths drawn from
    `distribution`. kind text: the rows of a JSONL file (`path`) or hub data set (`dataset`), tokenized by `tokenizer`
    (None: the model's). kind weights: no samples; the model's files are read, from a `page_cache` that holds them or
    not.

    `format` is how a row becomes tokens. messages: its one field is a chat, for the tokenizer's chat template.
    prompt_completion: its two fields, one right after the other; where they are lists of turns, the chat of both. text:
    its one field. None: its `fields`, each on a line of its own. No fields: they are found in the first row
    (plan/rows.py). `train_on` last_field: the loss is on the last field alone, of a chat on the assistant's turns.
    `fingerprint`: of the rows and the chat template, so that another content under the same name is another
    measurement. `drawn`: which rows, once they have been chosen (plan/samples.py).

    `jobs`: several fine-tuning jobs on one base, each with what it changes of the fields above and of the adapter; one
    with `copies: N` stands for N of them.
    None: the workload is the one job.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    kind: Literal["fixed", "lengths", "text", "weights"]
    batch_size: int = Field(ge=1, le=MOST_TOKENS)
    seq_len: int = Field(ge=2, le=MOST_TOKENS)
    samples: int = Field(default=0, ge=0, le=MOST_TOKENS)  # 0: one batch
    distribution: str | None = None
    path: str | None = None
    dataset: str | None = None
    subset: str | None = None  # a hub data set's configuration
    split: str = "train"
    fields: list[str] = ["question", "answer"]
    format: Literal["messages", "prompt_completion", "text"] | None = None
    fingerprint: str | None = None
    drawn: Drawn | None = None
    train_on: Literal["all", "last_field"] = "all"
    tokenizer: str | None = None
    seed: int | None = None  # of the draw, where the workload is to be the same under every seed of the sweep
    page_cache: Literal["warm", "cold"] | None = None
    jobs: list[JobSpec] = []

    @field_validator("jobs", mode="before")
    @classmethod
    def _copied(cls, value: Any) -> Any:
        return copied(value)

    @field_validator("distribution")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None:
            tables = length_tables()
            names = [*tables["measured"], *tables["approximate"]]
            if value not in names:
                raise nearest("length distribution", value, names)
        return value

    @field_validator("samples")
    @classmethod
    def _some(cls, value: int, info: ValidationInfo) -> int:
        if not value and info.data.get("kind") == "text":
            raise ValueError("of a text expected 1 or more")
        return value

    @model_validator(mode="after")
    def _complete(self) -> Workload:
        if self.kind == "lengths" and not self.distribution:
            raise ValueError("kind lengths needs `distribution`")
        if self.kind == "text" and bool(self.path) == bool(self.dataset):
            raise ValueError("kind text needs either `path` (a JSONL file) or `dataset` (a hub name)")
        if (self.kind == "weights") != (self.page_cache is not None):
            raise ValueError("`page_cache` (warm or cold) goes with kind weights, and with no other")
        if self.count * self.seq_len > MOST_TOKENS:
            raise ValueError(f"{self.count} samples of {self.seq_len} tokens: expected at most {MOST_TOKENS} in a step")
        twice = sorted({j.name for j in self.jobs if [k.name for k in self.jobs].count(j.name) > 1})
        if twice:
            raise ValueError(f"two jobs are named {twice[0]!r}")
        return self

    @property
    def count(self) -> int:
        return self.samples or self.batch_size

    @property
    def lengths_are(self) -> str | None:
        """ "measured" or "approximate": any figure that rests on approximate lengths has to say so."""
        if self.kind != "lengths":
            return None
        return "measured" if self.distribution in length_tables()["measured"] else "approximate"


def fixed(text: str) -> Workload | None:
    """`4x2048` -> batch 4 of 2048 tokens; None where the text is no such pair."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match:
        return None
    batch_size, seq_len = map(int, match.groups())
    return Workload(name=text, kind="fixed", batch_size=batch_size, seq_len=seq_len)
