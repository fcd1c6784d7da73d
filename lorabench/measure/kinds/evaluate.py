"""Kind `evaluate`: what a checkpoint's evaluation computes: the loss of its samples, and metrics of generated text.

    python -m lorabench.sweep kind=evaluate 'models=[tiny-llama]' 'ablations=[text_metrics]' workload=8x32
    python -m lorabench.sweep kind=evaluate 'models=[tiny-llama]' 'reference=[sdpa,text_metrics]' \\
        'ablations=[no_text_metrics,no_kv_cache,batched_generation]' workload=8x32

An arm computes the loss of the workload's samples (phase score). One with a toggle for text metrics first answers
samples of a validation set and of a test set greedily (generate), makes text of the tokens (decode), and compares it
with the text that was expected (metrics). The gate: the same loss but for rounding; answers of the promised number and
length, each token the best but for rounding (measure/greedy.py); of the same answers the same metrics.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, ClassVar

import torch

from lorabench.contract.ablation import Ablation
from lorabench.contract.arm import Arm
from lorabench.contract.batch import Sample
from lorabench.contract.cell import Cell
from lorabench.contract.kind import kind
from lorabench.contract.machine import Machine
from lorabench.contract.text_metrics import LOSS_ONLY, TextMetrics
from lorabench.contract.work import Work
from lorabench.measure import flops, greedy
from lorabench.measure.answers import SETS, Decode, Question, answer, decoder, questions
from lorabench.measure.feed import fresh_samples
from lorabench.measure.hooks import Hooks
from lorabench.measure.judging.depth_noise import off
from lorabench.measure.judging.limits import LOSS
from lorabench.measure.kind import Begin, JobCounts, Kind, Request
from lorabench.measure.memory import give_back
from lorabench.plan.samples import TEXT
from lorabench.record.schema import Check, Numerics

GENERATE, DECODE, METRICS, SCORE = "generate", "decode", "metrics", "score"
OF_TEXT = (GENERATE, DECODE, METRICS)
TRACED = 8  # new tokens of the trial under the audit's trace, which keeps every operator's event
LARGE = 2000  # answers of a checkpoint with 1000 samples in each set: what its time is extrapolated to
SAME = 1e-9  # relative difference of two metrics of the same texts
# Of the loss's spread over the trials: how far it may be from the reference's. Rounding does some hundredths; a loss of
# nine tenths of the tokens is off by a third, one of another trial by more than all of it.
FOLLOWED = 0.3
ROUNDED = 4 * torch.finfo(torch.float32).eps  # of the loss itself, which is a number in float32

Values = dict[str, dict[str, float]]  # by set and metric


@dataclass
class Evaluated:
    """What a trial came to, and as evidence what all of them came to: losses by the trial's number (0: the workload's
    own samples), answers and how many tokens each had to have by the question's name, metrics, what the arm's own model
    says of the answers, and what the reference's does of those that differ from its own."""

    losses: dict[int, float] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    values: Values = field(default_factory=dict)
    choices: greedy.Choices | None = None
    crossed: greedy.Choices | None = None

    def add(self, number: int, observed: Evaluated) -> None:
        self.losses[number] = observed.losses[number]
        self.wanted |= observed.wanted
        self.answers |= observed.answers
        self.values |= observed.values
        if observed.choices and self.choices:  # the rest of them is of all answers so far
            self.choices = replace(observed.choices, near=self.choices.near | observed.choices.near)

    def finish(self, crossed: greedy.Choices) -> None:
        self.crossed = crossed


@dataclass
class EvaluateArm(Arm):
    """`generation`: the arguments of `model.generate`, as the toggles left them. What follows `text_by` is of the last
    trial: the answers, how many kept keys and values, how many were made at a time, the metrics and their seconds."""

    metrics: TextMetrics = LOSS_ONLY
    generation: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 1
    ask: Callable[[int], list[Question]] = lambda number: []  # the questions of a trial
    questions: list[Question] = field(default_factory=list)
    decode: Decode = str
    text_by: str = ""
    answers: list[list[int]] = field(default_factory=list)
    with_cache: int = 0
    batches: list[int] = field(default_factory=list)
    values: Values = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0
    timed: list[dict[str, float]] = field(default_factory=list)  # `seconds` of the timed trials
    prompts: dict[str, list[int]] = field(default_factory=dict)  # by the name of what is answered
    reader: greedy.Reader | None = None
    evidence: Evaluated = field(default_factory=Evaluated)  # of the first trials
    given: dict[str, list[int]] = field(default_factory=dict)  # all answers, by their names


class Evaluate(Kind):
    name: ClassVar[str] = "evaluate"
    summary: ClassVar[str] = "a checkpoint's loss, and metrics of generated text"
    phases: ClassVar[tuple[str, ...]] = (*OF_TEXT, SCORE)
    optional: ClassVar[tuple[str, ...]] = OF_TEXT
    total: ClassVar[str] = "generate + decode + metrics + score"
    carries: ClassVar[tuple[str, ...]] = ("tokens", "numerics")

    def refusal(self, cell: Cell, machine: Machine) -> str | None:
        if cell.workload.jobs:
            return "an evaluation is of one job's checkpoint"
        return _trained().refusal(cell, machine)

    def samples(self, cell: Cell) -> list[list[Sample]]:
        return _trained().samples(cell)

    def work(self, cell: Cell, samples: Sequence[Sequence[Sample]], ablations: Sequence[Any] = ()) -> list[Work]:
        """Generation's is that with a cache: each position once."""
        shape = flops.decoder(cell.model, cell.model.lora)
        wanted = Hooks(ablations).first(Ablation.text_metrics) or LOSS_ONLY
        put = questions(samples[0], wanted.samples, wanted.max_new_tokens)
        answered = [len(question.prompt) + wanted.max_new_tokens for question in put]
        score = flops.forward_tflop(shape, flops.lengths_of(samples[0]))
        return [Work({GENERATE: flops.forward_tflop(shape, answered), SCORE: score})]

    def imports(self, request: Request) -> None:
        _trained().imports(request)

    def build(self, request: Request) -> Arm:
        """A training arm's model, in evaluation mode."""
        made = _trained().build(request)
        made.model.eval()
        hooks = Hooks(request.ablations)
        metrics = hooks.first(Ablation.text_metrics) or LOSS_ONLY
        own: dict[str, Any] = {"metrics": metrics}
        if metrics.samples:
            own["ask"] = partial(_questions, request, metrics)
            own["questions"] = own["ask"](0)
            own["decode"], own["text_by"] = decoder(request.jobs[0].workload)
            generation = _plain_generation(metrics)
            hooks.each(Ablation.generate, generation)
            own |= {"batch_size": generation.pop("batch_size"), "generation": generation}
        touched = (made.touched or set()) | hooks.touched
        return EvaluateArm(**{**vars(made), "kind": self, "touched": touched}, **own)

    def trial(self, arm: Any, begin: Begin) -> torch.Tensor:
        with torch.no_grad():
            if arm.questions:
                begin(GENERATE)
                _generate(arm)
                begin(DECODE)
                answers = [arm.decode(tokens) for tokens in arm.answers]
                expected = [arm.decode(question.expected) for question in arm.questions]
                begin(METRICS)
                _compute(arm, answers, expected)
            begin(SCORE)
            return torch.stack([arm.step.forward(batch).detach() for batch in arm.step.batches]).sum()

    def losses(self, arm: Any, out: Any) -> dict[str, float]:
        arm.loss = float(out)
        return {"": arm.loss}

    def held(self, arm: Arm) -> dict[str, int]:
        return arm.parameter_bytes()

    def counts(self, arm: Arm) -> dict[str, JobCounts]:
        """Of the samples that are scored, which every arm does; what is generated the kind says apart (`said`)."""
        return {"": JobCounts(arm.real, arm.padded, sum(sample.trained for sample in arm.samples))}

    def feed(self, arm: Any, number: int) -> None:
        for feed in arm.feeds:
            feed(number)
        arm.questions = arm.ask(number)

    def first_trial(self, arm: Any, run: Callable[[], Any], request: Request) -> dict[str, Any]:
        """Short answers: what a trace keeps of thousands of tokens would not fit the memory. The evidence begins with
        whole ones, in `settle`."""
        whole = arm.generation
        arm.generation = whole | {n: min(TRACED, arm.metrics.max_new_tokens) for n in LENGTHS if n in whole}
        run()
        arm.generation = whole
        arm.reader = greedy.Reader(arm.model, arm.dtype)
        arm.evidence.choices = arm.reader.choices
        return {"": arm.evidence}

    def settle(self, arm: Any, run: Callable[[], Any]) -> None:
        run()
        arm.evidence.add(0, self._read(arm, 0))
        give_back(arm.device, collect=False)  # what was reserved for reading the answers is none of the arm's

    def observe(self, arm: Any, number: int, losses: dict[str, float]) -> dict[str, Any]:
        arm.timed.append(arm.seconds)
        return {"": self._read(arm, number)}

    def _read(self, arm: Any, number: int) -> Evaluated:
        """What the last trial came to. An arm is held to what its own toggles promise, and its answers are read."""
        put = arm.questions
        answers = {question.name: tokens for question, tokens in zip(put, arm.answers, strict=False)}
        arm.prompts |= {question.name: question.prompt for question in put}
        arm.given |= answers
        arm.reader.read(arm.prompts, answers)
        near = {name: found for name, found in arm.reader.choices.near.items() if name in answers}
        return Evaluated(
            {number: arm.loss}, {question.name: arm.metrics.max_new_tokens for question in put}, answers, arm.values,
            replace(arm.reader.choices, near=near),
        )  # fmt: skip

    def cross(self, reference: Any, candidate: Any) -> dict[str, Any]:
        reader, ours = greedy.Reader(reference.model, reference.dtype), reference.given
        other = {name: tokens for name, tokens in candidate.given.items() if tokens != ours.get(name, tokens)}
        reader.read(reference.prompts, other)
        return {"": reader.choices}

    def said(self, arm: Any, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        if not arm.questions:
            return {}
        seconds = {phase: statistics.median(times[phase]) / 1000 for phase in self.phases}
        seconds |= {name: statistics.median(trial[name] for trial in arm.timed) for name in arm.metrics.names}
        count = len(arm.questions)
        of_text = sum(seconds[phase] for phase in OF_TEXT)
        return {
            "answers": count,
            "new_tokens": arm.metrics.max_new_tokens,
            "prompt_tokens": [len(question.prompt) for question in arm.questions],
            "at_a_time": max(arm.batches),
            "text": arm.text_by,
            "metrics": {of: arm.evidence.values[of] for of in SETS if of in arm.evidence.values},
            "seconds": seconds,
            "seconds_per_answer": {name: took / count for name, took in seconds.items() if name != SCORE},
            "quantities": {
                "minutes_saved_per_checkpoint": {
                    "value": of_text / count * LARGE / 60,
                    "how": f"extrapolated from {count} answers to {LARGE}, in proportion",
                }
            },
        }

    def agree(
        self, cell: Cell, verdict: Numerics | None, reference: Any, candidate: Any, dtype: torch.dtype
    ) -> Numerics | None:
        both = {"reference": reference, "candidate": candidate}
        wrong = [f"{w} ({arm})" for arm, e in both.items() for w in greedy.lengths(e.answers, e.wanted)]
        ours, theirs = reference.answers, candidate.answers
        found = greedy.compare(reference.choices, candidate.choices, ours, theirs, candidate.crossed)
        wrong += [*found.wrong, *_other_values(reference, candidate)]
        numbers = sorted(reference.losses.keys() & candidate.losses.keys())
        losses = [(reference.losses[n], candidate.losses[n]) for n in numbers]
        error = max((off(theirs, ours) for ours, theirs in losses), default=0.0)
        tolerated = [a.tolerance.grad for a in (*cell.reference, *cell.candidate) if a.tolerance]
        checks = [*found.checks, *_followed(losses, max([FOLLOWED, *tolerated]))]
        passed = not wrong and error <= LOSS[dtype] and all(check.passed for check in checks)
        return Numerics(
            passed=passed, loss_error=error, loss_allowed=LOSS[dtype], worst=next(iter(wrong), ""),
            tensors=found.tokens or len(losses), unequal=len(wrong) if found.tokens or wrong else None,
            checks=checks,
        )  # fmt: skip

    def explain(self, numerics: Numerics) -> str:
        failed = next((check.words for check in numerics.checks if not check.passed), "")
        if numerics.unequal:
            differ = "generated tokens differ from the reference's or from what was asked for"
            found = f"{numerics.unequal} of {numerics.tensors} {differ}, first {numerics.worst}"
            return f"{found}; {failed}" if failed else found
        if failed:
            return failed
        return f"the validation loss is off by {numerics.loss_error:.2g} (allowed {numerics.loss_allowed:.2g})"


LENGTHS = ("max_new_tokens", "min_new_tokens")


def _trained() -> Any:
    """The kind whose arm a checkpoint is evaluated of."""
    return kind("train")


def _plain_generation(metrics: TextMetrics) -> dict[str, Any]:
    """Greedy, whatever a checkpoint's own generation_config says, and always to the full length, so that all arms do
    the same: an end-of-text token is never chosen."""
    return {
        "do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "use_cache": True,
        "pad_token_id": 0, "batch_size": metrics.batch_size, **dict.fromkeys(LENGTHS, metrics.max_new_tokens),
    }  # fmt: skip


def _generate(arm: Any) -> None:
    made = list(answer(arm.model, arm.questions, arm.batch_size, arm.generation))
    arm.answers = [tokens for batch, _ in made for tokens in batch]
    arm.with_cache = sum(len(batch) for batch, cached in made if cached)
    arm.batches = [len(batch) for batch, _ in made]


def _compute(arm: Any, answers: Sequence[str], expected: Sequence[str]) -> None:
    arm.values, arm.seconds = {}, {}
    for name in arm.metrics.names:
        began = perf_counter()
        for of in dict.fromkeys(question.set for question in arm.questions):
            at = [n for n, question in enumerate(arm.questions) if question.set == of]
            value = arm.metrics.compute(name, [answers[n] for n in at], [expected[n] for n in at])
            arm.values.setdefault(of, {})[name] = value
        arm.seconds[name] = perf_counter() - began


def _questions(request: Request, metrics: TextMetrics, number: int) -> list[Question]:
    """Those of a trial. Its tokens are those that its batches have."""
    job = request.jobs[0]
    random, vocabulary = job.workload.kind != TEXT, request.model.hf_config().vocab_size
    samples = fresh_samples(request.samples[0], vocabulary, random, job.seed, number)
    return questions(samples, metrics.samples, metrics.max_new_tokens, number)


def _followed(losses: Sequence[tuple[float, float]], share: float) -> Iterator[Check]:
    """Whether the candidate's loss goes up and down with each trial's tokens as the reference's does: over many tokens
    random ones all have about the same loss, so that one of fewer tokens would be near enough."""
    if len(losses) < 3:
        return
    apart = statistics.pstdev(theirs - ours for ours, theirs in losses)
    spread, largest = statistics.pstdev(ours for ours, _ in losses), max(abs(ours) for ours, _ in losses)
    allowed = max(share * spread, ROUNDED * largest)
    yield Check(name="how the loss follows each trial's tokens, off", found=apart, allowed=allowed, where="the loss")


def _other_values(reference: Evaluated, candidate: Evaluated) -> Iterator[str]:
    """Metrics that both arms have and that differ, of sets in which their answers do not."""
    for of, mine in reference.values.items():
        other = candidate.values.get(of, {})
        ours, theirs = (_of_set(evidence.answers, of) for evidence in (reference, candidate))
        for name in mine.keys() & other.keys() if ours == theirs else ():
            if off(other[name], mine[name]) > SAME:
                yield f"{name} of the {of} set, {other[name]:.4g} where the reference has {mine[name]:.4g}"


def _of_set(answers: greedy.Answers, of: str) -> dict[str, Sequence[int]]:
    return {name: tokens for name, tokens in answers.items() if name.startswith(f"{of}, ")}
