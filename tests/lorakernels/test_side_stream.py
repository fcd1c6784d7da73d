"""The side stream of a captured graph. Run: python -m pytest tests/lorakernels/test_side_stream.py"""

import contextlib
import gc
import weakref
from copy import deepcopy

import lorakernels
import pytest
import torch
from kernel_checks import exhaustive_in_interpreter
from lorakernels import side_stream, tune
from lorakernels.nodes import node_backward
from lorakernels.runtime import INTERPRET
from lorakernels.side_stream import SideStream
from tiny_models import batch, build, captured, cuda, step, worst


class Stream:
    """Stands in for a CUDA stream and writes down who waits for whom."""

    def __init__(self, name, log):
        self.name, self.log, self.device = name, log, torch.device("cuda", 0)

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch):
    """A machine whose current stream is being captured."""
    seen: list[str] = []
    current = [Stream("main", seen)]

    @contextlib.contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", seen))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(side_stream, "_streams", {})
    return lambda text=None: seen.append(f"{current[-1].name}: {text}") if text else seen


def test_each_entry_waits_for_the_main_stream_and_join_for_the_side_stream(log):
    b = SideStream(torch.device("cuda", 0))
    log("dS")
    with b:
        log("dB")
    log("dX")
    with b:
        log("dA")
    log("norm")
    b.join()
    log("next node")
    assert log() == [
        "main: dS", "side waits for main", "side: dB", "main: dX", "side waits for main", "side: dA",
        "main: norm", "main waits for side", "main: next node",
    ]  # fmt: skip


def test_a_side_stream_that_was_not_entered_is_not_waited_for(log):
    SideStream(torch.device("cuda", 0)).join()
    assert log() == []


def test_all_nodes_of_a_device_share_a_stream(log):
    for _ in range(2):
        with SideStream(torch.device("cuda", 0)):
            pass
    assert len(side_stream._streams) == 1


def test_what_the_side_stream_reads_is_held_until_join(log):
    b, tensor = SideStream(torch.device("cuda", 0)), torch.ones(3)
    seen = weakref.ref(tensor)
    with b:
        b.keep_alive(tensor)
    del tensor
    gc.collect()
    assert seen() is not None
    b.join()
    assert seen() is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_outside_a_capture_nothing_is_held_and_nobody_waits(device, log, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    b, tensor = SideStream(torch.device(device)), torch.ones(3)
    seen = weakref.ref(tensor)
    with b:
        log("dA")
    b.keep_alive(tensor)
    del tensor
    assert seen() is None
    b.join()
    assert log() == ["main: dA"]


def test_a_large_node_has_none(log):
    device = torch.device("cuda", 0)
    assert SideStream(device, side_stream.MAX_ELEMENTS).active
    assert not SideStream(device, side_stream.MAX_ELEMENTS + 1).active


FORMS = [(family, form) for family in ("llama", "qwen3") for form in (None, "plain", "addmm", "with_a", "whole")]
IN_THE_INTERPRETER = [("qwen3", "whole"), exhaustive_in_interpreter("llama", None)]  # it is slow


@pytest.mark.parametrize(("family", "form"), IN_THE_INTERPRETER if INTERPRET else FORMS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        exhaustive_in_interpreter({"lora_dropout": 0.2}),
        exhaustive_in_interpreter({"targets": ["q_proj", "v_proj", "down_proj"]}),
    ],
    ids=str,
)
def test_what_a_capture_computes(family, form, options, monkeypatch):
    """With the side stream taken (dB beside dS, an accumulator that the main stream leaves alone) the gradients stay
    the same. In float64 and, under Triton's interpreter, by the kernels, in float16."""
    joined = []

    class Taken(SideStream):
        def __init__(self, device, elements=0):
            super().__init__(device, elements)
            self.active, self.entered, self._held = True, 0, []

        def __enter__(self):
            self.entered += 1
            return self

        def __exit__(self, *error):
            pass

        def join(self):
            joined.append(self.entered)
            self._held.clear()

    dtype = torch.float16 if INTERPRET else torch.float64
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 64, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "num_hidden_layers": 1}
    model, data = build(family, dtype, sizes=sizes, **options), batch(2, 5)
    other = deepcopy(model)
    results = []
    with contextlib.nullcontext() if form is None else tune.forced(form):
        for m in (model, other):
            lorakernels.apply(m)
            torch.manual_seed(3)
            results.append(step(m, data))
            monkeypatch.setattr(node_backward, "SideStream", Taken)
    (loss, wanted), (got_loss, got) = results
    assert len(joined) == 3 if "targets" not in options else joined
    assert max(joined) >= 2, "the side stream was not entered"
    assert got_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert worst(got, wanted) <= (2e-3 if INTERPRET else 1e-12)


FORMS = [None, "plain", "apart", "one_read", "one_read_small", "one_read_narrow", "with_a", "whole_short", "addmm"]


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("form", FORMS)
def test_captured_gradients_are_the_uncaptured_ones(form, dropout, monkeypatch):
    """Whatever form puts on the side stream: what the main stream overwrites too early, or does not wait for, would
    show. Two thousand rows, so that the launches take long enough to overlap; the gradients are poisoned before each
    replay."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    options = {"lora_dropout": dropout, "targets": ["q_proj", "o_proj", "down_proj"] if dropout else None}
    model, data = build("llama", torch.bfloat16, sizes=sizes, **options).cuda(), cuda(batch(8, 256))
    other = deepcopy(model)
    if dropout:  # the same masks on both sides
        monkeypatch.setattr(
            "lorakernels.nodes.projection.draw_seed",
            lambda device, n: torch.arange(1, n + 1, dtype=torch.int64, device=device),
        )
    data["position_ids"] = torch.arange(256, device="cuda")[None]

    def run(m):
        m.zero_grad(set_to_none=True)
        loss = m(**data).loss
        loss.backward()
        return loss.detach(), [p.grad for p in m.parameters() if p.grad is not None]

    with contextlib.nullcontext() if form is None else tune.forced(form):
        for m in (model, other):
            lorakernels.apply(m)
        graph, (static, grads), side = captured([lambda: run(model), lambda: run(other)])
        wanted_loss, wanted = run(other)
    assert grads and len(grads) == len(wanted)
    for _ in range(20):
        with torch.cuda.stream(side):
            for g in grads:
                g.fill_(float("nan"))
            graph.replay()
        torch.cuda.synchronize()
        assert static.item() == pytest.approx(wanted_loss.item(), rel=1e-3)
        for a, b in zip(grads, wanted, strict=True):
            assert (a - b).norm() <= 0.02 * b.norm()
