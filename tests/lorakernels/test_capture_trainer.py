"""`captured` trainers beside plain ones: the same logs of training and evaluation, the same checkpoints."""

from __future__ import annotations

from copy import deepcopy

import lorakernels
import pytest
import torch
from kernel_checks import exhaustive
from lorakernels.capturing.metrics import Later
from lorakernels.capturing.status import Status
from lorakernels.capturing.update import CapturedUpdate
from test_trainer import tokenizer
from tiny_models import build
from transformers import Trainer, TrainingArguments

BUCKETS = (8, 16)


def rows(count=22):
    torch.manual_seed(0)
    lengths = [(5, 9, 7, 12, 6, 8, 14, 4)[i % 8] for i in range(count)]
    return [torch.randint(3, 101, (n,)).tolist() for n in lengths]


def collate(examples):
    """Padded on the right, as data collators do."""
    longest = max(len(e["input_ids"]) for e in examples)
    padded = [e["input_ids"] + [0] * (longest - len(e["input_ids"])) for e in examples]
    mask = [[1] * len(e["input_ids"]) + [0] * (longest - len(e["input_ids"])) for e in examples]
    ids, mask = torch.tensor(padded), torch.tensor(mask)
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


COMMON = {
    "max_steps": 12, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
    "warmup_steps": 2, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5, "logging_steps": 3,
    "eval_strategy": "steps", "eval_steps": 4, "save_steps": 6, "report_to": [], "seed": 1, "bf16": False,
    "disable_tqdm": True,
}  # fmt: skip


def trainer_of(model, folder, device="cpu", kind=Trainer, **kwargs):
    data = [{"input_ids": r} for r in rows()]
    arguments = TrainingArguments(str(folder), use_cpu=device == "cpu", **{**COMMON, **kwargs})
    return kind(
        model=model, args=arguments, train_dataset=data, eval_dataset=data[:4], data_collator=collate,
        processing_class=tokenizer(),
    )  # fmt: skip


def sft_trainer_of(model, folder, device="cpu", **kwargs):
    trl = pytest.importorskip("trl", reason="needs the package trl")
    from datasets import Dataset
    from datasets.table import InMemoryTable

    # a fingerprint of its own: datasets would make one by pickling, which some versions of dill and pyarrow cannot
    data = Dataset(InMemoryTable.from_pydict({"input_ids": rows(), "labels": rows()}), fingerprint="rows")
    arguments = trl.SFTConfig(
        str(folder), use_cpu=device == "cpu", dataset_kwargs={"skip_prepare_dataset": True},
        **{**COMMON, "gradient_checkpointing": False, **kwargs},
    )  # fmt: skip
    return trl.SFTTrainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data.select(range(4)),
        processing_class=tokenizer(),
    )  # fmt: skip


TIMES = ("runtime", "per_second", "total_flos")


def history(trainer):
    """All that was logged, without times."""
    trainer.train()
    return [
        {n: v for n, v in entry.items() if not any(t in n for t in TIMES)} for entry in trainer.state.log_history
    ]  # fmt: skip


def same_history(got, wanted, rel=1e-4, least=6):
    assert len(got) == len(wanted) > least
    for a, b in zip(got, wanted, strict=True):
        assert a == pytest.approx(b, rel=rel, abs=1e-6)


MAKERS = pytest.mark.parametrize("make", [trainer_of, sft_trainer_of], ids=["Trainer", "SFTTrainer"])


def test_a_group_without_parameters_is_made_capturable_too():
    """transformers makes one of what it does not decay, and torch asks every group."""
    model = build("llama").to("meta")
    groups = [{"params": [p for p in model.parameters() if p.requires_grad]}, {"params": []}]
    update = CapturedUpdate(torch.optim.AdamW(groups), None, Status(), None)
    update._make_capturable()
    assert [g["capturable"] for g in update.optimizer.param_groups] == [False, False]
    update.__class__ = type("OnAGpu", (CapturedUpdate,), {"_device": torch.device("cuda", 0)})
    update._make_capturable()
    assert [g["capturable"] for g in update.optimizer.param_groups] == [True, True]


@pytest.mark.parametrize(
    "make, ours",
    [(sft_trainer_of, False), (trainer_of, True), exhaustive(trainer_of, False), exhaustive(sft_trainer_of, True)],
    ids=["SFTTrainer-peft", "Trainer-lorakernels", "Trainer-peft", "SFTTrainer-lorakernels"],
)
def test_the_same_logs_and_checkpoints(fake, make, ours, tmp_path):
    """Accumulation whose last group of an epoch is smaller, warm-up and cosine, clipping, evaluation and saving in
    between; SFTTrainer logs entropy, accuracy and tokens besides."""
    model = build("llama", sizes={"initializer_range": 0.02})
    fake.params = list(model.parameters())
    other = deepcopy(model)
    if ours:
        lorakernels.apply(model)
        lorakernels.apply(other)
    trainer = lorakernels.captured(make(model, tmp_path / "captured"), buckets=BUCKETS)
    got, wanted = history(trainer), history(make(other, tmp_path / "plain"))
    same_history(got, wanted)
    assert any("eval_loss" in entry for entry in got) and any("grad_norm" in entry for entry in got)
    if make is sft_trainer_of:
        assert {"entropy", "mean_token_accuracy", "num_tokens"} < set(got[0])
    status = trainer.capture.status()
    assert status.replays > 12 and status.replays + status.eager.total() == 22
    assert status.updates["optimizer replayed"] > 5 and status.updates["clipping replayed"] > 5
    names = [f"checkpoint-{n}" for n in (6, 12)]
    for name in names:
        saved = [torch_load(tmp_path / which / name) for which in ("captured", "plain")]
        assert saved[0].keys() == saved[1].keys()
        assert all(torch.allclose(saved[0][n], saved[1][n], atol=2e-4) for n in saved[0])
        assert (tmp_path / "captured" / name / "optimizer.pt").exists()


def test_padding_free_batches_of_trl(fake, flash, tmp_path):
    """SFTTrainer's collator makes a batch one row, and says of it in three ways where its samples begin."""
    model = build("llama", sizes={"initializer_range": 0.02})
    model.config._attn_implementation = "flash_test"
    fake.params = list(model.parameters())
    other, kwargs = deepcopy(model), {"padding_free": True, "max_length": None, "eval_strategy": "no"}
    trainer = lorakernels.captured(sft_trainer_of(model, tmp_path / "a", **kwargs), buckets=(16, 24, 32))
    same_history(history(trainer), history(sft_trainer_of(other, tmp_path / "b", **kwargs)), least=4)
    status = trainer.capture.status()
    assert {graph.masks for graph in status.graphs} == {"by segments"} and status.replays > 8, str(status)


def torch_load(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def test_resuming_from_a_checkpoint(fake, tmp_path):
    """Of a captured run, by a captured trainer: the optimizer's states are others then."""
    model = build("llama")
    other, third = deepcopy(model), deepcopy(model)
    fake.params = list(model.parameters())
    got = history(lorakernels.captured(trainer_of(model, tmp_path / "a"), buckets=BUCKETS))
    fake.params = list(other.parameters())
    trainer = lorakernels.captured(trainer_of(other, tmp_path / "b"), buckets=BUCKETS)
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-6"))
    assert trainer.capture.status().replays > 4
    last = [e for e in trainer.state.log_history if "loss" in e][-1]
    assert last["loss"] == pytest.approx([e for e in got if "loss" in e][-1]["loss"], rel=1e-4)
    resumed = trainer_of(third, tmp_path / "c")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-6"))
    assert [e for e in resumed.state.log_history if "loss" in e][-1]["loss"] == pytest.approx(last["loss"], rel=1e-4)


def test_training_twice_with_one_trainer(fake, tmp_path):
    model = build("llama")
    other = deepcopy(model)
    fake.params = list(model.parameters())
    trainers = [lorakernels.captured(trainer_of(model, tmp_path / "a"), buckets=BUCKETS), trainer_of(other, tmp_path)]
    for trainer in trainers:
        trainer.train()
    same_history(*(history(trainer) for trainer in trainers))


def test_losses_that_are_no_numbers_are_filtered_as_before(fake, tmp_path, monkeypatch):
    """`logging_nan_inf_filter`, which looks at every loss, is done on the device."""

    def spoil(trainer):
        own, count = trainer.compute_loss, iter(range(100))

        def compute_loss(*args, **kwargs):
            loss = own(*args, **kwargs)
            return loss * (torch.nan if next(count) == 9 and not kwargs.get("return_outputs") else 1.0)

        trainer.compute_loss = compute_loss
        return trainer

    model = build("llama")
    other = deepcopy(model)
    fake.needs = ["it is not captured in this test"]
    kwargs = {"logging_steps": 2, "max_steps": 4, "eval_strategy": "no"}
    got = history(lorakernels.captured(spoil(trainer_of(model, tmp_path / "a", **kwargs))))
    wanted = history(spoil(trainer_of(other, tmp_path / "b", **kwargs)))
    assert [e["loss"] for e in got[:2]] == pytest.approx([e["loss"] for e in wanted[:2]])


@pytest.mark.parametrize("make", [trainer_of, exhaustive(sft_trainer_of)], ids=["Trainer", "SFTTrainer"])
def test_without_a_gpu_a_trainer_runs_as_it_is(make, tmp_path):
    model = build("llama")
    other = deepcopy(model)
    trainer = lorakernels.captured(make(model, tmp_path / "a", max_steps=6), buckets=BUCKETS)
    got, wanted = history(trainer), history(make(other, tmp_path / "b", max_steps=6))
    assert got == wanted
    assert list(trainer.capture.status().eager) == ["CUDA graphs need a CUDA device; the model is on cpu"]


def test_what_a_trainer_does_that_no_graph_can(fake, tmp_path):
    class Odd(Trainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    def reason(**kwargs):
        trainer = lorakernels.captured(trainer_of(build("llama"), tmp_path, max_steps=1, eval_strategy="no", **kwargs))
        trainer.train()
        (found,) = trainer.capture.status().eager
        return found

    assert reason(kind=Odd).startswith("Odd has a compute_loss of its own")
    assert "frees memory" in reason(torch_empty_cache_steps=5)
    assert "NEFTune" in reason(neftune_noise_alpha=5.0)


def test_wrong_arguments(fake, tmp_path):
    with pytest.raises(TypeError, match="a Trainer of transformers or an SFTTrainer; LlamaForCausalLM has no"):
        lorakernels.captured(build("llama").base_model.model)
    trainer = lorakernels.captured(trainer_of(build("llama"), tmp_path))
    with pytest.raises(ValueError, match="captured already"):
        lorakernels.captured(trainer)
    with pytest.raises(ValueError, match="buckets are lengths"):
        lorakernels.captured(trainer_of(build("llama"), tmp_path), buckets=(0,))


def test_metrics_that_are_read_later():
    valid, right = Later(torch.tensor([3, 1])).sum(), Later(torch.tensor(2.0))
    assert valid.value == 4 and valid > 0 and (right / valid).item().value == 0.5
    assert (right / Later(torch.tensor(0))).value == 0
    assert (5 + Later(torch.tensor(7)) // 2).value == 8 and Later(torch.tensor([1, 2])).mean().value == 1.5


@pytest.mark.gpu
@MAKERS
@pytest.mark.parametrize("ours", [False, True], ids=["peft", "lorakernels"])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_graphs_make_the_same_logs(make, ours, bf16, tmp_path):
    """50 updates with everything on: accumulation, warm-up and cosine, clipping, evaluation and saving in between.
    TRL's own loss picks out the trained tokens by a mask, for which the host waits: it stays eager, and says so."""
    model = build("llama", sizes={"initializer_range": 0.02}).cuda()
    other = deepcopy(model)
    if ours:
        lorakernels.apply(model)
        lorakernels.apply(other)
    kwargs = {
        "device": "cuda",
        "bf16": bf16,
        "max_steps": 50,
        "eval_steps": 15,
        "save_steps": 25,
        "learning_rate": 2e-3,
    }
    trainer = lorakernels.captured(make(model, tmp_path / "captured", **kwargs), buckets=BUCKETS)
    got, wanted = history(trainer), history(make(other, tmp_path / "plain", **kwargs))
    status = trainer.capture.status()
    if make is sft_trainer_of and not ours:
        assert status.replays == 0 and any("waits for the device" in reason for reason in status.eager), str(status)
    else:
        assert status.replays > 60 and status.updates["optimizer replayed"] > 30, str(status)
        assert status.updates["clipping replayed"] > 30, str(status)
    names = ("loss", "eval_loss", "grad_norm", "entropy", "num_tokens", "learning_rate")
    for a, b in zip(got, wanted, strict=True):
        for name in names:
            if name in b:
                assert a[name] == pytest.approx(b[name], rel=0.1 if name == "grad_norm" else 2e-2 if bf16 else 5e-3)
    assert (tmp_path / "captured" / "checkpoint-50" / "adapter_model.safetensors").exists()


@pytest.mark.gpu
def test_graphs_beside_a_gradient_scaler(tmp_path):
    """fp16: forward and backward are replayed, the scaled update is the trainer's own."""
    model = build("llama")
    other = deepcopy(model)
    kwargs = {"device": "cuda", "fp16": True, "max_steps": 20, "learning_rate": 2e-3, "eval_strategy": "no"}
    trainer = lorakernels.captured(trainer_of(model, tmp_path / "a", **kwargs), buckets=BUCKETS)
    got, wanted = history(trainer), history(trainer_of(other, tmp_path / "b", **kwargs))
    assert trainer.capture.status().replays > 20, str(trainer.capture.status())
    losses = [[e["loss"] for e in h if "loss" in e] for h in (got, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


@pytest.mark.gpu
def test_graphs_of_padding_free_batches_of_trl(tmp_path):
    pytest.importorskip("flash_attn_2_cuda", reason="flash-attn is not installed")
    model = build("llama", sizes={"initializer_range": 0.02}).to("cuda", torch.bfloat16)
    model.config._attn_implementation = "flash_attention_2"
    other = deepcopy(model)
    lorakernels.apply(model)
    lorakernels.apply(other)
    kwargs = {"device": "cuda", "bf16": True, "padding_free": True, "max_length": None, "eval_strategy": "no"}
    trainer = lorakernels.captured(sft_trainer_of(model, tmp_path / "a", **kwargs), buckets=(16, 24, 32))
    got, wanted = history(trainer), history(sft_trainer_of(other, tmp_path / "b", **kwargs))
    status = trainer.capture.status()
    assert {graph.masks for graph in status.graphs} == {"by segments"} and status.replays > 8, str(status)
    losses = [[e["loss"] for e in h if "loss" in e] for h in (got, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
