"""What the tests of the autograd nodes share: members, masks, PEFT's arithmetic, and the cases of a whole node."""

import pytest
import torch
from kernel_checks import assert_close, exhaustive_in_interpreter
from lorakernels.nodes.member import Member
from lorakernels.nodes.projection import Projection
from lorakernels.ops.dropout import dropped
from torch import nn

F64 = torch.float64


def member(
    name, n, k, r, dtype=torch.float64, adapter_dtype=None, bias=False, lora_bias=False, scale=2.0, p=0.0, device="cpu"
):
    def parameter(*shape, grad=True, std=0.3, dtype=adapter_dtype or dtype):
        return nn.Parameter(torch.randn(shape).mul(std).to(device, dtype), requires_grad=grad)

    return Member(
        name, parameter(n, k, grad=False, dtype=dtype), parameter(n, dtype=dtype) if bias else None,
        parameter(r, k) if r else None, parameter(n, r) if r else None, parameter(n) if lora_bias else None, scale, p,
    )  # fmt: skip


def leaves(members):
    return [t for m in members for t in m.parameters if t is not None]


def fix_seeds(monkeypatch, members, device="cpu") -> torch.Tensor:
    """A seed for each member, in whichever Projection it is; no two are alike or neighbours."""
    seeds = torch.tensor([2**31 - 3 - 1000 * i for i in range(len(members))], device=device)
    places = {id(m): i for i, m in enumerate(members)}

    def fixed(self, device):
        return torch.stack([seeds[places[id(m)]] for m in self.members]) if self.dropped else None

    monkeypatch.setattr(Projection, "seeds", fixed)
    return seeds


def masks_of(members, x, seeds):
    """What each member's dropout multiplies its input, of x's shape, dtype and device, with. Triton's generator is not
    torch's, so a node's own dtype is asked."""
    drawn = [dropped(torch.ones_like(x).flatten(0, -2), s, m.dropout) != 0 for m, s in zip(members, seeds, strict=True)]
    return [mask.view(x.shape).double() / (1 - m.dropout) for m, mask in zip(members, drawn, strict=True)]


def plain(members, x, masks=None, dtype=torch.float64):
    """What PEFT computes, in dtype, side by side."""
    out = []
    for i, m in enumerate(members):
        y = x @ m.weight.to(dtype).t()
        y = y if m.bias is None else y + m.bias.to(dtype)
        if m.a is not None:
            xd = x if masks is None else x * masks[i].to(dtype)
            y = y + m.scale * (xd @ m.a.to(dtype).t() @ m.b.to(dtype).t())
            y = y if m.lora_bias is None else y + m.scale * m.lora_bias.to(dtype)
        out.append(y)
    return torch.cat(out, -1)


def check_all(got, wanted, inputs, wide, dtype=F64, times=1.0):
    """Outputs and gradients of lists of outputs with respect to lists of inputs."""
    torch.manual_seed(5)
    grads = [torch.randn(t.shape, dtype=F64).to(t.device) for t in wanted]
    a = torch.autograd.grad(got, inputs, [g.to(t.dtype) for g, t in zip(grads, got, strict=True)])
    b = torch.autograd.grad(wanted, wide, grads)
    for x, y in zip((*got, *a), (*wanted, *b), strict=True):
        assert_close(x, y, dtype, times)


# Ranks of q, k, v or of gate, up, down; tokens of each of two sequences; form; merged; dropout; whether there are head
# norms, or the residual is added. Spread over few cases: the interpreter spends a second or two on the masks of one.
NODES = pytest.mark.parametrize(
    "ranks, tokens, form, merged, p, more",
    [
        ((17, 17, 17), 5, "one", True, 0.0, True),
        ((1, 7, 0), 5, "addmm", True, 0.0, False),
        exhaustive_in_interpreter((256, 3, 17), 1, "apart", False, 0.0, True),
        ((7, 7, 70), 5, "plain", True, 0.0, True),
        ((17, 17, 17), 5, "apart", True, 0.3, True),
        exhaustive_in_interpreter((1, 7, 256), 2, "one", False, 0.3, False),
        exhaustive_in_interpreter((3, 3, 3), 1, "plain", True, 0.3, True),
    ],
)
