"""What a toggle says of itself, and what it does where it is asked to prove it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lorabench.contract.ablation import Tolerance
from lorabench.contract.step import Wrapped
from zoo.cheat import Cheat, Turns, layers

CLAIMS = ("not_applied", "untrusted", "unsupported", "wrong_numerics")


class NothingPatched(Cheat):
    name = "nothing_patched"
    summary = "says 21 sites, and changes nothing"
    caught = "none of its hooks changed"
    status = ("not_applied",)
    Wrapper = None

    def patch(self, model: Any) -> int:
        return 21


class MillionSites(Cheat):
    name = "million_sites"
    summary = "audit says a million sites, and nothing was changed"
    caught = "none of its hooks changed"
    status = ("not_applied",)
    Wrapper = None

    def audit(self, evidence: Any) -> int:
        return 10**6


class MoreSitesThanThereAre(Cheat):
    name = "more_sites_than_there_are"
    summary = "changes one module and says a million"
    caught = "site"
    status = CLAIMS

    def patch(self, model: Any) -> int:
        module = layers(model)[0].mlp
        forward = module.forward
        module.forward = lambda x: forward(x)
        return 10**6


class Empty(Wrapped):
    def forward(self, batch: Any) -> Tensor:
        return torch.tensor(5.5)

    def backward(self, loss: Tensor) -> None:
        pass

    def update(self) -> None:
        pass


class AuditSwapsTheStep(Cheat):
    name = "audit_swaps_the_step"
    summary = "audit puts an empty step in the arm"
    caught = "audit"
    status = CLAIMS

    def audit(self, evidence: Any) -> int:
        evidence.arm.steps[:] = [Empty(step) for step in evidence.arm.steps]
        return 1


class AuditSwapsTheKind(Cheat):
    name = "audit_swaps_the_kind"
    summary = "audit gives the arm a kind whose trial does nothing"
    caught = "audit"
    status = CLAIMS

    def audit(self, evidence: Any) -> int:
        arm, real = evidence.arm, evidence.arm.kind

        class Idle(type(real)):
            def trial(self, arm: Any, begin: Any) -> Any:
                for phase in self.phases:
                    begin(phase)
                return [[torch.tensor(5.5)] for _ in arm.steps]

        arm.kind = Idle()
        return 1


class NotesShortenTheBatches(Cheat):
    name = "notes_shorten_the_batches"
    summary = "notes cut the batches to two tokens after the audit"
    caught = "the audit of"
    status = CLAIMS

    def notes(self, evidence: Any) -> dict[str, Any]:
        for batch in evidence.arm.step.batches:
            batch.inputs.update({name: x[:, :2] for name, x in batch.inputs.items()})
        return {}


class AuditSwapsTheMethods(Cheat):
    name = "audit_swaps_the_methods"
    summary = "audit gives the very same step another backward"
    caught = "the audit of"
    status = CLAIMS

    def audit(self, evidence: Any) -> int:
        evidence.arm.step.innermost.backward = lambda loss: None
        return 1


class Tolerated(Cheat):
    """Base: declares a tolerance, and has one tensor's gradient off by a factor within it."""

    caught = "tolerance"
    status = CLAIMS
    factor = 1.1

    def patch(self, model: Any) -> int:
        weight = layers(model)[0].mlp.down_proj.lora_B["default"].weight
        weight.register_hook(lambda grad: self.factor * grad)
        return 1


class TenPercentTolerated(Tolerated):
    name = "ten_percent_tolerated"
    summary = "a tensor is scaled by 1.10, which a tolerance for rounding allows"
    caught = "tolerance"
    tolerance = Tolerance(words="rounds to eight bits", grad=0.2)


class NoBound(Tolerated):
    name = "no_bound"
    summary = "a tolerance without bound: every gradient is noise of its norm"
    caught = "tolerance"
    tolerance = Tolerance(words="rounds", grad=float("inf"), loss=float("inf"), update=float("inf"))

    def patch(self, model: Any) -> int:
        def noise(grad: Tensor) -> Tensor:
            drawn = torch.randn_like(grad)
            return drawn * (grad.norm() / drawn.norm())

        trained = [p for p in model.parameters() if p.requires_grad]
        for p in trained:
            p.register_hook(noise)
        return len(trained)


class NoWords(Tolerated):
    name = "no_words"
    summary = "a tolerance that does not say what for"
    caught = "tolerance"
    tolerance = Tolerance(words="", grad=0.2)


class BlankWords(Tolerated):
    name = "blank_words"
    summary = "a tolerance whose words are blanks"
    caught = "tolerance"
    tolerance = Tolerance(words=" \t", grad=0.2)


class NoUpdateTolerated(Tolerated):
    name = "no_update_tolerated"
    summary = "a tolerance of the update so wide that there need be none"
    caught = "tolerance"
    tolerance = Tolerance(words="states in four bits", update=1.0)

    def patch(self, model: Any) -> None:
        return None

    class Wrapper(Turns):
        def update(self) -> None:
            if self.full and self.taken == 0:  # the step that the audit looks at
                self.inner.update()
            self.taken += 1


class FrozenLater(Cheat):
    name = "frozen_later"
    summary = "lora_A wants no gradient any more after the audit"
    caught = "changed the arm that it was to look at"

    def audit(self, evidence: Any) -> int:
        for name, p in evidence.arm.model.named_parameters():
            if ".lora_A." in name:
                p.requires_grad_(False)
        return 1


class RemovedLater(Cheat):
    name = "removed_later"
    summary = "the adapters below the second layer are taken off after the audit"
    caught = "changed the arm that it was to look at"

    def audit(self, evidence: Any) -> int:
        for layer in layers(evidence.arm.model)[2:]:
            for parent in (layer.self_attn, layer.mlp):
                for name, module in list(parent.named_children()):
                    if hasattr(module, "base_layer"):
                        setattr(parent, name, module.base_layer)
        return 1


class RenamedLater(Cheat):
    name = "renamed_later"
    summary = "the trained tensors are replaced by others after the audit, and the optimizer keeps the old ones"
    caught = "each gradient"

    def audit(self, evidence: Any) -> int:
        for module in evidence.arm.model.modules():
            if isinstance(module, torch.nn.Linear) and module.weight.requires_grad:
                module.weight = torch.nn.Parameter(module.weight.detach().clone())
        return 1
