"""A captured step beside the plain loop that it stands for, on a CPU, with a recorder that keeps a graph's promises."""

from __future__ import annotations

from copy import deepcopy

import lorakernels
import pytest
import torch
from capture_loops import BUCKETS, batches, optimizer_of, padded_batch, plain, replayed, same_parameters, schedule_of
from kernel_checks import exhaustive
from lorakernels.capturing import backward as capture_backward
from lorakernels.capturing.inputs import Eager, fit
from tiny_models import build


@pytest.mark.parametrize("family", ["llama", exhaustive("mistral"), "gemma2", exhaustive("qwen3")])
def test_curves_are_those_of_the_plain_loop(fake, family):
    """Full attention, a sliding window and eager attention; every bucket replayed, with schedule and clipping."""
    model = build(family)
    other, data = deepcopy(model), batches(20)
    fake.params = list(model.parameters())
    losses, norms, step = replayed(model, data, clip=0.5)
    wanted, wanted_norms = plain(other, data, clip=0.5)
    assert torch.allclose(losses, wanted, atol=1e-5) and len(set(losses.tolist())) == 20
    assert norms == pytest.approx(wanted_norms, rel=1e-4) and max(norms) > 0.5
    same_parameters(model, other)
    status = step.status()
    assert [(g.rows, g.length, g.replays) for g in status.graphs] == [(2, 8, 6), (2, 12, 6), (2, 16, 2)]
    assert status.eager == {"a shape is warming up": 6}
    assert status.updates["optimizer replayed"] >= 10 and status.updates["clipping replayed"] >= 10
    assert status.replays == 14 and fake.replays == 14 + sum(
        n for how, n in status.updates.items() if "replayed" in how
    )


@pytest.mark.parametrize("set_to_none", [True, exhaustive(False)])
def test_accumulation_and_an_unfinished_group(fake, set_to_none):
    model = build("llama")
    other, data = deepcopy(model), batches(23)
    fake.params = list(model.parameters())
    losses, _, step = replayed(model, data, accumulate=3)
    wanted, _ = plain(other, data, accumulate=3)
    assert torch.allclose(losses, wanted, atol=1e-5)
    same_parameters(model, other)
    left = [p.grad.clone() for p in other.parameters() if p.grad is not None]
    got = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(left) == len(got) > 0
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(left, got, strict=True))
    step.update()
    assert step.updated and all(p.grad is None for p in model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    step.optimizer.zero_grad(set_to_none=set_to_none)
    step.update()  # nothing waits
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_number_of_items_in_the_batch_is_read_anew(fake):
    model = build("llama")
    other = deepcopy(model)
    fake.params = list(model.parameters())
    data = [{**b, "num_items_in_batch": torch.tensor(10 + i)} for i, b in enumerate(batches(12))]
    losses, _, step = replayed(model, data, accumulate=2)
    optimizer, wanted = optimizer_of(other), []
    schedule = schedule_of(optimizer)
    for i, one in enumerate(data, start=1):
        loss = other(**one).loss
        loss.backward()
        wanted.append(loss.detach())
        if i % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    assert torch.allclose(losses, torch.stack(wanted), atol=1e-5) and step.status().replays > 4
    same_parameters(model, other)


@pytest.mark.parametrize("kind", [exhaustive("left"), "packed", "positions", exhaustive("trained padding")])
def test_other_masks_than_right_padding(fake, kind):
    """What causality does not separate, a mask does."""
    model = build("llama")
    other, data = deepcopy(model), []
    fake.params = list(model.parameters())
    for one in batches(14):
        length = one["input_ids"].shape[1]
        if kind == "left":
            one = {n: t.flip(1) for n, t in one.items()}
        elif kind == "trained padding":
            one["labels"] = one["input_ids"].clone()
        else:
            del one["attention_mask"]
            positions = torch.arange(length).expand(2, -1)
            one["position_ids"] = positions if kind == "positions" else torch.where(
                positions < 4, positions, positions - 4
            )  # fmt: skip
        data.append(one)
    losses, _, step = replayed(model, data)
    wanted, _ = plain(other, data)
    assert torch.allclose(losses, wanted, atol=1e-5)
    assert step.status().replays == 8
    assert {g.masks for g in step.status().graphs} == {"causal" if kind == "positions" else "from the inputs"}


LAYOUTS = [
    (7, 5),
    (3, 8),
    (4, 4, 4),
    (12,),
    (6, 9),
    (2, 6, 3),
    (9, 2),
    (5, 5, 5),
    (10, 6),
    (16,),
    (8, 3),
    (1, 2, 8),
    (2, 9),
]


def test_packed_rows_of_flash_attention_share_a_graph(fake, flash):
    """Whatever samples a row has: where they begin is an input of the graph. What a collator says of it is left out."""
    model = build("llama")
    model.config._attn_implementation = "flash_test"
    other, data = deepcopy(model), []
    fake.params = list(model.parameters())
    for number, lengths in enumerate(LAYOUTS):
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        ids = padded_batch(number, positions.shape[1], rows=1)["input_ids"][:, : positions.shape[1]]
        data.append({"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions})
    data[5] |= {"cu_seq_lens_q": torch.tensor([0, 2, 8, 11]), "max_length_q": 6}
    losses, _, step = replayed(model, data)
    shapes = set(flash)
    wanted, _ = plain(other, [{n: x for n, x in one.items() if n in data[0]} for one in data])
    assert torch.allclose(losses, wanted, atol=1e-5)
    same_parameters(model, other)
    status = step.status()
    assert {g.masks for g in status.graphs} == {"by segments"} and status.replays >= 2, str(status)
    assert set(status.eager) == {"a shape is warming up"}
    assert shapes >= {(3, 12), (5, 12), (3, 16)} and None not in {count for count, longest in shapes if longest}


@pytest.mark.parametrize("kind", ["left-padded", "two rows"])
def test_what_flash_attention_has_to_be_told_by_the_host_runs_as_it_is(fake, flash, kind):
    model = build("llama")
    model.config._attn_implementation = "flash_test"
    one = padded_batch(0, 12)
    if kind == "left-padded":
        one = {n: t.flip(1) for n, t in one.items()}
    else:
        del one["attention_mask"]
        one["position_ids"] = torch.tensor([[*range(6), *range(6)]] * 2)
    with pytest.raises(Eager, match="takes the lengths of left-padded samples, or of several rows', from the host"):
        fit(one, BUCKETS, "flash_test", ())


def test_eager_batches_in_between(fake):
    """Too long, of another kind, or of too many shapes: they train as they are, and the graphs after them are right."""
    model = build("llama")
    other, data = deepcopy(model), batches(24)
    fake.params = list(model.parameters())
    data[9] = padded_batch(9, 20)
    data[15]["inputs_embeds"] = None
    data[16] = padded_batch(16, 8, rows=3)
    losses, _, step = replayed(model, data, accumulate=2)
    wanted, _ = plain(other, data, accumulate=2)
    assert torch.allclose(losses, wanted, atol=1e-5)
    same_parameters(model, other)
    eager = step.status().eager
    assert eager["longer than the largest bucket, 16 tokens"] == 1
    assert eager["a shape is warming up"] == 6 + 2
    assert any("uncaptured batch has left" not in how for how in step.status().updates)
    text = str(step.status())
    assert "graph 2 x 8, masks causal" in text and "eager x 1: longer than" in text


def test_what_cannot_be_captured_says_why(fake):
    model = build("llama")
    fake.params = list(model.parameters())
    other, data = deepcopy(model), batches(12)
    fake.needs = ["it waits for the device at somewhere.py:3"]
    losses, _, step = replayed(model, data)
    assert torch.allclose(losses, plain(other, data)[0], atol=1e-5) and fake.replays == 0
    assert step.status().eager["the step needs the host: it waits for the device at somewhere.py:3"] == 6
    fake.needs, fake.fails = [], "out of memory"
    _, _, step = replayed(model, data)
    assert step.status().eager["cannot be captured: out of memory"] == 6 and not step.status().graphs
    assert step.status().updates["optimizer eager: no backward is captured yet"] == 12


def test_too_many_shapes(fake, monkeypatch):
    monkeypatch.setattr(capture_backward, "MAX_GRAPHS", 1)
    model = build("llama")
    fake.params = list(model.parameters())
    _, _, step = replayed(model, batches(15))
    assert step.status().eager["1 other shapes are captured already"] == 5 and len(step.status().graphs) == 1


def test_optimizers_that_count_on_the_host_step_uncaptured(fake):
    model = build("llama")
    fake.params = list(model.parameters())
    other, data = deepcopy(model), batches(14)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, other)]
    step = lorakernels.capture(model, optimizers[0], buckets=BUCKETS, max_grad_norm=1.0)
    for one in data:
        loss = step(one)
        wanted = other(**one).loss
        wanted.backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert loss == pytest.approx(wanted.item(), abs=1e-5)
    updates = step.status().updates
    assert updates["optimizer eager: SGD counts or computes on the host (no `capturable`)"] == 14
    assert updates["clipping replayed"] > 5


def test_a_changed_hyperparameter_or_state_is_captured_anew(fake):
    model = build("llama")
    fake.params = list(model.parameters())
    optimizer, data = optimizer_of(model), batches(6) * 3
    step = lorakernels.capture(model, optimizer, buckets=(16,))
    for i, one in enumerate(data):
        if i == 8:
            optimizer.param_groups[0]["weight_decay"] = 0.5
        if i == 12:
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
        step(one)
    assert step.status().updates["optimizer eager: warming up"] == 1 + 2 + 1 - 1 + 1 - 1
    assert optimizer.param_groups[0]["lr"] == 1e-2 and not isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


@pytest.mark.parametrize("change", ["frozen", exhaustive("adapter off"), exhaustive("another scale"), "moved"])
def test_a_changed_model_is_captured_anew(fake, change):
    model = build("llama")
    fake.params = list(model.parameters())
    other = deepcopy(model)

    def between(i, m):
        if i != 9:
            return
        if change == "frozen":
            next(p for n, p in m.named_parameters() if "lora_A" in n).requires_grad_(False)
        elif change == "adapter off":
            m.base_model.model.model.layers[0].self_attn.q_proj.enable_adapters(False)
        elif change == "another scale":
            m.base_model.model.model.layers[0].self_attn.q_proj.set_scale("default", 3.0)
        else:
            for p in m.parameters():
                p.data = p.data.clone()

    data = batches(20)
    losses, _, step = replayed(model, data, between=between, buckets=(16,))
    wanted, _ = plain(other, data, between=between)
    assert torch.allclose(losses, wanted, atol=1e-5)
    same_parameters(model, other)
    assert step.status().dropped.total() == 1 and step.status().replays == 20 - 4
    assert "captured anew x 1" in str(step.status())


def test_evaluation_in_between(fake):
    model = build("llama", lora_dropout=0.2)
    fake.params = list(model.parameters())

    def between(i, m):
        m.eval()
        with torch.no_grad():
            m(**padded_batch(77, 9))
        m.train()

    _, _, step = replayed(model, batches(12), between=between)
    assert step.status().replays == 6 and not step.status().dropped


def test_no_accumulator_of_an_evaluation_under_autocast_meets_a_capture(fake, monkeypatch):
    """Autocast's cache keeps the casts of a forward without gradients, too, and a CUDA graph cannot be captured while a
    parameter's accumulator lives from before."""
    model, met = build("llama", torch.bfloat16, autocast_adapter_dtype=True), []
    trained = [p for p in model.parameters() if p.requires_grad]
    fake.params, record = list(model.parameters()), fake.record

    def accumulators():
        return [p.view_as(p).grad_fn.next_functions[0][0].metadata for p in trained]

    def between(i, m):
        with torch.no_grad():
            m(**padded_batch(77, 9))
        for metadata in accumulators():
            metadata["of an evaluation"] = True
        assert all(accumulators()), "kept alive by the cache: else this test tests nothing"

    def recorded(function):
        met.extend(accumulators())
        return record(function)

    monkeypatch.setattr(fake, "record", recorded)
    with torch.autocast("cpu", torch.bfloat16):
        _, _, step = replayed(model, batches(12), between=between)
    assert step.status().replays == 6 and len(met) >= 3 * len(trained)
    assert not any(met)


def test_dropout_draws_new_masks_every_replay(fake):
    model = build("llama", lora_dropout=0.5)
    fake.params = list(model.parameters())
    lorakernels.apply(model)
    optimizer = optimizer_of(model, lr=0.0)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    step, one = lorakernels.capture(model, optimizer, buckets=(16,)), padded_batch(0, 15)
    losses = [step(one).item() for _ in range(10)]
    assert step.status().replays == 8 and len(set(losses)) == 10


def test_gradient_checkpointing(fake):
    """Without dropout it is captured; with it, a graph could not draw the same masks again."""
    for dropout in (0.0, 0.1):
        model = build("llama", lora_dropout=dropout)
        fake.params = list(model.parameters())
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        other, data = deepcopy(model), batches(12)
        losses, _, step = replayed(model, data)
        if dropout:
            assert step.status().replays == 0
            assert any("draws dropout again" in reason for reason in step.status().eager)
        else:
            assert step.status().replays == 6
            assert torch.allclose(losses, plain(other, data)[0], atol=1e-5)


@pytest.mark.parametrize(
    "dropout, offload, reason",  # dropout's reason is that of checkpointing, which is above
    [(0.0, False, None), exhaustive(0.1, False, "draws dropout again"), (0.0, True, "host memory")],
)
def test_long_context(dropout, offload, reason, fake):
    model = build("llama", lora_dropout=dropout)
    fake.params = list(model.parameters())
    other, data = deepcopy(model), batches(12)
    lorakernels.apply(model, long_context=lorakernels.LongContext(mlp_rows=7, offload=offload))
    losses, _, step = replayed(model, data)
    if reason is None:
        assert step.status().replays == 6
        assert torch.allclose(losses, plain(other, data)[0], atol=1e-5)
    else:
        assert step.status().replays == 0
        assert any(reason in one for one in step.status().eager)


def test_a_model_that_sees_its_padding_is_not_padded(fake):
    """A bidirectional model without a mask."""
    model = build("llama")
    model.config.is_causal = False
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    fake.params = list(model.parameters())
    other, data = deepcopy(model), [{n: t for n, t in b.items() if n != "attention_mask"} for b in batches(16)]
    losses, _, step = replayed(model, data)
    assert torch.allclose(losses, plain(other, data)[0], atol=1e-5)
    assert step.status().eager["nothing shows that padding leaves this model's loss as it is"] > 5
    assert [(g.length, g.replays) for g in step.status().graphs] == [(8, 1)]


def test_lorakernels_and_a_loss_of_ones_own(fake):
    model = build("qwen2")
    other = deepcopy(model)
    fake.params = list(model.parameters())
    lorakernels.apply(model)
    calls = []

    def loss(model, batch):
        calls.append(batch)
        return model(**batch).loss * 2

    losses, _, _ = replayed(model, batches(12), loss=loss)
    optimizer = optimizer_of(other)
    schedule, wanted = schedule_of(optimizer), []
    for one in batches(12):
        value = other(**one).loss * 2
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        wanted.append(value.detach())
    assert calls and torch.allclose(losses, torch.stack(wanted), atol=1e-4)


def test_without_a_gpu_everything_runs_as_it_is():
    model = build("llama")
    other, data = deepcopy(model), batches(10)
    losses, norms, step = replayed(model, data, clip=0.5, accumulate=2)
    wanted, wanted_norms = plain(other, data, clip=0.5, accumulate=2)
    assert torch.equal(losses, wanted) and norms == wanted_norms
    assert step.status().eager == {"CUDA graphs need a CUDA device; the model is on cpu": 10}
    assert step.status().replays == 0


def test_several_gpus_are_left_eager_with_the_reason(fake):
    model = build("llama")
    wrapped = torch.nn.DataParallel(model)
    step = lorakernels.capture(wrapped, optimizer_of(model), buckets=(16,))
    step(padded_batch(0, 9))
    (reason,) = step.status().eager
    assert reason.startswith("DataParallel exchanges gradients")


def test_release_frees_and_captures_again(fake):
    model = build("llama")
    fake.params = list(model.parameters())
    step = lorakernels.capture(model, optimizer_of(model), buckets=(16,))
    for one in batches(5):
        step(one)
    assert step.status().replays == 3
    step.release()
    assert [g.live for g in step.status().graphs] == [False]
    for one in batches(5):
        step(one)
    assert [(g.replays, g.live) for g in step.status().graphs] == [(3, False), (3, True)]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"buckets": ()}, "buckets are lengths"),
        ({"buckets": (256, 1.5)}, "buckets are lengths"),
        ({"accumulate": 0}, "at least 1, not 0"),
        ({"max_grad_norm": 0}, "positive or None, not 0"),
    ],
)
def test_wrong_arguments(kwargs, message):
    model = build("llama")
    with pytest.raises(ValueError, match=message):
        lorakernels.capture(model, optimizer_of(model), **kwargs)
