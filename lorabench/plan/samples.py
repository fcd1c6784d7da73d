"""The samples of a workload, drawn or read: same seed, same samples."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lorabench.contract.batch import IGNORE, Sample
from lorabench.contract.job import jobs_of
from lorabench.contract.model import ModelSpec
from lorabench.contract.workload import Drawn, Workload, WorkloadError, length_tables
from lorabench.plan import chat
from lorabench.plan.hub import is_name
from lorabench.plan.packing_gain import padded
from lorabench.plan.rows import MESSAGES, SUFFIXES, Rows, check_row, file_rows, in_turns, rows_of
from lorabench.plan.rows import check as check_rows
from lorabench.plan.rows import found as find
from lorabench.plan.weights import RANDOM, load_tokenizer

TEXT = "text"  # the kind of workload that has rows
LOOKED = 500  # rows whose lengths stand for those of all
ORDERS = 100
ROW_LENGTH = 2048  # tokens to which a row of a user's own text is cut, where nothing else is said
OTHER_FILES = (".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".gz", ".zst", ".zip")


def own_text(item: str, samples: int, batch_size: int) -> dict[str, Any] | None:
    """Fields of a Workload for a user's JSONL file or hub data set, None for any other name. Its fields are to be
    found, and the loss is on what is to be learnt: the last of them, of a chat the assistant's turns. A step has so
    many `samples`, or all rows of a smaller file, and a row no more tokens than ROW_LENGTH or than the model has
    positions for (`settled` sees to both). Raises WorkloadError."""
    fields = {"kind": TEXT, "fields": [], "train_on": "last_field", "seq_len": ROW_LENGTH}
    if item.lower().endswith(SUFFIXES):
        path = Path(item).expanduser().resolve()
        samples = min(samples, len(file_rows(path)))
        return fields | {"path": str(path), "samples": samples, "batch_size": min(batch_size, samples)}
    if item.lower().endswith(OTHER_FILES):
        raise WorkloadError(f"{item}: expected JSON lines, one object a line, in a file whose name ends with .jsonl")
    return fields | {"dataset": item, "samples": samples, "batch_size": batch_size} if is_name(item) else None


def _asked(workload: Workload, field: str) -> bool:
    """Whether somebody gave this field. A user's own text is named by its file or data set, with what was changed of it
    behind that: `chats.jsonl(seq_len=512)`. Of any other workload all is given."""
    own = Path(workload.path).name if workload.path else workload.dataset or ""
    changes = workload.name.removeprefix(own)
    return changes == workload.name or f"{field}=" in changes


def draw(workload: Workload, vocab_size: int, seed: int) -> list[Sample]:
    """The samples of one step. Same seed, same samples. Raises WorkloadError."""
    seed = seed if workload.seed is None else workload.seed
    if workload.kind == TEXT:
        tokenizer, rows = load_tokenizer(workload.tokenizer or ""), rows_of(workload)
        chosen = (workload.drawn or choose(workload, vocab_size, seed, workload.count)).rows
        return [_tokenize(workload, rows[index], rows.place(index), tokenizer) for index in chosen]
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


def every(workload: Workload, spec: ModelSpec) -> tuple[list[Sample], int]:
    """All rows of a text of which something is trained within seq_len, in their order, and how many others there are.
    Raises WorkloadError."""
    rows, config = rows_of(workload), spec.hf_config()
    fields, form = find(rows, workload.fields)
    most = getattr(config, "max_position_embeddings", None) or workload.seq_len
    found = {"fields": fields, "format": workload.format or form, "seq_len": min(workload.seq_len, most)}
    whole = workload.model_copy(update=found | {"tokenizer": workload.tokenizer or _own(spec)})
    tokenizer = load_tokenizer(whole.tokenizer or "")
    read = (_tokenize(whole, rows[index], rows.place(index), tokenizer) for index in range(len(rows)))
    samples = [sample for sample in read if sample.trained]
    if not samples:
        where = f"{rows.source}: none of the {len(rows)} rows has anything to train on within seq_len {whole.seq_len}"
        raise WorkloadError(where + _roles(whole, rows[0]))
    if max(max(sample.tokens) for sample in samples) >= config.vocab_size:
        raise WorkloadError(
            f"the tokenizer {whole.tokenizer} has tokens above the model's vocabulary {config.vocab_size}"
        )
    return samples, len(rows) - len(samples)


def check_file(workload: Workload) -> None:
    """Whether the rows of a workload's own file are what they have to be. Raises WorkloadError."""
    if workload.path is not None:
        rows = rows_of(workload)
        fields, form = find(rows, workload.fields)
        check_rows(rows, fields, workload.format or form)


def settled(workload: Workload, spec: ModelSpec, seed: int) -> Workload:
    """The workload with what it leaves to the model and to its rows: tokenizer, fields, format, and a fingerprint of
    the content; that of each of its jobs too. Its samples are drawn once, so whatever is wrong with them is said now.

    Raises WorkloadError.
    """
    if not workload.jobs:
        return workload.model_copy(update=_settled(workload, spec, seed))
    alone = workload.model_copy(update={"jobs": []})
    jobs = []
    for job, own in zip(workload.jobs, jobs_of(spec, workload, seed), strict=True):
        jobs.append(job.model_copy(update={"workload": job.workload | _settled(own.workload, spec, own.seed)}))
    return workload.model_copy(update={"jobs": jobs, **_settled(alone, spec, seed)})


def _settled(workload: Workload, spec: ModelSpec, seed: int) -> dict[str, Any]:
    config = spec.hf_config()
    most = getattr(config, "max_position_embeddings", None)
    longest, shorter, found = workload.seq_len, f"seq_len of at most {most}", {}
    if workload.kind == TEXT:
        rows = rows_of(workload)
        fields, form = find(rows, workload.fields)
        found = {"fields": fields, "format": workload.format or form, "tokenizer": workload.tokenizer or _own(spec)}
        if most and not _asked(workload, "seq_len"):
            found["seq_len"] = min(workload.seq_len, most)
        whole = workload.model_copy(update=found)
        if workload.path is not None:
            check_rows(rows, fields, whole.format)
        least = workload.count if _asked(workload, "samples") else 1
        drawn = choose(whole, config.vocab_size, seed if workload.seed is None else workload.seed, least)
        if len(drawn.rows) < workload.count:
            few = len(drawn.rows)
            batch_size = workload.batch_size if _asked(workload, "batch_size") else min(workload.batch_size, few)
            found |= {"samples": few, "batch_size": batch_size}
        found["drawn"] = drawn
        longest = max(len(s.tokens) for s in draw(whole.model_copy(update=found), config.vocab_size, seed))
        shorter = f"{{{workload.dataset or 'FILE.jsonl'}: {{seq_len: {most}}}}} or less"
        template = getattr(load_tokenizer(whole.tokenizer or ""), "chat_template", None)
        found["fingerprint"] = hashlib.sha256(f"{rows.digest} {template}".encode()).hexdigest()[:16]
    if spec.location and most and longest > most:
        raise WorkloadError(
            f"the workload {workload.name} has samples of {longest} tokens, the model {spec.name} has positions for "
            f"{most} (max_position_embeddings); expected {shorter}"
        )
    return found


def _own(spec: ModelSpec) -> str:
    """Whose tokenizer a model's is. Raises WorkloadError."""
    published = spec.source.partition(",")[0]
    if own := spec.location or (spec.weights if spec.weights != RANDOM else None):
        return own
    if is_name(published):
        return published
    raise WorkloadError(f"the model {spec.name} has no tokenizer; expected {{FILE.jsonl: {{tokenizer: ORG/NAME}}}}")


def choose(workload: Workload, vocab_size: int, seed: int, least: int) -> Drawn:
    """The rows of a step, as many as the workload wants and `least` or more, with the lengths that the text has: of
    LOOKED random rows, in the order of their length, every nth. In random order, of ORDERS that whose padding is
    nearest to that of random batches. One of which nothing would be trained within seq_len is passed over. Raises
    WorkloadError."""
    tokenizer, rows = load_tokenizer(workload.tokenizer or ""), rows_of(workload)
    what = workload.model_dump_json(), tokenizer, vocab_size, seed, least
    if what not in rows.chosen:
        rows.chosen[what] = _chosen(workload, tokenizer, rows, vocab_size, seed, least)
    return rows.chosen[what]


def _chosen(workload: Workload, tokenizer: Any, rows: Rows, vocab_size: int, seed: int, least: int) -> Drawn:
    lengths, random, highest = dict[int, int](), np.random.default_rng(seed), 0
    if len(rows) < least:
        raise WorkloadError(f"{rows.source} has {len(rows)} rows; the workload needs {least}")
    for index in map(int, random.permutation(len(rows))):
        if (sample := _tokenize(workload, rows[index], rows.place(index), tokenizer)).trained:
            lengths[index], highest = len(sample.tokens), max(highest, *sample.tokens)
        if len(lengths) == max(LOOKED, workload.count):
            break
    if len(lengths) < least:
        few = f"only {len(lengths)} of" if lengths else "none of the"
        raise WorkloadError(
            f"{rows.source}: {few} {len(rows)} rows have anything to train on within seq_len "
            f"{workload.seq_len}{_roles(workload, rows[0])}; the workload needs {least}"
        )
    if highest >= vocab_size:
        raise WorkloadError(f"the tokenizer {workload.tokenizer} has tokens above the model's vocabulary {vocab_size}")
    ordered = sorted(lengths, key=lambda index: lengths[index])
    count = min(workload.count, len(ordered))
    chosen = [ordered[int((n + 0.5) * len(ordered) / count)] for n in range(count)]
    size = min(workload.batch_size, count)
    usual = _usual_padding(np.asarray(sorted(lengths.values())), size)
    orders = [list(map(int, random.permutation(chosen))) for _ in range(ORDERS)]
    paddings = [1 - padded([lengths[i] for i in order], size).efficiency for order in orders]
    best = int(np.argmin(np.abs(np.array(paddings) - usual)))
    return Drawn(rows=orders[best], of=len(rows), padding=paddings[best], text_padding=usual)


def _usual_padding(ordered: np.ndarray, size: int) -> float:
    """The same of random batches, from the lengths in ascending order: 1 - mean / the mean longest of `size`."""
    n = len(ordered)  # of each: so many batches of which it is the longest, of all
    chances = [math.comb(shorter, size - 1) / math.comb(n, size) for shorter in range(n)]
    return 1 - float(ordered.mean() / np.dot(chances, ordered))


def _tokenize(workload: Workload, row: Mapping[str, Any], place: str, tokenizer: Any) -> Sample:
    check_row(row, place, workload.fields, workload.format)
    values = [row[field] for field in workload.fields]
    try:
        if workload.format == MESSAGES:
            tokens, trained = chat.tokenize(tokenizer, values[0], _tools(row))
        elif in_turns(row, workload.fields, workload.format):
            tokens, trained = chat.tokenize_completion(tokenizer, values[0], values[1], _tools(row))
        else:
            tokens, trained = (_one_text if workload.format else _lines)(tokenizer, values)
    except chat.ChatError as error:
        raise WorkloadError(f"{place}: {error}") from None
    every = workload.train_on == "all"
    labels = [token if every or said else IGNORE for token, said in zip(tokens, trained, strict=True)]
    return Sample(tokens[: workload.seq_len], labels[: workload.seq_len])


def _roles(workload: Workload, row: Mapping[str, Any]) -> str:
    """Who speaks in a chat, for the reason why nothing of it is trained."""
    if workload.format != MESSAGES:
        return ""
    roles = sorted({message["role"] for message in row[workload.fields[0]]})
    return f" (the first has the roles {', '.join(roles)}; trained are the turns of assistant)"


def _tools(row: Mapping[str, Any]) -> Any:
    """The descriptions of functions beside a chat, as a list or as its JSON."""
    tools = row.get("tools")
    return (json.loads(tools) if isinstance(tools, str) and tools.strip() else tools) or None


def _one_text(tokenizer: Any, values: list[str]) -> tuple[list[int], list[bool]]:
    """One text, or a prompt with its completion right after it, as the tokenizer begins a text (its beginning-of-text
    token, where it has one); the last part is trained."""
    tokens = list(tokenizer("".join(values), add_special_tokens=True)["input_ids"])
    prompt = tokenizer("".join(values[:-1]), add_special_tokens=True)["input_ids"] if values[:-1] else []
    if tokenizer.eos_token_id is not None and tokens[-1:] != [tokenizer.eos_token_id]:
        tokens.append(tokenizer.eos_token_id)
    begin = chat.common(tokens, list(prompt))
    return tokens, [i >= begin for i in range(len(tokens))]


def _lines(tokenizer: Any, values: list[str]) -> tuple[list[int], list[bool]]:
    """Each value on a line of its own, tokenized apart; the last one is trained."""
    parts = [tokenizer(value + "\n", add_special_tokens=False)["input_ids"] for value in values]
    if tokenizer.eos_token_id is not None:
        parts[-1] = [*parts[-1], tokenizer.eos_token_id]
    tokens, prompt = [t for part in parts for t in part], sum(map(len, parts[:-1]))
    return tokens, [i >= prompt for i in range(len(tokens))]


def draw_lengths(distribution: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` token lengths: by inverse transform of the 101 measured quantiles, or log-normal where approximate."""
    tables = length_tables()
    if distribution in tables["measured"]:
        quantiles = tables["measured"][distribution]["quantiles"]
        return np.rint(np.interp(rng.uniform(0, 100, count), np.arange(101), quantiles)).astype(int)
    shape = tables["approximate"][distribution]
    mu = np.log(shape["mean"]) - shape["sigma"] ** 2 / 2  # so that the mean, not the median, is `mean`
    return np.rint(np.clip(rng.lognormal(mu, shape["sigma"], count), *shape["clip"])).astype(int)
