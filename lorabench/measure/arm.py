"""The arm: one model, one workload and a set of ablations, built and ready to step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lorabench.plan.ablation import Ablation, Blueprint, Unsupported
from lorabench.plan.model import ModelSpec
from lorabench.plan.weights import WeightsError, source_arguments
from lorabench.plan.workload import Batch, Sample, Workload, pad

LEARNING_RATE = 1e-4
LORA_B_STD = 0.02  # at its usual zero the gradient of lora_A is zero and half of the mathematics is untested


class Step:
    """One optimizer step in three phases over the arm's batches. Toggles wrap it: see `Wrapped`.

    The loss of every batch is the sum over its trained tokens divided by the trained tokens of the whole step, so that
    the gradients of a step do not depend on how its samples were put into batches.

    `loss_scale`: backward starts from the loss times this, and `update` divides it out again: `float16_scale`, else 1.
    """

    phases: tuple[str, ...] = ("forward", "backward", "step")  # those that a trial runs and times

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], loss_scale: float = 1.0
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.batches = list(batches)
        self.items = sum(b.trained for b in batches)
        self.loss_scale = loss_scale

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def forward(self, batch: Batch) -> Tensor:
        return self.model(**batch.inputs, num_items_in_batch=self.items).loss

    def backward(self, loss: Tensor) -> None:
        loss.backward(None if self.loss_scale == 1 else torch.full_like(loss, self.loss_scale))

    def update(self) -> None:
        if self.loss_scale != 1:
            scaled = (p.grad for group in self.optimizer.param_groups for p in group["params"])
            torch._foreach_mul_([g for g in scaled if g is not None], 1 / self.loss_scale)
        self.optimizer.step()

    def settle(self) -> None:
        """Called right before a trial's first mark, with an idle device; part of no time, and not waited for."""

    def loss_of(self, out: Tensor) -> float:
        """The number that stands for the loss, of what `forward` returned; asked for after the trial."""
        return float(out)

    def compared(self, out: Tensor) -> dict[str, Tensor]:
        """What the gate compares beside the adapters' gradients, in float32; `out` is what `forward` returned."""
        return {}


class Wrapped(Step):
    """A step around another step: override the phases that the toggle changes."""

    def __init__(self, inner: Step) -> None:
        self.inner = inner
        self.model, self.optimizer = inner.model, inner.optimizer
        self.batches, self.items, self.phases = inner.batches, inner.items, inner.phases
        self.loss_scale = inner.loss_scale

    def clear(self) -> None:
        self.inner.clear()

    def forward(self, batch: Batch) -> Tensor:
        return self.inner.forward(batch)

    def backward(self, loss: Tensor) -> None:
        self.inner.backward(loss)

    def update(self) -> None:
        self.inner.update()

    def settle(self) -> None:
        self.inner.settle()

    def loss_of(self, out: Tensor) -> float:
        return self.inner.loss_of(out)

    def compared(self, out: Tensor) -> dict[str, Tensor]:
        return self.inner.compared(out)


@dataclass
class Arm:
    """An arm, built. `patched` is what each toggle's `patch` returned; `samples` are the step's, before batching."""

    name: str
    ablations: tuple[Ablation, ...]
    model: nn.Module
    step: Step
    samples: list[Sample]
    dtype: torch.dtype
    device: torch.device
    patched: dict[str, int | None] = field(default_factory=dict)

    @property
    def real(self) -> int:
        return sum(b.real for b in self.step.batches)

    @property
    def padded(self) -> int:
        return sum(b.padded for b in self.step.batches)

    def adapters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of every trained tensor, by PEFT's names."""
        return ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)

    def gradients(self) -> dict[str, Tensor]:
        """A float32 copy of every adapter gradient between backward and update. A missing one is zeros: the gate will
        see it."""
        scale = self.step.loss_scale
        return {
            n: torch.zeros_like(p, dtype=torch.float32) if p.grad is None else p.grad.detach().float() / scale
            for n, p in self.adapters()
        }


def build(
    name: str,
    spec: ModelSpec,
    workload: Workload,
    samples: Sequence[Sample],
    ablations: Sequence[Ablation],
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    layers: int | None = None,
    upcast: bool = False,
) -> Arm:
    """Build an arm. Same seed, same weights, whatever the toggles: every tensor is drawn from its own name.

    `layers` cuts the depth (the gate's twin); `upcast` turns the finished model to float32 (the gate's gold), with the
    weights as `dtype` rounded them. Raises what the hooks raise, WeightsError, and out-of-memory errors.
    """
    from lorabench.measure import op  # which is made of this module's Step

    ordered = sorted(ablations, key=lambda a: (a.rank, a.name))
    load: dict[str, Any] = {"dtype": dtype}  # attention as transformers picks it, unless a toggle says
    adapt: dict[str, Any] = {"config": spec.adapter()}
    for ablation in ordered:
        ablation.load(load)
        ablation.adapt(adapt)

    def base() -> nn.Module:
        made = _base_model(spec, load, device, layers)
        if spec.weights == "random":
            _fill(made, dtype, seed, adapters=False)
        for ablation in ordered:
            ablation.prepare(made, upcast=upcast)
        return made

    blueprint = Blueprint(spec.hf_config(layers), dtype, adapt, base)
    own = (a.build(blueprint) for a in ordered)
    model = next((m for m in own if m is not None), None) or _with_adapter(base(), adapt)
    _fill(model, dtype, seed, adapters=True)
    if upcast:
        model.float()
    model.train()
    patched = {a.name: a.patch(model) for a in ordered}
    batches = [b for a in ordered if (b := a.batch(samples, workload)) is not None]
    chosen = batches[0] if batches else pad(samples, workload.batch_size)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizers = [o for a in ordered if (o := a.optimize(params, LEARNING_RATE)) is not None]
    optimizer = optimizers[0] if optimizers else torch.optim.AdamW(params, lr=LEARNING_RATE)
    if spec.op:
        rounding = {"dtype": torch.float32 if upcast else dtype, "rounded": dtype}
        step = op.OpStep(spec, model, optimizer, chosen, device=device, seed=seed, **rounding)
    else:
        scale = float16_scale(sum(b.trained for b in chosen)) if dtype == torch.float16 else 1.0
        step = Step(model, optimizer, [_to(b, device) for b in chosen], scale)
    for ablation in ordered:
        step = ablation.step(step)
    return Arm(name, tuple(ablations), model, step, list(samples), dtype, device, patched)


def float16_scale(trained: int) -> float:
    """The largest power of two not above the step's trained tokens: backward starts from about the summed loss. The
    gradients of a mean over thousands of tokens are subnormal in float16: over 8192 tokens 40 % of them are lost, for
    PEFT as for anybody. Nobody trains so; a GradScaler's job is done here by a constant, the same for every arm."""
    return float(2 ** (max(1, trained).bit_length() - 1))


def _to(batch: Batch, device: torch.device) -> Batch:
    return replace(batch, inputs={k: v.to(device) for k, v in batch.inputs.items()})


def _base_model(spec: ModelSpec, load: dict[str, Any], device: torch.device, layers: int | None) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: Any
    if spec.op:
        from lorabench.measure import op

        return op.OneLinear(spec, load["dtype"], device)
    if spec.weights == "random":
        from transformers.initialization import no_init_weights

        with device, no_init_weights():  # every weight is drawn in `_fill`; the library's own draw would be wasted
            model = _refusing(lambda: AutoModelForCausalLM.from_config(spec.hf_config(layers), **load), spec)
        model.tie_weights()  # what no_init_weights leaves out
        return model
    where, kwargs = source_arguments(spec.weights)
    try:
        safe = {} if "gguf_file" in kwargs else {"use_safetensors": True}  # nothing is unpickled
        read = partial(AutoModelForCausalLM.from_pretrained, where, trust_remote_code=False, **safe)
        model = _refusing(lambda: read(**kwargs, **load), spec)
    except (OSError, ValueError) as error:
        raise WeightsError(f"weights {spec.weights!r} cannot be read: {str(error).splitlines()[0]}") from None
    expected = spec.hf_config()
    for size in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        have, want = getattr(model.config, size), getattr(expected, size)
        if have != want:
            raise WeightsError(f"weights {spec.weights!r} have {size} {have}, the model {spec.name} has {want}")
    model.config.use_cache = False
    if layers is not None:
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = len(model.model.layers)
    return model.to(device)


def _refusing(make: Callable[[], Any], spec: ModelSpec) -> Any:
    """transformers refuses an attention that the architecture has not: that is the user's business, not a crash."""
    try:
        return make()
    except ValueError as error:
        if "attention implementation" not in str(error):
            raise
        message = f"transformers has not this attention for the family {spec.family}; try eager in reference="
        raise Unsupported(message) from error


def _with_adapter(base: Any, adapt: dict[str, Any]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = adapt.pop("config")
    return get_peft_model(base, LoraConfig(**config), **adapt)


def named_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """A generator of its own for whatever bears this name: the same draw in every arm, whatever else is drawn."""
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{name}".encode()))


def _fill(model: nn.Module, dtype: torch.dtype, seed: int, *, adapters: bool) -> None:
    """Draw the adapters, or everything else, each tensor from a generator seeded by its own name.

    Values are rounded to the compute dtype first, so that float32 and bfloat16 adapters, and the gate's float32 gold,
    start from the very same numbers. Norm weights stay as the model made them.
    """
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            std = _std(name, tensor)
            if std is None or ("lora_" in name) != adapters:
                continue
            generator = named_generator(seed, name, tensor.device)
            drawn = torch.empty(tensor.shape, device=tensor.device, dtype=torch.float32)
            tensor.copy_(drawn.normal_(0.0, std, generator=generator).to(dtype))


def _std(name: str, tensor: Tensor) -> float | None:
    if "lora_A" in name:
        return (3 * tensor.shape[-1]) ** -0.5  # as PEFT's kaiming_uniform(a=sqrt(5)) spreads it
    if "lora_B" in name:
        return LORA_B_STD
    if tensor.dim() >= 2 or name.endswith("bias"):
        return 0.02
    return None
