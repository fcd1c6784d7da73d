"""The questions of a checkpoint's evaluation, and how a model answers them: greedily, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from lorabench.contract.batch import IGNORE, Sample
from lorabench.contract.workload import Workload
from lorabench.plan.weights import load_tokenizer

SETS = VALIDATION, TEST = "validation", "test"
NUMBERS = "token numbers as words"  # what text is where no tokenizer is known
Decode = Callable[[Sequence[int]], str]


class Question(NamedTuple):
    """A prompt and how it goes on. `set`: one of SETS, with the trial's number where the samples are not the workload's
    own; `name`: what an answer is called by."""

    set: str
    name: str
    prompt: list[int]
    expected: list[int]


def questions(samples: Sequence[Sample], of_each: int, new_tokens: int, trial: int = 0) -> list[Question]:
    """Of so many samples of each set, fewer where a set has no more. The first half of the samples is the validation
    set, the rest the test set."""
    half, when = (len(samples) + 1) // 2, f" of trial {trial}" if trial else ""
    sets = ((VALIDATION + when, samples[:half]), (TEST + when, samples[half:]))
    return [
        Question(of, f"{of}, sample {n}", *_parts(sample, new_tokens))
        for of, own in sets for n, sample in enumerate(own[:of_each], start=1)
    ]  # fmt: skip


def _parts(sample: Sample, new_tokens: int) -> tuple[list[int], list[int]]:
    """What comes before the first trained token, and what is trained from there on without a gap (of a chat the first
    answer), as much as is answered. Of a sample that is trained from its first token on, its halves."""
    trained = [label != IGNORE for label in sample.labels]
    begin = trained.index(True) if any(trained) else 0
    begin = begin or max(1, len(trained) // 2)
    end = trained.index(False, begin) if False in trained[begin:] else len(trained)
    return sample.tokens[:begin], sample.tokens[begin : min(end, begin + new_tokens)]


def answer(
    model: Any, asked: Sequence[Question], batch_size: int, generation: dict[str, Any]
) -> Iterator[tuple[list[list[int]], bool]]:
    """Batch by batch (each question's new tokens, whether keys and values were kept). Prompts are padded on the left,
    so that every answer begins in the same column. The arguments of `generation` are those of `model.generate`."""
    device = next(model.parameters()).device
    for begin in range(0, len(asked), batch_size):
        prompts = [question.prompt for question in asked[begin : begin + batch_size]]
        width = max(map(len, prompts))
        padding = [[0] * (width - len(prompt)) for prompt in prompts]
        ids = torch.tensor([p + prompt for p, prompt in zip(padding, prompts, strict=True)], device=device)
        mask = torch.tensor([p + [1] * (width - len(p)) for p in padding], device=device)
        out = model.generate(input_ids=ids, attention_mask=mask, return_dict_in_generate=True, **generation)
        kept = out.get("cache", out.get("past_key_values"))  # the name since transformers 5.24, and before
        yield out.sequences[:, width:].tolist(), kept is not None


def decoder(workload: Workload) -> tuple[Decode, str]:
    """How tokens become text, and by what: the workload's tokenizer; where it has none, each token's number is a word.
    Raises WeightsError where the tokenizer cannot be read."""
    if not workload.tokenizer:
        return lambda tokens: " ".join(map(str, tokens)), NUMBERS
    tokenizer = load_tokenizer(workload.tokenizer)
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True), f"tokenizer {workload.tokenizer}"
