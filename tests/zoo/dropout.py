"""What passes where the arms draw different masks and nobody can compare their losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.cheat import Cheat, Turns, is_full, layers

DROPOUT = ("lora.lora_dropout=0.2", "workload=4x128")


class LayersLeftOut(Cheat):
    name = "layers_left_out"
    summary = "under dropout, what lies below the second layer is not computed"
    caught = "each gradient"
    command = DROPOUT

    def patch(self, model: Any) -> int:
        for layer in layers(model)[2:]:
            layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
        return len(layers(model)[2:])


class Dropouts(Cheat):
    """Base: every dropout of the full arm is another module; the gate's has the gate's masks."""

    caught = "dropout"
    command = DROPOUT

    def other(self, p: float) -> nn.Module:
        raise NotImplementedError

    def patch(self, model: Any) -> int:
        sites = [m.lora_dropout for m in model.modules() if isinstance(getattr(m, "lora_dropout", None), nn.ModuleDict)]
        for site in sites if is_full(model) else ():
            site["default"] = self.other(site["default"].p)
        return len(sites)


class DropoutLeftOut(Dropouts):
    name = "dropout_left_out"
    summary = "no dropout in the full arm"

    def other(self, p: float) -> nn.Module:
        return nn.Identity()


class LessDropout(Dropouts):
    name = "less_dropout"
    summary = "a dropout of a tenth of the rate"

    def other(self, p: float) -> nn.Module:
        return nn.Dropout(p / 10)


class OneMask(Dropouts):
    name = "one_mask"
    summary = "draws each mask once and uses it for ever"
    caught = "each gradient"

    def other(self, p: float) -> nn.Module:
        return Kept(p)


class Kept(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = (torch.rand_like(x) >= self.p) / (1 - self.p)
        return x * self.mask


class MasksOfItsOwn(Cheat):
    name = "masks_of_its_own"
    summary = "says that it draws masks of its own, is gated without dropout, and leaves the scaling of 1 / (1 - p) out"
    caught = "typical gradient's scale"
    command = DROPOUT
    own_dropout_masks = True

    def patch(self, model: Any) -> int:
        sites = [m for m in model.modules() if isinstance(getattr(m, "lora_dropout", None), nn.ModuleDict)]
        for site in sites:
            if isinstance(site.lora_dropout["default"], nn.Dropout):
                site.lora_dropout["default"] = Unscaled(site.lora_dropout["default"].p)
        return len(sites)


class Unscaled(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) >= self.p)


class Reseeds(Cheat):
    name = "reseeds"
    summary = "seeds torch's generator before each forward, for both arms' masks"
    caught = "how far dropout"
    command = DROPOUT

    class Wrapper(Turns):
        def forward(self, batch: Any) -> Tensor:
            torch.manual_seed(0)
            return self.inner.forward(batch)
