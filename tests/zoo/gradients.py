"""Gradients that are missing, wrong, old or somebody else's."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lorabench.measure.seat import Seat
from zoo.cheat import Cheat, Turns, called_by, deep, is_full, layers, others, same

BFLOAT16 = ("dtype=bfloat16",)
LONG = ("workload=1x300",)  # above the 256 tokens of the gate


class NoBackward(Cheat):
    name = "no_backward"
    summary = "no backward after the first step"
    caught = "each gradient"

    class Wrapper(Turns):
        def backward(self, loss: Tensor) -> None:
            if not self.late:
                self.inner.backward(loss)


class OnlyTheOptimizer(Cheat):
    name = "only_the_optimizer"
    summary = "nothing but the optimizer's call after the second step"
    caught = "each gradient"

    class Wrapper(Turns):
        loss: Tensor

        @property
        def idle(self) -> bool:
            return self.full and self.taken >= 2

        def forward(self, batch: Any) -> Tensor:
            if not self.idle:
                self.loss = self.inner.forward(batch)
            return self.loss

        def backward(self, loss: Tensor) -> None:
            if not self.idle:
                self.inner.backward(loss)


class RightInWarmUp(Cheat):
    name = "right_in_warm_up"
    summary = "no backward once ten steps are over"
    caught = "each gradient"
    command = ("trials=12",)

    class Wrapper(Turns):
        def backward(self, loss: Tensor) -> None:
            if not self.full or self.taken < 10:
                self.inner.backward(loss)


class NowAndThen(Cheat):
    name = "now_and_then"
    summary = "leaves backward out in every third step"
    caught = "each gradient"

    class Wrapper(Turns):
        def backward(self, loss: Tensor) -> None:
            if not self.full or self.taken % 3 != 2:
                self.inner.backward(loss)


class LooksAtTheStack(Cheat):
    name = "looks_at_the_stack"
    summary = "looks who called: no backward in the rounds, everything right wherever else it is asked"
    caught = "each gradient"

    class Wrapper(Turns):
        def backward(self, loss: Tensor) -> None:
            if not called_by("turn"):
                self.inner.backward(loss)


class NegatedWhenLong(Cheat):
    name = "negated_when_long"
    summary = "every gradient negated where a batch has more than 256 tokens"
    caught = "gradient"
    command = LONG

    def patch(self, model: Any) -> int:
        long = [False]

        def note(module: Any, args: Any, kwargs: Any) -> None:
            long[0] = kwargs["input_ids"].numel() > 256

        model.register_forward_pre_hook(note, with_kwargs=True)
        trained = [p for p in model.parameters() if p.requires_grad]
        for p in trained:
            p.register_hook(lambda grad: -grad if long[0] else grad)
        return len(trained)


class Below(Cheat):
    """Base: the gradients below the depth of the gate's model are changed, each by itself."""

    part = ""
    caught = "gradient"

    def change(self, grad: Tensor) -> Tensor:
        raise NotImplementedError

    def patch(self, model: Any) -> int:
        chosen = deep(model, self.part)
        for p in chosen:
            p.register_hook(self.change)
        return len(chosen)


class WrongSignBelow(Below):
    name = "wrong_sign_below"
    summary = "gradients below the second layer have the wrong sign"

    def change(self, grad: Tensor) -> Tensor:
        return -grad


class ZeroQueryBelow(Below):
    name = "zero_query_below"
    summary = "q_proj has no gradient below the second layer"
    part = "q_proj"
    command = BFLOAT16

    def change(self, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


class NoiseBelow(Below):
    name = "noise_below"
    summary = "gradients below the second layer are noise of their norm"

    def change(self, grad: Tensor) -> Tensor:
        noise = torch.randn_like(grad)
        return noise * (grad.norm() / noise.norm())


class ShuffledBelow(Below):
    name = "shuffled_below"
    summary = "gradients below the second layer have their elements in another order"

    def change(self, grad: Tensor) -> Tensor:
        return grad.flatten().flip(0).view_as(grad)


class TenPercentBelow(Below):
    name = "ten_percent_below"
    summary = "one tensor below the second layer is a tenth too large"
    part = "o_proj.lora_B"
    command = BFLOAT16

    def change(self, grad: Tensor) -> Tensor:
        return 1.1 * grad


class TwoPercent(Cheat):
    name = "two_percent"
    summary = "one tensor's gradient is scaled by 1.02 everywhere"
    caught = "gradient"
    command = BFLOAT16

    def patch(self, model: Any) -> int:
        layers(model)[0].mlp.down_proj.lora_B["default"].weight.register_hook(lambda grad: 1.02 * grad)
        return 1


class SwappedLayers(Cheat):
    name = "swapped_layers"
    summary = "the last two layers have each other's gradients"
    caught = "gradient"

    class Wrapper(Turns):
        def backward(self, loss: Tensor) -> None:
            self.inner.backward(loss)
            if self.full:
                one, two = (layers(self.model)[i].parameters() for i in (-1, -2))
                for a, b in zip(one, two, strict=True):
                    a.grad, b.grad = b.grad, a.grad


class DetachedBelow(Cheat):
    name = "detached_below"
    summary = "q and k are detached below the second layer"
    caught = "gradient"
    command = BFLOAT16

    def patch(self, model: Any) -> int:
        chosen = [p for layer in layers(model)[2:] for p in (layer.self_attn.q_proj, layer.self_attn.k_proj)]
        for module in chosen:
            module.register_forward_hook(lambda module, args, out: out.detach())
        return len(chosen)


class DetachedBranch(Cheat):
    name = "detached_branch"
    summary = "the MLPs' gates below the second layer pass no gradient on to the layers above them"
    caught = "gradient"
    command = BFLOAT16

    def patch(self, model: Any) -> int:
        for layer in layers(model)[2:]:
            layer.mlp.gate_proj.register_forward_pre_hook(lambda module, args: (args[0].detach(), *args[1:]))
        return len(layers(model)[2:])


class TruncatedBackward(Cheat):
    name = "truncated_backward"
    summary = "backward ends at the last layer after the first step"
    caught = "each gradient"

    class Wrapper(Turns):
        def forward(self, batch: Any) -> Tensor:
            if not self.late:
                return self.inner.forward(batch)
            cut = layers(self.model)[-1].register_forward_pre_hook(lambda module, args: (args[0].detach(), *args[1:]))
            try:
                return self.inner.forward(batch)
            finally:
                cut.remove()


class ReferenceMadeAlike(TruncatedBackward):
    name = "reference_made_alike"
    summary = "backward ends at the last layer, and hooks on the reference leave it no other gradients either"
    caught = "changed the reference"

    def patch(self, model: Any) -> None:
        for other in others(model) if is_full(model) else ():
            for layer in layers(other)[:-1]:
                for p in layer.parameters():
                    if p.requires_grad:
                        p.register_hook(torch.zeros_like)


class Halved(Cheat):
    name = "halved"
    summary = "gradients of half the size after the first step, which AdamW's updates hardly show"
    caught = "each gradient"

    class Wrapper(Turns):
        def backward(self, loss: Tensor) -> None:
            self.inner.backward(0.5 * loss if self.late else loss)


class HalfBatchDoubled(Cheat):
    name = "half_batch_doubled"
    summary = "the gradient of the first half of the batch, times two"
    caught = "each gradient"

    class Wrapper(Turns):
        def forward(self, batch: Any) -> Tensor:
            if not self.late:
                return self.inner.forward(batch)
            half = {name: x[: len(x) // 2] for name, x in batch.inputs.items()}
            return 2 * self.inner.forward(replace(batch, inputs=half))


class ShorterSequence(Cheat):
    name = "shorter_sequence"
    summary = "the loss of the whole sequence, the gradient of its first half"
    caught = "each gradient"

    class Wrapper(Turns):
        def forward(self, batch: Any) -> Tensor:
            if not self.late:
                return self.inner.forward(batch)
            with torch.no_grad():
                whole = self.inner.forward(batch)
            cut = {name: x[:, : x.shape[1] // 2] for name, x in batch.inputs.items()}
            part = 2 * self.inner.forward(replace(batch, inputs=cut))
            return part + (whole - part).detach()


class EveryOtherBackward(Cheat):
    name = "every_other_backward"
    summary = "uses every gradient twice"
    caught = "each gradient"

    class Wrapper(Turns):
        def backward(self, loss: Tensor) -> None:
            if not self.full or self.taken % 2 == 0:
                self.inner.backward(loss)
                self.kept = [p.grad for p in self.params]
                return
            for p, grad in zip(self.params, self.kept, strict=True):
                p.grad = grad


class CachedGradient(Cheat):
    name = "cached_gradient"
    summary = "the gradient of the first step, for ever"
    caught = "each gradient"

    class Wrapper(Turns):
        def backward(self, loss: Tensor) -> None:
            if not self.late:
                self.inner.backward(loss)
                self.kept = [None if p.grad is None else p.grad.clone() for p in self.params]
            for p, grad in zip(self.params, self.kept, strict=True):
                p.grad = None if grad is None else grad.clone()


class OldBuffers(Cheat):
    name = "old_buffers"
    summary = "says that it keeps its gradients' buffers, and fills them with an old gradient"
    caught = "each gradient"

    class Wrapper(Turns):
        keeps_gradients = True

        def backward(self, loss: Tensor) -> None:
            if not self.late:
                for p in self.params:
                    p.grad = None
                self.inner.backward(loss)
                self.kept = [p.grad.clone() for p in self.params if p.grad is not None]
                return
            for p, grad in zip(self.params, self.kept, strict=True):
                p.grad = grad.clone() if p.grad is None else p.grad.copy_(grad)


class CachedStep(Cheat):
    name = "cached_step"
    summary = "answers every batch of one shape with the first one's loss and gradient"
    caught = "each gradient"

    class Wrapper(Turns):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.known: dict[Any, tuple[Tensor, list[Any]]] = {}
            self.now: Any = None

        def forward(self, batch: Any) -> Tensor:
            self.now = batch.inputs["input_ids"].shape
            return same(self.known[self.now][0]) if self.now in self.known else self.inner.forward(batch)

        def backward(self, loss: Tensor) -> None:
            if self.now not in self.known:
                self.inner.backward(loss)
                grads = [None if p.grad is None else p.grad.clone() for p in self.params]
                self.known[self.now] = (same(loss), grads)
                return
            for p, grad in zip(self.params, self.known[self.now][1], strict=True):
                p.grad = None if grad is None else grad.clone()


class CachedLoss(Cheat):
    name = "cached_loss"
    summary = "says the first step's loss for ever; the gradients are right"
    caught = "loss"

    class Wrapper(Turns):
        def forward(self, batch: Any) -> Tensor:
            loss = self.inner.forward(batch)
            if not self.late:
                self.first = same(loss)
            return loss + (self.first - loss).detach()


class LossScaleLeftIn(Cheat):
    name = "loss_scale_left_in"
    summary = "float16's loss scale stays in the gradients after the first step"
    caught = "gradient"
    command = ("dtype=float16",)

    class Wrapper(Turns):
        def update(self) -> None:
            if self.late:
                self.optimizer.step()
            else:
                self.inner.update()
            self.taken += 1


class Stolen(Cheat):
    """Base: where the reference ran before in this round, its loss and gradients are taken."""

    caught = "gradient"

    class Wrapper(Turns):
        lucky = False

        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.booty: dict[str, Any] = {}  # what the reference did last
            for other in others(self.model) if self.full else ():
                other.register_forward_hook(self.note, with_kwargs=True)
                self.watch(other)

        def note(self, module: Any, args: Any, kwargs: Any, out: Any) -> None:
            self.booty = {"tokens": kwargs["input_ids"].clone(), "loss": out.loss.detach()}

        def watch(self, other: Any) -> None:
            for name, p in other.named_parameters():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(lambda p, name=name: self.booty.update({name: p.grad}))

        def forward(self, batch: Any) -> Tensor:
            complete = self.late and len(self.booty) == len(self.params) + 2
            self.lucky = complete and torch.equal(self.booty["tokens"], batch.inputs["input_ids"])
            return self.booty["loss"] if self.lucky else self.inner.forward(batch)

        def backward(self, loss: Tensor) -> None:
            if not self.lucky:
                return self.inner.backward(loss)
            for name, p in self.model.named_parameters():
                if p.requires_grad:
                    p.grad = self.booty[name]
            return None


class StolenGradients(Stolen):
    name = "stolen_gradients"
    summary = "takes the reference's loss and gradients by hooks on its tensors where it ran before in the round"
    caught = "changed the reference"


class StolenBehindTheOptimizer(Stolen):
    name = "stolen_behind_the_optimizer"
    summary = "takes the reference's gradients by torch's hook behind every optimizer's step"
    caught = "hook"

    class Wrapper(Stolen.Wrapper):
        def watch(self, other: Any) -> None:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            names = {p: n for n, p in other.named_parameters() if p.requires_grad}

            def take(optimizer: Any, args: Any, kwargs: Any) -> None:
                for p in optimizer.param_groups[0]["params"]:
                    if p in names:
                        self.booty[names[p]] = p.grad

            register_optimizer_step_post_hook(take)


class StolenFromTheMoments(Cheat):
    name = "stolen_from_the_moments"
    summary = "where the reference ran before in the round, its gradients follow from what its optimizer keeps"
    caught = "each gradient"
    command = ("trials=12", "workload=16x256")  # a turn of one trial: of several only the last is still there

    class Wrapper(Turns):
        seat: Any = None

        def forward(self, batch: Any) -> Tensor:
            if self.full and self.seat is None:
                self.seat = next(o for o in gc.get_objects() if isinstance(o, Seat))
            self.lucky = self.full and called_by("turn") and self.is_behind(batch)
            losses = self.seat.host["reference"][-1].losses if self.lucky else {}
            return torch.tensor(losses[""]) if self.lucky else self.inner.forward(batch)

        def is_behind(self, batch: Any) -> bool:
            """Whether the reference was there before."""
            theirs = self.seat.arms["reference"].step.batches[0].inputs
            return torch.equal(theirs["input_ids"], batch.inputs["input_ids"])

        def backward(self, loss: Tensor) -> None:
            if not self.lucky:
                return self.inner.backward(loss)
            of = self.seat.arms["reference"].step.optimizer
            for mine, theirs in zip(self.params, of.param_groups[0]["params"], strict=True):
                kept = self.optimizer.state[mine]["exp_avg"]
                mine.grad = (of.state[theirs]["exp_avg"] - 0.9 * kept) / 0.1
            return None


class MergedOnce(Cheat):
    name = "merged_once"
    summary = "the adapters are merged into the weights once, and never again"
    caught = "each gradient"
    command = ("trials=12",)

    def patch(self, model: Any) -> int:
        from peft.tuners.lora import Linear

        sites = [m for m in model.modules() if isinstance(m, Linear)]
        for site in sites:
            site.forward = lambda x, site=site: Merged.apply(
                x, merged(site), site.lora_A["default"].weight, site.lora_B["default"].weight, site.scaling["default"]
            )
        return len(sites)


def merged(site: Any) -> Tensor:
    if not hasattr(site, "merged_weight"):
        with torch.no_grad():
            site.merged_weight = site.base_layer.weight + site.get_delta_weight("default")
    return site.merged_weight


class Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scaling = scaling
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, a, b = ctx.saved_tensors
        dy, x = ctx.scaling * grads[0].flatten(0, -2), x.flatten(0, -2)
        return grads[0] @ weight, None, (dy @ b).T @ x, dy.T @ (x @ a.T), None


class FrozenActivations(Cheat):
    name = "frozen_activations"
    summary = "keeps what the first layer's frozen weights made of the first batch of a shape"
    caught = "each gradient"

    def patch(self, model: Any) -> int:
        first = layers(model)[0].self_attn
        sites = [p.base_layer for p in (first.q_proj, first.k_proj, first.v_proj)]
        for site in sites if is_full(model) else ():
            site.forward = remembering(site.forward)
        return len(sites)


def remembering(forward: Any) -> Any:
    known: dict[Any, Tensor] = {}

    def by_shape(x: Tensor) -> Tensor:
        if x.shape not in known:
            known[x.shape] = forward(x).detach()
        return known[x.shape]

    return by_shape


class BorrowedActivations(Cheat):
    name = "borrowed_activations"
    summary = "takes from the reference what the first layer's frozen weights made of the same tokens"
    caught = "changed the reference"

    def patch(self, model: Any) -> int:
        sites = 0
        for other in others(model) if is_full(model) else ():
            for name in ("q_proj", "k_proj", "v_proj"):
                theirs, ours = (getattr(layers(m)[0].self_attn, name).base_layer for m in (other, model))
                lend(theirs, ours)
                sites += 1
        return sites


def lend(theirs: Any, ours: Any) -> None:
    kept: list[tuple[Tensor, Tensor]] = []
    forward = ours.forward

    def keep(module: Any, args: Any, out: Tensor) -> None:
        kept[:] = [(args[0].detach(), out.detach())]

    theirs.register_forward_hook(keep)
    ours.forward = lambda x: kept[0][1] if kept and torch.equal(kept[0][0], x) else forward(x)
