"""What is expected of the contenders: the table is what the published results come to, and says who is tried first."""

from __future__ import annotations

import pytest
from helpers import benchmark

from lorabench.advice.expected import TABLE, expected, in_order, parameters, slow
from lorabench.plan import registry
from lorabench.plan.compose import load_config, model

BIG, SMALL = 1_700_000_000, 130_000_000


def toggles(*names):
    return [(registry.ablation(name),) for name in names]


def test_the_table_is_what_the_results_come_to():
    with benchmark("expected_gains") as script:
        assert script.table() == TABLE.read_text(), "run benchmarks/expected_gains.py"


def test_the_best_on_the_nearest_model_is_first_and_what_starts_slowly_is_last():
    some = toggles(
        "adamw_fused", "unsloth", "torch_compile", "lora_kernels", "cuda_graph", "auto_batch_size", "packing"
    )
    names = [own[0].name for own in in_order(some, BIG)]
    assert names[:3] == ["auto_batch_size", "cuda_graph", "lora_kernels"]
    assert set(names[-2:]) == {"unsloth", "torch_compile"}
    by_size = [expected(toggles("cuda_graph")[0], size).speedup for size in (1000, SMALL, BIG, 10**12)]
    assert by_size[0] == by_size[1] > by_size[2] > by_size[3] > 1


def test_nothing_is_expected_of_what_was_never_published():
    (own,) = toggles("parallel_reading")
    assert expected(own, BIG) == (1.0, 0.0) and not slow(own, BIG)


def test_a_compiler_is_slow_to_start_where_no_published_pair_says_how_slow():
    (own,) = toggles("torch_compile_layers")
    assert expected(own, BIG).start_s == 0 and slow(own, BIG)


@pytest.mark.parametrize(("name", "billions"), [("smollm2-135m", 0.135), ("llama-3.1-8b", 8.03)])
def test_a_models_size_is_its_number_of_parameters(name, billions):
    assert parameters(model(name, load_config([]))) / 1e9 == pytest.approx(billions, rel=0.01)
