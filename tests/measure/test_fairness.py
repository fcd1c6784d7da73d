"""Times that cannot be trusted are refused, and the reason says what was found."""

import gc
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import PEFT, arm

from lorabench.contract.switches import SWITCHES
from lorabench.measure import fairness, trial
from lorabench.measure.fairness import Guard, Untrusted
from lorabench.measure.judging import limits


def done(ms, wall=None, began=0.0, host=None, late=0.0):
    ended = began + (wall or ms) / 1000
    return trial.Trial({"all": ms}, {"all": ms if host is None else host}, {}, began, ended, late)


@pytest.mark.parametrize(
    ("change", "back", "named"),
    [
        (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32), "dtype"),
        (lambda: torch.set_num_threads(1), lambda: torch.set_num_threads(2), "number of threads"),
        (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False), "determ"),
        (lambda: torch.autograd.set_detect_anomaly(True), lambda: torch.autograd.set_detect_anomaly(False), "anomaly"),
        (lambda: setattr(time, "perf_counter", lambda: 0.0), None, "time.perf_counter"),
    ],
)
def test_what_is_changed_for_the_whole_process_is_named(change, back, named):
    torch.set_num_threads(2)
    guard, own = Guard(alone=False), time.perf_counter
    guard.check_all()
    change()
    try:
        with pytest.raises(Untrusted, match=rf"changed .*{named}.* for the whole process"):
            guard.check()
    finally:
        (back or (lambda: setattr(time, "perf_counter", own)))()
    guard.check_all()


@pytest.mark.parametrize("alone", [False, True])
def test_what_would_run_between_the_rounds_where_garbage_is_collected_is_named(alone, monkeypatch):
    guard = Guard(alone=alone)
    monkeypatch.setattr(gc, "callbacks", [*gc.callbacks, print])
    with pytest.raises(Untrusted, match=r"changed gc\.callbacks for the whole process"):
        guard.check()


@pytest.mark.parametrize("declared", [(), ("torch.set_float32_matmul_precision",), ("torch.set_flush_denormal",)])
@pytest.mark.parametrize("alone", [False, True])
def test_a_switch_of_torch_s_is_its_toggle_s_alone_where_it_declares_it(declared, alone):
    guard, before = Guard(alone), torch.get_float32_matmul_precision()
    guard.declare([SimpleNamespace(switches=declared)])  # type: ignore[list-item]
    torch.set_float32_matmul_precision("medium")
    try:
        if alone and "torch.set_float32_matmul_precision" in declared:
            guard.check_all()
            torch.set_default_dtype(torch.float64)
            with pytest.raises(Untrusted, match=r"changed torch.s default dtype for the whole process$"):
                guard.check()
        else:
            says = r"switches = \('torch.set_float32_matmul_precision',\)" if alone else "global_patch = True"
            with pytest.raises(Untrusted, match=f"matmul_precision for the whole process; one that has to says {says}"):
                guard.check()
    finally:
        torch.set_float32_matmul_precision(before)
        torch.set_default_dtype(torch.float32)


def test_what_a_switch_sets_is_watched():
    assert {name for sets in SWITCHES.values() for name in sets} <= fairness.settings().keys()


@pytest.mark.parametrize(
    ("owner", "name"), [(torch, "cat"), (torch.functional, "einsum"), (torch.Tensor, "matmul"), (torch.Tensor, "norm")]
)
def test_a_replaced_function_of_torch_or_method_of_its_tensors_is_named(owner, name, monkeypatch):
    guard = Guard(alone=False)
    monkeypatch.setattr(owner, name, lambda *args: None)
    with pytest.raises(Untrusted, match=rf"replaced torch\.\w*\.?{name} for the whole process"):
        guard.check_all()


def test_a_recursion_limit_may_be_raised_and_not_lowered():
    limit, guard = sys.getrecursionlimit(), Guard(alone=False)
    try:
        sys.setrecursionlimit(limit + 1000)
        guard.check()
        sys.setrecursionlimit(900)
        with pytest.raises(Untrusted, match="changed the recursion limit"):
            guard.check()
    finally:
        sys.setrecursionlimit(limit)


def test_a_replaced_function_and_a_hook_on_the_other_arm_s_model_are_named(monkeypatch):
    reference = arm(*PEFT)
    guard = Guard(alone=False)
    guard.watch("reference", reference)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Linear, "forward", lambda self, x: x)
        with pytest.raises(Untrusted, match=r"replaced torch.nn.modules.linear.Linear.forward"):
            guard.check_all()
    handle = next(reference.adapters())[1].register_hook(lambda grad: grad)
    with pytest.raises(Untrusted, match="changed the reference: base_model"):
        guard.check_all()
    handle.remove()
    handle = reference.model.get_submodule("base_model.model.model.layers.1").register_forward_hook(print)
    with pytest.raises(Untrusted, match=r"layers\.1"):
        guard.check_all()
    handle.remove()


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch.cuda.Event, "elapsed_time"), (torch.cuda.Event, "synchronize"), (torch.cuda, "synchronize")],
)
def test_the_device_s_clock_cannot_be_replaced(owner, name, monkeypatch):
    """Not even by a toggle that has its process to itself."""
    guard = Guard(alone=True)
    monkeypatch.setattr(owner, name, lambda *_: 0.0)
    with pytest.raises(Untrusted, match=r"changed torch\.cuda\.(Event|synchronize) for the whole process"):
        guard.check()


def test_a_thread_of_the_candidate_s_that_computes_is_named():
    guard, stop = Guard(alone=False), threading.Event()

    def burn():
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=burn, name="burner")
    thread.start()
    try:
        before = dict(guard.busy())
        time.sleep(0.5)
        with pytest.raises(Untrusted, match="the thread burner computed"):
            fairness.check_busy({name: spent - before[name] for name, spent in guard.busy()}, 0.5)
        fairness.check_busy(dict.fromkeys(before, 0.0), 0.5)
    finally:
        stop.set()
        thread.join()


def test_a_child_that_computes_is_named_and_a_compile_worker_is_not(tmp_path):
    """Inductor ends its pool after a minute of rest, and starts one when something is compiled again."""
    guard, started = Guard(alone=True), []
    for place in ("mine", "torch/_inductor/compile_worker"):
        script = tmp_path / place / "__main__.py"
        script.parent.mkdir(parents=True)
        script.write_text("while True: pass")
        started.append(subprocess.Popen([sys.executable, str(script)]))
    try:
        mine, compiling = (f"the process {child.pid}" for child in started)
        deadline = time.monotonic() + 20
        while dict(guard.busy()).get(mine, 0.0) < 0.1 and time.monotonic() < deadline:
            time.sleep(0.05)
        found = dict(guard.busy())
        assert found[mine] >= 0.1 and compiling not in found
    finally:
        for child in started:
            child.kill()
            child.wait()


def test_a_backward_on_a_cpu_has_no_thread_of_its_own():
    assert fairness.backward_threads(torch.device("cpu")) == {threading.get_native_id()}


@pytest.mark.gpu
def test_autograd_s_own_thread_is_nobody_s_once_python_has_met_it():
    """Checkpointing runs the forward again in it, and Triton or a logger may ask there which thread it is."""
    guard, ours = Guard(alone=False), threading.get_native_id()
    out = torch.ones((), device="cuda", requires_grad=True) * 1
    out.register_hook(lambda grad: threading.current_thread() and None)
    out.backward()
    own = fairness.backward_threads(out.device)
    assert own and ours not in own and dict(guard.busy()), "a thread that came after the guard"
    guard.threads |= own
    assert not dict(guard.busy())


def test_work_outside_the_clock_is_seen_on_the_wall():
    fairness.check_clock("candidate", [done(10.0, wall=12.0), done(29.0, wall=30.0, host=29.0)])
    with pytest.raises(Untrusted, match="trial 2 of the candidate took 40 ms of which its clock saw 10"):
        fairness.check_clock("candidate", [done(10.0), done(10.0, wall=40.0)])
    with pytest.raises(Untrusted, match="trial 1 of the candidate took 30 ms of which its clock saw 3"):
        fairness.check_clock("candidate", [done(3.0, wall=30.0, host=29.0)])  # events that lie, of a host that does not


def test_work_on_a_stream_that_nothing_waits_for_is_seen():
    fairness.check_clock("candidate", 8 * [done(10.0, late=0.19)] + 2 * [done(10.0, late=5.0)])
    fairness.check_clock("candidate", 8 * [done(1.0, late=0.09)])
    with pytest.raises(Untrusted, match="after the end of the candidate's trials"):
        fairness.check_clock("candidate", 6 * [done(10.0)] + 4 * [done(10.0, late=0.5)])


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda patch: patch.setattr(limits, "MOST", 1e9), "judging.limits.MOST"),
        (lambda patch: patch.setitem(limits.UPDATE, False, 1e9), "judging.limits.UPDATE"),
    ],
)
def test_another_limit_of_this_harness_is_named(change, named, alone, monkeypatch):
    guard = Guard(alone=alone)
    guard.check_all()
    change(monkeypatch)
    with pytest.raises(Untrusted, match=f"replaced lorabench.measure.{named}"):
        guard.check_all()


def test_what_a_model_s_forward_hangs_on_is_noticed():
    made = arm(*PEFT)
    before = fairness.of_model(made.model)
    assert fairness.difference(before, fairness.of_model(made.model)) is None
    next(made.adapters())[1].requires_grad_(False)
    assert "lora_A" in str(fairness.difference(before, fairness.of_model(made.model)))
