"""The samples of a workload, drawn or read: same seed, same samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from lorabench.contract.batch import IGNORE, Sample
from lorabench.contract.workload import Workload, WorkloadError, length_tables


def draw(workload: Workload, vocab_size: int, seed: int) -> list[Sample]:
    """The samples of one step. Same seed, same samples. Raises WorkloadError."""
    seed = seed if workload.seed is None else workload.seed
    if workload.kind == "text":
        return _text(workload, vocab_size, seed)
    rng = np.random.default_rng(seed)
    if workload.kind == "fixed":
        lengths = np.full(workload.count, workload.seq_len)
    else:
        lengths = draw_lengths(workload.distribution or "", workload.count, rng)
    samples = []
    for length in np.clip(lengths, 2, workload.seq_len):
        tokens = rng.integers(0, vocab_size, int(length)).tolist()
        samples.append(Sample(tokens, list(tokens)))
    return samples


def check(workload: Workload) -> None:
    """What a workload names on this machine has to be there, before anything is started. Raises WorkloadError."""
    from lorabench.plan.weights import WeightsError, check_local

    if workload.kind != "text":
        return
    if workload.path is not None:
        _file(workload, Path(workload.path))
    try:
        check_local(workload.tokenizer or "")
    except WeightsError as error:
        raise WorkloadError(f"tokenizer {error}") from None


def _file(workload: Workload, path: Path) -> Path:
    if not path.is_file():
        raise WorkloadError(f"{path}: no such file; expected JSON lines with the fields {', '.join(workload.fields)}")
    return path


def _text(workload: Workload, vocab_size: int, seed: int) -> list[Sample]:
    from lorabench.plan.weights import load_tokenizer

    tokenizer = load_tokenizer(workload.tokenizer or "")
    rows = list(_rows(workload))
    if len(rows) < workload.count:
        raise WorkloadError(
            f"{workload.path or workload.dataset} has {len(rows)} rows; the workload needs {workload.count}"
        )
    order = np.random.default_rng(seed).permutation(len(rows))[: workload.count]
    samples = [_tokenize(workload, rows[i], tokenizer) for i in order]
    if max(max(s.tokens) for s in samples) >= vocab_size:
        raise WorkloadError(f"the tokenizer {workload.tokenizer} has tokens above the model's vocabulary {vocab_size}")
    return samples


def _rows(workload: Workload) -> list[dict[str, Any]]:
    if workload.path is None:
        from datasets import load_dataset  # an extra: lorabench[data]

        table: Any = load_dataset(
            workload.dataset or "", workload.subset, split=workload.split
        )  # by their type, any rows
        return list(table)
    path = _file(workload, Path(workload.path))
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise WorkloadError(f"{path} line {number} is not JSON; expected one object a line")
            rows.append(row)
    return rows


def _tokenize(workload: Workload, row: dict[str, Any], tokenizer: Any) -> Sample:
    missing = [f for f in workload.fields if f not in row]
    if missing:
        raise WorkloadError(f"no field {missing[0]!r} in {workload.path or workload.dataset}; it has {', '.join(row)}")
    parts = [tokenizer(str(row[f]) + "\n", add_special_tokens=False)["input_ids"] for f in workload.fields]
    if tokenizer.eos_token_id is not None:
        parts[-1] = [*parts[-1], tokenizer.eos_token_id]
    tokens = [t for part in parts for t in part][: workload.seq_len]
    prompt = sum(map(len, parts[:-1])) if workload.train_on == "last_field" else 0
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
