"""The joint step on our own kernels: lorakernels' linears for rows of several adapters, and its chunked head, once a
job. A module of its own because it is torch throughout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lorabench.contract.ablation import Unsupported
from lorabench.contract.batch import IGNORE, Batch
from lorabench.contract.step import Step
from lorabench_ablations.joint_step import JointStep, Part

TRIED = 4  # tokens by which it is found out whether the logits are the head's product with what the layers give


class KernelRouter:
    """lorakernels' `MultiAdapters`, told by the parts of a joint batch. Raises Unsupported where a layer cannot have an
    adapter for each row."""

    def __init__(self, model: nn.Module) -> None:
        import lorakernels

        try:
            self.jobs = lorakernels.apply_multi(model)
        except ValueError as error:
            raise Unsupported(f"fused_multi_lora: {error}") from None
        self.linears = self.jobs.linears
        base: Any = model.get_base_model()  # pyright: ignore[reportCallIssue]
        self.body, self.head = base.base_model, base.get_output_embeddings()
        self.plain_head = _is_product(base, self.body, self.head)  # now, while the linears have no rows set

    def set(self, parts: Sequence[Part]) -> None:
        from lorakernels.ops.job_rows import JobRows

        self.jobs.set(JobRows([(self.jobs.adapters.index(part.adapter), part.positions) for part in parts]))


class KernelStep(JointStep):
    """With `chunked_head` the logits are never held: a job's loss is that of the head over its own rows."""

    def __init__(
        self, steps: Sequence[Step], router: Any, *, packed: bool, tokens: int | None, chunked_head: bool
    ) -> None:
        super().__init__(steps, router, packed=packed, tokens=tokens)
        self.body, self.head = router.body, router.head
        self.chunked = chunked_head and router.plain_head

    def forward(self, batch: Batch) -> Tensor:
        if not self.chunked:
            return super().forward(batch)
        from lorakernels.ops.linear_cross_entropy import linear_cross_entropy

        inputs = dict(batch.inputs)
        parts, labels = inputs.pop("parts"), inputs.pop("labels")
        self.router.set(parts)
        hidden = self.body(**inputs).last_hidden_state.flatten(0, 1)
        following = F.pad(labels, (0, 1), value=IGNORE)[:, 1:].flatten()
        found, sizes = [hidden.new_zeros((), dtype=torch.float32)] * len(self.steps), [p.positions for p in parts]
        for part, own, target in zip(parts, hidden.split(sizes), following.split(sizes), strict=True):
            items, own = self.steps[part.job].items, own.to(self.head.weight.dtype)
            found[part.job] = linear_cross_entropy(own, self.head.weight, target, self.head.bias, num_items=items)
        return torch.stack(found)


def _is_product(base: Any, body: Any, head: Any) -> bool:
    """Whether the logits are those of a frozen, plain head: some families cap or scale them, and a head may have an
    adapter."""
    if type(head) is not nn.Linear or head.weight.requires_grad:
        return False
    seen: list[Tensor] = []
    handle = body.register_forward_hook(lambda module, args, out: seen.append(out.last_hidden_state))
    training = base.training
    try:
        base.eval()
        with torch.no_grad():
            logits = base(input_ids=torch.zeros(1, TRIED, dtype=torch.long, device=head.weight.device)).logits
            return torch.equal(logits, head(seen[0]))
    finally:
        handle.remove()
        base.train(training)
