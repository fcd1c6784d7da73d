"""Toggles that do nothing wrong, each of them in a way that a hasty referee would take for a trick."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lorabench.contract.ablation import Tolerance
from lorabench.contract.batch import Batch, Sample, pad
from lorabench.contract.rehearsal import Rehearsal, Sizing
from lorabench.contract.workload import Workload
from lorabench_ablations.parallel import Ddp
from zoo.cheat import Honest, Turns, is_full, layers
from zoo.data import left_padded


class CallsThrough(Honest):
    name = "calls_through"
    summary = "a wrapper that changes nothing"
    Wrapper = Turns


class StaticGradients(Honest):
    name = "static_gradients"
    summary = "gradients live in buffers that are never given back, as a captured step's do"

    class Wrapper(Turns):
        keeps_gradients = True

        def clear(self) -> None:
            pass

        def forward(self, batch: Any) -> Tensor:
            if batch is self.batches[0]:
                for p in self.params:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad.zero_()
            return self.inner.forward(batch)


class SlowerButRight(Honest):
    name = "slower_but_right"
    summary = "waits in every phase"

    class Wrapper(Turns):
        def forward(self, batch: Any) -> Tensor:
            time.sleep(0.002)
            return self.inner.forward(batch)

        def backward(self, loss: Tensor) -> None:
            time.sleep(0.002)
            self.inner.backward(loss)


class SilentHooks(Honest):
    name = "silent_hooks"
    summary = "hooks on its own model that do nothing"

    def patch(self, model: Any) -> int:
        for layer in layers(model):
            layer.register_forward_hook(lambda module, args, out: None)
            layer.register_full_backward_pre_hook(lambda module, grad: None)
        return len(layers(model))


class DeclaredPatch(Honest):
    name = "declared_patch"
    summary = "patches a class, says so, and is measured in a process of its own"
    global_patch = True
    pairing = "turns"

    def patch(self, model: Any) -> int:
        from peft.tuners.lora import Linear

        forward = Linear.forward
        Linear.forward = lambda module, x, *args, **kwargs: forward(module, x, *args, **kwargs)
        return sum(isinstance(m, Linear) for m in model.modules())


class Reorders(Honest):
    name = "reorders"
    summary = "puts the samples into its batches in another order"
    slot = "batching"
    command = ("workload={alpaca:{samples:4,batch_size:2,seq_len:24}}",)

    def batch(self, samples: Sequence[Sample], workload: Workload) -> list[Batch]:
        return pad(sorted(samples, key=lambda s: len(s.tokens)), workload.batch_size)


class NoMaskForTrailingPadding(Honest):
    name = "no_mask_for_trailing_padding"
    summary = "leaves out the mask of padding on the right, which no causal token sees anyway"
    slot = "batching"
    command = ("workload={alpaca:{samples:4,batch_size:4,seq_len:24}}",)

    def batch(self, samples: Sequence[Sample], workload: Workload) -> list[Batch]:
        batches = pad(samples, workload.batch_size)
        for batch in batches:
            batch.inputs.pop("attention_mask", None)
        return batches


class PadsOnTheLeft(Honest):
    name = "pads_on_the_left"
    summary = "pads on the other side, with the mask that it takes"
    slot = "batching"
    command = ("workload={alpaca:{samples:4,batch_size:4,seq_len:24}}",)

    def batch(self, samples: Sequence[Sample], workload: Workload) -> list[Batch]:
        return left_padded(samples, workload.batch_size)


class SizesAfterTrying(Honest):
    name = "sizes_after_trying"
    summary = "trains the whole arm before it is timed, to say how many samples go into a micro-batch"
    slot = "batch_size"
    command = ("workload={alpaca:{samples:4,batch_size:1,seq_len:24}}",)

    def size(self, rehearsal: Rehearsal) -> Sizing:
        for size in (1, 4):
            rehearsal.run(rehearsal.lay_out(rehearsal.samples, size), rehearsal.room)
        return Sizing(4)


class CachesByValue(Honest):
    name = "caches_by_value"
    summary = "keeps what the first layer's frozen weights made of tokens, and looks whether they are the same"
    at_most = 1.5

    def patch(self, model: Any) -> int:
        first = layers(model)[0].self_attn
        sites = [p.base_layer for p in (first.q_proj, first.k_proj, first.v_proj)]
        for site in sites:
            site.forward = by_value(site.forward)
        return len(sites)


def by_value(forward: Any) -> Any:
    known: list[tuple[Tensor, Tensor]] = []

    def looked_up(x: Tensor) -> Tensor:
        if not known or not torch.equal(known[0][0], x):
            known[:] = [(x.detach().clone(), forward(x).detach())]
        return known[0][1]

    return looked_up


class OwnAdamW(Honest):
    name = "own_adamw"
    summary = "AdamW written out by hand"
    slot = "optimizer"

    def optimize(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return ByHand(params, {"lr": lr})


class ByHand(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s |= {"t": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                s["t"] += 1
                p.mul_(1 - group["lr"] * 0.01)
                s["m"].lerp_(p.grad, 0.1)
                s["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                m, v = s["m"] / (1 - 0.9 ** s["t"]), s["v"] / (1 - 0.999 ** s["t"])
                p.sub_(group["lr"] * m / (v.sqrt() + 1e-8))


class SlowFirstStep(Honest):
    name = "slow_first_step"
    summary = "compiles, so to speak, in its first step"

    class Wrapper(Turns):
        def forward(self, batch: Any) -> Tensor:
            if self.taken == 0:
                time.sleep(0.2)
            return self.inner.forward(batch)


class DeclaresRounding(Honest):
    name = "declares_rounding"
    summary = "rounds gradients to bfloat16, and says so"
    tolerance = Tolerance(words="gradients are rounded to bfloat16", grad=0.01)

    def patch(self, model: Any) -> int:
        trained = [p for p in model.parameters() if p.requires_grad]
        for p in trained:
            p.register_hook(lambda grad: grad.bfloat16().to(grad.dtype))
        return len(trained)


class OwnMasks(Honest):
    name = "own_masks"
    summary = "draws dropout masks of its own, at the right rate"
    command = ("lora.lora_dropout=0.1",)
    own_dropout_masks = True

    def patch(self, model: Any) -> int:
        sites = [m for m in model.modules() if isinstance(getattr(m, "lora_dropout", None), nn.ModuleDict)]
        for site in sites:
            if isinstance(site.lora_dropout["default"], nn.Dropout):
                site.lora_dropout["default"] = Mask(site.lora_dropout["default"].p)
        return len(sites)


class Mask(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, generator=self.generator) >= self.p) / (1 - self.p)


class DrawsNumbers(Honest):
    name = "draws_numbers"
    summary = "draws from torch's generator, as dropout does"

    class Wrapper(Turns):
        def forward(self, batch: Any) -> Tensor:
            torch.rand(8)
            return self.inner.forward(batch)


class PutsFlagsBack(Honest):
    name = "puts_flags_back"
    summary = "chooses SDPA's kernel for its own forward, and puts the flags back"

    class Wrapper(Turns):
        def forward(self, batch: Any) -> Tensor:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            with sdpa_kernel([SDPBackend.MATH]):
                return self.inner.forward(batch)


class WaitingThread(Honest):
    name = "waiting_thread"
    summary = "has a thread that waits for work, as a loader of data does"

    def patch(self, model: Any) -> int:
        model.loads_beside = True
        if is_full(model):
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        return 1


class ClonesTheLoss(Honest):
    name = "clones_the_loss"
    summary = "returns another tensor than the model's loss, of the same value and graph"

    class Wrapper(Turns):
        def forward(self, batch: Any) -> Tensor:
            return self.inner.forward(batch) * 1.0


class HonestRanks(Honest, Ddp):
    name = "honest_ranks"
    summary = "DDP with a wrapper that changes nothing"
    slot = "parallel"
    command = ("world_size=2", "workload=4x16")
    Wrapper = Turns


class HonestJobs(Honest):
    name = "honest_jobs"
    summary = "a wrapper around each of two jobs that changes nothing"
    command = ("workload=two_jobs",)
    Wrapper = Turns


class HonestUnderDropout(Honest):
    name = "honest_under_dropout"
    summary = "a wrapper that changes nothing, under dropout"
    command = ("lora.lora_dropout=0.1",)
    Wrapper = Turns


class HonestInBfloat16(Honest):
    name = "honest_in_bfloat16"
    summary = "the MLP written out once more, in bfloat16"
    command = ("dtype=bfloat16",)

    def patch(self, model: Any) -> int:
        sites = [layer.mlp for layer in layers(model)]
        for site in sites:
            site.forward = lambda x, m=site: m.down_proj(m.up_proj(x) * m.act_fn(m.gate_proj(x)))
        return len(sites)
