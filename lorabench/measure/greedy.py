"""Whether two arms' greedy answers are the same, where rounding may decide between two tokens that are equally likely.

Each answer is read once more in one forward without a cache (its own tokens, as in training), which gives every token's
logit at every position. How far rounding moves a logit is measured on the same model (`depth_noise.other_rounding`).

- Of each arm, every token of every answer is the best of its own model, or below it by no more than rounding may do.
  This holds for what comes after a tie, too, and the loss says whether the model is right.
- At the first token in which two arms' answers differ, the candidate's lies as near to the best by the reference's
  model. What follows has another prefix, and no token of the reference to be compared with: where both arms are in one
  process, the reference's model reads the candidate's answer to its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorabench.measure.judging.depth_noise import other_rounding
from lorabench.record.schema import Check

TOP = 16  # of a position's tokens, the likeliest: no more are ever near enough to the best
RUNS = 2  # with other rounding
# What rounding does to the difference of two logits is about normal: of ten thousand tokens it takes none further.
SIGMAS = 5.0
NEIGHBOURS = 2.0  # logits are numbers of the compute dtype: each of two may be rounded to the next one
MOST = 0.5  # of the logits' own spread over the vocabulary: with any noise, a token from among the others is wrong
KEPT = 4.0  # times what is allowed: how far below the best a logit is kept, to say how far off a token was

Answers = Mapping[str, Sequence[int]]  # by the name of what is answered


class Place(NamedTuple):
    """A token: how far its logit is below the best one's, of which answer, at which position (from 1)."""

    below: float
    answer: str
    position: int

    def __str__(self) -> str:
        return f"token {self.position} of the answer to {self.answer}"


@dataclass
class Choices:
    """What an arm's model says of its own answers. Numbers only: it crosses a process's boundary."""

    eps: float = 0.0  # of the compute dtype
    noise: float = 0.0  # standard deviation of a logit over right runs
    spread: float = math.inf  # the same of the logits of one position over the vocabulary
    largest: float = 0.0  # logit
    worst: Place = field(default_factory=lambda: Place(0.0, "", 0))  # the token that is furthest below the best
    # By answer and position (from 0), where there are any: other tokens that are near the best, and how far below.
    near: dict[str, dict[int, dict[int, float]]] = field(default_factory=dict)

    @property
    def allowed(self) -> float:
        """How far below the best a logit may be whose token is as good."""
        rounding = max(SIGMAS * 2**0.5 * self.noise, NEIGHBOURS * self.eps * self.largest)
        return min(rounding, MOST * self.spread)


class Reader:
    """Reads answers with an arm's model, which computes in `dtype`."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.model = model
        self.choices = Choices(torch.finfo(dtype).eps)
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        self._barred = [ends] if isinstance(ends, int) else list(ends or ())  # an answer never ends early

    def read(self, prompts: Mapping[str, Sequence[int]], answers: Answers) -> None:
        """Add what the model says of these answers. How far rounding goes is measured on the first one."""
        for name, answer in answers.items():
            if not answer:
                continue
            logits = self._logits(prompts[name], answer)
            if not self.choices.near:
                self.choices.noise = self._noise(prompts[name], answer, logits)
            self._add(name, answer, logits)

    def _add(self, name: str, answer: Sequence[int], logits: Tensor) -> None:
        found = self.choices
        known = logits[:, torch.isfinite(logits[0])]
        found.spread = min(found.spread, float(known.std(dim=-1).median()))
        found.largest = max(found.largest, float(known.abs().max()))
        best = logits.max(dim=-1, keepdim=True).values
        own = logits.gather(1, torch.tensor(answer, device=logits.device)[:, None])
        places = [Place(d if d == d else math.inf, name, n) for n, d in enumerate((best - own)[:, 0].tolist(), start=1)]
        found.worst = max(found.worst, *places)
        top = logits.topk(min(TOP, logits.shape[1]))
        rows = zip(answer, top.indices.tolist(), (best - top.values).tolist(), strict=True)
        limit = KEPT * found.allowed
        near = {
            n: others for n, (token, ids, below) in enumerate(rows)
            if (others := {i: d for i, d in zip(ids, below, strict=True) if i != token and d <= limit})
        }  # fmt: skip
        found.near[name] = near

    def _noise(self, prompt: Sequence[int], answer: Sequence[int], plain: Tensor) -> float:
        """Of the likeliest tokens; what moves all of them alike decides nothing."""
        top = plain.topk(min(TOP, plain.shape[1] - len(self._barred)))
        runs = []
        for _ in range(RUNS):
            with other_rounding(self.model):
                moved = self._logits(prompt, answer).gather(1, top.indices) - top.values
            runs.append(float((moved - moved.mean(dim=1, keepdim=True)).pow(2).mean().sqrt()))
        return max(runs)

    def _logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """float32 (tokens of the answer, vocabulary), each after what comes before it."""
        ids = torch.tensor([[*prompt, *answer[:-1]]], device=next(self.model.parameters()).device)
        with torch.no_grad():
            logits = self.model(input_ids=ids, logits_to_keep=len(answer), use_cache=False).logits[0].float()
        logits[:, self._barred] = -math.inf
        return logits


class Compared(NamedTuple):
    """Two arms' answers held together: how many tokens, which of them are wrong, and the checks."""

    tokens: int
    wrong: list[str]
    checks: list[Check]


def compare(
    reference: Choices, candidate: Choices, ours: Answers, theirs: Answers, crossed: Choices | None = None
) -> Compared:
    """`ours` and `theirs`: the reference's and the candidate's answers. What only one arm answers is not compared.
    `crossed`: what the reference's model says of the candidate's answers that differ from its own."""
    read = (
        ("reference, below its model's", reference), ("candidate, below its model's", candidate),
        ("candidate, below the reference's", crossed),
    )  # fmt: skip
    checks = [
        Check(name=f"each token of the {name} best", found=found.worst.below, allowed=found.allowed,
              where=str(found.worst) if found.worst.below else "")
        for name, found in read if found and found.near
    ]  # fmt: skip
    tokens, parted = 0, list[Place]()
    for name in (name for name in ours if name in theirs):
        mine, other = ours[name], theirs[name]
        shorter = min(len(mine), len(other))
        alike = next((n for n in range(shorter) if mine[n] != other[n]), shorter)
        tokens += min(alike + 1, shorter)
        if alike < shorter:
            parted.append(Place(reference.near[name].get(alike, {}).get(other[alike], math.inf), name, alike + 1))
    if parted:
        said = f"{max(parted)}; {len(parted)} of {len(ours)} answers part"
        name = "first token that differs, below the reference's best"
        checks.append(Check(name=name, found=max(parted).below, allowed=reference.allowed, where=said))
    return Compared(tokens, [str(place) for place in parted if not place.below <= reference.allowed], checks)


def lengths(answers: Answers, wanted: Mapping[str, int]) -> Iterator[str]:
    """What is wrong with the number or the length of an arm's answers, in words."""
    for name in wanted.keys() | answers.keys():
        if len(answers.get(name, ())) != wanted.get(name, 0):
            yield f"the answer to {name} has {len(answers.get(name, ()))} tokens, expected {wanted.get(name, 0)}"
