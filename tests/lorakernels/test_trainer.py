"""transformers' Trainer over a patched model: losses, accumulation with num_items_in_batch, evaluation, saving."""

import lorakernels
import pytest
import torch
from tiny_models import build, twin


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


@pytest.mark.parametrize("kwargs", [{}, {"gradient_checkpointing": True}, {"bf16": True}], ids=["plain", "gc", "bf16"])
def test_trainer(kwargs, tmp_path):
    model = build("llama")
    plain = twin(model)
    assert lorakernels.apply(model).total > 0
    losses, evaluated, predictions = train(model, tmp_path / "ours", **kwargs)
    wanted, wanted_evaluated, wanted_predictions = train(plain, tmp_path / "plain", **kwargs)
    tolerance = 2e-2 if "bf16" in kwargs else 1e-3
    assert len(losses) == 4 and max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < tolerance * wanted[0]
    assert abs(evaluated - wanted_evaluated) < tolerance * wanted_evaluated
    assert predictions.shape == wanted_predictions.shape == (2, 8, 101)
    assert (tmp_path / "ours" / "checkpoint-4" / "adapter_model.safetensors").exists()
