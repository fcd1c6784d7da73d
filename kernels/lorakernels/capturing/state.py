"""What a captured step depends on beside its inputs: the parameters' gradients, which it adds to where they lie, and
the model as it was when the step was captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn


class Gradients:
    """Buffers that every graph adds its gradients to, and that are the parameters' `.grad`: so optimizers, clipping and
    uncaptured steps in between see what they would see without graphs."""

    def __init__(self, params: Sequence[nn.Parameter], buffers: Sequence[torch.Tensor] = ()):
        """buffers: of these parameters, in their order; by default new ones, of zeros."""
        self.params = list(params)
        self.buffers = list(buffers) or [torch.zeros_like(p, requires_grad=False) for p in self.params]

    def narrow(self, params: Sequence[nn.Parameter]) -> None:
        """Keeps those of these parameters: one that gets no gradient keeps None, which optimizers skip."""
        kept = {id(p) for p in params}
        pairs = [(p, b) for p, b in zip(self.params, self.buffers, strict=True) if id(p) in kept]
        self.params, self.buffers = [p for p, _ in pairs], [b for _, b in pairs]

    def attach(self) -> None:
        """Makes every `.grad` its buffer: with what it held, or zero where `zero_grad` has left None."""
        pairs = list(zip(self.params, self.buffers, strict=True))
        cleared = [b for p, b in pairs if p.grad is None]
        others = [(b, p.grad) for p, b in pairs if p.grad is not None and p.grad is not b]
        if cleared:
            torch._foreach_zero_(cleared)
        if others:
            torch._foreach_copy_([b for b, _ in others], [grad for _, grad in others])
        self.put()

    def put(self) -> None:
        """Makes every `.grad` its buffer, whatever either held: a replay is about to overwrite it."""
        for p, b in zip(self.params, self.buffers, strict=True):
            p.grad = b

    def are_all(self, others: Iterable[nn.Parameter]) -> bool:
        """Whether these parameters have gradients, and none of the others."""
        known = {id(p) for p in self.params}
        return all(p.grad is not None for p in self.params) and all(p.grad is None or id(p) in known for p in others)

    def collect(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Adds what a backward has left in `.grad` of these parameters to the buffers, in a few launches, where
        autograd would take one a parameter; the parameters that had a gradient."""
        place = dict(zip((id(p) for p in self.params), self.buffers, strict=True))
        made = [p for p in params if p.grad is not None]
        pairs = [(place[id(p)], p.grad) for p in made if id(p) in place and p.grad is not None]
        if pairs:
            torch._foreach_add_([buffer for buffer, _ in pairs], [grad for _, grad in pairs])
        return made


class Watch:
    """Tells whether a model is still what was captured: looked at before every step, so from lists made once."""

    def __init__(self, model: nn.Module):
        self.params = list(model.parameters())
        modules: list[Any] = list(model.modules())
        self._adapters = [m for m in modules if hasattr(m, "merged_adapters") and hasattr(m, "_disable_adapters")]
        self._checkpointed = [m for m in modules if hasattr(m, "gradient_checkpointing")]
        self._dropouts = [m for m in modules if isinstance(m, nn.Dropout)]
        self._config = getattr(model, "config", None)
        self._then = self._now()

    def _now(self) -> dict[str, Any]:
        """By name: what a graph has burnt in."""
        return {
            "where the parameters lie": [p.data_ptr() for p in self.params],
            "which parameters learn": [p.requires_grad for p in self.params],
            "which adapters are active": [
                (str(m._active_adapter), bool(m._disable_adapters), len(m.merged_adapters)) for m in self._adapters
            ],
            "the adapters' scaling": [tuple(getattr(m, "scaling", {}).values()) for m in self._adapters],
            "gradient checkpointing": [m.gradient_checkpointing for m in self._checkpointed],
            "dropout": [m.p for m in self._dropouts],
            "the attention implementation": attention_of(self._config),
        }

    def changed(self) -> str | None:
        """What has changed since the last look, or None."""
        now = self._now()
        found = [name for name, value in now.items() if value != self._then[name]]
        self._then = now
        return ", ".join(found) or None

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.params if p.requires_grad]

    @property
    def checkpoints(self) -> bool:
        return any(m.gradient_checkpointing for m in self._checkpointed) or bool(self._long)

    @property
    def offloads(self) -> bool:
        """Whether what layers keep, or their weights, are in host memory."""
        return any(options.offload or options.offload_weights for options in self._long)

    @property
    def _long(self) -> list[Any]:
        plans = (m.__dict__.get("_lorakernels") for m in self._checkpointed)
        return [plan.long for plan in plans if getattr(plan, "long", None) is not None]

    @contextlib.contextmanager
    def unpreserved(self) -> Iterator[None]:
        """Inside, checkpoints do not save the random state, which cannot be read in a capture."""
        found = [m for m in self._checkpointed if hasattr(m, "_gradient_checkpointing_func")]
        own = [m._gradient_checkpointing_func for m in found]
        for m, function in zip(found, own, strict=True):
            m._gradient_checkpointing_func = partial(function, preserve_rng_state=False)
        try:
            yield
        finally:
            for m, function in zip(found, own, strict=True):
                m._gradient_checkpointing_func = function


def attention_of(config: Any) -> str:
    """transformers' name of the attention implementation, or "" of a model that has none."""
    return str(getattr(config, "_attn_implementation", None) or "")


def why_uncapturable(model: nn.Module) -> str | None:
    """Why no step of this model can be captured, or None."""
    wrapper = type(model).__name__
    if wrapper in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"):
        return f"{wrapper} exchanges gradients between GPUs; only steps of one GPU are captured"
    if wrapper == "OptimizedModule":
        return "torch.compile has wrapped the model, and captures graphs of its own (mode='reduce-overhead')"
    params = list(model.parameters())
    if any(type(p).__name__ == "DTensor" for p in params):
        return "its parameters are sharded over several GPUs; only steps of one GPU are captured"
    devices = {p.device for p in params}
    if len(devices) > 1:
        return f"it lies on several devices: {', '.join(sorted(map(str, devices)))}"
    return None
