"""Whether two arms' greedy answers are the same, where rounding may decide between two tokens that are equally likely.

Each answer is read once more in one forward without a cache (its own tokens, as in training), which gives every token's
logit at every position. How far rounding moves a logit is measured on the same model (`depth_noise.other_rounding`).

- Of each arm, every token of every answer is the best of its own model, or below it by no more than rounding may do.
  This holds for what comes after a tie, too, and the loss says whether the model is right.
- At the first token in which two arms' answers differ, the reference's logits of both lie as near to each other.
  What follows has another prefix and is not compared with the other arm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorabench.measure.depth_noise import other_rounding
from lorabench.record.schema import Check

TOP = 16  # tokens of a position whose logits are kept: no more are ever near enough to the best
RUNS = 2  # with other rounding
# What rounding does to the difference of two logits is about normal: of ten thousand tokens it takes none further.
SIGMAS = 5.0
NEIGHBOURS = 2.0  # logits are numbers of the compute dtype: each of two may be rounded to the next one
MOST = 0.5  # of the logits' own spread over the vocabulary: with any noise, a token from among the others is wrong

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

    noise: float = 0.0  # standard deviation of a logit over right runs
    spread: float = math.inf  # the same of the logits of one position over the vocabulary
    largest: float = 0.0  # logit
    worst: Place = Place(0.0, "", 0)  # the token that is furthest below the best
    # By answer, position by position: token → how far its logit is below the best one's.
    below: dict[str, list[dict[int, float]]] = field(default_factory=dict)

    def allowed(self, dtype: torch.dtype) -> float:
        """How far below the best a logit may be whose token is as good."""
        rounding = max(SIGMAS * 2**0.5 * self.noise, NEIGHBOURS * torch.finfo(dtype).eps * self.largest)
        return min(rounding, MOST * self.spread)


class Reader:
    """Reads answers with an arm's model, each once."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.choices = Choices()
        self._read: set[tuple[str, tuple[int, ...]]] = set()
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        self._barred = [ends] if isinstance(ends, int) else list(ends or ())  # an answer never ends early

    def read(self, prompts: Mapping[str, Sequence[int]], answers: Answers) -> int:
        """Add what the model says of these answers, where they were not read before. Returns how many that were."""
        new = {n: a for n, a in answers.items() if a and (n, tuple(a)) not in self._read}
        for name, answer in new.items():
            if not self._read:
                self.choices.noise = self._noise(prompts[name], answer)
            self._read.add((name, tuple(answer)))
            self._add(name, prompts[name], answer)
        return len(new)

    def _add(self, name: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        logits, found = self._logits(prompt, answer), self.choices
        best = logits.max(dim=-1, keepdim=True).values
        of_answer = logits.gather(1, torch.tensor(answer, device=logits.device)[:, None])
        deficits = (best - of_answer)[:, 0].tolist()
        places = [Place(d if d == d else math.inf, name, n) for n, d in enumerate(deficits, start=1)]
        found.worst = max(found.worst, *places)
        finite = logits[:, torch.isfinite(logits[0])]
        found.spread = min(found.spread, float(finite.std(dim=-1).median()))
        found.largest = max(found.largest, float(finite.abs().max()))
        top = logits.topk(min(TOP, logits.shape[1]))
        rows = zip(top.indices.tolist(), (best - top.values).tolist(), strict=True)
        found.below.setdefault(name, [dict(zip(*row, strict=True)) for row in rows])  # of the first one under this name

    def _noise(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Of the likeliest tokens; what moves all of them alike decides nothing."""
        plain = self._logits(prompt, answer)
        top = plain.topk(min(TOP, plain.shape[1]) - len(self._barred))
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
    reference: Choices, candidate: Choices, ours: Sequence[Answers], theirs: Sequence[Answers], dtype: torch.dtype
) -> Compared:
    """`ours` and `theirs`: the reference's and the candidate's answers, trial by trial; all are held against the
    reference's first. Answers that only one arm has are not compared."""
    checks = [
        Check(name=f"each token of the {name}, below its model's best", found=found.worst.below,
              allowed=found.allowed(dtype), where=str(found.worst) if found.worst.below else "")
        for name, found in (("reference", reference), ("candidate", candidate)) if found.below
    ]  # fmt: skip
    tokens, parted = 0, dict[Place, str]()
    for trial, answers in [*enumerate(theirs), *enumerate(ours)]:
        for name in (name for name in answers if name in reference.below):
            mine, other = ours[0][name], answers[name]
            alike = _alike(mine, other)
            tokens += alike
            if alike < min(len(mine), len(other)):
                tokens += 1
                below = reference.below[name][alike].get(other[alike], math.inf)
                parted.setdefault(Place(below, name, alike + 1), f" of trial {trial}" if trial else "")
    allowed = reference.allowed(dtype)
    if parted:
        said = f"{max(parted)}; {len({place.answer for place in parted})} answers part"
        name = "first token that differs, below the reference's best"
        checks.append(Check(name=name, found=max(parted).below, allowed=allowed, where=said))
    wrong = [f"{place}{when}" for place, when in parted.items() if not place.below <= allowed]
    return Compared(tokens, wrong, checks)


def _alike(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens are the same from the beginning on."""
    return next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))


def lengths(answers: Iterable[Answers], wanted: Mapping[str, int]) -> Iterator[str]:
    """What is wrong with the number or the length of an arm's answers, in words."""
    for trial in answers:
        for name in wanted.keys() | trial.keys():
            if len(trial.get(name, ())) != wanted.get(name, 0):
                yield f"the answer to {name} has {len(trial.get(name, ()))} tokens, expected {wanted.get(name, 0)}"
