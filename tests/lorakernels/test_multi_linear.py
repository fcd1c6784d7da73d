"""A frozen linear under rows of several adapters: y and every gradient against plain autograd in float32."""

import pytest
import torch
from kernel_checks import assert_close
from lorakernels.nodes.multi_linear import multi_linear
from lorakernels.ops.job_rows import JobRows
from lorakernels.ops.multi_lora import Adapter, multi_lora_reference
from lorakernels.runtime import tensor_cores
from torch.nn import functional as F

RUNS, K, N = [(2, 9), (0, 70), (2, 21)], 40, 33


def made(dtype, device, ranks=(4, 7, 1), dropout=0.0):
    def leaf(*shape):
        return (torch.randn(*shape) * shape[-1] ** -0.5).to(device, dtype).requires_grad_()

    x, weight = torch.randn(5, 20, K).to(device, dtype).requires_grad_(), leaf(N, K).detach()
    adapters = [Adapter(leaf(r, K), leaf(N, r), 1.0 + job, dropout) for job, r in enumerate(ranks)]
    return x, weight, torch.randn(N).to(device, dtype), adapters, JobRows(RUNS, device)


def plain(x, weight, bias, adapters, jobs, seeds=None):
    wide = [t.detach().float().requires_grad_() for t in (x, *(m for a in adapters for m in a[:2]))]
    own = [a._replace(a=wide[1 + 2 * i], b=wide[2 + 2 * i]) for i, a in enumerate(adapters)]
    y = F.linear(wide[0], weight.float(), bias.float())
    return y + multi_lora_reference(wide[0].flatten(0, 1), own, jobs, seeds).view(y.shape), wide


@pytest.mark.parametrize("quantized", [False, True])
def test_output_and_gradients(quantized, dtype, device):
    """quantized: the frozen product is somebody else's, and has its own gradient."""
    x, weight, bias, adapters, jobs = made(dtype, device)
    if quantized:
        base = F.linear(x, weight, bias)
        before = base.detach().clone()
        y = multi_linear(x, None, adapters, jobs, base=base)
        assert torch.equal(base, before)
    else:
        y = multi_linear(x, weight, adapters, jobs, bias)
    wanted, wide = plain(x, weight, bias, adapters, jobs)
    assert y.shape == (5, 20, N) and y.dtype == dtype
    assert_close(y, wanted, dtype, 3)
    grad = torch.randn_like(y)
    y.backward(grad)
    wanted.backward(grad.float())
    parameters = [m for a in adapters for m in a[:2]]
    assert_close(x.grad, wide[0].grad, dtype, 4)
    for index, parameter in enumerate(parameters):
        if index in (2, 3):  # job 1 has no rows: Adam would move zeros
            assert parameter.grad is None
            continue
        assert parameter.grad.dtype == dtype
        assert_close(parameter.grad, wide[1 + index].grad, dtype, 5)


def test_dropout_has_the_masks_of_its_seeds(device):
    x, weight, bias, adapters, jobs = made(torch.float32, device, dropout=0.3)
    if tensor_cores(x):
        pytest.skip("the reference has the torch path's masks")
    seeds = torch.tensor([5, 6, 7], device=device)
    y = multi_linear(x, weight, adapters, jobs, bias, seeds=seeds)
    wanted, wide = plain(x, weight, bias, adapters, jobs, seeds)
    assert_close(y, wanted, torch.float32, 3)
    y.square().sum().backward()
    wanted.square().sum().backward()
    assert_close(x.grad, wide[0].grad, torch.float32, 4)
    assert_close(adapters[0].a.grad, wide[1].grad, torch.float32, 4)


def test_masks_are_drawn_anew_and_follow_torch_s_seed(device):
    x, weight, _, adapters, jobs = made(torch.float32, device, dropout=0.5)
    torch.manual_seed(3)
    one, other = (multi_linear(x, weight, adapters, jobs) for _ in range(2))
    torch.manual_seed(3)
    assert not torch.equal(one, other) and torch.equal(one, multi_linear(x, weight, adapters, jobs))


def test_gradients_exactly_in_float64():
    x, weight, bias, adapters, jobs = made(torch.float64, "cpu")
    leaves = [m for a in adapters for m in a[:2]]

    def function(x, *leaves):
        own = [a._replace(a=leaves[2 * i], b=leaves[2 * i + 1]) for i, a in enumerate(adapters)]
        return multi_linear(x, weight, own, jobs, bias)[:2, :3]

    present = [leaf for i, leaf in enumerate(leaves) if i not in (2, 3)]
    assert torch.autograd.gradcheck(
        lambda x, *some: function(x, *some[:2], *leaves[2:4], *some[2:]), (x, *present), fast_mode=True
    )


def test_a_job_without_an_adapter_here_has_the_frozen_product():
    x, weight, bias, adapters, jobs = made(torch.float32, "cpu")
    y = multi_linear(x, weight, [adapters[0], None, None], jobs, bias).flatten(0, 1)
    rows = jobs.of(2)
    assert torch.equal(y[rows], F.linear(x, weight, bias).flatten(0, 1)[rows])


def test_no_rows():
    _, weight, _, adapters, _ = made(torch.float32, "cpu")
    x = torch.zeros(0, K, requires_grad=True)
    y = multi_linear(x, weight, adapters, JobRows([]))
    y.sum().backward()
    assert y.shape == (0, N) and adapters[0].a.grad is None


def test_autocast_computes_in_its_dtype():
    x, weight, bias, adapters, jobs = made(torch.float32, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        y = multi_linear(x, weight, adapters, jobs, bias)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert adapters[0].a.grad.dtype == x.grad.dtype == torch.float32


def test_what_does_not_fit():
    x, weight, _, adapters, _ = made(torch.float32, "cpu")
    with pytest.raises(ValueError, match="the jobs have 7 rows"):
        multi_linear(x, weight, adapters, JobRows([(0, 7)]))
    with pytest.raises(ValueError, match="either weight or base"):
        multi_linear(x, None, adapters, JobRows([(0, 100)]))
    with pytest.raises(ValueError, match="no job has an adapter"):
        multi_linear(x, weight, [None], JobRows([(0, 100)]))
