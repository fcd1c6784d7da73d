"""The activation of a gated MLP between its projections, and what LoRA reads of it on the way, by form:

    forward      [act(gate)·up | S] of the down projection                               `activate`
    backward     the gradients of gate and up, dA of down, dS and dB of gate and up      `activation_backward`
    both in FP8, with what LoRA adds to the frozen product before                        `…_in_fp8`

gate, up, act(gate)·up: (M, I) each. Which of these a launch makes together is measured (`tune`).
Run: python -m pytest tests/lorakernels/test_mlp_node.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._C import _autograd

from ..ops import glu, quantized_glu
from ..ops.concat_operand import LoraColumns
from ..ops.glu import GluBackward, OwnOfMLP
from ..ops.grad_accumulator import GradAccumulator
from ..ops.linear_cross_entropy import mm_in
from ..ops.own_columns import Own
from ..ops.quantize_rows import quantize_rows
from ..runtime import MAX_FUSED_RANK, multiprocessors, tensor_cores, use_triton
from ..tuning import tune
from ..tuning.worth_trying import glu_backward_tiles, glu_tiles
from .operand import Operand
from .output_grad import (
    OutputGradient,
    SavedForward,
    frozen_input_gradient,
    wide_output_gradient,
    with_raised,
)
from .own_rows import own_of
from .products import Fp8Operand, lora_input
from .projection import Projection


def activate(
    gate_up: torch.Tensor, act: str, down: Projection, op_down: Operand, seeds: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """([act(gate)·up | S] (M, I + p) of the down projection, its sS (M, p)) of gate_up (M, 2·I); act: a key of
    ACTIVATIONS; seeds: (members,) of the down projection's dropout, or None."""
    m, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    packed = torch.empty(m, width + down.p, dtype=gate_up.dtype, device=gate_up.device)
    scaled_s = down.new_scaled_s(m, packed.dtype, packed.device)

    def plain() -> None:
        glu.forward_into(gate, up, packed[:, :width], act)
        lora_input(down, packed[:, :width], op_down, seeds, packed[:, width:], scaled_s)

    own = own_of(down, packed, op_down) if seeds is None else None
    if own is not None and own.columns.rank > MAX_FUSED_RANK:
        own = None

    def fused(tile: str) -> None:
        glu.forward_lora_into(gate, up, packed, LoraColumns(op_down.a, down.rank, scaled_s), act, tile, own)
        if own is None:
            down.keep_own_columns(packed[:, width:], scaled_s.out)

    forms, kind = {"plain": plain}, "" if own is None else "own_"
    if down.p and seeds is None and tensor_cores(packed, op_down.a):
        forms = {kind + tile: partial(fused, tile) for tile in glu_tiles(tune.bucket(m))} | forms
    key = (tune.bucket(m), width, down.p, act, packed.dtype, *([] if own is None else ["own"]))
    forms[tune.pick("glu", key, forms, packed.device)]()
    return packed, scaled_s.out


def activate_in_fp8(
    gate_up: torch.Tensor, of_gate_up: tuple[Projection, Operand, torch.Tensor], act: str, down: Projection,
    op_down: Operand,
) -> tuple[Fp8Operand, torch.Tensor]:  # fmt: skip
    """(act(gate)·up in e4m3 (M, I) and S (M, p) of the down projection, its sS (M, p)) of gate_up (M, 2·I), a frozen
    product to which LoRA's part is added. of_gate_up: its projection, whose operand and S (M, p); down has no
    dropout."""
    (group, op, s), m, width = of_gate_up, gate_up.shape[0], down.k
    scaled_s = down.new_scaled_s(m, gate_up.dtype, gate_up.device)

    def sums(tile: str, gate_up: torch.Tensor) -> Fp8Operand:
        t = torch.empty(m, down.p, dtype=gate_up.dtype, device=gate_up.device)
        columns = LoraColumns(op_down.a, down.rank, scaled_s)
        quantized = quantized_glu.forward(gate_up, s, op.sb, act, columns, t, group.rank, tile)
        down.keep_own_columns(t, scaled_s.out)
        return Fp8Operand(quantized, t)

    def plain(gate_up: torch.Tensor) -> Fp8Operand:
        packed, of_packed = activate(gate_up.addmm_(s, op.sb.t()), act, down, op_down, None)
        scaled_s.out = of_packed
        return Fp8Operand(quantize_rows(packed[:, :width]), packed[:, width:])

    forms: dict[str, Any] = {"plain": plain}
    if tensor_cores(gate_up, op.sb) or not use_triton(gate_up):
        tiles = glu_tiles(tune.bucket(m)) or ["fused_small"]
        forms = {tile: partial(sums, tile) for tile in tiles} | forms
    key = (tune.bucket(m), width, group.rank, down.rank, act, gate_up.dtype)
    picked = tune.pick("glu in fp8", key, forms, gate_up.device, lambda: (gate_up.clone(),))
    return forms[picked](gate_up), scaled_s.out


class ActivationGradient(NamedTuple):
    """wides: for each group a buffer (M, N + p) that begins with its output's gradient; gradients: an OutputGradient of
    each, or None where dS and dB are still to be made; da: dA (rank, I) of the down projection, or None."""

    wides: list[torch.Tensor]
    gradients: list[OutputGradient] | None
    da: torch.Tensor | None


def activation_backward(
    gate_up: torch.Tensor, dh: torch.Tensor, act: str, groups: Sequence[Projection], saved: Sequence[SavedForward],
    ds_down: torch.Tensor | None, own_down: Own | None = None,
) -> ActivationGradient:  # fmt: skip
    """Of dh (M, I), the gradient of act(gate)·up; gate_up: (M, 2·I), and p more columns with one group, if not in FP8.

    ds_down: (M, rank) if dA is wanted. Where one pass for both is faster it comes from there; otherwise it is None and
    dh is overwritten with act(gate)·up. own_down: whose columns of ds_down are whose, where kernels make each row's own
    (own_rows.py). With one group gate_up is overwritten with its gradient, where nobody will ask for it again.
    """
    width = dh.shape[1]
    gate, up = gate_up[:, :width], gate_up[:, width : 2 * width]
    if len(groups) == 1:
        inputs = GluBackward(gate, up, dh, act)
        return _single_group_backward(gate_up, inputs, groups[0], saved[0], ds_down, own_down)
    wides = [torch.empty(dh.shape[0], g.n + g.p, dtype=dh.dtype, device=dh.device) for g in groups]
    parts = wides[0][:, :width], wides[1][:, :width]
    inputs = GluBackward(gate, up, dh, act)
    return ActivationGradient(wides, None, _parts_backward(inputs, parts, ds_down, saved[0].main_stream_accumulator))


def activation_backward_in_fp8(
    gate_up: torch.Tensor, dh: torch.Tensor, act: str, group: Projection, saved: SavedForward,
    of_down: tuple[torch.Tensor, torch.Tensor],
) -> ActivationGradient:  # fmt: skip
    """As `activation_backward` of one group, of a dh (M, I) that is the frozen product, to which dS · A of the down
    projection is added. of_down: dS (M, rank) and A (rank, I). Needs `fits_fp8`."""
    (ds, a), width, accumulator = of_down, dh.shape[1], saved.main_stream_accumulator
    inputs = GluBackward(gate_up[:, :width], gate_up[:, width : 2 * width], dh, act)
    assert group.fp8 is not None
    fp8 = group.fp8

    def sums(tile: str, dh: torch.Tensor) -> ActivationGradient:
        of_group = torch.empty(dh.shape[0], group.p, dtype=dh.dtype, device=dh.device)
        w = fp8.transposed(saved.op.w)
        grad = inputs.of(dh)
        dy, da, db = quantized_glu.backward(
            grad, ds, a, w.factor, saved.sb, saved.scaled_s, of_group, tile, accumulator
        )  # fmt: skip
        group.keep_own_columns(of_group)
        return ActivationGradient([], [OutputGradient(of_group[:, :0], of_group, db=db, in_fp8=(dy, w))], da)

    def plain(dh: torch.Tensor) -> ActivationGradient:
        return activation_backward(gate_up, dh.addmm_(ds, a), act, [group], [saved], ds)

    def with_dx(form: Callable[[torch.Tensor], ActivationGradient], dh: torch.Tensor) -> None:
        # A trial has the frozen dX in it, because one form quantizes on the way and the other for that product.
        made = form(dh)
        gradients = made.gradients or [wide_output_gradient(group, made.wides[0], saved)]
        if made.da is None:
            mm_in(ds.t(), dh, torch.float32)
        frozen_input_gradient(group, gradients[0], saved.op)

    tiles = glu_backward_tiles(tune.bucket(dh.shape[0]), width, multiprocessors(dh))
    forms: dict[str, Any] = {**{tile: partial(sums, tile) for tile in tiles}, "plain": plain}
    trials = {name: partial(with_dx, form) for name, form in forms.items()}
    key = (tune.bucket(dh.shape[0]), width, group.rank, act, dh.dtype)
    return forms[tune.pick("glu backward in fp8", key, trials, dh.device, lambda: (dh.clone(),))](dh)


def fits_fp8(groups: Sequence[Projection], down: Projection, saved: Sequence[SavedForward], needed: list[bool]) -> bool:
    """Whether `activation_backward_in_fp8` takes the gradient of groups' output and of the down projection's input.
    saved: of each, down last; needed: autograd's flags of all their parameters. Gradients of biases are sums of dY,
    which is not written there."""
    if len(groups) != 1 or any(g.fp8 is None for g in (groups[0], down)) or saved[-1].seeds is not None:
        return False
    (group,), of_group, wanted = groups, 4 * len(groups[0].members), needed[::4]
    biases = any(needed[2:of_group:4]) or any(needed[3:of_group:4])
    if biases or not all(wanted) or not down.rank or any(s.raised is not None for s in saved):
        return False
    sb = saved[0].sb
    runs = tensor_cores(sb) or not use_triton(sb)
    return runs and quantized_glu.backward_fits(down.rank, group.ranks, group.widths)


def _single_group_backward(
    gate_up: torch.Tensor, inputs: GluBackward, group: Projection, saved: SavedForward, ds_down: torch.Tensor | None,
    own_down: Own | None,
) -> ActivationGradient:  # fmt: skip
    (m, width), act, accumulator = inputs.grad.shape, inputs.act, saved.main_stream_accumulator

    def apart(dh: torch.Tensor, into: torch.Tensor) -> ActivationGradient:
        parts = into[:, :width], into[:, width : 2 * width]
        return ActivationGradient([into], None, _parts_backward(inputs.of(dh), parts, ds_down, accumulator))

    def apart_with_ds(dh: torch.Tensor, into: torch.Tensor) -> None:
        # What the form costs; where it is taken, its dS and dB come later.
        da = apart(dh, into).da
        if da is None and ds_down is not None:
            mm_in(ds_down.t(), dh, torch.float32)
        wide_output_gradient(group, into, saved)

    own_group = None if own_down is None else own_of(group, inputs.grad, saved.op)
    own = None if own_down is None or own_group is None else OwnOfMLP(own_group, own_down)
    if own is not None and (ds_down is None or not glu.own_whole_fits(own, ds_down, group.ranks, group.widths)):
        own = None

    def whole(tile: str, ds: torch.Tensor, dh: torch.Tensor, into: torch.Tensor) -> ActivationGradient:
        grad = inputs.of(dh)
        da, db = glu.backward_whole_into(grad, into, ds, saved.sb, saved.scaled_s, tile, accumulator, own)
        gradient = OutputGradient(into[:, : group.n], into[:, group.n :], into, db)
        if own is None:
            group.keep_own_columns(gradient.ds)
        return ActivationGradient([into], [with_raised(gradient, saved)], da)

    forms, kind = dict[str, Any](apart=apart), "" if own is None else "own_"
    if ds_down is not None and (own is not None or glu.whole_fits(ds_down, group.ranks, group.widths)):
        tiles = glu_backward_tiles(tune.bucket(m), width, multiprocessors(ds_down))
        forms = {kind + tile: partial(whole, tile, ds_down) for tile in tiles} | forms
    dh = inputs.grad

    def fresh() -> torch.Tensor:
        return torch.empty(m, group.n + group.p, dtype=gate_up.dtype, device=gate_up.device)

    trials, spare = forms | {"apart": apart_with_ds}, lambda: (dh.clone(), fresh())
    key = (tune.bucket(m), width, group.rank, act, dh.dtype, *([] if own is None else ["own"]))
    picked = tune.pick("gate and up backward", key, trials, dh.device, spare)
    roomy = gate_up.shape[1] == group.n + group.p
    return forms[picked](dh, gate_up if roomy and may_overwrite() else fresh())


def may_overwrite() -> bool:
    """Whether this backward is the last over its graph (no retain_graph), so that saved tensors of our own may go."""
    keeps = getattr(_autograd, "_get_current_graph_task_keep_graph", lambda: True)
    return not keeps()


def _parts_backward(
    inputs: GluBackward, parts: tuple[torch.Tensor, torch.Tensor], ds_down: torch.Tensor | None,
    accumulator: GradAccumulator | None,
) -> torch.Tensor | None:  # fmt: skip
    """The activation's backward into parts; dA of the down projection where one pass for both is the faster way, else
    None, and dh is overwritten with act(gate)·up."""
    dh = inputs.grad
    if ds_down is None or ds_down.shape[1] > glu.MAX_A_RANK or not tensor_cores(dh, ds_down):
        glu.backward_into(inputs, *parts, h_into_grad=True)
        return None
    return _backward_with_a(inputs, parts, ds_down, accumulator)


def _backward_with_a(
    inputs: GluBackward, parts: tuple[torch.Tensor, torch.Tensor], ds_down: torch.Tensor,
    accumulator: GradAccumulator | None,
) -> torch.Tensor | None:  # fmt: skip
    """dA of the down projection, in one pass with the activation's backward where that is the faster way."""
    dh, act = inputs.grad, inputs.act

    def plain(dh: torch.Tensor, d_gate: torch.Tensor, d_up: torch.Tensor) -> None:
        glu.backward_into(inputs.of(dh), d_gate, d_up, h_into_grad=True)

    def plain_with_a(dh: torch.Tensor, d_gate: torch.Tensor, d_up: torch.Tensor) -> None:
        # What the form costs; where it is taken, dA comes later.
        plain(dh, d_gate, d_up)
        mm_in(ds_down.t(), dh, torch.float32)

    def one_pass(tile: str, dh: torch.Tensor, d_gate: torch.Tensor, d_up: torch.Tensor) -> torch.Tensor:
        return glu.backward_a_into(inputs.of(dh), d_gate, d_up, ds_down, tile, accumulator)

    forms: dict[str, Any] = {**{tile: partial(one_pass, tile) for tile in glu.A_TILES}, "plain": plain}
    trials, spare = forms | {"plain": plain_with_a}, lambda: [dh.clone(), *(torch.empty_like(t) for t in parts)]
    key = (tune.bucket(dh.shape[0]), dh.shape[1], ds_down.shape[1], act, dh.dtype)
    return forms[tune.pick("glu backward", key, trials, dh.device, spare)](dh, *parts)
