"""Our own kernels (kernels/lorakernels) as toggles: each part alone, and `lora_kernels` for all of them.

The parts fill slots of their own, so they go together; they are one patch of the model all the same, so the second
part takes the first one's patch off and puts both on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Requires, Tolerance, added
from lorabench.contract.machine import Machine
from lorabench.contract.model import ModelSpec
from lorabench.contract.settings import Settings, Worth
from lorabench.contract.step import Step
from lorabench_ablations.loading import round_weights

if TYPE_CHECKING:
    import torch
    from torch import nn

PARTS = ("mlp", "qkv", "o", "rms_norm", "rope", "linear_cross_entropy", "linear")
SLOTS = ("mlp", "qkv", "o", "norm", "rope", "loss")  # of the parts, as toggles of their own
MULTIPLY = (  # toggles that multiply with the frozen weights themselves, and so pass by what stands in a linear's place
    "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_kernels", "fp8_base", "long_context", "lora_addmm",
    "axolotl", "axolotl_liger", "unsloth", "limit",
)  # fmt: skip
MARK = "_lorabench_lorakernels"  # on the model: the switches that are on, and the last report
LAY_OUT = "_lorabench_lay_out"  # on the base: of the PEFT model, makes what lays a layer out before it is sharded


def on_kernels(model: nn.Module) -> bool:
    """Whether lorakernels has changed some module of this model, which it may not be installed for."""
    return any("_lorakernels_state" in module.__dict__ for module in model.modules())


@dataclass(frozen=True, kw_only=True)
class Kernel(Ablation):
    """Base: `lorakernels.apply` with some of its switches."""

    parts: ClassVar[tuple[str, ...]]
    fp8: ClassVar[bool] = False
    own_dropout_masks: ClassVar[bool] = True
    requires: ClassVar[Requires] = Requires(
        packages={"lorakernels": "pip install lorakernels (in a checkout: pip install ./kernels)"}
    )

    def patch(self, model: nn.Module) -> int:
        import lorakernels

        before = getattr(model, MARK, None)
        parts = {*self.parts, *(before["parts"] if before else ())}
        fp8 = self.fp8 or bool(before and before["fp8"])
        options = {**(before["options"] if before else {}), **self.options()}
        if before:
            lorakernels.remove(model)
        report = lorakernels.apply(model, **{part: part in parts for part in PARTS}, fp8=fp8, **options)
        mark = {"parts": parts, "fp8": fp8, "options": options, "report": report, "others": _others(model)}
        setattr(model, MARK, mark)
        return sum(report.counts.get(part, 0) for part in self.parts)

    def options(self) -> dict[str, Any]:
        """Further keyword arguments of `lorakernels.apply`."""
        return {}

    def audit(self, evidence: Evidence) -> int:
        report = getattr(evidence.arm.model, MARK)["report"]
        if not evidence.patched and report.left:
            (reason, count), *_ = Counter(site.reason for site in report.left).most_common()
            first = next(site.name for site in report.left if site.reason == reason)
            others = f" and {count - 1} more" if count > 1 else ""
            raise NotApplied(f"{self.name} left {first}{others} to PEFT: {reason}")
        return evidence.patched or 0

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        from lorakernels import tune

        mark = getattr(evidence.arm.model, MARK)
        report, others = mark["report"], mark["others"]
        left = sorted({f"{site.part}: {site.reason}" for site in report.left})
        if others:
            left.append(f"the adapters {', '.join(others)}: PEFT computes them; fused_multi_lora serves several")
        return {"lorakernels": {"changed": dict(report.counts), "left": left, "picked": str(tune.choices())}}


def _others(model: Any) -> list[str]:
    """The adapters that are not active while the kernels are put on, which serve one."""
    return sorted(set(getattr(model, "peft_config", {})) - set(getattr(model, "active_adapters", ())))


@dataclass(frozen=True, kw_only=True)
class LoraMlpKernel(Kernel):
    name: ClassVar[str] = "lora_mlp_kernel"
    slot: ClassVar[str] = "mlp"
    summary: ClassVar[str] = "ours: gate and up as one GEMM with its LoRA, SwiGLU, down"
    parts: ClassVar[tuple[str, ...]] = ("mlp",)


@dataclass(frozen=True, kw_only=True)
class LoraQkvKernel(Kernel):
    name: ClassVar[str] = "lora_qkv_kernel"
    slot: ClassVar[str] = "qkv"
    summary: ClassVar[str] = "ours: q, k and v as one GEMM with their LoRA"
    parts: ClassVar[tuple[str, ...]] = ("qkv",)


@dataclass(frozen=True, kw_only=True)
class LoraOKernel(Kernel):
    name: ClassVar[str] = "lora_o_kernel"
    slot: ClassVar[str] = "o"
    summary: ClassVar[str] = "ours: the output projection as one GEMM with its LoRA"
    parts: ClassVar[tuple[str, ...]] = ("o",)


@dataclass(frozen=True, kw_only=True)
class FusedRmsNorm(Kernel):
    name: ClassVar[str] = "fused_rms_norm"
    slot: ClassVar[str] = "norm"
    summary: ClassVar[str] = "ours: RMSNorm in one kernel, recomputed in backward"
    parts: ClassVar[tuple[str, ...]] = ("rms_norm",)


@dataclass(frozen=True, kw_only=True)
class FusedRope(Kernel):
    name: ClassVar[str] = "fused_rope"
    slot: ClassVar[str] = "rope"
    summary: ClassVar[str] = "ours: RoPE on q and k together"
    parts: ClassVar[tuple[str, ...]] = ("rope",)


@dataclass(frozen=True, kw_only=True)
class FusedLinearCrossEntropy(Kernel):
    name: ClassVar[str] = "fused_linear_cross_entropy"
    slot: ClassVar[str] = "loss"
    summary: ClassVar[str] = "ours: head and loss in chunks, the logits are never held"
    parts: ClassVar[tuple[str, ...]] = ("linear_cross_entropy",)


@dataclass(frozen=True, kw_only=True)
class LoraKernels(Kernel):
    """All parts. `one_gemm` and `merge_projections` off show what each of the two forms is worth."""

    name: ClassVar[str] = "lora_kernels"
    slot: ClassVar[str] = "fused_kernels"
    summary: ClassVar[str] = "ours: every kernel of lorakernels"
    parts: ClassVar[tuple[str, ...]] = PARTS
    excludes: ClassVar[dict[str, str]] = dict.fromkeys(SLOTS, "lora_kernels already has this part")

    kinds: ClassVar[tuple[str, ...]] = ("train", "op")
    keeps_weights: ClassVar[bool] = True
    worth_trying: ClassVar[Worth | None] = "time"

    one_gemm: bool = True
    merge_projections: bool = True

    def prepare(self, base: nn.Module, *, upcast: bool) -> None:
        """Leaves word for whoever shards the weights, and is asked to patch before us: fsdp2."""
        import lorakernels

        setattr(base, LAY_OUT, partial(lorakernels.before_fully_shard, merge_projections=self.merge_projections))

    def patch(self, model: nn.Module) -> int:
        from lorabench.measure.kinds.operations.linear import OneLinear

        base = model.get_base_model()  # type: ignore[operator]
        if not isinstance(base, OneLinear):
            return super().patch(model)
        from lorakernels.model.linear import apply_linears, apply_normed

        if base.norm is None:
            report = apply_linears(model, one_gemm=self.one_gemm)
        else:
            report = apply_normed(base, one_gemm=self.one_gemm)
        setattr(model, MARK, {"report": report, "others": _others(model)})
        return report.total

    def step(self, step: Step) -> Step:
        """Behind a norm, X is born where the GEMM wants it; so is then dY, which in a model comes from our kernels."""
        from lorabench.measure.kinds.operations.linear import OpStep

        if isinstance(step, OpStep):
            from lorakernels.model.linear import like_ours

            base = step.model.get_base_model()  # type: ignore[operator]
            step.dy = step.dy if base.norm is None else like_ours(base, step.dy)
        return step

    def options(self) -> dict[str, Any]:
        return {"one_gemm": self.one_gemm, "merge_projections": self.merge_projections}

    def settings(self) -> Settings:
        changed = {name: value for name, value in self.options().items() if value is not True}
        changed |= {"fp8": True} if self.fp8 else {}
        call = f"lorakernels.apply({', '.join(['model', *(f'{name}={value!r}' for name, value in changed.items())])})"
        return Settings(imports=("import lorakernels",), code=(call,))


@dataclass(frozen=True, kw_only=True)
class Fp8Products(Requires):
    """A GPU that multiplies in FP8. A CPU emulates it, for the numbers alone."""

    def unmet(self, machine: Machine, model: ModelSpec | None = None) -> str | None:
        if machine.device == "cuda" and not (machine.capability and machine.capability >= (8, 9)):
            have = ".".join(map(str, machine.capability or (0, 0)))
            return f"needs a GPU with FP8, CUDA capability 8.9 or newer; this one has {have}"
        return super().unmet(machine, model)


@dataclass(frozen=True, kw_only=True)
class Fp8Base(LoraKernels):
    """Rounds the frozen weights and the activations of their GEMMs to e4m3, scaled by rows. `attention` off keeps
    q, k, v and o in the compute dtype, and `keep` the linears of these names."""

    name: ClassVar[str] = "fp8_base"
    summary: ClassVar[str] = "ours: every kernel, with the frozen weights' GEMMs in FP8"
    fp8: ClassVar[bool] = True
    rounds_weights: ClassVar[bool] = True
    requires: ClassVar[Requires] = Fp8Products(packages=Kernel.requires.packages)
    kinds: ClassVar[tuple[str, ...]] = ("train",)
    worth_trying: ClassVar[Worth | None] = None  # it rounds more: for whoever asks for it
    attention: bool = added(True)
    keep: tuple[str, ...] = added(())
    # Three bits of mantissa (eps 2⁻³): 16 times as coarse as bfloat16, 128 times as float16. Measured, over plain
    # PEFT's own error: 10.9 times in Llama-3.1-8B's worst tensor (0.38), at most 12.6 in SmolLM2-135M, 101 in float16.
    tolerance: ClassVar[Tolerance] = Tolerance(
        words="frozen weights and their inputs in e4m3", grad=0.5, eps=2**-3, loss=0.02
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "keep", tuple(self.keep))  # a list as YAML has it

    def prepare(self, base: nn.Module, *, upcast: bool) -> None:
        """With `upcast` each weight gets the numbers that its products have."""
        if not upcast:
            return super().prepare(base, upcast=upcast)

        from lorakernels.ops.quantize_rows import quantize_rows

        def rounded(name: str, linear: Any) -> torch.Tensor | None:
            attention = ".self_attn." in name or ".attention." in name
            if (attention and not self.attention) or name.rpartition(".")[2] in self.keep:
                return None
            made = quantize_rows(linear.weight)
            return made.q.float() * made.scale

        round_weights(base, rounded)

    def options(self) -> dict[str, Any]:
        kept = {"fp8_except": self.keep} if self.keep else {}
        return super().options() | {"fp8_attention": self.attention} | kept
