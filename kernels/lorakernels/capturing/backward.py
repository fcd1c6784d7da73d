"""Forward and backward as graphs, one for each form of batch, captured when a form has been seen often enough.

The first WARM_UP batches of a form run uncaptured but padded as the graph's will be: they train, and meanwhile
autotuning, proofs and lazy states get done for that shape. The next is captured, which executes nothing, and replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .graph import CudaGraphs, NotCaptured, Outputs, Recording
from .inputs import CAUSAL, Batch, Eager, Fitted, Form, StaticInputs, fit, to_device
from .masks import CausalMasks
from .state import Gradients, Watch, attention_of
from .status import Graph, Status

WARM_UP = 2  # the first compiles and tunes; the second is looked at for what it needs of the host
MAX_GRAPHS = 24  # each holds its launches, megabytes of a small model
PROBE = 32  # tokens, and as many of padding


class _Entry:
    """One form: its inputs, and its graph once there is one."""

    def __init__(self, fitted: Fitted, device: torch.device):
        self.inputs = StaticInputs(fitted, device)
        self.masks = CausalMasks()
        self.seen = 0
        self.refused: str | None = None
        self.random = False  # whether its step draws random numbers
        self.recording: Recording | None = None
        self.counted = Graph(fitted.form.rows, fitted.form.length, fitted.form.masks)


class CapturedBackward:
    """run: forward and backward of a batch on the device, which gives tensors of one number by name and leaves
    gradients in `.grad`; graphs: None where nothing can be captured, for the reason `never`."""

    def __init__(
        self, model: nn.Module, run: Callable[[dict[str, Any]], Outputs], buckets: Sequence[int],
        graphs: CudaGraphs | None, status: Status, never: str | None,
    ):  # fmt: skip
        self.model, self.run, self.graphs, self.status, self.never = model, run, graphs, status, never
        self.device = next(model.parameters()).device
        limit = getattr(getattr(model, "config", None), "max_position_embeddings", None) or max(buckets)
        self.buckets = [b for b in buckets if b <= limit] or [int(limit)]
        self.watch = Watch(model)
        self.gradients: Gradients | None = None
        self._entries: dict[Form, _Entry] = {}
        self._harmless: dict[Any, bool] = {}  # by kind of form, whether padding changes nothing

    def __call__(self, batch: Batch, depends_on: tuple[Any, ...] = ()) -> Outputs:
        """Of one batch, what `run` gives; depends_on: hashable facts that are no inputs but change what `run` does."""
        try:
            if self.never:
                raise Eager(self.never)
            self._drop_if_changed()
            fitted = self._fit(batch, depends_on)
            entry = self._entry(fitted)
        except Eager as reason:
            return self._eager(batch, str(reason))
        entry.inputs.feed(fitted)
        if self.gradients is not None:
            self.gradients.attach()
        if entry.recording is None:
            if entry.seen < WARM_UP:
                return self._warm_up(entry, fitted)
            if not self._record(entry, fitted):
                return self._eager(batch, str(entry.refused))
        return self._replay(entry)

    def release(self) -> None:
        """Frees the graphs and their memory; gradients stay what they are."""
        for entry in self._entries.values():
            entry.counted.live = False
        self._entries.clear()
        self.gradients = None

    def _drop_if_changed(self) -> None:
        if what := self.watch.changed():
            self.status.dropped[what] += 1
            self.release()
            self._harmless.clear()

    def _fit(self, batch: Batch, depends_on: tuple[Any, ...]) -> Fitted:
        autocast = torch.is_autocast_enabled(self.device.type), torch.get_autocast_dtype(self.device.type)
        facts = (self.model.training, *autocast, *depends_on)
        fitted = fit(batch, self.buckets, attention_of(getattr(self.model, "config", None)), facts)
        if fitted.padded and not self._padding_is_harmless(fitted):
            raise Eager("nothing shows that padding leaves this model's loss as it is")
        return fitted

    def _entry(self, fitted: Fitted) -> _Entry:
        entry = self._entries.get(fitted.form)
        if entry is None:
            entry = self._entries[fitted.form] = _Entry(fitted, self.device)
        if entry.refused is not None:
            raise Eager(entry.refused)
        return entry

    def _eager(self, batch: Batch, reason: str) -> Outputs:
        """The batch as it is, unpadded."""
        self.status.eager[reason] += 1
        aside = contextlib.nullcontext() if self.graphs is None else self.graphs.aside()
        with aside:
            return self.run(to_device(batch, self.device))

    def _warm_up(self, entry: _Entry, fitted: Fitted) -> Outputs:
        assert self.graphs is not None
        self.status.eager["a shape is warming up"] += 1
        entry.seen += 1
        last = entry.seen == WARM_UP
        before = self.graphs.random_state()
        looked = self.graphs.needs_of_host() if last else contextlib.nullcontext([])
        with looked as needs, self.graphs.aside(), self._masks(entry, fitted, captured=False):
            outputs = self.run(entry.inputs.batch())
        entry.random |= not torch.equal(before, self.graphs.random_state())
        if needs:
            entry.refused = f"the step needs the host: {', '.join(sorted(set(needs)))}"
        elif last and self.watch.offloads:
            entry.refused = "layers have tensors in host memory (long_context), for which no graph can wait"
        elif last and entry.random and self.watch.checkpoints:
            entry.refused = "gradient checkpointing draws dropout again from a saved state, which no graph can read"
        return outputs

    @contextlib.contextmanager
    def _masks(self, entry: _Entry, fitted: Fitted, captured: bool):
        """Around a forward that is padded to its bucket."""
        if fitted.form.masks != CAUSAL:
            yield
        else:
            with entry.masks.repeated() if captured else entry.masks.noted():
                yield

    def _record(self, entry: _Entry, fitted: Fitted) -> bool:
        """Whether the entry has a recording now; where not, it says why."""
        assert self.graphs is not None
        if sum(e.recording is not None for e in self._entries.values()) >= MAX_GRAPHS:
            entry.refused = f"{MAX_GRAPHS} other shapes are captured already"
            return False
        params = self.watch.trained
        kept = [p.grad for p in params]
        first = self.gradients is None
        gradients = self.gradients = self.gradients or Gradients(params)
        made: list[nn.Parameter] = []

        def function() -> Outputs:
            for p in params:
                p.grad = None
            with self._masks(entry, fitted, captured=True), self.watch.unpreserved():
                outputs = self.run(entry.inputs.batch())
            made[:] = gradients.collect(params)
            return {name: t.detach() for name, t in outputs.items()}

        # The cache keeps the casts of anybody's forward, with or without gradients, and by them the parameters'
        # accumulators on the stream of that forward, for which a capture must not wait.
        torch.clear_autocast_cache()
        try:
            entry.recording = self.graphs.record(function)
        except NotCaptured as reason:
            entry.refused = f"cannot be captured: {reason}"
        finally:
            for p, grad in zip(params, kept, strict=True):
                p.grad = grad
        if first:
            self._first(entry, made)
        elif entry.recording is not None and set(map(id, made)) != set(map(id, gradients.params)):
            entry.recording, entry.refused = None, "other parameters get gradients than in the first graph"
        if entry.recording is None:
            return False
        gradients.attach()
        self.status.graphs.append(entry.counted)
        return True

    def _first(self, entry: _Entry, made: Sequence[nn.Parameter]) -> None:
        """The first capture shows which parameters get gradients."""
        if entry.recording is None:
            self.gradients = None
        else:
            assert self.gradients is not None
            self.gradients.narrow(made)

    def _replay(self, entry: _Entry) -> Outputs:
        assert entry.recording is not None
        entry.counted.replays += 1
        return {name: t.clone() for name, t in entry.recording.replay().items()}

    def _padding_is_harmless(self, fitted: Fitted) -> bool:
        kind = fitted.form.kind
        if kind not in self._harmless:
            self._harmless[kind] = self._proved_harmless(fitted)
        return self._harmless[kind]

    @torch.no_grad()
    def _proved_harmless(self, fitted: Fitted) -> bool:
        """Whether the loss of a few tokens stays the same when other tokens stand in the padding behind them; False
        where the model gives none."""
        tokens = min(PROBE, fitted.form.length // 2)
        ids = fitted.tensors["input_ids"][:1, :tokens].repeat(1, 2).to(self.device)
        real = torch.arange(2 * tokens, device=self.device)[None] < tokens
        probe = {"input_ids": ids, "labels": ids.masked_fill(~real, -100), "attention_mask": real.long()}
        probe["position_ids"] = torch.arange(2 * tokens, device=self.device)[None]
        names = {name for name, _ in fitted.form.tensors} | {"labels"}
        losses = []
        masks = CausalMasks().noted() if fitted.form.masks == CAUSAL else contextlib.nullcontext()
        with masks, torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            for padding in (0, 1):
                torch.manual_seed(0)
                probe["input_ids"] = torch.where(real, ids, padding)
                try:
                    losses.append(self.model(**{n: t for n, t in probe.items() if n in names}).loss)
                except (TypeError, AttributeError):  # no labels, or no loss
                    return False
        first, second = losses
        return bool((first - second).abs() <= 1e-5 * first.abs())
