"""A captured step beside the plain loop that it stands for, with CUDA graphs themselves (-m gpu)."""

from __future__ import annotations

import contextlib
from copy import deepcopy

import lorakernels
import pytest
import torch
from capture_loops import batches, optimizer_of, padded_batch, plain, replayed, schedule_of
from lorakernels.capturing.graph import CudaGraphs
from lorakernels.capturing.inputs import to_device
from tiny_models import build

OPTIMIZERS = {
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
}


@pytest.mark.gpu
@pytest.mark.parametrize("ours", [False, True], ids=["peft", "lorakernels"])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_graphs_follow_the_plain_loop(optimizer, name, ours, monkeypatch):
    """50 batches of three buckets with accumulation, schedule, clipping, evaluation and a copy of the state in
    between."""
    monkeypatch.setattr(
        f"{__name__}.optimizer_of", lambda m: OPTIMIZERS[optimizer]([p for p in m.parameters() if p.requires_grad])
    )
    model = build("llama", getattr(torch, name)).cuda()
    other, data, saved = deepcopy(model), batches(50), []
    if ours:
        lorakernels.apply(model)
        lorakernels.apply(other)

    def between(i, m):
        if i % 20 == 0:
            m.eval()
            with torch.no_grad():
                saved.append(m(**to_device(padded_batch(99, 13), "cuda")).loss.item())
            m.train()

    losses, norms, step = replayed(model, data, accumulate=2, clip=0.5, between=between)
    wanted, wanted_norms = plain(other, data, accumulate=2, clip=0.5, between=between, device="cuda")
    rel = 2e-3 if name == "float32" else 3e-2
    assert losses.tolist() == pytest.approx(wanted.tolist(), rel=rel)
    assert norms == pytest.approx(wanted_norms, rel=20 * rel) and saved[:2] == pytest.approx(saved[2:], rel=rel)
    status = step.status()
    assert status.replays == 50 - 6 and len(status.graphs) == 3, str(status)
    assert status.updates["clipping replayed"] > 15, str(status)
    if optimizer != "sgd":
        assert status.updates["optimizer replayed"] > 15, str(status)


@pytest.mark.gpu
def test_optimizers_in_branches_of_one_graph_do_what_they_do_one_after_the_other():
    """More of them than branches, and what comes behind them in the graph waits for all."""
    torch.manual_seed(0)
    params = [torch.randn(300, 70, device="cuda", requires_grad=True) for _ in range(11)]
    other = [p.detach().clone().requires_grad_() for p in params]
    ours, theirs = (
        [torch.optim.AdamW([p], lr=1e-2, fused=True, capturable=True) for p in own] for own in (params, other)
    )
    for p, q in zip(params, other, strict=True):
        p.grad, q.grad = p.detach().sin(), p.detach().sin()
    graphs = CudaGraphs(torch.device("cuda"))
    before = [p.detach().clone() for p in params]
    with graphs.aside():
        for optimizer in (*ours, *theirs):
            optimizer.step()

    def update():
        graphs.in_branches([optimizer.step for optimizer in ours])
        return {"sum": torch.stack([p.sum() for p in params])}

    recording = graphs.record(update)
    for _ in range(3):
        for optimizer in theirs:
            optimizer.step()
        found = recording.replay()["sum"]
        assert torch.equal(found, torch.stack([p.sum() for p in other]))
    assert all(torch.equal(p, q) for p, q in zip(params, other, strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(params, before, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["left", "packed"])
def test_graphs_with_masks_of_their_own(kind):
    model = build("llama").cuda()
    other, data = deepcopy(model), []
    for one in batches(20):
        if kind == "left":
            one = {n: t.flip(1) for n, t in one.items()}
        else:
            del one["attention_mask"]
            positions = torch.arange(one["input_ids"].shape[1]).expand(2, -1)
            one["position_ids"] = torch.where(positions < 4, positions, positions - 4)
        data.append(one)
    losses, _, step = replayed(model, data)
    wanted, _ = plain(other, data, device="cuda")
    assert losses.tolist() == pytest.approx(wanted.tolist(), rel=2e-3)
    assert step.status().replays == 14, str(step.status())


@pytest.mark.gpu
@pytest.mark.parametrize("ours", [False, True], ids=["peft", "lorakernels"])
def test_packed_rows_under_flash_attention(ours):
    pytest.importorskip("flash_attn_2_cuda", reason="flash-attn is not installed")
    model, data = build("llama").to("cuda", torch.bfloat16), []
    model.config._attn_implementation = "flash_attention_2"
    other = deepcopy(model)
    for number in range(16):
        lengths = ((5, 7), (3, 8), (4, 4, 4), (11,))[number % 4]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        ids = padded_batch(number, positions.shape[1], rows=1)["input_ids"]
        data.append({"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions})
    if ours:
        lorakernels.apply(model)
    losses, _, step = replayed(model, data)
    wanted, _ = plain(other, data, device="cuda")
    assert losses.tolist() == pytest.approx(wanted.tolist(), rel=2e-2)
    assert step.status().replays >= 8 and {g.masks for g in step.status().graphs} == {"by segments"}, str(step.status())


@pytest.mark.gpu
@pytest.mark.parametrize("ours", [False, True], ids=["peft", "lorakernels"])
def test_replays_draw_dropout_as_uncaptured_steps_do(ours):
    """Nothing learns, so losses differ by their masks alone: all different, and of the same mean and spread."""
    model = build("llama", lora_dropout=0.5).cuda()
    if ours:
        lorakernels.apply(model)
    one, count = padded_batch(0, 15), 200
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0, weight_decay=0.0)
    step = lorakernels.capture(model, optimizer, buckets=(16,))
    got = torch.stack([step(one) for _ in range(count + 2)])[2:].cpu()
    with torch.no_grad():
        wanted = torch.stack([model(**to_device(one, "cuda")).loss for _ in range(count)]).cpu()
    assert step.status().replays == count and len(set(got.tolist())) > count - 5
    error = (got.var() / count + wanted.var() / count).sqrt()
    assert (got.mean() - wanted.mean()).abs() < 4 * error
    assert 0.75 < got.std() / wanted.std() < 1.33


@pytest.mark.gpu
def test_graphs_of_all_buckets_share_one_pool():
    """The largest first: those after it find room in what it has reserved."""
    model = build(
        "llama", sizes={"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 4096}
    ).cuda()
    step = lorakernels.capture(model, optimizer_of(model), buckets=(512, 1024, 2048))
    reserved = []
    for length in (2000, 1000, 500):
        for _ in range(4):
            step(padded_batch(0, length, rows=4))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert len(step.status().graphs) == 3, str(step.status())
    assert reserved[2] < 1.25 * reserved[0], [f"{r / 2**20:.0f} MiB" for r in reserved]
    step.release()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved[0]


@pytest.mark.gpu
def test_a_step_that_needs_the_host_is_refused_before_its_capture():
    model = build("llama").cuda()
    other, data = deepcopy(model), batches(15)

    def loss(model, batch):
        out = model(**batch).loss
        return out if out.item() < 1e9 else out * 0

    losses, _, step = replayed(model, data, loss=loss)
    assert losses.tolist() == pytest.approx(plain(other, data, device="cuda")[0].tolist(), rel=2e-3)
    assert step.status().replays == 0
    assert any("waits for the device at" in r and "test_capture_graphs.py" in r for r in step.status().eager), str(
        step.status()
    )


@pytest.mark.gpu
def test_a_capture_that_breaks_off_leaves_everything_working(monkeypatch):
    """Had nobody looked before: training goes on as it is, random numbers are drawn, and other shapes are captured."""
    monkeypatch.setattr("lorakernels.capturing.graph.CudaGraphs.needs_of_host", lambda self: contextlib.nullcontext([]))
    model = build("llama", lora_dropout=0.1).cuda()
    stream = torch.cuda.current_stream()

    def loss(model, batch):
        out = model(**batch).loss
        return out if batch["input_ids"].shape[1] != 8 or out.item() < 1e9 else out * 0

    losses, _, step = replayed(model, batches(25), loss=loss)
    assert losses.isfinite().all() and torch.rand(3, device="cuda").isfinite().all()
    assert torch.cuda.current_stream() == stream
    assert {g.length for g in step.status().graphs} == {12, 16}, str(step.status())
    assert any("cannot be captured" in reason for reason in step.status().eager), str(step.status())


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [True, False])
def test_graphs_with_gradient_checkpointing(reentrant):
    model = build("llama").cuda()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    other, data = deepcopy(model), batches(20)
    losses, _, step = replayed(model, data)
    wanted, _ = plain(other, data, device="cuda")
    assert losses.tolist() == pytest.approx(wanted.tolist(), rel=2e-3)
    assert step.status().replays == 14, str(step.status())


@pytest.mark.gpu
def test_a_replayed_step_does_not_wait_for_the_device():
    model = build("llama", torch.bfloat16).cuda()
    lorakernels.apply(model)
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    step = lorakernels.capture(model, optimizer, buckets=(16,), max_grad_norm=1.0)
    data = [padded_batch(i, 13) for i in range(12)]
    for one in data[:8]:
        step(one)
        schedule.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for one in data[8:]:
            step(one)
            schedule.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.status().replays == 10, str(step.status())


@pytest.mark.gpu
def test_autocast_around_the_step():
    """float32 adapters are cast anew by every replay: each loss is that of the parameters of just then. (Two curves
    would drift apart: Adam makes a whole step of a rounding in bfloat16.)"""
    model = build("llama", torch.bfloat16, autocast_adapter_dtype=True).cuda()
    other, data = deepcopy(model), batches(25)
    wanted = []

    def eager(i, model):
        if i < len(data):
            other.load_state_dict(model.state_dict())
            # autocast's cache would keep the casts of older parameters
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                wanted.append(other(**to_device(data[i], "cuda")).loss.item())

    with torch.autocast("cuda", torch.bfloat16):
        eager(0, model)
        losses, _, step = replayed(model, data, between=eager)
    assert losses.tolist() == pytest.approx(wanted, rel=1e-2)
    assert step.status().replays == 19, str(step.status())
