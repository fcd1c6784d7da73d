"""A model on our kernels beside its unpatched copy, and whether the two compute the same."""

from copy import deepcopy

import lorakernels
import pytest
import torch
from tiny_models import batch, build, gradients


def pair(family="llama", **lora):
    plain = build(family, **lora)
    ours = deepcopy(plain)
    lorakernels.apply(ours)
    return ours, plain


def layer(model):
    return model.base_model.model.model.layers[0]


def step(model, loss_of=None):
    model.zero_grad()
    loss = loss_of(model) if loss_of else model(**batch()).loss
    loss.backward()
    return loss.item(), gradients(model)


def assert_like_peft(ours, plain, loss_of=None):
    (loss, got), (wanted_loss, wanted) = step(ours, loss_of), step(plain, loss_of)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert set(got) == set(wanted)
    for n, g in wanted.items():
        torch.testing.assert_close(got[n], g, rtol=1e-4, atol=1e-5 * g.abs().max().item() + 1e-9, msg=n)


def strided(model):
    """Parameters that lie in a buffer of ours."""
    return [n for n, p in model.named_parameters() if not p.is_contiguous()]


def bound(model):
    """Modules with something of ours on them."""
    return [n for n, m in model.named_modules() if {"forward", "_lorakernels", "save_pretrained"} & set(m.__dict__)]
