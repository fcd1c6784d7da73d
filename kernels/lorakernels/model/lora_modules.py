"""The model's linears: which there are, what PEFT put on them, and whether today, at this very forward, they still are
what they were when `apply` looked. PEFT is only looked at, never imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..nodes.member import Member
from .held import HeldLinear, stored_weight
from .module_checks import NotFused, check_weight, is_gathered, is_library_function, is_unhooked


@dataclass
class LinearModule:
    """A linear of the model, with or without LoRA, and the Member that the projection works with.

    name: its full path; module: PEFT's layer, or the linear itself; base: the frozen linear; adapter: the name of the
    active one, or None; parent: the module that it is in; called: whether the forward that is ours is bound to the
    module itself, so that torch runs the module's hooks around it.
    """

    name: str
    module: Any
    base: Any
    adapter: str | None
    member: Member
    parent: Any = None
    called: bool = False

    @property
    def members(self) -> list[Member]:
        """What the projection works with: one for each adapter that the linear's rows may have."""
        return [self.member]

    def __post_init__(self) -> None:
        self.leaf, self.rank, self.kind = self.name.rpartition(".")[2], self.member.rank, type(self.base)
        self.stored = "operand" if isinstance(self.base, HeldLinear) else "weight"  # the parameter's name
        self.known = stored_weight(self.base)

    def what_changed(self) -> str | None:
        """Reads weight, bias, A, B, scale and dropout anew; the reason, in words that are the same for every linear, if
        PEFT must run this forward (merged, hooked, switched, another kind of adapter under the same name …).

        It runs for every linear on every forward, so it reads modules' dictionaries: torch's own attribute look-up
        costs a microsecond each, and small models wait for the host.
        """
        module, member, base = self.module, self.member, self.base
        if self.parent is not None and self.parent._modules.get(self.leaf) is not module:
            return "another module is in a linear's place (its adapter was unloaded?)"
        if (module is not base and module._modules.get("base_layer") is not base) or type(base) is not self.kind:
            return "a linear has another base layer, or one of another class"
        if not ((self.called or self._unhooked()) and (module is base or is_unhooked(base))):
            return "a linear has hooks or a replaced forward"
        weight = base._parameters.get(self.stored)  # None where somebody has put a parametrization on it
        if weight is None or weight.requires_grad or "bias" not in base._parameters:
            _check_not_sharded(base)
            return "a base weight is trained, or parametrized"
        if member.gathered and hasattr(weight, "device_mesh"):
            return "a sharded base weight is not gathered (FSDP)"
        if weight is not self.known:
            if not _alike(weight, self.known):
                _check_not_sharded(base)
                return "a base weight of another kind is in the place of one that was known"
            self.known, member.weight = weight, base.weight
        member.bias = base._parameters["bias"]
        if member.quantized is not None:
            member.quantized = weight.quant_state
        return None if module is base else self._adapter_changed()

    def _unhooked(self) -> bool:
        """Whether nobody hooks into the module."""
        return is_unhooked(self.module)

    def _adapter_changed(self) -> str | None:
        module, adapter, parts = self.module, self.adapter, self.module._modules
        if module._disable_adapters or module.merged_adapters:
            return "adapters are disabled" if module._disable_adapters else "adapters are merged"
        active = [a for a in module.active_adapters if a in parts["lora_A"]._modules]
        if active != ([] if adapter is None else [adapter]):
            now = " and ".join(active) or "none"
            return f"the active adapter is {now}, at apply it was {adapter or 'none'}; call remove and apply again"
        if adapter is None:
            return None
        a, b, drop = (parts[name]._modules[adapter] for name in ("lora_A", "lora_B", "lora_dropout"))
        known = type(a) is type(b) is nn.Linear and type(drop) in (nn.Identity, nn.Dropout)
        weight = a._parameters.get("weight") if known else None
        if weight is None or adapter in module.__dict__.get("lora_variant", ()):
            return "an adapter is of another kind than at apply"
        if weight.shape[0] != self.rank:
            return "an adapter is of another rank than at apply; call remove and apply again"
        if not (is_unhooked(a) and is_unhooked(b) and is_unhooked(drop)):
            return "an adapter has hooks"
        dropout = drop.p if drop.training and type(drop) is nn.Dropout else 0.0
        scale, b = float(module.scaling[adapter]), b._parameters
        self.member.adapter = weight, b["weight"], b["bias"], scale, dropout, None
        return None


def _alike(weight: Any, known: Any) -> bool:
    """Whether a weight that was put in another's place (load_state_dict with assign=True, say) can take it here too.
    FSDP2 puts what it has gathered in the place of its part, whose shape is that of the whole."""
    gathered = hasattr(known, "device_mesh") and not hasattr(weight, "device_mesh")
    if (type(weight) is not type(known) and not gathered) or weight.shape != known.shape:
        return False
    if hasattr(known, "quant_state"):  # bitsandbytes makes a new one when the model moves
        return weight.quant_state is not None
    return (weight.dtype, weight.device) == (known.dtype, known.device)


def _sharded(base: Any) -> bool:
    """Whether FSDP (1 or 2) manages this linear's weight."""
    return getattr(base, "_is_fsdp_managed_module", False) or hasattr(stored_weight(base), "device_mesh")


def _check_not_sharded(base: Any) -> None:
    """FSDP reads the storage behind a weight that is no longer contiguous, neighbours and all: from then on the model
    computes with other weights, whoever runs it."""
    if _sharded(base):
        raise RuntimeError(
            "FSDP has flattened weights that lorakernels.apply had moved into a buffer, which it cannot read; "
            "build the model anew and wrap it without apply"
        )


def is_lora(module: Any) -> bool:
    """Whether a module is a layer with LoRA on it, of PEFT or in its manner."""
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def base_linear(module: Any) -> Any:
    """The frozen linear that a module is, or that is inside PEFT's layer; None where there is none."""
    base = None if module is None else module._modules.get("base_layer", module)
    return base if isinstance(base, nn.Linear) else None


def linear_module(name: str, parent: Any) -> LinearModule:
    """The linear `name` (its full path) in parent. Raises NotFused with the reason where it is left to PEFT."""
    module = getattr(parent, name.rpartition(".")[2])
    lora = is_lora(module)
    if lora and not type(module).__module__.startswith("peft.tuners.lora"):
        raise NotFused(f"{type(module).__name__} is not PEFT's LoRA linear")
    if lora and not is_library_function(type(module).forward, "peft"):
        raise NotFused(f"the forward of PEFT's {type(module).__name__} was replaced")
    if not lora and hasattr(module, "base_layer"):
        raise NotFused(f"the adapter {type(module).__module__}.{type(module).__name__} is not LoRA")
    base = module.base_layer if lora else module
    quantized, dtype = _base_kind(base)
    weight: Any = stored_weight(base)
    if weight.requires_grad:
        raise NotFused("its base weight is trained")
    gathered = is_gathered(base)
    if _sharded(base) and not gathered:
        raise NotFused("its weight is sharded (FSDP of the first kind, or another library)")
    if quantized is None:
        check_weight(weight, base)
    if not is_unhooked(module) or not is_unhooked(base):
        raise NotFused("it has hooks or a replaced forward")
    adapter = _only_adapter(module) if lora else None
    known: dict[str, Any] = {"quantized": quantized, "compute_dtype": dtype, "gathered": gathered}
    if isinstance(base, HeldLinear):  # its weight is there once the operand is gathered, and stays in it
        known |= {"shape": (base.out_features, base.in_features), "gathered": True}
    member = Member(name, weight, base.bias, **known)
    if adapter is not None:
        member = Member(name, weight, base.bias, *adapter_weights(module, adapter, base), **known)
    return LinearModule(name, module, base, adapter, member, parent)


def adapter_weights(module: Any, adapter: str, base: Any) -> tuple[Any, Any]:
    """A (r, K) and B (N, r) of an adapter of PEFT's layer. Raises NotFused where they cannot be used as they are."""
    a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
    for part in (module.lora_A[adapter], module.lora_B[adapter]):
        check_weight(part.weight, part)
    if a.device != (device := stored_weight(base).device):
        raise NotFused(f"its adapter is on {a.device}, its weight on {device}")
    return a, b


def _base_kind(base: Any) -> tuple[object | None, torch.dtype | None]:
    """(quant_state of NF4 or None, compute dtype of NF4 or None)."""
    kind = type(base).__name__
    if kind == "Linear8bitLt":
        raise NotFused("8-bit weights are left to PEFT: their product needs bitsandbytes' own kernel")
    if kind == "Linear4bit":
        state = getattr(base.weight, "quant_state", None)
        if state is None:
            raise NotFused("its 4-bit weight is not quantized yet (move the model to the GPU first)")
        if state.quant_type != "nf4":
            raise NotFused(f"4-bit type {state.quant_type} is not NF4")
        return state, base.compute_dtype or state.dtype
    if type(base) not in (nn.Linear, HeldLinear) or not is_library_function(nn.Linear.forward, "torch"):
        raise NotFused(f"its base layer is a {kind}, not a Linear")
    if (kept := stored_weight(base).dtype) not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise NotFused(f"its weight is {kept}")
    return None, None


def _only_adapter(module) -> str | None:
    if module.disable_adapters:
        raise NotFused("its adapters are disabled")
    if module.merged:
        raise NotFused("its adapters are merged")
    active = [a for a in module.active_adapters if a in module.lora_A]
    if len(active) > 1:
        raise NotFused(f"{len(active)} adapters are active at once")
    if not active:
        return None
    adapter = active[0]
    if getattr(module, "fan_in_fan_out", False):
        raise NotFused("fan_in_fan_out")
    if adapter in getattr(module, "lora_variant", {}):
        raise NotFused(f"the LoRA variant {type(module.lora_variant[adapter]).__name__.removesuffix('LinearVariant')}")
    drop = module.lora_dropout[adapter]
    if type(drop) not in (nn.Identity, nn.Dropout):
        raise NotFused(f"its dropout is a {type(drop).__name__}")
    if any(type(part[adapter]) is not nn.Linear for part in (module.lora_A, module.lora_B)):
        raise NotFused("its lora_A or lora_B is not a Linear")
    return adapter
