"""Kind `evaluate`: what a checkpoint's evaluation computes: greedy generation over a few prompts, loss of a validation
set.

    python -m lorabench.sweep kind=evaluate 'models=[smollm2-135m]' 'ablations=[no_kv_cache]' workload=gsm8k

The validation set is the workload's samples. A prompt is the first half of one of them; each is answered alone. The
gate: the same tokens, and the same loss but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from lorabench.contract.ablation import Ablation
from lorabench.contract.arm import Arm
from lorabench.contract.batch import Sample
from lorabench.contract.cell import Cell
from lorabench.contract.kind import kind
from lorabench.contract.machine import Machine
from lorabench.contract.work import Work
from lorabench.measure import flops
from lorabench.measure.certificate import LOSS
from lorabench.measure.depth_noise import off
from lorabench.measure.hooks import Hooks
from lorabench.measure.kind import Begin, JobCounts, Kind, Request
from lorabench.record.schema import Numerics

GENERATE, SCORE = "generate", "score"
PROMPTS = 4  # of the validation set's first samples
NEW_TOKENS = 16  # that each prompt is answered with; an end-of-text token does not end it, so that all arms do the same


@dataclass
class EvaluateArm(Arm):
    """`generation`: the arguments of `model.generate`, as the toggles left them. `answers` and `loss`: the last
    trial's; `with_cache`: how many of its answers kept keys and values."""

    generation: dict[str, Any] = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)  # of every trial, the answers and the loss
    loss: float = 0.0
    with_cache: int = 0


class Evaluate(Kind):
    name: ClassVar[str] = "evaluate"
    summary: ClassVar[str] = "a checkpoint's metrics: generate, score"
    phases: ClassVar[tuple[str, ...]] = (GENERATE, SCORE)
    total: ClassVar[str] = "generate + score"
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
        answered = [len(prompt) + NEW_TOKENS for prompt in prompts(samples[0])]
        score = flops.forward_tflop(shape, flops.lengths_of(samples[0]))
        return [Work({GENERATE: flops.forward_tflop(shape, answered), SCORE: score})]

    def build(self, request: Request) -> Arm:
        """A training arm's model, in evaluation mode."""
        made = _trained().build(request)
        made.model.eval()
        generation: dict[str, Any] = {
            "do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "use_cache": True,
            "pad_token_id": 0,
        }  # fmt: skip
        hooks = Hooks(request.ordered)
        hooks.each(Ablation.generate, generation)
        touched = (made.touched or set()) | hooks.touched
        return EvaluateArm(**{**vars(made), "kind": self, "touched": touched}, generation=generation)

    def trial(self, arm: Any, begin: Begin) -> torch.Tensor:
        with torch.no_grad():
            begin(GENERATE)
            found = [_answer(arm, prompt) for prompt in prompts(arm.samples)]
            begin(SCORE)
            losses = torch.stack([arm.step.forward(batch).detach() for batch in arm.step.batches])
        arm.answers = [tokens.tolist() for tokens, _ in found]
        arm.with_cache = sum(cached for _, cached in found)
        return losses.sum()

    def losses(self, arm: Any, out: Any) -> dict[str, float]:
        arm.loss = float(out)
        return {"": arm.loss}

    def held(self, arm: Arm) -> dict[str, int]:
        return arm.parameter_bytes()

    def counts(self, arm: Arm) -> dict[str, JobCounts]:
        generated = len(prompts(arm.samples)) * NEW_TOKENS
        scored = sum(sample.trained for sample in arm.samples)
        return {"": JobCounts(arm.real + generated, arm.padded, scored)}

    def first(self, arm: Any, run: Callable[[], Any], request: Request) -> dict[str, Any]:
        run()
        arm.evidence = {"answers": [arm.answers], "losses": [arm.loss]}
        return {"": arm.evidence}

    def seen(self, arm: Any, losses: dict[str, float]) -> None:
        arm.evidence["answers"].append(arm.answers)
        arm.evidence["losses"].append(arm.loss)

    def agree(
        self, cell: Cell, verdict: Numerics | None, reference: Any, candidate: Any, dtype: torch.dtype
    ) -> Numerics | None:
        trials = list(zip(reference["answers"], candidate["answers"], strict=False))  # the first one, then the timed
        pairs = [
            (f"token {i + 1} of answer {n + 1}" + (f" of trial {t}" if t else ""), a == b)
            for t, (ours, theirs) in enumerate(trials)
            for n, (first, second) in enumerate(zip(ours, theirs, strict=True))
            for i, (a, b) in enumerate(zip(first, second, strict=True))
        ]
        different = [name for name, same in pairs if not same]
        losses = zip(reference["losses"], candidate["losses"], strict=False)
        error = max(off(theirs, ours) for ours, theirs in losses)
        return Numerics(
            passed=not different and error <= LOSS[dtype], loss_error=error, loss_allowed=LOSS[dtype],
            worst=next(iter(different), ""), tensors=len(pairs), unequal=len(different),
        )  # fmt: skip

    def explain(self, numerics: Numerics) -> str:
        if numerics.unequal:
            found = f"{numerics.unequal} of {numerics.tensors} generated tokens"
            return f"{found} differ from the reference's, first {numerics.worst}"
        return f"the validation loss is off by {numerics.loss_error:.2g} (allowed {numerics.loss_allowed:.2g})"


def _trained() -> Any:
    """The kind whose arm a checkpoint is evaluated of."""
    return kind("train")


def prompts(samples: Sequence[Sample]) -> list[list[int]]:
    return [s.tokens[: max(1, len(s.tokens) // 2)] for s in samples[:PROMPTS]]


def _answer(arm: Any, prompt: list[int]) -> tuple[torch.Tensor, bool]:
    """(new tokens, whether keys and values were kept) of one prompt."""
    ids = torch.tensor([prompt], device=arm.device)
    out = arm.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **arm.generation
    )
    return out.sequences[0, len(prompt) :], out.past_key_values is not None
