"""Slot `parallel`: DeepSpeed's ZeRO, by its engine.

python -m lorabench.sweep world_size=2 'ablations=[{deepspeed_zero: {stage: 3}}]' workload=4x2048
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from lorabench.contract.ablation import Evidence, Requires, Unsupported, added
from lorabench.contract.arm import bytes_of
from lorabench.contract.parts import Part
from lorabench.contract.step import Step
from lorabench_ablations.parallel import (
    CAPTURED,
    COMPILED,
    Averaged,
    Parallel,
    alike,
    layers_of,
    sent,
    trained_bytes,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lorabench.contract.arm import Arm


GATHERED_INSIDE = (
    "stage 3 gathers weights inside a layer, and not the same ones when it runs a second time, which has to run the "
    "operators of the first; gradient_checkpointing goes with it"
)
LIVE = 10**9  # gathered weights that stage 3 lets stay for later, as DeepSpeed has it by default


@dataclass(frozen=True, kw_only=True)
class DeepspeedZero(Parallel):
    """ZeRO (Rajbhandari et al. 2020) divides AdamW's state among the ranks (stage 1), the gradients, too (2), and the
    weights (3).

    The engine's AdamW updates float32 copies, a part of them on each rank. The step says where they and their gradients
    lie (`Step.parts`), and the harness reads and sets them. In stages 1 and 2 the engine is given the adapters alone:
    it would broadcast every frozen weight. In stage 3 it has to, once, before it keeps its part of each. Adapters are
    gathered after an update and stay (`stage3_param_persistence_threshold` is the largest one's size), and with them
    every weight that is no larger. `by_layer`: stage 3 gathers a decoder layer at once (DeepSpeed's leaf modules) and
    the next one meanwhile; else each linear by itself, with hooks around every module, which the host runs.
    The first layer's input is given a gradient then, which is a little more work.
    """

    name: ClassVar[str] = "deepspeed_zero"
    summary: ClassVar[str] = "DeepSpeed's ZeRO-1, 2 or 3: optimizer state, gradients, weights divided among the ranks"
    one_rank: ClassVar[bool] = True
    requires: ClassVar[Requires] = Requires(
        packages={"deepspeed": "pip install 'lorabench[deepspeed]' (DS_BUILD_OPS=0 before it: without a compiler)"}
    )
    excludes: ClassVar[dict[str, str]] = {"capture": CAPTURED, "compilation": COMPILED}
    stage: Annotated[int, Field(ge=1, le=3)] = 2
    by_layer: bool = added(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by_layer and self.stage != 3:
            raise ValueError(f"by_layer is of stage 3, which gathers weights; this is stage={self.stage}")
        if self.stage == 3 and not self.by_layer:
            object.__setattr__(self, "excludes", self.excludes | {"selective_checkpointing": GATHERED_INSIDE})

    def patch(self, model: nn.Module) -> int | None:
        """In stage 3: frozen weights become parts before other toggles see them, who have to know what they are."""
        if self.stage < 3:
            return None
        import torch

        frozen = [p for p in model.parameters() if not p.requires_grad]
        for p in frozen:
            if not p.is_floating_point() or type(p.data) is not torch.Tensor:
                raise Unsupported(f"stage 3 divides plain weights; this model has a {type(p).__name__} of {p.dtype}")
        largest = max(p.numel() for p in model.parameters() if p.requires_grad)
        _library().zero.Init(module=_module(frozen), config_dict_or_path=self._config(largest, 1))
        return len(frozen)

    def step(self, step: Step) -> Step:
        import torch

        alike(self.name, step)
        trained = [p for group in step.optimizer.param_groups for p in group["params"]]
        if not isinstance(step.optimizer, torch.optim.AdamW):
            raise Unsupported(f"deepspeed_zero is measured with torch's AdamW; this is {type(step.optimizer).__name__}")
        if step.loss_scale != 1:
            raise Unsupported("deepspeed_zero is measured without a loss scale, which float16 needs: take bfloat16")
        if any(p.dtype != torch.float32 for p in trained):
            raise Unsupported("deepspeed_zero updates float32 copies: of adapters in 16 bits it is another optimizer")
        largest = max(p.numel() for p in trained)
        config = self._config(largest, len(step.batches), sum(p.numel() for p in trained))
        if self.by_layer:
            config["zero_optimization"]["stage3_prefetch_bucket_size"] = _make_leaves(step.model)
            # DeepSpeed reduces a leaf's gradients when that of its input is there. Where the input needs none, as the
            # first layer's, it does so before the layer's backward.
            step.model.get_base_model().enable_input_require_grads()
        engine, *_ = _library().initialize(
            model=step.model if self.stage == 3 else _module(trained, step.model),
            model_parameters=trained,
            optimizer=step.optimizer,
            config=config,
        )
        _gather(trained)
        step.innermost.call = engine
        step.innermost.parts = [part for p in trained for part in _parts(p)]
        return _Zero(step, engine, trained)

    def _config(self, largest: int, batches: int, elements: int = 1) -> dict[str, Any]:
        """`elements`: of all adapters, which is how much one bucket holds; the default of 5e8 is allocated whole."""
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": batches,
            "steps_per_print": 1 << 30,  # a line every ten steps would be printed inside the clock
            "gradient_clipping": 0.0,  # by default gradients longer than 1 are cut; torch's loop cuts none
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": elements,
                "stage3_param_persistence_threshold": largest,  # so many elements, or fewer, stay whole
                "stage3_max_live_parameters": LIVE,
                "memory_efficient_linear": False,  # replaces a function of torch's for the whole process
            },
        }

    def audit(self, evidence: Evidence) -> int:
        """Of stage 3 the frozen weights of which this rank holds a part; else the adapters that it updates alone, which
        on one rank are all."""
        arm = evidence.arm
        if self.stage == 3:
            return len(_divided(arm))
        parts = arm.step.innermost.parts or ()
        most = sum(p.numel() for _, p in arm.adapters())
        divided = sum(part.copies[0].numel() for part in parts) < most
        return len(parts) if divided or arm.ranks.size == 1 else 0

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        made = super().notes(evidence)
        masters = bytes_of([part.copies[0] for part in evidence.arm.step.innermost.parts or ()])
        made[self.name]["held_bytes"]["float32 copies"] = masters
        return made

    def least(self, arm: Arm, n: int) -> float:
        """Each gradient goes to the rank that updates it, which sends the parameter to all. In stage 3 each divided
        weight is gathered for forward and again for backward, but for as many as may stay in between."""
        adapters = trained_bytes(arm)
        moved = sent("reduce_scatter", adapters, n) + sent("all_gather", adapters / n, n)
        if self.stage < 3:
            return moved
        part = bytes_of(_divided(arm))
        stay = min(part, LIVE / n * arm.dtype.itemsize)
        return moved + sent("all_gather", 2 * part - stay, n) * len(arm.step.batches)


class _Zero(Averaged):
    """The engine averages gradients over the ranks and the micro-batches."""

    def __init__(self, inner: Step, engine: Any, trained: list[nn.Parameter]) -> None:
        super().__init__(inner)
        self.engine, self.trained, self.done = engine, trained, 0

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss * self.size, scale_wrt_gas=False)
        self.done = (self.done + 1) % len(self.batches)
        if self.done:
            self.engine.step()  # which counts the micro-batch and updates nothing
            return
        _gather(self.trained)
        for part in self.innermost.parts or ():
            part.grad = _gradient(part)

    def update(self) -> None:
        self.engine.step()


def _make_leaves(model: Any) -> int:
    """Each decoder layer a leaf module; how many elements the largest one has."""
    from deepspeed.utils import set_z3_leaf_module

    layers = layers_of(model.get_base_model())
    for layer in layers:
        set_z3_leaf_module(layer, True)
    return max(sum(getattr(p, "ds_numel", p.numel()) for p in layer.parameters()) for layer in layers)


def _gather(params: list[Any]) -> None:
    """Of stage 3 those that are away: at first, and after the first forward, in which the engine writes down the order
    of the modules and gives every weight back. Later updates gather them."""
    if away := [p for p in params if hasattr(p, "ds_id") and not p.numel()]:
        away[0].all_gather(away)


def _parts(param: Any) -> Iterator[Part]:
    """Of a trained parameter what this rank updates; one at most."""
    import torch.distributed as dist
    from deepspeed.utils import safe_get_local_fp32_param

    if hasattr(param, "ds_id"):
        own = safe_get_local_fp32_param(param)
        start = own.numel() * dist.get_rank()
        if (there := param.ds_numel - start) > 0:  # the last part may be longer than what is left
            yield Part(param, start, (own[:there], param.ds_tensor.data[:there]))
    elif (mapped := param._hp_mapping) is not None:
        yield Part(param, mapped.lp_fragment_address.start, (mapped.hp_fragment,))


def _gradient(part: Part) -> Tensor:
    """The engine's own tensor, not copied."""
    from deepspeed.utils import safe_get_local_grad

    param: Any = part.param
    size = part.copies[0].numel()
    if hasattr(param, "ds_id"):
        return safe_get_local_grad(param)[:size]
    grad = param._hp_mapping.get_lp_grad_fragment(param._index_in_param_group).flatten()
    return grad if grad.numel() == size else grad[part.start : part.start + size]


def _module(params: list[nn.Parameter], model: nn.Module | None = None) -> nn.Module:
    """A module that has these parameters alone; it computes what `model` does."""
    from torch import nn

    made = nn.Module()
    made.params = nn.ParameterList(params)
    if model is not None:
        made.forward = model.__call__
    return made


def _divided(arm: Arm) -> list[nn.Parameter]:
    """The frozen weights of which a rank holds a part."""
    return [p for p in arm.model.parameters() if not p.requires_grad and not p.numel()]


def _library() -> Any:
    """DeepSpeed, over the process group that there is."""
    import torch.distributed as dist

    on_cpu = dist.get_backend() == "gloo"
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if on_cpu else "cuda")  # else it looks for one, and warns
    library: Any = import_module("deepspeed")
    library.logger.setLevel("WARNING")
    if on_cpu:  # of a CPU it would compile collectives of its own, at the first use, for a minute
        library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    library.init_distributed(dist_backend=dist.get_backend())
    return library
