"""Greedy answers of two arms: a near tie may part them, nothing else may."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lorabench.measure.greedy import MOST, Choices, Place, Reader, compare, lengths

VOCABULARY, END = 24, 23
PROMPTS = {"a": [1, 2, 3], "b": [4, 5]}


class Model(nn.Module):
    """A causal model whose next logits are a linear of the running sum of what it has read, through some rounding."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.hidden, self.head = nn.Linear(16, 16), nn.Linear(16, VOCABULARY)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw) / 4
        self.generation_config = SimpleNamespace(eos_token_id=END)
        self.to(dtype)

    def forward(self, input_ids, logits_to_keep, use_cache):
        assert not use_cache
        hidden = self.hidden(torch.tanh(self.embedding(input_ids).cumsum(1)))
        return SimpleNamespace(logits=self.head(hidden)[:, -logits_to_keep:])

    def greedy(self, prompt, count, pick=lambda logits, n: int(logits.argmax())):
        """`pick(logits, n)`: the token at position n, of these logits."""
        tokens = []
        for n in range(count):
            logits = self(torch.tensor([[*prompt, *tokens]]), 1, False).logits[0, -1].float()
            logits[END] = -math.inf
            tokens.append(pick(logits, n))
        return tokens


def second(logits, n):
    return int(logits.topk(2).indices[1])


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def model(request):
    return Model(request.param)


def dtype_of(model):
    return model.head.weight.dtype


def read(model, answers):
    reader = Reader(model, dtype_of(model))
    reader.read(PROMPTS, answers)
    return reader.choices


def right(model, count=12):
    return {name: model.greedy(prompt, count) for name, prompt in PROMPTS.items()}


def passed(compared):
    return not compared.wrong and all(check.passed for check in compared.checks)


def test_the_same_answers_pass_and_every_token_counts(model):
    answers = right(model)
    choices = read(model, answers)
    found = compare(choices, choices, answers, answers)
    assert passed(found) and found.tokens == 2 * 12
    assert choices.worst.below == 0.0 and choices.noise > 0 and choices.largest < math.inf
    assert END not in {token for rows in choices.near.values() for others in rows.values() for token in others}


@pytest.mark.parametrize("at", [0, 5, 11])
def test_a_wrong_token_is_refused_wherever_it_stands(model, at):
    """The one that is furthest below the best, and what follows from it."""
    answers = right(model)
    wrong = {**answers, "b": model.greedy([4, 5], 12, lambda logits, n: int(
        logits.nan_to_num(neginf=math.inf).argmin() if n == at else logits.argmax()))}  # fmt: skip
    found = compare(read(model, answers), read(model, wrong), answers, wrong)
    assert found.wrong == [f"token {at + 1} of the answer to b"]
    assert not any(check.passed for check in found.checks if "candidate" in check.name or "differs" in check.name)


def test_always_the_second_best_token_is_refused(model):
    answers = right(model)
    wrong = {name: model.greedy(prompt, 12, second) for name, prompt in PROMPTS.items()}
    found = compare(read(model, answers), read(model, wrong), answers, wrong)
    assert not passed(found)


def tied(model, at=4):
    """(answers, answers that part at a near tie): the head gives the best and another token the same logit there."""
    first = model.greedy([4, 5], 12)
    logits = model(torch.tensor([[4, 5, *first[:at]]]), 1, False).logits[0, -1].float()
    other = int(logits.topk(3).indices[2])
    if other == END:
        other = int(logits.topk(4).indices[3])
    with torch.no_grad():
        model.head.bias[other] += (logits.max() - logits[other]).to(model.head.bias.dtype)
    answers = right(model)
    rest = lambda logits, n: other if n == at else int(logits.argmax())  # noqa: E731
    return answers, {**answers, "b": model.greedy([4, 5], 12, rest)}


def test_a_near_tie_passes_and_nothing_after_it_is_compared():
    model = Model(torch.bfloat16)
    answers, parted = tied(model)
    at = next(n for n in range(12) if answers["b"][n] != parted["b"][n])
    found = compare(read(model, answers), read(model, parted), answers, parted)
    assert passed(found) and found.tokens == 12 + at + 1
    (check,) = [c for c in found.checks if "differs" in c.name]
    assert f"token {at + 1} of the answer to b; 1 of 2 answers part" == check.where


def test_rubbish_after_a_near_tie_is_refused():
    """It is not compared with the reference, but it is not what the candidate's own model says either."""
    model = Model(torch.bfloat16)
    answers, parted = tied(model)
    at = next(n for n in range(12) if answers["b"][n] != parted["b"][n])
    rubbish = {**parted, "b": [*parted["b"][: at + 1], *[7] * (11 - at)]}
    found = compare(read(model, answers), read(model, rubbish), answers, rubbish)
    assert not found.wrong and not passed(found)
    (check,) = [c for c in found.checks if not c.passed]
    assert "candidate" in check.name and check.found > check.allowed


def test_rubbish_after_a_near_tie_that_the_candidate_confirms_is_refused_by_the_reference_s_model():
    model = Model(torch.bfloat16)
    answers, parted = tied(model)
    at = next(n for n in range(12) if answers["b"][n] != parted["b"][n])
    rubbish = {**parted, "b": [*parted["b"][: at + 1], *[7] * (11 - at)]}
    lies = read(model, parted)  # of what it should have answered
    assert passed(compare(read(model, answers), lies, answers, rubbish))
    found = compare(read(model, answers), lies, answers, rubbish, read(model, {"b": rubbish["b"]}))
    (check,) = [c for c in found.checks if not c.passed]
    assert check.name == "each token of the candidate, below the reference's best"
    assert passed(compare(read(model, answers), read(model, parted), answers, parted, read(model, {"b": parted["b"]})))


def test_answers_of_one_arm_are_not_compared_but_still_read(model):
    answers, nothing = right(model), Choices()
    choices = read(model, answers)
    for found in (
        compare(choices, nothing, answers, {}),
        compare(nothing, choices, {}, answers),
    ):
        assert passed(found) and len(found.checks) == 1
    wrong = {name: [5] * 12 for name in PROMPTS}
    assert not passed(compare(nothing, read(model, wrong), {}, wrong))


def test_whatever_the_noise_a_token_from_among_the_others_is_wrong():
    assert Choices(eps=2**-7, noise=100.0, spread=2.0, largest=5.0).allowed == MOST * 2.0
    assert Choices(eps=2**-7, noise=0.0, spread=2.0, largest=4.0).allowed == pytest.approx(2 * 2**-7 * 4.0)


def test_logits_that_are_no_numbers_are_refused():
    model = Model()
    answers = right(model)
    good = read(model, answers)
    with torch.no_grad():
        model.head.weight[3] = math.nan
    found = compare(good, read(model, answers), answers, answers)
    assert not passed(found)


def test_number_and_length_of_the_answers():
    wanted = {"a": 3, "b": 3}
    assert not list(lengths({"a": [1, 2, 3], "b": [1, 2, 3]}, wanted))
    assert list(lengths({"a": [1, 2], "b": [1, 2, 3]}, wanted)) == ["the answer to a has 2 tokens, expected 3"]
    assert list(lengths({"a": [1, 2, 3]}, wanted)) == ["the answer to b has 0 tokens, expected 3"]
    assert list(lengths({"c": [1]}, {})) == ["the answer to c has 1 tokens, expected 0"]
    assert str(Place(0.5, "c", 1)) == "token 1 of the answer to c"
