"""The limit's step: the frozen GEMMs and the fastest attention, on the model's own weights. `limit.py` has the toggle.

A module of its own because it is torch throughout: a list of toggles is to be had without importing torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lorabench.contract.ablation import Unsupported
from lorabench.contract.batch import Batch
from lorabench.contract.step import Step, Wrapped

BACKENDS = (
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
)  # fmt: skip
TRIES = 5  # a backend's time is the median of so many calls
MARK = "_lorabench_frozen"


def frozen(module: nn.Module) -> Tensor:
    """The frozen weight (out, in) of a linear, with an adapter around it or not."""
    weight: Any = getattr(module, "base_layer", module).weight
    if not weight.is_floating_point() or weight.dim() != 2:
        raise Unsupported("frozen_limit knows dense weights only, no quantized ones")
    return weight.detach()


def merged(modules: list[nn.Module]) -> Tensor:
    """Weights that share their input as one (sum of out, in). The modules keep views of it: no memory is held twice."""
    weights = [frozen(m) for m in modules]
    if len(weights) == 1:
        return weights[0]
    joined = torch.cat(weights)
    for module, part in zip(modules, joined.split([len(w) for w in weights]), strict=True):
        getattr(module, "base_layer", module).weight.data = part
    return joined


class LimitStep(Wrapped):
    """Forward and backward are the limit's; there is no update. Everything is made at the first forward of a shape."""

    def __init__(self, inner: Step) -> None:
        super().__init__(inner)
        self.updates = False
        self.shapes: dict[tuple[int, int], _Shape] = {}
        self.current: _Shape | None = None

    def forward(self, batch: Batch) -> Tensor:
        batch_size, length = batch.inputs["input_ids"].shape
        if (batch_size, length) not in self.shapes:
            layers, head = getattr(self.model, MARK)
            self.shapes[batch_size, length] = _Shape(self.model.config, layers, head, batch_size, length)
        self.current = self.shapes[batch_size, length]
        self.current.forward()
        return self.current.loss

    def backward(self, loss: Tensor) -> None:
        assert self.current is not None
        self.current.backward()


class _Way(NamedTuple):
    """How attention is computed: by which backend, and whether grouped heads are repeated for it."""

    backend: SDPBackend
    repeats: bool

    @property
    def label(self) -> str:
        return self.backend.name + ", heads repeated" * self.repeats


class _Shape:
    """The work of one batch of `batch` samples of `length` tokens: buffers, attention, and on a GPU two CUDA graphs,
    because a limit must not wait for the host."""

    def __init__(self, config: Any, layers: list[dict[str, Tensor]], head: Tensor, batch: int, length: int) -> None:
        window = getattr(config, "sliding_window", None)
        if window and length > window:
            raise Unsupported(f"frozen_limit knows no sliding window; this model's is {window} tokens")
        self.layers, self.head = layers, head
        self.loss = torch.zeros((), device=head.device)
        draw = lambda *sizes: torch.randn(*sizes, dtype=head.dtype, device=head.device)  # noqa: E731
        first, rows = layers[0], batch * length
        widths = {
            "qkv": first["qkv"],
            "o": first["o"],
            "gate_up": first["gate_up"],
            "down": first["down"],
            "head": head,
        }
        # A GEMM's input, its output, which is also the gradient that comes back, and the gradient of its input.
        self.x = {k: draw(rows, w.shape[1]) for k, w in widths.items()}
        self.y = {k: draw(rows, w.shape[0]) for k, w in widths.items()}
        self.dx = {k: torch.empty_like(x) for k, x in self.x.items()}
        heads, size = config.num_attention_heads, first["o"].shape[1] // config.num_attention_heads
        per = (heads, config.num_key_value_heads, config.num_key_value_heads)
        self.qkv = [draw(batch, length, n, size).transpose(1, 2).requires_grad_() for n in per]
        self.dout = draw(batch, length, heads, size).transpose(1, 2)
        self.outputs: list[Tensor] = []
        found = self._ways()
        self.way = min(found, key=lambda way: found[way])
        self.notes: dict[str, Any] = {
            "batch": batch, "length": length, "attention": self.way.label,
            "attention_ms": {way.label: round(ms, 4) for way, ms in found.items()},
        }  # fmt: skip
        self.forward, self.backward = self._forward, self._backward
        if head.is_cuda:
            self._capture()

    def _attention(self) -> Tensor:
        q, k, v = self.qkv
        groups = q.shape[1] // k.shape[1]
        if self.way.repeats:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])

    def _ways(self) -> dict[_Way, float]:
        """Milliseconds of one attention, forward and backward; a backend that refuses grouped heads gets them repeated,
        and one that refuses the shape altogether is left out."""
        grouped = self.qkv[0].shape[1] != self.qkv[1].shape[1]
        found: dict[_Way, float] = {}

        def once() -> None:
            with sdpa_kernel(self.way.backend):
                torch.autograd.grad(self._attention(), self.qkv, self.dout)

        for backend in BACKENDS:
            if backend is SDPBackend.MATH and found:
                continue  # never the fastest, and it holds the scores: it may not even fit
            for way in (_Way(backend, False), _Way(backend, True))[: 1 + grouped]:
                self.way = way
                try:
                    found[way] = _median_ms(once, self.head.is_cuda)
                    break
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError:  # "No available kernel"
                    continue
        if not found:
            raise Unsupported("frozen_limit: no SDPA backend takes this model's shapes")
        return found

    def _forward(self) -> None:
        self.outputs.clear()
        with sdpa_kernel(self.way.backend):
            for layer in self.layers:
                self._product("qkv", layer["qkv"])
                self.outputs.append(self._attention())
                for name in ("o", "gate_up", "down"):
                    self._product(name, layer[name])
        self._product("head", self.head)

    def _backward(self) -> None:
        self._input_gradient("head", self.head)
        with sdpa_kernel(self.way.backend):
            for i, layer in reversed(list(enumerate(self.layers))):
                for name in ("down", "gate_up", "o"):
                    self._input_gradient(name, layer[name])
                torch.autograd.grad(self.outputs.pop(), self.qkv, self.dout)
                if i:  # nothing below the first layer is trained: it owes the embedding no gradient
                    self._input_gradient("qkv", layer["qkv"])

    def _product(self, name: str, weight: Tensor) -> None:
        torch.mm(self.x[name], weight.T, out=self.y[name])

    def _input_gradient(self, name: str, weight: Tensor) -> None:
        torch.mm(self.y[name], weight, out=self.dx[name])

    def _capture(self) -> None:
        """Both phases as graphs. Where that fails, the eager calls stay, and the notes say so."""
        try:
            forward, backward = _graphs(self._forward, self._backward)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.notes["captured"] = f"no: {str(error).splitlines()[0]}"
            return
        self.notes["captured"] = "yes"
        self.forward, self.backward = forward.replay, backward.replay


def _graphs(*calls: Callable[[], None]) -> list[torch.cuda.CUDAGraph]:
    """Each call as a CUDA graph, in one memory pool, after two rounds of all of them on the side stream."""
    side, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.synchronize()
    made = []
    for call in calls:
        made.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(made[-1], pool=pool, stream=side):
            call()
    return made


def _median_ms(call: Callable[[], None], cuda: bool) -> float:
    """Milliseconds of one call; on a GPU of its replay as a graph, between events, so that the host is left out."""
    times = []
    if not cuda:
        call()
        for _ in range(TRIES):
            began = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - began))
        return statistics.median(times)
    (graph,) = _graphs(call)
    graph.replay()
    for _ in range(TRIES):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    return statistics.median(times)
