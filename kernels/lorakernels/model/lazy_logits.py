"""The logits of a training forward whose loss comes from the chunked head: a Tensor for whoever gathers, maps or
measures outputs, of which nothing is made until somebody looks at its values (TRL's token accuracy, a loss of one's
own, another process). Their gradient flows to the hidden states, like that of any logits.
Run: python -m pytest tests/lorakernels/test_lazy_logits.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from ..nodes.mlp_activation import may_overwrite
from ..runtime import no_autocast

aten = torch.ops.aten
SAME_VALUES = (aten.detach.default, aten.alias.default)
CHUNK = 2**27  # elements of the logits that are made at a time: half a GiB in float32


class Head(NamedTuple):
    """What logits are made of: hidden (…, H), weight (V, H), bias (V,) or None; softcap: cap · tanh(z / cap) where it
    is given; version: of a weight that is trained, else None."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None
    version: int | None

    def logits(self, dtype: torch.dtype) -> torch.Tensor:
        """The logits (…, V) in dtype, by chunks of rows, so that nothing else of their size is ever there. Raises
        RuntimeError where the head was trained on since."""
        hidden, weight, bias, cap, version = self
        if version not in (None, weight._version):
            raise RuntimeError(
                "the head was trained on since, so these logits can no longer be made; look at them before the "
                "optimizer's step, or apply with linear_cross_entropy=False"
            )
        columns = weight.shape[0]
        out = torch.empty(*hidden.shape[:-1], columns, dtype=dtype, device=hidden.device)
        rows, places, some = hidden.reshape(-1, hidden.shape[-1]), out.view(-1, columns), max(1, CHUNK // columns)
        with no_autocast(hidden.device):
            for part, place in zip(rows.split(some), places.split(some), strict=True):
                z = F.linear(part, weight, bias)
                place.copy_(z if cap is None else cap * torch.tanh(z / cap))
        return out


class LazyLogits(torch.Tensor):
    """The logits (…, V) of a head in dtype. Shape, dtype, device, and another dtype of the same (accelerate asks for
    float32 in mixed precision) cost nothing; any other operation makes them, once."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, head: Head, dtype: torch.dtype) -> LazyLogits:
        shape = (*head.hidden.shape[:-1], head.weight.shape[0])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=head.hidden.device)

    def __init__(self, head: Head, dtype: torch.dtype):
        self._head, self._logits = head, None

    def materialize(self) -> torch.Tensor:
        """The values (…, V), a plain Tensor without gradient, made at the first call. Raises RuntimeError where the
        head was trained on since."""
        if self._logits is None:
            with torch.no_grad():
                self._logits = self._head.logits(self.dtype)
        return self._logits

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lazy = args[0] if args and isinstance(args[0], cls) else None
        if lazy is not None and function in SAME_VALUES:
            other = cls(lazy._head, lazy.dtype)
            other._logits = lazy._logits
            return other
        if lazy is not None and lazy._logits is None and function is aten._to_copy.default and set(kwargs) == {"dtype"}:
            return cls(lazy._head, kwargs["dtype"])
        values, named = tree_map_only(cls, cls.materialize, (args, kwargs))
        out = function(*values, **named)
        # What was written to in place stays the Tensor that it was.
        return lazy if lazy is not None and out is lazy._logits else out

    def retain_grad(self) -> None:
        """Raises RuntimeError: the loss is not made from these logits."""
        raise RuntimeError("the loss is not made from these logits; apply with linear_cross_entropy=False")

    def numpy(self, *, force: bool = False) -> Any:
        """As of any Tensor (…, V), which has to be detached first."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self.materialize().numpy(force=force)

    def tolist(self) -> Any:
        """The values (…, V) as nested lists."""
        return self.materialize().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.materialize().clone()


class _MakeLogits(torch.autograd.Function):
    """hidden (…, H), weight (V, H), bias (V,) → LazyLogits (…, V)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None
    ) -> LazyLogits:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.set_materialize_grads(False)  # zeros (…, V) where nobody used the logits
        ctx.softcap = softcap
        version = weight._version if weight.requires_grad else None
        bias = None if bias is None else bias.detach()
        return LazyLogits(Head(hidden.detach(), weight.detach(), bias, softcap, version), hidden.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        hidden, weight, bias = ctx.saved_tensors
        needs = ctx.needs_input_grad
        with no_autocast(hidden.device):
            if ctx.softcap is not None:
                slope = 1 - torch.tanh(F.linear(hidden, weight, bias) / ctx.softcap).square()
                grad = grad * slope
            flat = grad.flatten(0, -2)
            d_hidden = grad @ weight if needs[0] else None
            d_weight = flat.t() @ hidden.flatten(0, -2) if needs[1] else None
            return d_hidden, d_weight, flat.sum(0) if needs[2] else None, None


def lazy_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None
) -> torch.Tensor:
    """The logits (…, V) of hidden (…, H), weight (V, H) and bias (V,) of one dtype, which are made when somebody looks
    at them; softcap: cap · tanh(z / cap)."""
    return _MakeLogits.apply(hidden, weight, bias, softcap)


class _LossOf(torch.autograd.Function):
    """The loss, as it is, with an edge to the logits: who asks for its gradient by them alone gets it."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, logits: torch.Tensor, made_by: Any, target: torch.Tensor,
        num_items: int | torch.Tensor | None, ignore_index: int,
    ) -> torch.Tensor:  # fmt: skip
        ctx.logits, ctx.made_by, ctx.target = logits.detach(), made_by, target
        ctx.num_items, ctx.ignore_index = num_items, ignore_index
        ctx.mark_dirty(loss)  # it is the same tensor, and no view: trainers divide it in place
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # In any backward to what is trained the chunked head's own gradient is the one that flows.
        if torch._C._will_engine_execute_node(ctx.made_by):  # pyright: ignore[reportAttributeAccessIssue]
            if may_overwrite():  # or the hidden states stay for as long as somebody has the loss
                ctx.logits = None
            return grad, None, None, None, None, None
        if ctx.logits is None:
            raise RuntimeError("a second backward through the loss needs retain_graph=True in the first")
        z, target = ctx.logits.materialize(), ctx.target
        kept = target != ctx.ignore_index
        count = kept.sum() if ctx.num_items is None else ctx.num_items
        wanted = F.one_hot(target.where(kept, 0), z.shape[-1])
        d_logits = (z.float().softmax(-1) - wanted) * kept[..., None] * (grad / count)
        return None, d_logits.to(z.dtype), None, None, None, None


def loss_of(
    loss: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, num_items: int | torch.Tensor | None,
    ignore_index: int,
) -> torch.Tensor:  # fmt: skip
    """The loss (a scalar) that a chunked head made beside lazy logits (…, V) for target (…), so that
    `torch.autograd.grad(loss, logits)` has an answer: the gradient by the mean over num_items. Beside other inputs
    that lead to the hidden states it has none."""
    return _LossOf.apply(loss, logits, loss.grad_fn, target, num_items, ignore_index)
