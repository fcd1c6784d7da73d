"""`apply(model)`: a PEFT model's decoder layers, norms and loss on the kernels of this package; `remove(model)`: back.

    report = lorakernels.apply(model)           # model = peft.get_peft_model(...)
    print(report)                               # what changed, what was left to PEFT and why
    lorakernels.remove(model)

Only instances are changed (a forward bound to the object), never classes or modules' source. A decoder layer of which
everything is known is taken as a whole; of others, the known parts one by one.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from types import MethodType
from typing import Any

import torch

from .attention import BACKENDS, AttentionPlan, attention_forward, attention_plan
from .attention_form import looks_like_attention
from .decoder_layer import LayerPlan, layer_forward, layer_plan
from .forwards import Forwards
from .head import causal_lm_forward, head_plan, looks_like_causal_lm
from .long_context import EXCLUDES, LongContext
from .lora_linear import LinearPlan, linear_forward
from .lora_modules import is_lora
from .mlp import MLPPlan, looks_like_mlp, mlp_forward, mlp_plan
from .module_checks import NotFused, is_unhooked
from .norms import NormModule, looks_like_norm, norm_forward, norm_module
from .offloaded import Offloaded
from .parked import Parking
from .plans import NO_PICKLE, Linears, Switches, linears
from .proofs import Proofs
from .rotary import looks_like_rotary, rotary_forward, rotary_plan
from .slots import Jobs
from .trl_head import HEAD, give_back, is_trl_forward, watch

STATE = "_lorakernels_state"
COMPILED = (
    "runs its kernels outside of torch.compile's graphs, so what is fused is not compiled and fullgraph=True is not "
    "possible; to compile PEFT's model, call lorakernels.remove"
)
PART_OF = {  # the switch of a linear, by the name that transformers gives it
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "qkv"),
    "o_proj": "o",
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "down_proj"), "mlp"),
}


@dataclass(frozen=True)
class Change:
    """A module that runs on our kernels: its name, and the parts of it."""

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Left:
    """A module that was left to PEFT or transformers, and why."""

    name: str
    part: str
    reason: str


@dataclass
class Report:
    """What `apply` did to a model, what it left alone, and, as the model is used, which forwards were really ours."""

    changed: list[Change] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    forwards: Forwards = field(default_factory=Forwards)

    @property
    def counts(self) -> dict[str, int]:
        """Number of modules by part: {"qkv": 32, "o": 32, …}."""
        return dict(Counter(part for change in self.changed for part in change.parts))

    @property
    def total(self) -> int:
        """Number of modules and parts of modules that run on our kernels."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        done = ", ".join(f"{part} {n}" for part, n in sorted(self.counts.items())) or "nothing"
        reasons = Counter((e.part, e.reason) for e in self.left)
        lines = [f"changed: {done}"]
        lines += [f"left alone: {part} x {n}: {reason}" for (part, reason), n in sorted(reasons.items())]
        ran = self.forwards
        return "\n".join([*lines, str(ran)] if ran.fused or ran.left else lines)


@dataclass
class _State:
    """undo: (a module, what gives back to it what `apply` took), in the order in which it was taken."""

    forwards: Forwards
    undo: list[tuple[Any, Callable[[], object]]] = field(default_factory=list)

    def __deepcopy__(self, memo: dict) -> _State:
        return _State(copy.deepcopy(self.forwards, memo), copy.deepcopy(self.undo, memo))

    def __reduce__(self) -> Any:
        raise TypeError(NO_PICKLE)


def _unbind(module: Any) -> None:
    """Not a closure: a copy of the model must undo what was bound to the copy's modules. A forward that somebody else
    has put around ours stays; ours then passes on to the class's."""
    for name in ("_lorakernels", "_lorakernels_forwards"):
        module.__dict__.pop(name, None)
    bound = module.__dict__.get("forward")
    # functools.wraps copies our mark to what wraps us: the function itself has to be the marked one.
    if getattr(bound, "__func__", None) is getattr(bound, "_lorakernels_forward", bound):
        del module.__dict__["forward"]


def _unwatch(module: Any) -> None:
    module.__dict__.pop(HEAD, None)


def _unbind_saving(model: Any) -> None:
    model.__dict__.pop("save_pretrained", None)


# Whether PEFT's save_pretrained is running: it keeps the adapters alone, and must not pay for copies of all weights.
_adapters_only = ContextVar("_adapters_only", default=False)


def _save_adapters(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Bound to a PeftModel as its save_pretrained."""
    token = _adapters_only.set(True)
    try:
        return type(self).save_pretrained(self, *args, **kwargs)
    finally:
        _adapters_only.reset(token)


def _own_weight(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state_dict has the weight itself, not a view of the buffer that others are in: what writes state_dicts takes
    views of one storage for one tensor, or cannot write them."""
    name = f"{prefix}weight"
    weight = state_dict.get(name)
    if weight is not None and not weight.is_contiguous() and not _adapters_only.get():
        copied = weight.detach().contiguous()
        state_dict[name] = torch.nn.Parameter(copied, False) if isinstance(weight, torch.nn.Parameter) else copied


def _bring_weights(weights: Offloaded, *_: Any) -> None:
    """Before a state_dict, which has the weights themselves."""
    if not _adapters_only.get():
        weights.bring(stay=False)


@cache
def _outside_graphs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward for a module of a model under torch.compile, which cannot follow kernels into buffers: it runs as it
    is, between two graphs, instead of in dozens of them."""

    def outside(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._lorakernels_forwards.warn(COMPILED)
        return forward(self, *args, **kwargs)

    return torch.compiler.disable(outside)


class _Patcher:
    def __init__(self, switches: Switches, widths: frozenset[int]):
        self.switches, self.widths, self.report, self.proofs = switches, widths, Report(), Proofs()
        self.state = _State(self.report.forwards)
        self.parking = Parking()
        self.offloaded: list[Offloaded] = []  # of the layers, in their order
        self.taken: set[str] = set()  # linears
        self.inside: set[int] = set()  # the ids of modules that a node takes the place of, or that were left already

    def bind(self, module: Any, forward: Callable[..., Any], plan: Any = None) -> None:
        if "forward" in module.__dict__:
            raise NotFused("its forward was replaced already")
        module._lorakernels, module._lorakernels_forwards = plan, self.report.forwards

        # Trainer reads the signature of forward to know which columns of the data to keep.
        outside = _outside_graphs(forward)

        @wraps(type(module).forward)
        def signed(self: Any, *args: Any, **kwargs: Any) -> Any:
            if "_lorakernels" not in self.__dict__:
                return type(self).forward(self, *args, **kwargs)
            if torch.compiler.is_dynamo_compiling():
                return outside(self, *args, **kwargs)
            return forward(self, *args, **kwargs)

        signed._lorakernels_forward = signed  # type: ignore[attr-defined]
        module.forward = MethodType(signed, module)
        self.undoing(module, partial(_unbind, module))

    def undoing(self, module: Any, *undo: Callable[[], object]) -> None:
        self.state.undo += [(module, one) for one in undo]

    def take(self, linears: Linears | None) -> None:
        if linears is None:
            return
        linears.adopt()
        parent = linears.modules[0].parent  # which stays where adapters are unloaded
        self.undoing(parent, linears.release)
        self.taken |= {m.name for m in linears.modules}
        for linear in linears.modules:
            self.undoing(parent, linear.base.register_state_dict_post_hook(_own_weight).remove)
        for group in linears.groups:
            if group.not_fp8:
                self.leave(" + ".join(m.name for m in group.members), "fp8", group.not_fp8)

    def leave(self, name: str, part: str, reason: object) -> None:
        self.report.left.append(Left(name, part, str(reason)))

    def saving(self, model: Any) -> None:
        if hasattr(model, "peft_config") and "save_pretrained" not in model.__dict__:
            model.save_pretrained = MethodType(_save_adapters, model)
            self.undoing(model, partial(_unbind_saving, model))

    # ---- the parts of a layer ----------------------------------------------------------------------------------------
    def layer(self, name: str, layer: Any) -> None:
        attention = self.attention_plan(f"{name}.self_attn", layer.self_attn)
        mlp = self.mlp_plan(f"{name}.mlp", getattr(layer, "mlp", None))
        self.inside |= {id(getattr(layer, "mlp", None)), *([] if attention is None else [id(layer.self_attn)])}
        if self.whole(name, layer, attention, mlp):
            return
        if self.switches.long_context:
            self.leave(name, "long_context", "the layer is not taken as a whole, so it keeps every activation")
        if attention is not None:
            self.attention(f"{name}.self_attn", layer.self_attn, attention)
        if mlp is not None:
            self.try_bind(f"{name}.mlp", layer.mlp, mlp_forward, mlp, ["mlp"], [mlp.gate_up, mlp.down])

    def attention_plan(self, name: str, module: Any) -> AttentionPlan | None:
        s = self.switches
        if not (s.qkv or s.o or s.rope):
            return None
        try:
            plan, left = attention_plan(module, name, s, self.proofs, self.widths)
        except NotFused as reason:
            self.leave(name, "attention", reason)
            return None
        for part, reason in left.items():
            self.leave(name, part, reason)
        return plan

    def mlp_plan(self, name: str, module: Any) -> MLPPlan | None:
        if not self.switches.mlp or module is None:
            return None
        try:
            return mlp_plan(module, name, self.switches, self.proofs)
        except NotFused as reason:
            self.leave(name, "mlp", reason)
            return None

    def whole(self, name: str, layer: Any, attention: AttentionPlan | None, mlp: MLPPlan | None) -> bool:
        """Takes the whole layer if norms, q,k,v and o are ours, and its MLP is ours or no gated MLP (experts)."""
        known_mlp = mlp is not None or not hasattr(getattr(layer, "mlp", None), "down_proj")
        if attention is None or attention.qkv is None or attention.o is None:
            return False
        if not (self.switches.rms_norm and known_mlp):
            return False
        try:
            plan = layer_plan(layer, attention, mlp, self.proofs)
            if not is_unhooked(layer.self_attn) or (mlp is not None and not is_unhooked(layer.mlp)):
                raise NotFused("its attention or MLP has hooks or a replaced forward")
            plan.long, plan.parking = self.switches.long_context, self.parking
            self.bind(layer, layer_forward, plan)
        except NotFused as reason:
            self.leave(name, "layer", reason)
            return False
        parts = ["qkv", "o", "rms_norm"] + ["rope"] * attention.rope + ["mlp"] * (mlp is not None)
        parts += ["long_context"] * (plan.long is not None)
        for part in (attention.qkv, attention.o, *((mlp.gate_up, mlp.down) if mlp else ())):
            self.take(part)
        if plan.long is not None and plan.long.offload_weights:
            self.offload(name, plan)
        self.takes_the_place_of(*plan.norms.values(), *(attention.head_norms or ()))
        self.report.changed.append(Change(name, tuple(parts)))
        return True

    def offload(self, name: str, plan: LayerPlan) -> None:
        """The layer's frozen weights wait in host memory from here on."""
        own = [g for g in plan.groups if g.buffer is not None and g.holder is None]
        if len(own) < len(plan.groups):
            self.leave(name, "offload_weights", "quantized or sharded weights stay where they are")
        if own:
            plan.weights = Offloaded(own, self.offloaded)
            hook = plan.module.register_state_dict_pre_hook(partial(_bring_weights, plan.weights))
            self.undoing(plan.module, plan.weights.end, hook.remove)

    def takes_the_place_of(self, *norms: NormModule) -> None:
        self.inside |= {id(norm.module) for norm in norms}

    def attention(self, name: str, module: Any, plan: AttentionPlan) -> None:
        parts = [p for p, here in (("qkv", plan.qkv), ("o", plan.o), ("rope", plan.rope)) if here]
        if parts:
            self.takes_the_place_of(*(plan.head_norms or ()))
            self.try_bind(name, module, attention_forward, plan, parts, [plan.qkv, plan.o])

    def mlp(self, name: str, module: Any) -> None:
        """A gated MLP anywhere: an expert, a shared expert, of a layer that is not known."""
        plan = self.mlp_plan(name, module)
        if plan is not None:
            self.try_bind(name, module, mlp_forward, plan, ["mlp"], [plan.gate_up, plan.down])

    def try_bind(
        self, name: str, module: Any, forward: Callable[..., Any], plan: Any, parts: list[str],
        linears: list[Linears | None],
    ) -> None:  # fmt: skip
        try:
            self.bind(module, forward, plan)
        except NotFused as reason:
            self.leave(name, "+".join(parts), reason)
            return
        for part in linears:
            self.take(part)
        self.report.changed.append(Change(name, tuple(parts)))

    def linear(self, name: str, parent: Any) -> None:
        """A LoRA linear that no other part took; of a part that was left because of it, its reason stands already."""
        leaf, s = name.rpartition(".")[2], self.switches
        if name in self.taken or not getattr(s, PART_OF.get(leaf, "linear")) or not s.linear:
            return
        try:
            plan = LinearPlan(linears(parent, name.rpartition(".")[0], [leaf], s, s.fp8))
            self.bind(plan.linear.module, linear_forward, plan)
        except NotFused as reason:
            why, parent_name = str(reason), name.rpartition(".")[0]
            if not any(e.name == parent_name and e.reason == why for e in self.report.left):
                self.leave(name, "linear", why.removeprefix(f"{leaf}: "))
            return
        self.take(plan.linears)
        self.report.changed.append(Change(name, ("linear",)))

    def rotary(self, name: str, module: Any) -> None:
        """The rotary embedding of an attention of which the whole is not known."""
        try:
            self.bind(module, rotary_forward, rotary_plan(module, self.proofs))
        except NotFused as reason:
            self.leave(name, "rope", reason)
            return
        self.report.changed.append(Change(name, ("rope",)))

    def norm(self, name: str, module: Any) -> None:
        try:
            self.bind(module, norm_forward, norm_module(module, self.proofs))
        except NotFused as reason:
            self.leave(name, "rms_norm", reason)
            return
        self.report.changed.append(Change(name, ("rms_norm",)))

    def head(self, name: str, model: Any, whole: Any) -> None:
        """The loss of a causal language model, which is all of `whole` or inside it."""
        theirs = model.__dict__.get("forward")
        if is_trl_forward(theirs):
            del model.__dict__["forward"]
        try:
            self.bind(model, causal_lm_forward, head_plan(model, self.proofs))
            object.__setattr__(whole, HEAD, model)
            self.undoing(model, partial(give_back, model))
            self.undoing(whole, whole.register_forward_pre_hook(watch).remove, partial(_unwatch, whole))
        except NotFused as reason:
            self.leave(name, "linear_cross_entropy", reason)
        else:
            self.report.changed.append(Change(name, ("linear_cross_entropy",)))
        if is_trl_forward(theirs):
            model.forward = theirs


def _check_backends(names: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    names = (names,) if isinstance(names, str) else tuple(names)
    if wrong := [n for n in names if n not in BACKENDS]:
        raise ValueError(f"sdpa_backends has {wrong}; known are {sorted(BACKENDS)}")
    return names


def apply(
    model: Any, *, mlp: bool = True, qkv: bool = True, o: bool = True, rms_norm: bool = True, rope: bool = True,
    linear_cross_entropy: bool = True, linear: bool = True, one_gemm: bool = True, merge_projections: bool = True,
    fp8: bool = False, fp8_attention: bool = True, fp8_except: str | Sequence[str] = (),
    sdpa_backends: str | tuple[str, ...] | list[str] | None = None, long_context: bool | LongContext = False,
    jobs: Jobs | None = None,
) -> Report:  # fmt: skip
    """Changes what it knows in `model`, in place, and reports it.

    mlp, qkv, o, rms_norm, rope, linear_cross_entropy: the parts; linear: every LoRA linear that no part took, but for
    those of parts that are switched off. one_gemm: [X|S]·[W|sB]ᵀ where it is measured to be faster; off: a GEMM and an
    in-place addmm. merge_projections: q, k, v and gate, up as one GEMM each. fp8: the frozen weights' products in FP8
    (changes the mathematics: see fp8.py); fp8_attention: those of q, k, v and o, too, or in the compute dtype;
    fp8_except: the names in their modules of linears that stay in it, such as "v_proj".
    sdpa_backends: an order of "cudnn", "flash", "efficient", "math" to pin where attention is plain causal SDPA without
    a mask; None leaves torch's choice. long_context: decoder layers keep their input and attention's result alone and
    are made again in backward (`LongContext` has the options). jobs: `apply_multi` gives them, of rows that have
    several adapters. Raises TypeError where model is none or a switch no bool, ValueError at an unknown backend or a
    name in fp8_except that no module has, and where long_context has not the parts of a layer, meets jobs, or the model
    checkpoints already, RuntimeError where `apply` was called before.
    """
    _check_model(model, "apply")
    long = LongContext.of(long_context)
    if long is not None and jobs is not None:
        raise ValueError("long_context makes layers again by tiles of rows, and here rows have several adapters")
    if long is not None:
        if off := [n for n, on in {"mlp": mlp, "qkv": qkv, "o": o, "rms_norm": rms_norm}.items() if not on]:
            raise ValueError(f"long_context takes decoder layers as a whole, so {', '.join(off)} must be on")
        if any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
            raise ValueError(EXCLUDES)
    _check_not_applied(model)
    switches = Switches(
        mlp=mlp, qkv=qkv, o=o, rms_norm=rms_norm, rope=rope, linear_cross_entropy=linear_cross_entropy, linear=linear,
        one_gemm=one_gemm, merge_projections=merge_projections, fp8=fp8, fp8_attention=fp8_attention,
        fp8_except=(fp8_except,) if isinstance(fp8_except, str) else tuple(fp8_except),
        sdpa_backends=_check_backends(sdpa_backends), long_context=long, jobs=jobs,
    )  # fmt: skip
    modules = list(model.named_modules())
    if unknown := set(switches.fp8_except) - {name.rpartition(".")[2] for name, _ in modules}:
        raise ValueError(f"fp8_except has names that no module of the model has: {sorted(unknown)}")
    patcher = _patcher(model, switches)
    try:
        for name, module in modules:
            if module._modules.get("self_attn") is not None and looks_like_attention(module.self_attn):
                patcher.layer(name, module)
        patcher.saving(model)
        for name, module in modules:
            if id(module) not in patcher.inside and looks_like_mlp(module):
                patcher.mlp(name, module)
            elif rms_norm and id(module) not in patcher.inside and _is_norm(module):
                patcher.norm(name, module)
            elif rope and id(module) not in patcher.inside and looks_like_rotary(module):
                patcher.rotary(name, module)
            if linear_cross_entropy and looks_like_causal_lm(module):
                patcher.head(name, module, model)
        for name, module in modules:
            for child, linear in module._modules.items():
                if linear is not None and is_lora(linear) and not is_lora(module):
                    patcher.linear(f"{name}.{child}" if name else child, module)
    except BaseException:
        _undo(patcher.state)
        raise
    for holder in (model, _inner(model)):
        object.__setattr__(holder, STATE, patcher.state)
    return patcher.report


def before_fully_shard(model: Any, *, merge_projections: bool = True) -> Callable[[torch.nn.Module], int]:
    """What lays a decoder layer's frozen weights out for `apply`, before FSDP2's `fully_shard` takes the layer:

        lay_out = lorakernels.before_fully_shard(model)     # model = peft.get_peft_model(...)
        for layer in layers:
            lay_out(layer)
            fully_shard(layer, ignored_params=adapters)
        fully_shard(model, ignored_params=adapters)
        lorakernels.apply(model)

    `[W | sB ; A]` of each of the layer's projections becomes one parameter, which FSDP2 shards and gathers in one
    piece, and the linears' weights become views of it (`held.py`). It returns how many there are, 0 for a module
    without a projection that is ours. Of the whole model that module alone needs its weights. `remove` does not take it
    back, a state_dict has operands in the place of weights, and PEFT can put a further adapter on a layer only while it
    is gathered. merge_projections: as `apply` will have it; what is laid out otherwise is not merged, and its adapters
    stay apart. Raises TypeError where model is none, RuntimeError where `apply` was called before.
    """
    _check_model(model, "before_fully_shard")
    _check_not_applied(model)
    patcher = _patcher(model, Switches(merge_projections=merge_projections))
    names = {module: name for name, module in model.named_modules()}

    def lay_out(layer: torch.nn.Module) -> int:
        name, parts, inside = names[layer], [], layer._modules
        if inside.get("self_attn") is not None and looks_like_attention(layer.self_attn):
            attention = patcher.attention_plan(f"{name}.self_attn", layer.self_attn)
            parts += [attention.qkv, attention.o] if attention else []
        if mlp := patcher.mlp_plan(f"{name}.mlp", inside.get("mlp")):
            parts += [mlp.gate_up, mlp.down]
        return sum(part.hold() for part in parts if part is not None)

    return lay_out


def _patcher(model: Any, switches: Switches) -> _Patcher:
    """With what of the whole model a plan for one module asks for."""
    weights = Counter(
        id(m._parameters["weight"]) for m in model.modules() if m._parameters.get("weight") is not None
    )  # fmt: skip
    switches.shared = frozenset(weight for weight, n in weights.items() if n > 1)
    widths = {
        2 * b.numel() // n for m in model.modules() for k, b in m._buffers.items() for n in (1, 2) if _rotary(k, b)
    }
    return _Patcher(switches, frozenset(widths))


def _rotary(name: str, buffer: Any) -> bool:
    """Whether a buffer has the frequencies of a rotary embedding, a pair of columns of cos and sin each."""
    return name.endswith("inv_freq") and buffer is not None and buffer.dim() == 1


def _is_norm(module: Any) -> bool:
    """Whether a module may be an RMSNorm; one that says so and has another shape is left with the reason."""
    return looks_like_norm(module) or type(module).__name__.endswith("RMSNorm")


def _check_model(model: Any, function: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"lorakernels.{function} takes a model (torch.nn.Module), not {type(model).__name__}")


def _check_not_applied(model: Any) -> None:
    if any(STATE in m.__dict__ or "_lorakernels" in m.__dict__ for m in model.modules()):
        raise RuntimeError("lorakernels.apply was called on this model before; call lorakernels.remove first")


def _inner(model: Any) -> Any:
    """The model inside PEFT's wrapper, which outlives it where adapters are merged and unloaded."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def _undo(state: _State) -> None:
    for _, undo in reversed(state.undo):
        undo()


def status(model: Any) -> Forwards:
    """Which forwards of a changed model were fused since `apply`, and which were left and why; it goes on counting.

    Takes what `remove` takes. Raises RuntimeError where `apply` was called on none of these."""
    _check_model(model, "status")
    return _states(model)[0].forwards


def _states(model: Any) -> list[_State]:
    """Raises RuntimeError where there is none."""
    states = {id(m.__dict__[STATE]): m.__dict__[STATE] for m in model.modules() if STATE in m.__dict__}
    if not states:
        raise RuntimeError("lorakernels.apply was not called on this model")
    return list(states.values())


def forget(model: Any) -> None:
    """Lets go of modules that are in the model no more, such as the layers of a pipeline's other stages: else what
    `remove` would give back to them keeps their weights.

    Takes what `remove` takes. Raises RuntimeError where `apply` was called on none of these."""
    _check_model(model, "forget")
    here = {id(module) for module in model.modules()}
    for state in _states(model):
        state.undo = [(module, undo) for module, undo in state.undo if id(module) in here]


def remove(model: Any) -> None:
    """Gives the model its own forwards and contiguous weights back; outputs are bitwise what they were.

    Takes the model that `apply` was given, one that was wrapped around it since, or what is left of it when PEFT's
    wrapper is gone (merge_and_unload). Raises RuntimeError where `apply` was called on none of these."""
    _check_model(model, "remove")
    for state in _states(model):
        _undo(state)
        state.undo.clear()
    for module in model.modules():
        module.__dict__.pop(STATE, None)
        if "_lorakernels" in module.__dict__:  # a copy that PEFT made of a module of ours (modules_to_save)
            _unbind(module)
