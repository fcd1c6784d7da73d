"""Several adapters of a PEFT model trained at once, each on its own rows of a batch:

    jobs = lorakernels.apply_multi(model, ["one", "two"])     # adapters that PEFT has put on the model
    jobs.set([0, 0, 1])                                       # samples 0 and 1 are of `one`, sample 2 of `two`
    losses = …                                                # model(**batch), and a loss for each job
    jobs.remove()

PEFT's own `adapter_names` say the same, and PEFT refuses them in training. Whoever trains keeps its adapters, losses
and optimizers: an adapter without rows gets no gradient, and each is saved and loaded by PEFT as if it were alone.
Between two calls of `set` the rows stay, also for a layer that a checkpoint runs again in the backward. What is no
plain LoRA on a linear is refused by `apply_multi`, because its rows would silently have the active adapter. Run:
python -m pytest tests/lorakernels/test_multi.py
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..nodes.multi_linear import multi_linear
from ..ops.job_rows import JobRows
from ..ops.multi_lora import Adapter, AdapterTables
from .lora_modules import is_lora
from .module_checks import is_library_function, is_unhooked
from .patching import STATE, Report, apply, remove

MARK = "_lorakernels_multi"


class _Linear:
    """One linear with LoRA: its jobs' adapters, read anew on each forward."""

    def __init__(self, module: Any, jobs: MultiAdapters) -> None:
        self.jobs, self.base = jobs, module.base_layer
        own = [name if name in module.lora_A else None for name in jobs.adapters]
        self.parts = [
            None if name is None else (module.lora_A[name], module.lora_B[name], module.lora_dropout[name], name)
            for name in own
        ]
        self.tables = AdapterTables()
        self.tables.of(self.read(module))  # what does not fit is said now
        plain = type(self.base) is nn.Linear and is_library_function(nn.Linear.forward, "torch")
        self.plain = plain and is_unhooked(self.base)

    def read(self, module: Any) -> list[Adapter | None]:
        """By job; PEFT changes scales in place, and parameters may be put in others' places."""
        absent = set(self.jobs.rows.present) - self.jobs.serving
        return [
            None
            if part is None or job in absent
            else Adapter(part[0].weight, part[1].weight, module.scaling[part[3]], _p(part[2]))
            for job, part in enumerate(self.parts)
        ]

    def forward(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        if module._disable_adapters or module.merged_adapters:
            state = "disabled" if module._disable_adapters else "merged"
            raise RuntimeError(f"the adapters are {state}; expected set(None) on what apply_multi returned before that")
        adapters = self.read(module)
        if not any(adapters):
            return self.base(x)
        table = self.tables.of(adapters)
        rows = self.jobs.rows.of_input(x)
        if self.plain and not self.base.weight.requires_grad:
            return multi_linear(x, self.base.weight, table, rows, self.base.bias)
        base = self.base(x)
        return multi_linear(x, None, table, rows, base=base).to(base.dtype)


def _p(dropout: Any) -> float:
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Bound to an instance of PEFT's LoRA linear: (…, N) of x (…, K)."""
    linear: _Linear = self.__dict__[MARK]
    if not linear.jobs.on:
        return type(self).forward(self, x, *args, **kwargs)
    if args or kwargs:
        raise RuntimeError(
            "a linear was called with more than its input (adapter_names); `set` says the rows' adapters"
        )
    return linear.forward(self, x)


class MultiAdapters:
    """What `apply_multi` returns. adapters: the jobs' adapters, a job being its place among them; linears: how many
    linears have rows of several adapters; report: of the fused form what runs on its nodes, else None; rows: what `set`
    was given; serving: the jobs whose adapters their rows have; resident: those whose adapters stay in their slots."""

    linear_forward = staticmethod(_forward)

    def __init__(self, model: nn.Module, adapters: Sequence[str]) -> None:
        self.model, self.adapters, self.linears = model, tuple(adapters), 0
        self.on = False
        self.report: Report | None = None
        self.rows, self.serving, self.resident = JobRows([]), frozenset[int](), frozenset[int]()
        self._trained: dict[str, bool] = {}

    def set(
        self, job: Sequence[int] | torch.Tensor | JobRows | None, *, without: Collection[int] = (),
        resident: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Which job the rows of the batches to come are of: for each sample (B,), or for each position (B, S) or
        (B · S,); give it on the host. None: PEFT's own forward, with its active adapter, until the next call. without:
        jobs whose rows go through the frozen model alone (one that has become NaN, say). resident: jobs whose adapters
        are known to be finite: in the fused form they stay in their slots where they have no rows, so that batches of
        one job after another need not bring them in and out. Their gradients are None all the same."""
        self.on = job is not None
        if job is None:
            return
        self.rows = job if isinstance(job, JobRows) else JobRows.each(job)
        self.serving = frozenset(self.rows.present) - frozenset(without)
        self.resident = frozenset(resident) - frozenset(without)
        if self.rows.present and self.rows.present[-1] >= len(self.adapters):
            raise ValueError(f"job {self.rows.present[-1]}: expected one of the {len(self.adapters)} from 0")

    def remove(self) -> None:
        """Give PEFT's linears their own forwards back, and to each parameter whether it is trained."""
        if any(STATE in module.__dict__ for module in self.model.modules()) and self.report is not None:
            remove(self.model)
        for module in self.model.modules():
            if getattr(module.__dict__.get(MARK), "jobs", None) is self:
                del module.__dict__[MARK], module.__dict__["forward"]
        for name, parameter in self.model.named_parameters():
            if name in self._trained:
                parameter.requires_grad_(self._trained[name])


def apply_multi(
    model: nn.Module, adapters: Sequence[str] | None = None, *, fused: bool = False, **switches: Any
) -> MultiAdapters:  # fmt: skip
    """Give every LoRA linear of a PEFT model, in place, rows of several adapters; these are then all trained, where
    PEFT trains the active one.

    adapters: their names, a job being a place among them; None: all that are on the model. fused: the model runs on all
    that `apply` has, with these switches of `apply`, and the adapters of a linear lie side by side in one product;
    there a number that is not finite, in one job's adapter, activations or gradients, makes the others' not finite too,
    so whoever trains must look at losses and gradients before an optimizer steps. Without it rows are kept apart, and
    such a job leaves the others bitwise alone. Where a node cannot serve the rows (hooks …) they go linear by
    linear. Raises ValueError for a name that is not there, and for a layer that is no plain LoRA on a linear.
    """
    if switches and not fused:
        raise ValueError(f"{', '.join(switches)}: expected fused=True, or no switches of `apply`")
    found: dict[str, Any] = {name: module for name, module in model.named_modules() if is_lora(module)}
    there = list(dict.fromkeys(name for module in found.values() for name in module.lora_A))
    names = there if adapters is None else list(adapters)
    if not names or not set(names) <= set(there) or len(set(names)) < len(names):
        raise ValueError(
            f"adapters {', '.join(names) or 'none'}: expected some of {', '.join(there) or 'none'}, each once"
        )
    jobs = MultiAdapters(model, names)
    whole = {name: module for name, module in model.named_modules() if hasattr(module, "original_module")}
    for name, module in (found | whole).items():
        if reason := _why_not(module, names):
            raise ValueError(f"{name}: {reason}; expected plain LoRA on a linear, so that each row has its own adapter")
    if fused:
        jobs.report = apply(model, jobs=jobs, linear=False, **switches)
    for module in found.values():
        if any(name in module.lora_A for name in names):
            module.__dict__[MARK] = _Linear(module, jobs)
            module.forward = MethodType(_forward, module)
            jobs.linears += 1
    for name, parameter in model.named_parameters():
        if ".lora_" in name and any(f".{adapter}." in name for adapter in names):
            jobs._trained[name] = parameter.requires_grad
            parameter.requires_grad_(True)
    return jobs


def _why_not(module: Any, names: Sequence[str]) -> str | None:
    """Why the rows of a layer with LoRA, or of one that PEFT trains whole, cannot have an adapter each, or None."""
    if hasattr(module, "original_module"):
        mine = sorted(set(names) & module._get_available_adapters())
        return f"PEFT's {type(module).__name__} trains it for {', '.join(mine)}, for all rows" if mine else None
    if not type(module).__module__.startswith("peft.tuners.lora") or not hasattr(module, "lora_dropout"):
        return f"{type(module).__name__} is not PEFT's LoRA linear"
    if not is_unhooked(module):
        return "it has hooks or a replaced forward"
    if module.merged_adapters:
        return "its adapters are merged"
    if any(name in module.lora_embedding_A for name in names):
        return "it adapts an embedding"
    if any(name in getattr(module, "lora_variant", {}) for name in names):
        return "an adapter is a variant of LoRA (DoRA, say)"
    own = [part[name] for part in (module.lora_A, module.lora_B) for name in names if name in part]
    if any(type(part) is not nn.Linear or part.bias is not None for part in own):
        return "its lora_A or lora_B is no Linear without a bias"
    if any(parameter.requires_grad for parameter in module.base_layer.parameters()):
        return "its base weight or bias is trained, which the jobs would share"
    odd = [module.lora_dropout[name] for name in names if name in module.lora_dropout]
    if kinds := [type(drop).__name__ for drop in odd if type(drop) not in (nn.Identity, nn.Dropout)]:
        return f"its dropout is a {kinds[0]}"
    return None
