"""The kind `evaluate`: the loss alone or text metrics beside it; whose answers are right, and whose are not."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from helpers import InProcess, config
from own_models import CHATS, chats, saved

from lorabench.contract.ablation import Ablation
from lorabench.contract.kind import kind
from lorabench.contract.text_metrics import TextMetrics
from lorabench.measure.answers import NUMBERS, questions
from lorabench.measure.kind import request_of
from lorabench.measure.kinds.evaluate import FOLLOWED, _followed
from lorabench.measure.machine import describe
from lorabench.measure.trial import run_trial
from lorabench.plan.compose import plan
from lorabench.plan.samples import Sample
from lorabench.run.runner import Runner

CPU = torch.device("cpu")
LOSS_ALONE = "reference=[sdpa,no_text_metrics]"
FEW = "{text_metrics:{max_new_tokens:4,samples:1,metrics:[bleu,rougeL]}}"
METRICS = "{text_metrics:{max_new_tokens:6,samples:2,metrics:[bleu,rougeL]}}"


def planned(*overrides):
    common = ("kind=evaluate", "models=[tiny-llama@4x16]", "trials=2", "warmup=1", "dtype=float32")
    return plan(config(*common, *overrides), "cpu").cells


def records(tmp_path, *overrides):
    with Runner(InProcess(), describe(), None, "test", 60, tmp_path) as runner:
        return [runner.measure(cell) for cell in planned(*overrides)[1:]]  # not the reference against itself


def built(cell, name="candidate", dtype=torch.float32):
    return kind("evaluate").build(request_of(cell, name, dtype, CPU))


def evidence(arm):
    """Of the workload's own samples and of one timed trial."""
    own = kind("evaluate")
    found = own.first_trial(arm, lambda: run_trial(arm), None)
    own.settle(arm, lambda: run_trial(arm))
    own.feed(arm, 1)
    own.take(found, 1, own.observe(arm, 1, run_trial(arm).losses), {})
    return found[""]


@functools.cache
def of_reference(dtype=torch.float32):
    """The cell whose reference has METRICS, and that reference's evidence, which no test changes."""
    cell = planned(f"reference=[sdpa,{METRICS}]")[0]
    return cell, evidence(built(cell, "reference", dtype))


def verdict(*toggles, dtype=torch.float32):
    """Of an arm with these toggles beside the reference's, against the reference."""
    cell, right = of_reference(dtype)
    cheating = replace(cell, candidate=(*cell.reference, *toggles), toggles=toggles)
    found = evidence(built(cheating, "candidate", dtype))
    return kind("evaluate").agree(cell, None, copy.deepcopy(right), found, dtype)


def test_text_metrics_beside_the_loss_alone(tmp_path):
    (with_text,) = records(tmp_path, LOSS_ALONE, f"ablations=[{FEW}]")
    assert with_text.status == "ok", with_text.reason
    assert list(with_text.phases) == ["generate", "decode", "metrics", "score", "total"]
    for name in ("generate", "decode", "metrics"):  # a phase that one arm does: its times, and no ratio
        phase = with_text.phases[name]
        assert [*phase] == ["candidate"] and len(phase["candidate"]) == 2
    sums = [sum(with_text.ms("candidate", (p,))[0] for p in ("generate", "decode", "metrics", "score"))]
    assert sums == pytest.approx(with_text.ms("candidate")[:1], rel=1e-3)
    assert with_text.applied["text_metrics"] == 2 and with_text.numerics.passed
    said = with_text.notes["candidate"]
    assert "reference" not in with_text.notes
    assert (said["answers"], said["new_tokens"], said["text"]) == (2, 4, NUMBERS)
    assert set(said["metrics"]) == {"validation", "test"} and set(said["metrics"]["test"]) == {"bleu", "rougeL"}
    assert set(said["seconds"]) == {"generate", "decode", "metrics", "score", "bleu", "rougeL"}
    assert said["seconds_per_answer"]["bleu"] == pytest.approx(said["seconds"]["bleu"] / 2)
    minutes = said["quantities"]["minutes_saved_per_checkpoint"]
    of_text = sum(said["seconds"][p] for p in ("generate", "decode", "metrics"))
    assert minutes["value"] == pytest.approx(of_text / 2 * 2000 / 60)
    assert minutes["how"] == "extrapolated from 2 answers to 2000, in proportion"


def test_switched_off_and_generated_in_other_ways(tmp_path):
    """In bfloat16, where near ties may part the answers of arms that are right."""
    toggles = "ablations=[no_text_metrics,no_kv_cache,{batched_generation:{batch_size:2}}]"
    off, no_cache, batched = records(tmp_path, "dtype=bfloat16", f"reference=[sdpa,{FEW}]", toggles)
    for record in (off, no_cache, batched):
        assert record.status == "ok", record.reason
    assert "candidate" not in off.phases["generate"] and off.ms("candidate", ("score",))
    assert set(off.notes) >= {"reference"} and "candidate" not in off.notes
    assert no_cache.applied["no_kv_cache"] == 2 and no_cache.notes["candidate"]["at_a_time"] == 1
    assert batched.applied["batched_generation"] == 2 and batched.notes["candidate"]["at_a_time"] == 2
    assert no_cache.numerics.tensors >= 4 and no_cache.numerics.unequal == 0


def test_prompts_of_other_lengths_in_one_batch_have_the_same_answers():
    lengths = ("models=[tiny-llama@short_samples]", f"reference=[sdpa,{METRICS}]")
    cell = planned(*lengths, "ablations=[{batched_generation:{batch_size:2}}]")[-1]
    one, other = evidence(built(cell, "reference")), evidence(built(cell))
    assert len({len(q.prompt) for q in built(cell).questions}) == 2
    assert one.answers == other.answers and len(one.answers) == 4


def test_the_loss_is_bit_for_bit_that_of_a_training_forward():
    cell = planned(LOSS_ALONE)[0]
    arm, trained = built(cell), kind("train").build(request_of(cell, "candidate", torch.float32, CPU))
    with torch.no_grad():
        expected = sum(float(trained.step.forward(batch)) for batch in trained.step.batches)
    assert run_trial(arm).losses[""] == expected


def test_each_trial_asks_other_questions_and_scores_other_tokens():
    arm = built(planned(f"reference=[sdpa,{METRICS}]")[0], "reference")
    found = evidence(arm)
    assert found.losses[0] != found.losses[1]
    assert found.answers["validation, sample 1"] != found.answers["validation of trial 1, sample 1"]
    batch, asked = arm.step.batches[0].inputs["input_ids"].tolist(), arm.questions
    assert [q.prompt for q in asked] == [row[: len(q.prompt)] for row, q in zip(batch, asked, strict=True)]


def test_questions():
    """The prompt ends where training begins; the sets are the two halves of the samples."""
    samples = [Sample([n] * 10, [-100] * 4 + [n] * 6) for n in range(5)]
    made = questions(samples, 2, 3)
    assert [(q.name, q.prompt[0], len(q.prompt), len(q.expected)) for q in made] == [
        ("validation, sample 1", 0, 4, 3), ("validation, sample 2", 1, 4, 3),
        ("test, sample 1", 3, 4, 3), ("test, sample 2", 4, 4, 3),
    ]  # fmt: skip
    chat = Sample([*range(9)], [-100, -100, 2, 3, -100, -100, 6, 7, 8])
    assert questions([chat], 1, 9)[0].expected == [2, 3]  # the first answer of several
    (alone,) = questions([Sample([1, 2, 3], [1, 2, 3])], 9, 9, trial=2)
    assert alone == ("validation of trial 2", "validation of trial 2, sample 1", [1], [2, 3])
    assert questions(samples, 0, 0) == []


def test_text_comes_from_the_workloads_tokenizer(tmp_path):
    """The prompt is what comes before the assistant's first word; the expected text is its first answer."""
    folder, rows = saved(tmp_path / "model"), chats(tmp_path / "chats.jsonl")
    metrics = "{text_metrics:{max_new_tokens:40}}"
    wanted = (f"models=[{folder}]", f"workload={{{rows}:{{samples:4}}}}", f"reference=[sdpa,{metrics}]")
    arm = built(planned(*wanted)[0], "reference")
    assert arm.text_by == f"tokenizer {folder}"
    answers = [next(content for role, content in chat if role == "assistant") for chat in CHATS]
    assert sorted(arm.decode(question.expected).strip() for question in arm.questions) == sorted(answers)


@dataclass(frozen=True, kw_only=True)
class Cheat(Ablation):
    """Puts another `generate` into the model: `answer` makes it of the real one."""

    name: ClassVar[str] = "cheat"
    slot: ClassVar[str] = "cheat"
    kinds: ClassVar[tuple[str, ...]] = ("evaluate",)

    def patch(self, model):
        real = model.generate
        model.generate = lambda **kwargs: self.answer(real, kwargs)
        return 1

    def answer(self, real, kwargs):
        return real(**kwargs)


class OneWrongToken(Cheat):
    """The last one of every answer."""

    def answer(self, real, kwargs):
        out = real(**kwargs)
        out.sequences[:, -1] = (out.sequences[:, -1] + 1) % 256
        return out


class Sampling(Cheat):
    def answer(self, real, kwargs):
        return real(**{**kwargs, "do_sample": True})


class FewerTokens(Cheat):
    def answer(self, real, kwargs):
        return real(**{**kwargs, "max_new_tokens": 3, "min_new_tokens": 3})


class FirstAnswersAgain(Cheat):
    """Remembers what it answered to the workload's own samples, and is very fast from then on."""

    def patch(self, model):
        object.__setattr__(self, "known", [])
        return super().patch(model)

    def answer(self, real, kwargs):
        if len(self.known) < 8:  # four short ones under the trace, four whole ones
            self.known.append(real(**kwargs))
            return self.known[-1]
        return self.known[4]


class ShorterByItsHook(Cheat):
    def generate(self, kwargs):
        kwargs["max_new_tokens"] = kwargs["min_new_tokens"] = 4


@dataclass(frozen=True, kw_only=True)
class Flattering(TextMetrics):
    def compute(self, name, answers, expected):
        return 100.0


class Scores(Cheat):
    """Metrics of another slot's making, in place of the reference's."""

    rank = -1

    def text_metrics(self):
        return Flattering(names=("bleu", "rougeL"), samples=2, max_new_tokens=6)


@pytest.mark.parametrize(
    ("cheat", "says", "dtype"),
    [
        pytest.param(OneWrongToken(), "first token 6 of the answer to", torch.float32, marks=pytest.mark.exhaustive),
        (OneWrongToken(), "first token 6 of the answer to", torch.bfloat16),
        (Sampling(), "of the answer to", torch.bfloat16),
        (FewerTokens(), "has 3 tokens, expected 6", torch.float32),
        (FirstAnswersAgain(), "of the answer to validation of trial 1", torch.float32),
        (ShorterByItsHook(), "has 4 tokens, expected 6", torch.float32),
        (Scores(), "where the reference has", torch.float32),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Ablation) else "",
)
def test_a_cheat_is_refused(cheat, says, dtype):
    found = verdict(cheat, dtype=dtype)
    words = kind("evaluate").explain(found)
    assert not found.passed and says in words, words


def test_the_cheats_scaffold_by_itself_is_none():
    assert verdict(Cheat(), dtype=torch.bfloat16).passed


def test_another_loss_is_refused():
    own, cell = kind("evaluate"), planned(LOSS_ALONE)[0]
    right = evidence(built(cell))
    wrong = replace(right, losses={n: loss * 1.001 for n, loss in right.losses.items()})
    assert own.agree(cell, None, right, right, torch.float32).passed
    found = own.agree(cell, None, right, wrong, torch.float32)
    assert not found.passed and "validation loss is off by 0.001" in own.explain(found)
    assert own.agree(cell, None, right, wrong, torch.bfloat16).passed


def test_evidence_is_numbers_that_cross_a_process_s_boundary():
    from multiprocessing.reduction import ForkingPickler

    _, found = of_reference()
    assert len(ForkingPickler.dumps(found)) < 50_000
    assert not any(isinstance(value, torch.Tensor) for value in vars(found.choices).values())


def followed(theirs):
    ours = [7.001, 7.004, 6.998, 7.0]
    return [check.passed for check in _followed(list(zip(ours, theirs, strict=False)), FOLLOWED)]


def test_a_loss_has_to_follow_each_trial_s_tokens():
    assert followed([7.0012, 7.0041, 6.9983, 7.0002]) == [True]
    assert followed([7.002, 7.005, 6.999, 7.001]) == [True]  # always a little more: the loss itself is held to that
    assert followed([7.001, 7.001, 7.001, 7.001]) == [False]
    assert followed([6.999, 7.001, 7.003, 6.998]) == [False]
    assert followed([7.001, 7.004]) == []  # of two trials nothing can be said


def test_losses_of_the_same_tokens_are_equal_but_for_rounding():
    same = [(7.0, 7.0000005), (7.0, 7.0), (7.0, 6.9999995)]
    assert [check.passed for check in _followed(same, FOLLOWED)] == [True]
