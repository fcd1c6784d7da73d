"""The captured step's attention gets the mask that the uncaptured one gets. On a CPU capturing is pretended:
transformers asks `is_cuda_stream_capturing`, and what SDPA is then given is what counts."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers import PEFT, arm, random_samples

from lorabench.contract.ablation import Unsupported
from lorabench.plan import registry
from lorabench_ablations.captured_step import SameMasks

FAMILIES = ["llama", "mistral", "qwen2", "gemma"]


@pytest.fixture
def given(monkeypatch):
    """given(forward, capturing=…) -> (attn_mask, is_causal) of each call of SDPA."""
    plain, calls = torch.nn.functional.scaled_dot_product_attention, []

    def spy(*args, attn_mask=None, is_causal=False, **kwargs):
        calls.append((attn_mask, is_causal))
        return plain(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)

    def run(forward, *, capturing):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: capturing)
            forward()
        return list(calls)

    return run


def made(family, lengths=(16, 16), config=()):
    tiny = arm(*PEFT, model=f"tiny-{family}", samples=random_samples(list(lengths)))
    for key, value in config:
        setattr(tiny.model.config, key, value)
    return tiny


def three_ways(given, tiny):
    """What SDPA is given uncaptured, captured as transformers does it, and captured as `cuda_graph` does it."""
    masks, batch = SameMasks(), tiny.step.batches[0]

    def forward(around=nullcontext):
        with around():
            tiny.step.forward(batch)

    uncaptured = given(lambda: forward(masks.noted), capturing=False)
    return uncaptured, given(forward, capturing=True), given(lambda: forward(masks.repeated), capturing=True)


def same(one, two):
    return len(one) == len(two) > 0 and all(
        causal_a == causal_b and ((a is None) == (b is None)) and (a is None or torch.equal(a, b.expand_as(a)))
        for (a, causal_a), (b, causal_b) in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_batch_is_captured_without_a_mask(given, family):
    uncaptured, left_alone, ours = three_ways(given, made(family))
    assert all(mask is None and causal for mask, causal in uncaptured)
    assert all(mask is not None and not causal for mask, causal in left_alone), "nothing to mend in this transformers"
    assert same(ours, uncaptured)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_keeps_its_mask(given, family):
    uncaptured, _, ours = three_ways(given, made(family, lengths=(16, 9)))
    assert all(mask is not None for mask, _ in uncaptured)
    assert same(ours, uncaptured)


def test_sliding_windows_keep_theirs(given):
    """All layers of mistral, and qwen2's last one while its first ones see everything."""
    uncaptured, _, ours = three_ways(given, made("mistral", config=[("sliding_window", 8)]))
    assert all(mask is not None for mask, _ in uncaptured) and same(ours, uncaptured)
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    tiny = made("qwen2", config=[("layer_types", kinds), ("sliding_window", 8)])
    tiny.model.get_base_model().model.has_sliding_layers = True
    uncaptured, _, ours = three_ways(given, tiny)
    assert [mask is None for mask, _ in uncaptured] == [True, True, False] and same(ours, uncaptured)


def test_transformers_table_is_as_before():
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    masks = SameMasks()
    for around in (masks.noted, masks.repeated):
        with pytest.raises(KeyError), around():
            assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_mask
            raise KeyError
        assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask


def test_several_micro_batches_are_refused_with_what_to_do():
    with pytest.raises(Unsupported, match="this workload has 2 a step: give it a batch_size of all its samples"):
        registry.ablation("cuda_graph").step(SimpleNamespace(batches=[None, None]))
