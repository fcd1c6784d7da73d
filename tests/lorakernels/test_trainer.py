"""transformers' Trainer over a patched model: losses, accumulation with num_items_in_batch, evaluation, saving."""

from copy import deepcopy

import lorakernels
import pytest
import torch
from kernel_checks import exhaustive
from tiny_models import batch, build


def train(model, folder, **kwargs):
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    ids = [torch.randint(3, 101, (8,)) for _ in range(16)]
    data = [{"input_ids": t, "labels": torch.where(torch.rand(8) < 0.2, -100, t)} for t in ids]
    arguments = TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=4,
        report_to=[],
        use_cpu=True,
        seed=1,
        **kwargs,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4])
    trainer.train()
    losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
    return losses, trainer.evaluate()["eval_loss"], trainer.predict(data[:2]).predictions


@pytest.mark.parametrize(
    "kwargs", [exhaustive({}), {"gradient_checkpointing": True}, {"bf16": True}], ids=["plain", "gc", "bf16"]
)
def test_trainer(kwargs, tmp_path):
    model = build("llama")
    plain = deepcopy(model)
    assert lorakernels.apply(model).total > 0
    losses, evaluated, predictions = train(model, tmp_path / "ours", **kwargs)
    wanted, wanted_evaluated, wanted_predictions = train(plain, tmp_path / "plain", **kwargs)
    tolerance = 2e-2 if "bf16" in kwargs else 1e-3
    assert len(losses) == 4 and max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < tolerance * wanted[0]
    assert abs(evaluated - wanted_evaluated) < tolerance * wanted_evaluated
    assert predictions.shape == wanted_predictions.shape == (2, 8, 101)
    assert (tmp_path / "ours" / "checkpoint-4" / "adapter_model.safetensors").exists()


def sft_trainer(model, folder, **kwargs):
    """TRL's trainer, which computes entropy and accuracy from the logits beside the loss."""
    trl = pytest.importorskip("trl", reason="needs the package trl")
    from datasets import Dataset
    from datasets.table import InMemoryTable

    torch.manual_seed(0)
    ids = [torch.randint(3, 101, (n,)).tolist() for n in (5, 9, 7, 12, 6, 8)]
    # a fingerprint of its own: datasets would make one by pickling, which some versions of dill and pyarrow cannot
    rows = Dataset(InMemoryTable.from_pydict({"input_ids": ids}), fingerprint="rows")
    arguments = trl.SFTConfig(
        str(folder), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1, seed=1,
        report_to=[], use_cpu=True, dataset_kwargs={"skip_prepare_dataset": True},
        **{"bf16": False, "gradient_checkpointing": False, **kwargs},
    )  # fmt: skip
    return trl.SFTTrainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer()
    )


def logged(trainer):
    """What is logged of training and evaluation."""
    trainer.train()
    trainer.evaluate()
    names = ("loss", "eval_loss", "entropy", "eval_entropy", "mean_token_accuracy", "eval_mean_token_accuracy")
    return [e[n] for n in names for e in trainer.state.log_history if n in e]


TRL_CASES = [{}, {"loss_type": "dft"}, {"bf16": True}, exhaustive({"gradient_checkpointing": True})]


@pytest.mark.parametrize("kwargs", TRL_CASES, ids=["plain", "dft", "bf16", "gc"])
@pytest.mark.parametrize("late", [False, exhaustive(True)])
def test_sft_trainer(kwargs, late, tmp_path):
    model = build("llama", sizes={"initializer_range": 0.02})
    plain = deepcopy(model)
    if not late:
        report = lorakernels.apply(model)
    trainer = sft_trainer(model, tmp_path / "ours", **kwargs)
    if late:
        report = lorakernels.apply(trainer.model)
    got, wanted = logged(trainer), logged(sft_trainer(plain, tmp_path / "plain", **kwargs))
    assert len(got) == 12 and got[0] != got[2]
    assert got == pytest.approx(wanted, rel=2e-2 if "bf16" in kwargs else 1e-3)
    assert report.forwards.fused["linear_log_probs"] == 4, "three steps, one batch of evaluation"
    assert not report.forwards.left
    lorakernels.remove(model)
    assert "_lorakernels_trl" not in model.base_model.model.__dict__ and not model._forward_pre_hooks
    data = {**batch(), "fused_lm_head": True}
    assert model(**data).loss.item() == pytest.approx(trainer.model(**data).loss.item())


def test_sft_trainer_with_long_context(tmp_path):
    model = build("llama", sizes={"initializer_range": 0.02})
    plain = deepcopy(model)
    report = lorakernels.apply(model, long_context=lorakernels.LongContext(mlp_rows=7))
    got, wanted = (logged(sft_trainer(m, tmp_path / n)) for m, n in ((model, "ours"), (plain, "plain")))
    assert got == pytest.approx(wanted, rel=1e-3)
    assert report.forwards.fused["layer made again"] == 2 * 3 == report.forwards.fused["attention kept"]
    with pytest.raises(RuntimeError, match=r"gradient_checkpointing=False in the trainer's arguments"):
        sft_trainer(model, tmp_path / "both", gradient_checkpointing=True).train()


def test_a_head_that_learns_is_left_to_trl_with_one_warning(tmp_path):
    model = build("llama", modules_to_save=None)
    lorakernels.apply(model)
    trainer = sft_trainer(model, tmp_path)
    model.base_model.model.lm_head.weight.requires_grad_()
    with pytest.warns(UserWarning, match="TRL's own head runs: the head learns"):
        trainer.train()
    assert lorakernels.status(model).fused["linear_log_probs"] == 0


def tokenizer():
    """A tokenizer of 101 whole words, for trainers that insist on one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {word: n for n, word in enumerate(["<pad>", "<s>", "</s>", *map(str, range(98))])}
    made = Tokenizer(models.WordLevel(words, "<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("reentrant", [None, exhaustive(True), False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_grad_scaler_in_float16(device, reentrant):
    """A float16 base with float32 adapters under autocast and torch's GradScaler, as Trainer runs fp16; with and
    without checkpointing. The first scales overflow: those steps must be skipped, and the others learn as PEFT does."""
    model = build("llama", torch.float16, autocast_adapter_dtype=True).to(device)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    data = {n: t.to(device) for n, t in batch(4, 12).items()}
    plain = deepcopy(model)
    assert lorakernels.apply(model).total > 0

    def train(model):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**28)
        losses, scales = [], []
        for _ in range(20):
            with torch.autocast(device, torch.float16):
                loss = model(**data, use_cache=False).loss
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            scales.append(scaler.get_scale())
        return losses, scales

    def settled(losses, scales):
        """The losses from the first step on that was not skipped."""
        assert scales[0] == 2.0**27 and losses[0] == losses[1] and scales[-1] == scales[-6], scales
        return losses[scales.index(scales[-1]) :]

    ours, peft = train(model), train(plain)
    assert 0.5 <= ours[1][-1] / peft[1][-1] <= 2  # the scale at which the last gradient overflows may be next door
    got, wanted = settled(*ours), settled(*peft)
    common = min(len(got), len(wanted))
    assert got[:common] == pytest.approx(wanted[:common], rel=5e-3)
    assert common >= 6 and got[common - 1] < 0.95 * got[0]
