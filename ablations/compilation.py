"""Slot `compilation`: torch.compile over the whole model, or over each of its layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Unsupported
from lorabench.contract.settings import Settings, Worth
from lorabench.contract.step import Step

REGION = "Torch-Compiled Region"  # how torch's profiler calls a run of a graph


@dataclass(frozen=True, kw_only=True)
class TorchCompile(Ablation):
    """`model.compile(mode=…, dynamic=False)`, on the instance. Its time to compile is not part of any trial."""

    name: ClassVar[str] = "torch_compile"
    slot: ClassVar[str] = "compilation"
    summary: ClassVar[str] = "torch.compile of the whole PEFT model"
    slow_start: ClassVar[bool] = True  # 131 s for 30 layers on an H200's host
    worth_trying: ClassVar[Worth | None] = "time"

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    fullgraph: bool = False

    def step(self, step: Step) -> Step:
        self.compile([step.model])
        return step

    def compile(self, modules: Iterable[Any]) -> None:
        """Each of them by itself."""
        import torch

        if not torch.cuda.is_available() and not has_compiler():
            raise Unsupported("torch_compile needs a C++ compiler on a CPU: install g++ or clang")
        torch._dynamo.utils.counters.clear()
        for module in modules:
            module.compile(mode=None if self.mode == "default" else self.mode, dynamic=False, fullgraph=self.fullgraph)

    def audit(self, evidence: Evidence) -> int:
        """Graphs that ran, not those compiled: a model of two layers runs what the gate's had compiled."""
        return sum(name.startswith(REGION) for name in evidence.ops)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        from torch._dynamo.utils import counters

        breaks = sum(counters["graph_break"].values())
        return {"torch_compile": {"graphs": self.audit(evidence), "graph_breaks": breaks}}

    def settings(self) -> Settings | None:
        if self.fullgraph:  # which no trainer can be told
            return None
        switches = {"torch_compile": True} | ({} if self.mode == "default" else {"torch_compile_mode": self.mode})
        return Settings(trainer=switches, axolotl=switches)


@dataclass(frozen=True, kw_only=True)
class TorchCompileLayers(TorchCompile):
    """torch's recipe of regional compilation: what the compiler made of the first layer serves those that are like it.
    So it begins in a fraction of the time; what lies between layers is left as it is."""

    name: ClassVar[str] = "torch_compile_layers"
    summary: ClassVar[str] = "torch.compile of each decoder layer by itself, which compiles one of them"

    def patch(self, model: Any) -> int:
        layers = self._layers(model)
        self.compile(layers)
        return len(layers)

    def step(self, step: Step) -> Step:
        return step

    def _layers(self, model: Any) -> Sequence[Any]:
        from lorabench.plan.architecture import decoder_layers

        return decoder_layers(model)

    def audit(self, evidence: Evidence) -> int:
        """Every layer of every batch has to have run as a graph: where they are not alike the compiler gives up."""
        layers = len(self._layers(evidence.arm.model))
        expected = layers * len(evidence.arm.micro_batches)
        ran = sum(count for name, count in evidence.ops.items() if name.startswith(REGION))
        if ran < expected:
            raise NotApplied(f"compiled layers ran {ran} times; layers run {expected} times in a step")
        return layers

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        from torch._dynamo.utils import counters

        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        return {self.name: {"layers": self.audit(evidence), "graphs": graphs, "graph_breaks": breaks}}

    def settings(self) -> Settings | None:
        given = ", ".join(["dynamic=False", *([] if self.mode == "default" else [f"mode={self.mode!r}"])])
        if self.fullgraph:
            given += ", fullgraph=True"
        lines = ("for layer in model.get_base_model().model.layers:", f"    layer.compile({given})")
        return Settings(code=lines, note="the path to the layers is that of Llama and its like")


def has_compiler() -> bool:
    import shutil

    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))
