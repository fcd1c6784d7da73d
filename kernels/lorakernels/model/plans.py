"""What `apply` was asked for, and what it decides for one module: a plan, made once, and the projections it works with.

Each forward first asks its plan what has changed since (adapters disabled or merged, new hooks); if anything has, the
class's own forward runs, which is PEFT's.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

from ..nodes.projection import Projection
from .held import held_operand, hold
from .lora_modules import LinearModule, linear_module
from .module_checks import NotFused
from .slots import Jobs, with_slots

if TYPE_CHECKING:
    from .long_context import LongContext


@dataclass
class Switches:
    """What `apply` was asked for."""

    mlp: bool = True
    qkv: bool = True
    o: bool = True
    rms_norm: bool = True
    rope: bool = True
    linear_cross_entropy: bool = True
    linear: bool = True
    one_gemm: bool = True
    merge_projections: bool = True
    fp8: bool = False
    fp8_attention: bool = True
    fp8_except: tuple[str, ...] = ()  # names of linears in their parents
    sdpa_backends: tuple[str, ...] | None = None
    long_context: LongContext | None = None
    jobs: Jobs | None = None  # whose rows are of several adapters
    shared: frozenset[int] = frozenset()  # the ids of weights that several modules of the model have

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "bool" and not isinstance(given := getattr(self, field.name), bool):
                raise TypeError(f"{field.name} takes True or False, not {given!r}")


class Linears:
    """Linears that share an input: merged into one Projection, or one each. fp8: their frozen products in FP8, but for
    those that are excepted, which are merged with their like alone."""

    def __init__(self, modules: list[LinearModule], switches: Switches, fp8: bool = False):
        self.modules = modules
        members = [member for m in modules for member in m.members]
        # One dtype, device and kind of storage a buffer; q and k in NF4 with a bf16 v stay apart, as does what is
        # gathered anew for each use, unless it is gathered in one piece: to merge it would be to copy it.
        same = len({(m.weight.dtype, m.weight.device, m.quantized is None, m.compute_dtype) for m in members}) == 1

        def in_fp8(m: LinearModule) -> bool:
            return fp8 and m.name.rpartition(".")[2] not in switches.fp8_except

        self.groups = []
        if switches.merge_projections and same:
            alike = [list(run) for _, run in groupby(modules, in_fp8)]
            self.groups = [_projection(run, switches, in_fp8(run[0])) for run in alike]
        if not self.groups or self.groups[0].apart:
            self.groups = [_projection([m], switches, in_fp8(m)) for m in modules]
        self._merged = [g.members for g in self.groups if len(g.members) > 1]

    def what_changed(self) -> str | None:
        """Reads all of them anew; the reason, in words, if PEFT must run this forward."""
        for m in self.modules:
            if changed := m.what_changed():
                return changed
        for members in self._merged:
            dtype = members[0].weight.dtype
            for m in members:
                if m.weight.dtype is not dtype:
                    return "one of the linears that share an input was cast to another dtype"
        return None

    def adopt(self) -> None:
        """Moves the frozen weights into the projections' buffers."""
        for g in self.groups:
            g.adopt()

    def hold(self) -> int:
        """Makes a parameter of the model of each projection's buffer; returns how many these are."""
        held, bases = 0, [m.base for m in self.modules]
        for g in self.groups:
            own, bases = bases[: len(g.linears)], bases[len(g.linears) :]
            g.adopt()
            if g.buffer is not None:
                hold(own, g)
                held += 1
        return held

    def release(self) -> None:
        """Gives each module a contiguous weight of its own again."""
        for g in self.groups:
            g.release()


def _projection(modules: list[LinearModule], switches: Switches, fp8: bool) -> Projection:
    """Of linears that share an input."""
    members = [member for m in modules for member in m.members]
    return Projection(members, switches.one_gemm, fp8, held_operand([m.base for m in modules]))


def linears(module: Any, path: str, names: list[str], switches: Switches, fp8: bool = False) -> Linears:
    """The linears of these names in a module, whose path this is; fp8: in FP8. Raises NotFused with the reason where
    one is left to PEFT."""
    found = []
    for name in names:
        try:
            linear = linear_module(f"{path}.{name}", module)
            if switches.jobs is not None:
                linear = with_slots(linear, switches.jobs)
            if id(linear.base._parameters.get("weight")) in switches.shared:
                raise NotFused("its weight is another layer's, too (layer_replication), and can lie in one buffer only")
        except NotFused as reason:
            raise NotFused(f"{name}: {reason}") from None
        found.append(linear)
    return Linears(found, switches, fp8)


NO_PICKLE = (
    "a model that lorakernels.apply has changed cannot be pickled; call lorakernels.remove first, or save its "
    "state_dict (save_pretrained works as it is)"
)


@dataclass
class Plan:
    """What was decided for one module, whose class and numbers must stay what they were. read: the numbers that are
    read anew at each forward."""

    module: Any
    read: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        self.kind = type(self.module)
        found = self.module.__dict__.items()
        self.numbers = [(n, v) for n, v in found if type(v) is float and n not in self.read]

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce__(self) -> Any:
        raise TypeError(NO_PICKLE)

    @property
    def same_class(self) -> bool:
        """Whether the module's class is the one that was planned for, with its numbers (a dropout's probability)."""
        if type(self.module) is not self.kind:
            return False
        here = self.module.__dict__
        return all(here.get(name) == value for name, value in self.numbers)
