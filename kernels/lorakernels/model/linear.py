"""PEFT's LoRA linears one by one, wherever they stand: for modules that `apply` does not know, and for measuring one.

    report = apply_linears(model)               # every LoRA linear that stays PEFT's own computation
    remove_linears(model)

What comes before is somebody else's, so X is copied into the operand buffer where the one-GEMM form is taken; `apply`,
which knows the layer, has X written there in the first place. `apply_normed` shows that on the smallest piece of a
model: linear(norm(x)), one node. Run: python -m pytest tests/lorakernels/test_linear.py
"""

from __future__ import annotations

from typing import Any

import torch

from ..nodes.projection import Projection
from ..nodes.projection_node import project
from ..ops.concat_operand import with_spare_columns
from ..ops.rms_norm import Norm
from .lora_modules import LinearModule, is_lora, linear_module
from .module_checks import NotFused
from .patching import Change, Left, Report

MARK = "_lorakernels_linear"


class _Single:
    """One linear of the model and its projection."""

    def __init__(self, linear: LinearModule, one_gemm: bool):
        self.linear, self.group = linear, Projection([linear.member], one_gemm)

    def ready(self) -> bool:
        """`what_changed` takes a replaced forward for somebody else's; ours stands aside while it looks."""
        own = self.linear.module.__dict__.pop("forward")
        try:
            return not self.linear.what_changed()
        finally:
            self.linear.module.forward = own


def _forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Bound to an instance of PEFT's LoRA linear."""
    single: _Single = getattr(self, MARK)
    if args or kwargs or not single.ready():
        return type(self).forward(self, x, *args, **kwargs)
    return project(x, [single.group]).to(x.dtype)


def apply_linears(model: Any, *, one_gemm: bool = True) -> Report:
    """Changes every LoRA linear in `model`, in place; the report names them and those left to PEFT, with the reason.

    one_gemm: [X|S]·[W|sB]ᵀ where it is measured to be faster; off: a GEMM and an in-place addmm.
    """
    report = Report()
    for name, parent in list(model.named_modules()):
        for child, module in list(parent._modules.items()):
            if not is_lora(module):
                continue
            path = f"{name}.{child}" if name else child
            try:
                single = _Single(linear_module(path, parent), one_gemm)
                _bind(module, single, _forward)
            except NotFused as reason:
                report.left.append(Left(path, "linear", str(reason)))
            else:
                report.changed.append(Change(path, ("linear",)))
    return report


def _bind(module: Any, single: _Single, forward: Any) -> None:
    setattr(module, MARK, single)
    module.forward = forward.__get__(module)
    single.group.adopt()


def apply_normed(module: Any, norm: str = "norm", linear: str = "linear", *, one_gemm: bool = True) -> Report:
    """Makes a module whose forward is linear(norm(x)) one node: S = norm(x)·Aᵀ is made while the norm writes X.

    norm: name of an RMSNorm in it with `weight` and `eps`; linear: name of PEFT's LoRA linear.
    """
    try:
        found = linear_module(linear, module)
    except NotFused as reason:
        return Report(left=[Left(linear, "linear", str(reason))])
    single = _Single(found, one_gemm)
    rms = getattr(module, norm)

    def forward(self: Any, x: Any) -> Any:
        if found.what_changed():
            return type(self).forward(self, x)
        return project(x, [single.group], norm=Norm(rms.eps), norm_weight=rms.weight).to(x.dtype)

    _bind(module, single, forward)
    return Report([Change(linear, ("linear", "rms_norm"))])


def like_ours(module: Any, dy: torch.Tensor) -> torch.Tensor:
    """dY (…, N) as the node behind `module` (see `apply_normed`) would have written it if it were ours: with room for
    dS."""
    group: Projection = getattr(module, MARK).group
    out = with_spare_columns(dy.shape, group.p, dy)
    return out.copy_(dy)


def remove_linears(model: Any) -> None:
    """Gives every module that these functions changed its own forward and a contiguous weight back."""
    for module in model.modules():
        single = module.__dict__.pop(MARK, None)
        if single is not None:
            del module.__dict__["forward"]
            single.group.release()
