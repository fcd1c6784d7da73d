"""`captured(trainer)`: transformers' Trainer or TRL's SFTTrainer, whose training steps are captured and replayed.

    trainer = lorakernels.captured(SFTTrainer(model, args, train_dataset=…))
    trainer.train()
    print(trainer.capture.status())

While it trains, methods of this one trainer are replaced: the training step, clipping, its optimizer's step, and what
would wait for the device or search the whole model at every step. What is captured is the trainer's own code.
Schedules, logging, evaluation, saving and callbacks are the trainer's and run as they did. A callback of transformers
could not do this: it is called around a step, not in its place.
Run: python -m pytest tests/lorakernels/test_capture_trainer.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .backward import CapturedBackward
from .graph import Outputs
from .inputs import BUCKETS
from .metrics import SftMetrics, every_position, filled_numbers
from .state import why_uncapturable
from .status import Status
from .step import checked, graphs_of
from .update import CapturedUpdate

KNOWN = ("transformers.trainer", "trl.trainer.sft_trainer")
ITEMS = "num_items_in_batch"


class TrainerCapture:
    """What `captured` puts into a trainer, as `trainer.capture`."""

    def __init__(self, trainer: Any, buckets: Sequence[int]):
        self.trainer, self._buckets, self._status = trainer, buckets, Status()
        self._never = why_trainer_uncapturable(trainer)
        self._graphs = None
        self._own = {name: getattr(trainer, name) for name in ("train", *self._replacements())}
        self._metrics = SftMetrics(trainer)
        self._undo = contextlib.ExitStack()
        self._backward: CapturedBackward | None = None
        self._forget()

    def status(self) -> Status:
        """What was captured, replayed and left; prints as a few lines."""
        return self._status

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own, while its methods are replaced; afterwards graphs and their memory are freed."""
        if self._never is None:
            self._graphs, self._never = graphs_of(self.trainer.model)
        replaced = self._replacements() if self._graphs else {"training_step": self._counted}
        with contextlib.ExitStack() as self._undo:
            self._undo.callback(self._forget)
            self._undo.enter_context(replaced_in(self.trainer, **replaced))
            return self._own["train"](*args, **kwargs)

    def _replacements(self) -> dict[str, Any]:
        return {
            "training_step": self._training_step,
            "_clip_grad_norm": self._clip_grad_norm,
            "get_train_dataloader": self._train_dataloader,
            "_get_num_items_in_batch": self._items_on_host,
            "floating_point_ops": self._floating_point_ops,
            "log": self._log,
        }

    def _forget(self) -> None:
        """What is known of one training; graphs are freed."""
        if self._backward is not None:
            self._backward.release()  # whatever still holds it
        self._backward = None
        self._update: CapturedUpdate | None = None
        self._filters: bool | None = None  # whether losses that are no numbers are to be kept out of the log
        self._flops = 0  # of a token

    def _counted(self, *args: Any, **kwargs: Any) -> Tensor:
        self._status.eager[str(self._never)] += 1
        return self._own["training_step"](*args, **kwargs)

    def _train_dataloader(self) -> Any:
        """The trainer's loader, which leaves batches on the host: there, looking at one waits for nothing."""
        loader = self._own["get_train_dataloader"]()
        if getattr(loader, "device", None) is not None:
            loader.device = None
        return loader

    def _items_on_host(self, batches: Any, device: Any) -> Any:
        """The number of trained tokens, which the step brings to the device without a wait."""
        return self._own["_get_num_items_in_batch"](batches, torch.device("cpu"))

    def _floating_point_ops(self, inputs: Any) -> int:
        """So many a token: the trainer would count the model's parameters at every batch, which takes a small model
        longer than its replay."""
        tokens = inputs["input_ids"].numel() if "input_ids" in inputs else 0
        if not tokens:
            return self._own["floating_point_ops"](inputs)
        self._flops = self._flops or self._own["floating_point_ops"](inputs) // tokens
        return self._flops * tokens

    def _training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if not model.training:
            model.train()  # as the trainer's own step does, but no replay
        backward = self._backward_of(model)
        self._take_over_optimizer()
        items = {} if num_items_in_batch is None else {ITEMS: num_items_in_batch}
        outputs = backward({**inputs, **items}, self._facts(num_items_in_batch))
        loss = outputs.pop("loss")
        self._metrics.add(outputs, inputs)
        return self._filtered(loss)

    def _facts(self, items: Any) -> tuple[Any, ...]:
        """What the trainer divides its loss by, where that is a number of its own."""
        divides = items is None or getattr(self.trainer, "aux_loss_enabled", False)
        return (self.trainer.current_gradient_accumulation_steps,) if divides else ()

    def _backward_of(self, model: Any) -> CapturedBackward:
        if self._backward is None or self._backward.model is not model:
            never = why_uncapturable(model)
            graphs = None if never else self._graphs
            made = CapturedBackward(model, self._run, self._buckets, graphs, self._status, never)
            self._undo.enter_context(replaced_in(model, zero_grad=partial(_zero_grad, made.watch.params)))
            self._backward = made
        return self._backward

    def _take_over_optimizer(self) -> None:
        optimizer = self.trainer.optimizer
        while hasattr(optimizer, "optimizer"):  # accelerate's around torch's
            optimizer = optimizer.optimizer
        if self._update is not None and self._update.optimizer is optimizer:
            return
        scaled = getattr(self.trainer.accelerator, "scaler", None) is not None
        never = "a gradient scaler decides on the host whether to step" if scaled else None
        self._update = CapturedUpdate(optimizer, self._graphs, self._status, never)
        if not scaled:
            self._undo.enter_context(replaced_in(optimizer, step=self._optimizer_step))

    def _run(self, batch: dict[str, Any]) -> Outputs:
        """The trainer's own forward and backward, with the metrics of its loss as outputs."""
        assert self._backward is not None
        items = batch.pop(ITEMS, None)
        with self._metrics.collected() as metrics, every_position(), filled_numbers():
            loss = self._own["training_step"](self._backward.model, batch, items)
        return {**metrics, "loss": loss}

    def _filtered(self, loss: Tensor) -> Tensor:
        """The loss as the trainer would add it up with `logging_nan_inf_filter`: it would look at every loss, and wait
        for it; this is the same on the device."""
        trainer = self.trainer
        if self._filters is None:
            self._filters = bool(trainer.args.logging_nan_inf_filter) and hasattr(trainer, "_tr_loss")
            if self._filters:
                self._undo.enter_context(replaced_in(trainer.args, logging_nan_inf_filter=False))
        if not self._filters:
            return loss
        steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
        return torch.where(loss.isfinite(), loss, trainer._tr_loss / steps)

    def _clip_grad_norm(self, model: Any) -> Any:
        assert self._update is not None and self._backward is not None
        limit = self.trainer.args.max_grad_norm
        return self._update.clip(lambda: self._own["_clip_grad_norm"](model), self._backward.gradients, limit)

    def _optimizer_step(self, closure: Any = None) -> None:
        assert self._update is not None and self._backward is not None
        if closure is not None:
            raise ValueError("a captured optimizer steps without a closure")
        self._update.step(self._backward.gradients)

    def _log(self, *args: Any, **kwargs: Any) -> None:
        self._metrics.read()
        self._own["log"](*args, **kwargs)


@contextlib.contextmanager
def replaced_in(thing: Any, **others: Any) -> Iterator[None]:
    """Inside, these attributes of one object are others."""
    before = {name: thing.__dict__[name] for name in others if name in thing.__dict__}
    thing.__dict__.update(others)
    try:
        yield
    finally:
        for name in others:
            thing.__dict__.pop(name, None)
        thing.__dict__.update(before)


def _zero_grad(params: Sequence[torch.nn.Parameter], set_to_none: bool = True) -> None:
    """A module's `zero_grad` from a list of its parameters: a small model's replay is shorter than the search for
    them."""
    for p in params:
        if set_to_none or p.grad is None:
            p.grad = None
        else:
            p.grad.detach_().zero_()


def captured(trainer: Any, *, buckets: Sequence[int] = BUCKETS) -> Any:
    """The same trainer, which captures its training steps; `trainer.capture.status()` tells how that went.

    trainer: transformers' Trainer or TRL's SFTTrainer, before `train()`; buckets: tokens a row, to the next of which
    batches are padded on the right. Raises TypeError for anything else, ValueError where it is captured already.
    """
    wanted = ("train", "accelerator", "training_step", "_clip_grad_norm", "_get_num_items_in_batch", "log")
    if missing := [name for name in wanted if not hasattr(trainer, name)]:
        name = type(trainer).__name__
        raise TypeError(f"captured takes a Trainer of transformers or an SFTTrainer; {name} has no {missing[0]}")
    if isinstance(getattr(trainer, "capture", None), TrainerCapture):
        raise ValueError("this trainer is captured already")
    trainer.capture = TrainerCapture(trainer, checked(buckets))
    trainer.train = trainer.capture.train
    return trainer


def why_trainer_uncapturable(trainer: Any) -> str | None:
    """Why no step of this trainer can be captured, or None."""
    for name in ("training_step", "compute_loss", "floating_point_ops"):
        if getattr(type(trainer), name).__module__ not in KNOWN:
            kind = type(trainer).__name__
            return f"{kind} has a {name} of its own; what it does on the host would not be repeated"
    args = trainer.args
    if args.n_gpu > 1 or trainer.accelerator.num_processes > 1:
        return "several GPUs exchange gradients; only steps of one are captured"
    optim = getattr(args.optim, "value", args.optim)
    reasons = {
        "deepspeed steps by itself": trainer.is_deepspeed_enabled,
        "FSDP shards the model": trainer.is_fsdp_enabled,
        "torch_compile captures graphs of its own (torch_compile_mode='reduce-overhead')": args.torch_compile,
        "torch_empty_cache_steps frees memory within a step": args.torch_empty_cache_steps is not None,
        "NEFTune's noise depends on the padded length": args.neftune_noise_alpha is not None,
        "activation_offloading copies to the host within a step": getattr(args, "activation_offloading", False),
        f"{optim} updates within the backward": "lomo" in str(optim),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
