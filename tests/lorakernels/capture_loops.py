"""What the tests of captured steps share: padded batches, the plain loop, and the same loop captured."""

from __future__ import annotations

import lorakernels
import torch
from lorakernels.capturing.inputs import to_device

BUCKETS = (8, 12, 16)
LENGTHS = (7, 11, 15, 8, 10)


def padded_batch(seed, length, rows=2, pad=101 - 1):
    """Rows of other lengths, padded on the right to the longest."""
    torch.manual_seed(100 + seed)
    ids = torch.randint(3, 100, (rows, length))
    mask = torch.ones_like(ids)
    mask[0, max(3, length - 2 - seed % 3) :] = 0
    ids[mask == 0] = pad
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def batches(count, **kwargs):
    return [padded_batch(i, LENGTHS[i % len(LENGTHS)], **kwargs) for i in range(count)]


def optimizer_of(model, lr=1e-2):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def schedule_of(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))


def plain(model, data, accumulate=1, clip=None, device="cpu", between=None):
    """(losses, norms) of the loop that a captured step stands for."""
    optimizer = optimizer_of(model)
    schedule, losses, norms = schedule_of(optimizer), [], []
    for i, one in enumerate(data, start=1):
        loss = model(**to_device(one, device)).loss
        (loss / accumulate).backward()
        losses.append(loss.detach())
        if i % accumulate == 0:
            if clip is not None:
                params = [p for p in model.parameters() if p.requires_grad]
                norms.append(torch.nn.utils.clip_grad_norm_(params, clip))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if between is not None:
            between(i, model)
    return torch.stack(losses).cpu(), [float(n) for n in norms]


def replayed(model, data, accumulate=1, clip=None, between=None, **kwargs):
    """(losses, norms, the step) of the same through `capture`."""
    optimizer = optimizer_of(model)
    schedule, losses, norms = schedule_of(optimizer), [], []
    kwargs.setdefault("buckets", BUCKETS)
    step = lorakernels.capture(model, optimizer, max_grad_norm=clip, accumulate=accumulate, **kwargs)
    for i, one in enumerate(data, start=1):
        losses.append(step(one))
        if step.updated:
            schedule.step()
            if clip is not None:
                norms.append(step.grad_norm)
        if between is not None:
            between(i, model)
    return torch.stack(losses).cpu(), [float(n) for n in norms], step


def same_parameters(a, b, atol=2e-4):
    """But for what Adam makes of rounding in gradients near zero: a hundredth of one of its steps."""
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.allclose(p, q, atol=atol), name
