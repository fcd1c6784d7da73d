"""Op cells: one linear, measured as whole models are (pairing, gate, record), without a loss or an optimizer step."""

import pytest
import torch
from helpers import InProcess, arm, cells, config, shared_step

from lorabench.contract.ablation import Evidence, NotApplied
from lorabench.measure import trial
from lorabench.measure.judging import numerics
from lorabench.measure.machine import describe
from lorabench.measure.profile import traced
from lorabench.plan import registry
from lorabench.plan.compose import plan
from lorabench.plan.design import refusal
from lorabench.run.runner import Runner

K, N, ROWS = 24, 40, 32  # the helpers' workload has two samples of 16 tokens
LINEAR = f"linear-{K}x{N}"
NAMES = [f"base_model.model.linear.lora_{x}.default.weight" for x in "AB"]
OURS = ["lora_addmm", "lora_kernels", {"lora_kernels": {"one_gemm": False}}]


def op(*names, **kwargs):
    return arm(*names, model=LINEAR, **kwargs)


def parts(made):
    weights = {n.rpartition("linear.")[2].removesuffix(".weight"): p for n, p in made.model.named_parameters()}
    scale = 32 / 16
    return weights["base_layer"], weights["lora_A.default"], weights["lora_B.default"], scale


@pytest.mark.parametrize("toggle", [None, *OURS], ids=str)
def test_one_step_is_the_linear_and_all_its_gradients(toggle):
    made = op(*[toggle] * (toggle is not None), dtype=torch.float64)
    found = numerics.one_step(made)
    made = op(dtype=torch.float64)  # again: the step has moved the adapter
    w, a, b, s = parts(made)
    x, dy = made.step.x.detach()[0], made.step.dy[0]
    assert (x.shape, dy.shape) == ((ROWS, K), (ROWS, N))
    hidden, ds = x @ a.T, s * dy @ b
    wanted = {
        "the output Y": (x @ w.T + s * hidden @ b.T)[None],
        "the gradient dX": (dy @ w + ds @ a)[None],
        NAMES[0]: ds.T @ x,
        NAMES[1]: s * dy.T @ hidden,
    }
    assert found.gradients.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found.gradients[name], tensor.float(), rtol=1e-5, atol=1e-5, msg=name)
    assert found.loss == pytest.approx(wanted["the output Y"].square().mean().item(), rel=1e-6)


@pytest.mark.parametrize("toggle", [None, *OURS], ids=str)
def test_behind_a_norm_it_is_the_same_with_the_norm_s_gradient(toggle):
    made = arm(*[toggle] * (toggle is not None), model=f"norm-{LINEAR}", dtype=torch.float64)
    found = numerics.one_step(made)
    made = arm(model=f"norm-{LINEAR}", dtype=torch.float64)
    w, a, b, s = parts(made)
    leaves = [made.step.x.detach().requires_grad_(), a, b]
    normed = torch.nn.functional.rms_norm(leaves[0], (K,), eps=1e-6)
    y = normed @ w.T + s * normed @ a.T @ b.T
    wanted = [y.detach(), *torch.autograd.grad(y, leaves, made.step.dy)]
    for name, tensor in zip(("the output Y", "the gradient dX", *NAMES), wanted, strict=True):
        torch.testing.assert_close(found.gradients[name], tensor.float(), rtol=1e-5, atol=1e-5)


def test_behind_a_norm_ours_gets_its_gradient_with_room_and_the_bound_the_same_norm():
    made = arm("lora_kernels", model=f"norm-{LINEAR}")
    assert made.patched["lora_kernels"] == 2
    assert made.step.dy.stride(-2) == N + 16 and op("lora_kernels").step.dy.is_contiguous()
    assert torch.equal(made.step.dy, arm(model=f"norm-{LINEAR}").step.dy)
    bare = arm("bare_linear", model=f"norm-{LINEAR}")
    out = bare.step.forward(bare.step.batches[0])
    w, *_ = parts(bare)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(bare.step.x, (K,), eps=1e-6) @ w.T)
    before = out.grad_fn.next_functions[0][0].next_functions[0][0].next_functions[0][0]  # views, the product, the norm
    assert before.name() == "RMSNormBackward" and bare.patched["bare_linear"] == 2


def test_a_trial_has_two_phases_and_leaves_the_adapter_alone():
    made = op()
    before = {n: p.detach().clone() for n, p in made.adapters()}
    done = trial.run_trial(made)
    assert set(done.device_ms) == set(done.host_ms) == {"forward", "backward"}
    assert done.total_ms == pytest.approx(sum(done.device_ms.values()))
    assert all(torch.equal(p, before[n]) and p.grad is not None for n, p in made.adapters())
    made.kind.clear(made)
    assert made.step.x.grad is None and all(p.grad is None for _, p in made.adapters())


def test_a_captured_backward_keeps_the_buffer_of_dx_full_of_nan_until_it_is_replayed(monkeypatch):
    made = op()
    monkeypatch.setattr("lorabench.measure.kinds.operations.linear.capturing", lambda: True)
    trial.run_trial(made)
    dx = made.step.x.grad
    assert dx.isfinite().all()
    made.kind.clear(made)
    assert made.step.x.grad is dx and dx.isnan().all()


def test_the_cache_is_made_cold_before_every_trial_and_before_it_starts(monkeypatch):
    made, calls = op("adapters_in_compute_dtype"), []
    for name in ("cleared", "forward", "backward"):
        original = getattr(made.step, name)
        monkeypatch.setattr(made.step, name, lambda *a, n=name, o=original: (calls.append(n), o(*a))[1])
    monkeypatch.setattr("lorabench.measure.kinds.op.empty_l2", lambda device: calls.append("empty"))
    trial.run_trial(made, lambda phase: calls.append(f"({phase}"))
    assert calls == ["cleared", "empty", "(forward", "forward", "(backward", "backward"]


def test_both_arms_and_the_gate_s_gold_get_the_same_numbers():
    low, again = op(dtype=torch.bfloat16), op("lora_addmm", dtype=torch.bfloat16)
    gold = op(dtype=torch.bfloat16, upcast=True)
    assert low.step.x.dtype == torch.bfloat16 and gold.step.x.dtype == torch.float32
    for a, b, c in zip(*([m.step.x, m.step.dy, *m.model.parameters()] for m in (low, again, gold)), strict=True):
        assert torch.equal(a, b) and torch.equal(a.float(), c)
    assert low.step.x.std().item() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("toggle", [None, "lora_addmm"])
def test_the_gate_shares_the_dropout_mask(toggle):
    dropout = {"model": LINEAR, "overrides": ("lora.lora_dropout=0.5",)}
    gold = shared_step(upcast=True, **dropout)
    got = shared_step(*[toggle] * (toggle is not None), **dropout)
    assert numerics.judge(gold, gold, got, torch.float32, ()).passed
    undropped = numerics.one_step(op())
    verdict = numerics.judge(gold, gold, undropped, torch.float32, ())
    assert not verdict.passed


def test_a_shared_mask_is_drawn_once(monkeypatch):
    mask, x = numerics.SharedMask("a name", 0.5), torch.ones(8, 8)
    first = mask(x)
    monkeypatch.setattr(torch, "rand", None)  # as inside a CUDA graph, where a generator cannot be seeded
    assert torch.equal(mask(x), first) and 0 < (first == 0).sum() < 64


def test_the_gate_looks_at_the_output_too():
    gold, got = numerics.one_step(op()), numerics.one_step(op())
    got.gradients["the output Y"] *= 1.01
    verdict = numerics.judge(gold, gold, got, torch.float32, ())
    assert not verdict.passed
    assert numerics.explain(verdict).startswith("the output Y is off by 0.01 from float32 PEFT")


def test_addmm_runs_no_pass_of_its_own_and_leaves_mixed_dtypes_alone():
    made = op("lora_addmm")
    _, ops = traced(lambda: trial.run_trial(made))
    assert ops["aten::addmm_"] == 2 and ops["aten::add"] == 0
    toggle = registry.ablation("lora_addmm")
    assert toggle.audit(Evidence(made, made.patched["lora_addmm"], ops)) == 1
    mixed = op("lora_addmm", dtype=torch.bfloat16)
    with pytest.raises(NotApplied, match="reference=peft_low"):
        toggle.audit(Evidence(mixed, mixed.patched["lora_addmm"], ops))


def test_a_whole_model_s_linears_take_addmm_too():
    plain, ours = (numerics.one_step(arm("sdpa", "adamw", *extra)) for extra in ((), ("lora_addmm",)))
    assert ours.loss == pytest.approx(plain.loss, rel=1e-6)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-4, atol=1e-7)


def test_toggles_for_whole_models_are_refused_and_so_is_the_bare_linear_of_a_model():
    class Machine:
        device, gpus, capability = "cpu", 0, None
        dtype = staticmethod(lambda name: "float32")

    linear = cells(f"models=[{LINEAR}]", "reference=linear", "ablations=[adamw,packing,bare_linear]")
    words = f"adamw is for cells of the kind train; {LINEAR} is measured as op"
    assert refusal(linear[1], Machine) == ("unsupported", words)
    assert refusal(linear[2], Machine) == ("unsupported", "a single linear has nothing that packing could change")
    assert refusal(linear[3], Machine) is None
    whole = cells("ablations=[bare_linear]")[1]
    assert refusal(whole, Machine) == ("unsupported", "bare_linear knows the families linear; tiny-llama is a llama")


@pytest.mark.exhaustive
def test_the_suite_s_cells_become_records_on_a_cpu(tmp_path):
    small = ("reference=linear", "trials=3", "warmup=1", "dtype=float32")
    overrides = config("suite=lorafusion_kernels", *small, f"models=[{{{LINEAR}@1x32: {{lora_dropout: 0.1, r: 4}}}}]")
    with Runner(InProcess(), describe(), None, "test", 60, tmp_path) as runner:
        every = [runner.measure(cell) for cell in plan(overrides, "cpu").cells]
    again, _, addmm, ours = every
    assert {r.model for r in every} == {f"{LINEAR}(lora_dropout=0.1, r=4)"}
    assert {(r.status, r.reason) for r in every} == {("ok", None)}
    assert all(set(r.phases) == {"forward", "backward", "total"} for r in every)
    assert [r.kind for r in every] == ["op", "limit", "op", "op"]
    assert [r.numerics and r.numerics.tensors for r in every] == [4, None, 4, 4]
    assert ours.applied["lora_kernels"] == 1
    assert ours.notes["gate"].startswith("at dropout 0: lora_kernels draws masks") and "gate" not in addmm.notes
    assert type(again).model_validate_json(again.model_dump_json(by_alias=True, exclude_none=True)) == again
