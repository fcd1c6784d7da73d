"""BLEU and ROUGE are the libraries' own, on strings whose values are known; what the toggles are given and find."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from lorabench.contract.ablation import NotApplied
from lorabench.contract.names import NameUnknown
from lorabench.contract.text_metrics import LOSS_ONLY
from lorabench.measure.machine import describe
from lorabench.plan import registry
from lorabench_ablations.generation import BatchedGeneration, NoKvCache
from lorabench_ablations.text_metrics import METRICS, BleuAndRouge, NoTextMetrics, TextMetrics

CAT, MAT = "the cat sat on the mat", "the cat lay on the mat"


def compute(name, answers, expected):
    return BleuAndRouge().compute(name, answers, expected)


@pytest.mark.parametrize("name", METRICS)
def test_the_same_text_has_a_hundred_and_another_one_nothing_in_common(name):
    assert compute(name, [CAT], [CAT]) == pytest.approx(100)
    if name != "bleu":
        assert compute(name, [CAT], ["nothing alike here"]) == 0


def test_values_that_can_be_counted_by_hand():
    """Five of six words, three of five pairs of words, a common subsequence of five words."""
    assert compute("rouge1", [CAT], [MAT]) == pytest.approx(100 * 5 / 6)
    assert compute("rouge2", [CAT], [MAT]) == pytest.approx(100 * 3 / 5)
    assert compute("rougeL", [CAT], [MAT]) == pytest.approx(100 * 5 / 6)
    # Of one to four words 5 of 6, 3 of 5, 1 of 4 and 0 of 3, of which sacrebleu makes half of one third ("exp").
    expected = 100 * math.exp(sum(map(math.log, (5 / 6, 3 / 5, 1 / 4, 1 / 6))) / 4)
    assert compute("bleu", [CAT], [MAT]) == pytest.approx(expected)


def test_values_are_the_libraries_and_the_corpus_s():
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu import corpus_bleu

    answers, expected = [CAT, "12 7 7 9", "yes"], [MAT, "12 7 9 9 4", "no"]
    assert compute("bleu", answers, expected) == corpus_bleu(answers, [expected]).score
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    for name in ("rouge1", "rouge2", "rougeL"):
        own = [scorer.score(target, said)[name].fmeasure for target, said in zip(expected, answers, strict=True)]
        assert compute(name, answers, expected) == pytest.approx(100 * sum(own) / 3)


def test_the_answer_and_the_expected_text_do_not_change_places():
    """BLEU has a brevity penalty for what is too short and precisions for what is too long; an F-measure is the same
    both ways."""
    longer = f"{CAT} and slept"
    assert compute("bleu", [CAT], [longer]) == pytest.approx(100 * math.exp(1 - 8 / 6))
    assert compute("bleu", [longer], [CAT]) == pytest.approx(100 * (6 / 8 * 5 / 7 * 4 / 6 * 3 / 5) ** 0.25)
    assert compute("rougeL", [CAT], [longer]) == compute("rougeL", [longer], [CAT]) == pytest.approx(100 * 12 / 14)


def test_parameters_are_checked_and_are_part_of_the_label():
    made = registry.ablation({"text_metrics": {"metrics": ["bleu"], "max_new_tokens": 64}})
    assert made == TextMetrics(metrics=("bleu",), max_new_tokens=64) and hash(made)
    assert made.label == "text_metrics(metrics=('bleu',), max_new_tokens=64)"
    assert TextMetrics(metrics="bleu").metrics == ("bleu",)
    for wrong, says in (
        ({"metrics": ["blue"]}, "metrics.0: should be 'bleu', 'rouge1'"),
        ({"max_new_tokens": 0}, "max_new_tokens: should be greater than 0, not 0"),
        ({"samples": -1}, "samples: should be greater"),
        ({"batch_size": 0}, "batch_size: should be greater"),
        ({"samples": "many"}, "samples: should be a valid integer, not 'many'"),
    ):
        with pytest.raises(NameUnknown, match=says):
            registry.ablation({"text_metrics": wrong})
    with pytest.raises(NameUnknown, match="batch_size: should be greater than or equal to 2, not 1"):
        registry.ablation({"batched_generation": {"batch_size": 1}})


def test_without_the_libraries_it_is_unsupported_with_the_install_command(monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rouge_score" else real(name))
    reason = TextMetrics.requires.unmet(describe())
    assert reason == "needs the package rouge_score, which is not installed: pip install 'lorabench[text-metrics]'"
    assert NoTextMetrics.requires.unmet(describe()) is None


def test_loss_alone_needs_a_reference_that_computes_more():
    assert NoTextMetrics().text_metrics() is LOSS_ONLY and not LOSS_ONLY.samples
    assert NoTextMetrics().without_effect([TextMetrics()], "float32") is None
    assert "add text_metrics to reference=" in str(NoTextMetrics().without_effect([], "float32"))


def found(**fields):
    arm = {"answers": [[1], [2]], "with_cache": 0, "batches": [2], "values": {"test": {"bleu": 1.0}}}
    return SimpleNamespace(arm=SimpleNamespace(**(arm | fields)))


@pytest.mark.parametrize(
    ("toggle", "fields", "says"),
    [
        (NoKvCache(), {"with_cache": 1}, "1 of 2 answers kept keys and values"),
        (NoKvCache(), {"answers": []}, "add text_metrics to reference="),
        (BatchedGeneration(), {"batches": [1, 1]}, "nothing to put together"),
        (BatchedGeneration(), {"answers": [], "batches": []}, "add text_metrics to reference="),
        (NoTextMetrics(), {}, "2 answers were generated all the same"),
        (TextMetrics(), {}, "rouge1 was not computed"),
    ],
)
def test_an_audit_sees_that_nothing_was_done(toggle, fields, says):
    with pytest.raises(NotApplied, match=says):
        toggle.audit(found(**fields))


def test_an_audit_counts_answers():
    assert NoKvCache().audit(found()) == 2
    assert BatchedGeneration().audit(found(batches=[2, 1])) == 2
    assert TextMetrics(metrics=("bleu",)).audit(found()) == 2
