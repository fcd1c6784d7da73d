"""Long context: a decoder layer that keeps its input and attention's result between forward and backward, and makes the
rest again in backward. For each token and layer, K hidden columns and H·D of attention:

    kept     x (K), attention's output (H·D), its log-sum-exp (H, float32)
    again    norm, q, k, v and their rotation; o; norm, gate, up and the activation, tile of rows after tile
    not      attention, which is quadratic in the tokens; down, whose output nobody reads

In long rows attention goes by groups of heads, forward and backward.

What attention returned is taken down and handed back at torch's dispatcher, as torch's selective checkpointing does, so
that each fused attention keeps its own backward. It can wait in host memory (`Parked`).
Chen et al., "Training deep nets with sublinear memory cost" (2016). Run: python -m pytest
tests/lorakernels/test_long_context.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..nodes.member import SavedAdapters, with_saved_adapters
from ..nodes.mlp_activation import may_overwrite
from .attention import CACHES, AttentionPlan, attend
from .parked import Parked, Parking

EXCLUDES = (
    "long_context runs layers again in backward itself; switch the model's gradient checkpointing off "
    "(gradient_checkpointing=False in the trainer's arguments)"
)

LONG = 16384  # tokens of a row, from which attention is made by groups of heads: each group fills a GPU then
GROUPS = 4


@dataclass(frozen=True, kw_only=True)
class LongContext:
    """keep_attention: whether attention's output and log-sum-exp are kept, else it runs again. mlp_rows: how many rows
    of the MLP are made again at a time. offload: whether what is kept waits in pinned host memory. offload_weights:
    whether the layers' frozen weights do, all but those of the layer that computes and of the next one. Raises
    ValueError where mlp_rows is no number of rows."""

    keep_attention: bool = True
    mlp_rows: int = 8192
    offload: bool = False
    offload_weights: bool = False

    def __post_init__(self) -> None:
        if type(self.mlp_rows) is not int or self.mlp_rows < 1:
            raise ValueError(f"mlp_rows={self.mlp_rows!r}: expected how many rows a tile has, 1 or more")

    @classmethod
    def of(cls, given: bool | LongContext) -> LongContext | None:
        """What `apply` was given, True or the options; None where it is off. Raises TypeError at anything else."""
        if isinstance(given, bool):
            return cls() if given else None
        if not isinstance(given, cls):
            raise TypeError(f"long_context takes True, False or lorakernels.LongContext(…), not {given!r}")
        return given


class Pass:
    """One run of a layer, as it is without checkpointing. tile: rows of the MLP at a time; again: whether it is for
    backward, where nobody reads the layer's output; keeps_attention: whether attention's result is there already."""

    tile: int | None = None
    again: bool = False
    keeps_attention: bool = False

    def attend(self, plan: AttentionPlan, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> torch.Tensor:
        """Attention's output (B, S, H, D) of q, k, v (B, H, S, D)."""
        return attend(plan, q, k, v, mask, **kwargs)[0]


PLAIN = Pass()
Results = list[tuple[Any, Any]]  # an operator and what it returned


class _ByHeads(Pass):
    """In long rows attention of one group of heads after the other. What a backward of attention takes beside its
    inputs and results, float32 sums of dq, or a dk and a dv for each head of q, is a group's then."""

    def attend(self, plan: AttentionPlan, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> torch.Tensor:
        count = _groups(plan, q, k, mask, kwargs)
        if count == 1:
            return super().attend(plan, q, k, v, mask, **kwargs)
        groups, attend = zip(*(t.chunk(count, 1) for t in (q, k, v)), strict=True), super().attend
        return torch.cat([attend(plan, q, k, v, mask, **kwargs) for q, k, v in groups], 2)


def _groups(plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, mask: Any, kwargs: dict[str, Any]) -> int:
    """Into how many groups of heads q (B, H, S, D) and k (B, H', S, D) are cut."""
    a = plan.module
    whole = (
        q.shape[2] < LONG
        or not _is_one_operator(plan)
        or bool(a.training and a.attention_dropout)  # drawn in another order, the masks would be others
        or any(name == "s_aux" for name, *_ in plan.form.arguments)  # a number for each head
        or any(kwargs.get(name) is not None for name in CACHES)
        or (mask is not None and not (isinstance(mask, torch.Tensor) and (mask.dim() < 4 or mask.shape[1] == 1)))
    )
    return 1 if whole else next(n for n in range(GROUPS, 0, -1) if k.shape[1] % n == 0)


class _First(_ByHeads):
    """In forward, without gradients. results: of attention; state: of the random numbers behind it."""

    def __init__(self, options: LongContext, draws: bool):
        self.tile, self._keep, self._draws = options.mlp_rows, options.keep_attention, draws
        self.results: Results = []
        self.state: torch.Tensor | None = None

    def attend(self, plan: AttentionPlan, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> torch.Tensor:
        if not (self._keep and _is_one_operator(plan)):
            return super().attend(plan, q, k, v, mask, **kwargs)
        # With gradients, or some backends make no log-sum-exp.
        with torch.enable_grad(), _Record(self.results):
            q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
            out = super().attend(plan, q, k, v, mask, **kwargs)
        if self._draws:
            self.state = _random_state(q.device)
        return out.detach()


class _Again(_ByHeads):
    """In backward, with gradients. results, state: those of the first pass; parked: what holds them, if they waited in
    host memory."""

    again = True

    def __init__(self, tile: int, results: Results, state: torch.Tensor | None, parked: Parked | None):
        self.tile, self._results, self._state, self._parked = tile, results, state, parked
        self.keeps_attention = bool(results)

    def attend(self, plan: AttentionPlan, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> torch.Tensor:
        if self._parked is not None:
            self._parked.wait()
            if q.requires_grad:
                q.register_hook(lambda _, parked=self._parked: parked.ahead())  # behind attention's backward
        if not self.keeps_attention:
            return super().attend(plan, q, k, v, mask, **kwargs)
        with _Replay(self._results):
            out = super().attend(plan, q, k, v, mask, **kwargs)
        if self._state is not None:
            _set_random_state(q.device, self._state)
        return out


def _is_one_operator(plan: AttentionPlan) -> bool:
    """Whether attention may be an operator with a result of its own; eager attention is several, and flex attention is
    compiled."""
    name = plan.module.config._attn_implementation
    return name == "sdpa" or "flash" in name


def _is_attention(operator: Any) -> bool:
    name = operator.name()
    return ("attention" in name or "attn" in name) and "backward" not in name


class _Record(TorchDispatchMode):
    """Takes down what attention's operators return."""

    def __init__(self, results: Results):
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_attention(func):
            self._results.append((func, _detached(out)))
        return out


class _Replay(TorchDispatchMode):
    """Gives back what was taken down, in order, and runs nothing in its place. What it gave it holds no more."""

    def __init__(self, results: Results):
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_attention(func):
            return func(*args, **(kwargs or {}))
        operator, out = self._results.pop(0) if self._results else (None, None)
        if operator is not func:
            raise RuntimeError(f"attention ran as {operator} in forward and as {func} in backward")
        return _detached(out)


def _detached(out: Any) -> Any:
    """The same values as tensors of their own, which autograd may mark."""
    leaves, form = tree_flatten(out)
    return tree_unflatten([t.detach() if isinstance(t, torch.Tensor) else t for t in leaves], form)


# ---- what a backward has to find as its forward found it -------------------------------------------------------------
def _random_state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


@dataclass
class Call:
    """A layer's forward. run: of an input (…, K) and a `Pass`; draws: whether it draws random numbers; adapters: its
    members' as they are now."""

    run: Callable[[torch.Tensor, Pass], torch.Tensor]
    options: LongContext
    parking: Parking
    draws: bool
    adapters: SavedAdapters

    def remember(self, device: torch.device) -> None:
        """Autocast and random numbers as they are now."""
        self._autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        self._state = _random_state(device) if self.draws else None

    @contextlib.contextmanager
    def as_before(self, device: torch.device) -> Iterator[None]:
        """Inside, all is as it was; behind, random numbers go on where they were."""
        enabled, dtype = self._autocast
        now = None if self._state is None else _random_state(device)
        try:
            if self._state is not None:
                _set_random_state(device, self._state)
            with torch.autocast(device.type, dtype, enabled), with_saved_adapters(self.adapters):
                yield
        finally:
            if now is not None:
                _set_random_state(device, now)


class _Layer(torch.autograd.Function):
    """x (…, K) → the layer's output (…, K). parameters: all of the layer's that are trained, in any order."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        call.remember(x.device)
        first = _First(call.options, call.draws)
        out = call.run(x, first)
        ctx.call, ctx.state, ctx.parked = call, first.state, None
        leaves, ctx.form = tree_flatten(first.results)
        ctx.others = [None if isinstance(t, torch.Tensor) else t for t in leaves]
        tensors = [x, *(t for t in leaves if isinstance(t, torch.Tensor))]
        ctx.is_tensor = [isinstance(t, torch.Tensor) for t in leaves]
        if call.options.offload:
            ctx.parked = call.parking.park(tensors)
            ctx.save_for_backward(*parameters)
        else:
            ctx.save_for_backward(*parameters, *tensors)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, needs, parked = ctx.call, ctx.needs_input_grad, None
        count = len(needs) - 2
        parameters, tensors = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if call.options.offload:
            if ctx.parked is None:
                raise RuntimeError("a second backward through a layer needs retain_graph=True in the first")
            parked = ctx.parked
            tensors = parked.back()
            if may_overwrite():  # the node may live as long as the loss does
                ctx.parked = None
        x, *kept = tensors
        rest = iter(kept)
        leaves = [next(rest) if ours else t for ours, t in zip(ctx.is_tensor, ctx.others, strict=True)]
        again = _Again(call.options.mlp_rows, tree_unflatten(leaves, ctx.form), ctx.state, parked)
        del tensors, kept, rest, leaves  # attention's result is free behind attention's backward
        x = x.detach().requires_grad_(needs[1])
        with torch.enable_grad(), call.as_before(grad.device):
            out = call.run(x, again)
        # Of a parameter that was frozen since (PEFT's set_adapter does it) torch would drop the gradient.
        wanted = [need and t.requires_grad for t, need in zip((x, *parameters), needs[1:], strict=True)]
        inputs = [t for t, want in zip((x, *parameters), wanted, strict=True) if want]
        made = iter(torch.autograd.grad(out, inputs, grad, allow_unused=True) if inputs else ())
        if parked is not None:
            parked.ahead()  # where attention had no gradient to make
        return None, *(next(made) if want else None for want in wanted)


def kept_layer(call: Call, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The layer's output (…, K) of x (…, K), of which nothing but x and attention's result is kept for backward.
    parameters: the layer's that are trained."""
    return _Layer.apply(call, x, *parameters)
