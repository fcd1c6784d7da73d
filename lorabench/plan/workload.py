"""The workload: what is fed. Samples (tokens and labels) come from one of three sources, batches are made of samples.

Padding positions never count as work done: real and padded tokens are kept apart everywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

IGNORE = -100  # the label that cross-entropy leaves out


class WorkloadError(ValueError):
    """A workload that cannot be drawn or read; the message says what was expected."""


@dataclass(frozen=True)
class Sample:
    """One training sample: `tokens` and `labels` of equal length; the first token is never predicted."""

    tokens: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Batch:
    """One micro-batch: the model's inputs (input_ids and labels (B, S), int64; attention_mask or position_ids where
    needed), and its counts of real, padding and trained positions."""

    inputs: dict[str, Any]
    real: int
    padded: int
    trained: int


@cache
def length_tables() -> dict[str, dict[str, Any]]:
    """The shipped token-length figures: "measured" (quantiles of real text) and "approximate" (log-normal), apart."""
    return json.loads(resources.files("lorabench.plan").joinpath("lengths.json").read_text())


class Workload(BaseModel):
    """What one optimizer step is fed: `samples` samples in micro-batches of `batch_size`, none above `seq_len` tokens.

    kind fixed: every sample has `seq_len` random tokens. kind lengths: random tokens, lengths drawn from
    `distribution`. kind text: a JSONL file (`path`) or hub data set (`dataset`), its `fields` joined and tokenized.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    kind: Literal["fixed", "lengths", "text"]
    batch_size: int = Field(ge=1)
    seq_len: int = Field(ge=2)
    samples: int = Field(default=0, ge=0)  # 0: one batch
    distribution: str | None = None
    path: str | None = None
    dataset: str | None = None
    subset: str | None = None  # a hub data set's configuration
    split: str = "train"
    fields: list[str] = ["question", "answer"]
    train_on: Literal["all", "last_field"] = "all"
    tokenizer: str | None = None
    seed: int | None = None  # of the draw, where the workload is to be the same under every seed of the sweep

    @field_validator("distribution")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None:
            from lorabench.plan.registry import nearest

            tables = length_tables()
            names = [*tables["measured"], *tables["approximate"]]
            if value not in names:
                raise nearest("length distribution", value, names)
        return value

    @model_validator(mode="after")
    def _complete(self) -> Workload:
        if self.kind == "lengths" and not self.distribution:
            raise ValueError("kind lengths needs `distribution`")
        if self.kind == "text" and (bool(self.path) == bool(self.dataset) or not self.tokenizer):
            raise ValueError("kind text needs `tokenizer` and either `path` (a JSONL file) or `dataset` (a hub name)")
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

    def draw(self, vocab_size: int, seed: int) -> list[Sample]:
        """The samples of one step. Same seed, same samples. Raises WorkloadError."""
        seed = seed if self.seed is None else self.seed
        if self.kind == "text":
            return self._text(vocab_size, seed)
        rng = np.random.default_rng(seed)
        if self.kind == "fixed":
            lengths = np.full(self.count, self.seq_len)
        else:
            lengths = draw_lengths(self.distribution or "", self.count, rng)
        samples = []
        for length in np.clip(lengths, 2, self.seq_len):
            tokens = rng.integers(0, vocab_size, int(length)).tolist()
            samples.append(Sample(tokens, list(tokens)))
        return samples

    def _text(self, vocab_size: int, seed: int) -> list[Sample]:
        from lorabench.plan.weights import load_tokenizer

        tokenizer = load_tokenizer(self.tokenizer or "")
        rows = list(self._rows())
        if len(rows) < self.count:
            raise WorkloadError(f"{self.path or self.dataset} has {len(rows)} rows; the workload needs {self.count}")
        order = np.random.default_rng(seed).permutation(len(rows))[: self.count]
        samples = [self._tokenize(rows[i], tokenizer) for i in order]
        if max(max(s.tokens) for s in samples) >= vocab_size:
            raise WorkloadError(f"the tokenizer {self.tokenizer} has tokens above the model's vocabulary {vocab_size}")
        return samples

    def _rows(self) -> list[dict[str, Any]]:
        if self.path is None:
            from datasets import load_dataset  # an extra: lorabench[data]

            table: Any = load_dataset(self.dataset or "", self.subset, split=self.split)  # by their type, any rows
            return list(table)
        path = Path(self.path)
        if not path.is_file():
            raise WorkloadError(f"{path}: no such file; expected JSON lines with the fields {', '.join(self.fields)}")
        rows = []
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    raise WorkloadError(f"{path} line {number} is not JSON; expected one object a line") from None
        return rows

    def _tokenize(self, row: dict[str, Any], tokenizer: Any) -> Sample:
        missing = [f for f in self.fields if f not in row]
        if missing:
            raise WorkloadError(f"no field {missing[0]!r} in {self.path or self.dataset}; it has {', '.join(row)}")
        parts = [tokenizer(str(row[f]) + "\n", add_special_tokens=False)["input_ids"] for f in self.fields]
        if tokenizer.eos_token_id is not None:
            parts[-1] = [*parts[-1], tokenizer.eos_token_id]
        tokens = [t for part in parts for t in part][: self.seq_len]
        prompt = sum(map(len, parts[:-1])) if self.train_on == "last_field" else 0
        labels = [IGNORE if i < prompt else t for i, t in enumerate(tokens)]
        return Sample(tokens, labels)


def draw_lengths(distribution: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` token lengths: by inverse transform of the 101 measured quantiles, or log-normal where approximate."""
    tables = length_tables()
    if distribution in tables["measured"]:
        quantiles = tables["measured"][distribution]["quantiles"]
        return np.rint(np.interp(rng.uniform(0, 100, count), np.arange(101), quantiles)).astype(int)
    shape = tables["approximate"][distribution]
    mu = np.log(shape["mean"]) - shape["sigma"] ** 2 / 2  # so that the mean, not the median, is `mean`
    return np.rint(np.clip(rng.lognormal(mu, shape["sigma"], count), *shape["clip"])).astype(int)


def fixed(text: str) -> Workload | None:
    """`4x2048` -> batch 4 of 2048 tokens; None where the text is no such pair."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match:
        return None
    batch_size, seq_len = map(int, match.groups())
    return Workload(name=text, kind="fixed", batch_size=batch_size, seq_len=seq_len)


def pad(samples: Sequence[Sample], batch_size: int) -> list[Batch]:
    """Plain batching: `batch_size` samples side by side, in order, padded on the right to the longest of them."""
    return [_pad_one(samples[i : i + batch_size]) for i in range(0, len(samples), batch_size)]


def _pad_one(samples: Sequence[Sample]) -> Batch:
    import torch

    width = max(len(s.tokens) for s in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    labels = torch.full_like(ids, IGNORE)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        n = len(sample.tokens)
        ids[row, :n] = torch.tensor(sample.tokens)
        labels[row, :n] = torch.tensor(sample.labels)
        mask[row, :n] = 1
    real = int(mask.sum())
    inputs = {"input_ids": ids, "labels": labels}
    if real < ids.numel():  # without padding there is no mask, so that attention may take its causal path
        inputs["attention_mask"] = mask
    return Batch(inputs, real=real, padded=ids.numel() - real, trained=int((labels[:, 1:] != IGNORE).sum()))
