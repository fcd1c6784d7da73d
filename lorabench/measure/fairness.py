"""Whether the times of a cell can be trusted: nothing done outside the clock, nothing changed for the other arm.

A toggle runs in the process that measures it, so nothing here can stop one that means to cheat. What is here makes the
known ways of it visible: each is named in the record, which then has the status `untrusted` and no speed.
"""

from __future__ import annotations

import copy
import gc
import os
import signal
import statistics
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks as _saved_tensors_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lorabench.contract.ablation import Ablation
from lorabench.contract.arm import Arm
from lorabench.contract.switches import SWITCHES
from lorabench.measure.trial import Trial

# The wall clock may see this much more of a GPU's trial than its events do: launching the first kernel, waking up.
OUTSIDE_SHARE, OUTSIDE_MS = 1.25, 2.0
# For so long the device may work behind the last mark (asking it takes some hundredths); in that share of the trials it
# may be longer, because the host was interrupted between two questions.
LATE_SHARE, LATE_MS, LATE_TRIALS = 0.02, 0.1, 0.25
UNSEEN_S = 0.1  # that the runner's clock may see of all turns beyond what their answers can explain
TICKS_S = 0.02  # what the kernel counts of a process comes in ticks of 10 ms
BUSY = 0.05  # share of the trials' time that another thread or a child may compute
COMPILE_WORKER = "/torch/_inductor/compile_worker/"  # in the command line of Inductor's pool and of what it forks
OURS = "lorabench."
WATCHED = (
    OURS,
    "transformers.models.",
    "transformers.modeling_utils",
    "transformers.masking_utils",
    "transformers.integrations.",
    "transformers.activations",
    "transformers.loss.",
    "torch.functional",
    "torch.nn.",
    "torch.optim.",
    "torch.autograd.",
    "torch.utils.checkpoint",
    "peft.tuners.lora.",
)


class Untrusted(Exception):
    """The times cannot be trusted; the message says why, in words."""


class Overwritten(Untrusted):
    """The frozen weights that all arms share are not what they were."""


class Disturbed(Untrusted):
    """Of what the clocks alone say, a busy machine can be the cause, too: it is said when it is so a second time."""


def settings() -> dict[str, Any]:
    """What is set for the whole process and can change what any arm computes or how fast, by its name."""
    matmul, cudnn, sdp = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cuda
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's number of threads": torch.get_num_threads(),
        "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "TF32 in matrix products": matmul.allow_tf32,
        "TF32 in cuDNN": cudnn.allow_tf32,
        "reduced precision in bfloat16's sums": matmul.allow_bf16_reduced_precision_reduction,
        "reduced precision in float16's sums": matmul.allow_fp16_reduced_precision_reduction,
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "cuDNN's flags": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "scaled_dot_product_attention's backends": (
            sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.math_sdp_enabled(), sdp.cudnn_sdp_enabled(),
        ),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "oneDNN": torch._C._get_mkldnn_enabled(),
        "hooks of saved tensors": _saved_tensors_hooks(True) is not None,
        "a timer's signal": tuple(
            (signal.getsignal(number), signal.getitimer(timer)[1])
            for number, timer in ((signal.SIGALRM, signal.ITIMER_REAL), (signal.SIGPROF, signal.ITIMER_PROF),
                                  (signal.SIGVTALRM, signal.ITIMER_VIRTUAL))
        ),
        "anomaly detection": torch.is_anomaly_enabled(),
        "flushing of denormals": torch.tensor([1e-310], dtype=torch.float64).mul(1.0).item() != 0.0,
        "the garbage collector": gc.get_threshold(),
        "gc.callbacks": tuple(map(Same, gc.callbacks)),
        "the interpreter's switch interval": sys.getswitchinterval(),
        "the recursion limit": min(sys.getrecursionlimit(), 1000),  # torch.compile raises it, which slows nobody
        "tracing or profiling by Python": (sys.gettrace() is not None, sys.getprofile() is not None),
        "the process's priority": os.nice(0),
        "the process's CPUs": tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
        "global module hooks": tuple(
            len(hooks) for name, hooks in vars(nn.modules.module).items() if name.startswith("_global_") and hooks
        ),
        "global optimizer hooks": (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)),
        "torch function and dispatch modes": (
            torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(),
        ),
        "the current CUDA stream": torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
        **{f"time.{name}": getattr(time, name) for name in ("perf_counter", "perf_counter_ns", "time", "monotonic")},
        "torch.cuda.synchronize": Same(torch.cuda.synchronize),
        "torch.cuda.Event": tuple(
            Same(getattr(torch.cuda.Event, name)) for name in ("record", "elapsed_time", "synchronize", "wait", "query")
        ),
    }  # fmt: skip


def functions(watched: str | tuple[str, ...] = WATCHED) -> dict[str, Any]:
    """The identity of every function and class method of the modules that measure, train and adapt, by its name, and
    the constants of this harness; `watched`: how their modules' names begin."""
    found = of_torch() if watched == WATCHED else {}
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or not module_name.startswith(watched):
            continue
        for name, value in list(vars(module).items()):
            if name.isupper() and module_name.startswith(OURS):
                found[f"{module_name}.{name}"] = copy.copy(value) if isinstance(value, dict | list) else Same(value)
            elif _is_function(value):
                found[f"{module_name}.{name}"] = _identity(value)
            elif _is_table(value) and not name.startswith("__"):
                table = {f"{module_name}.{name}[{key!r}]": item for key, item in list(value.items()) if callable(item)}
                found |= {place: _identity(item) for place, item in table.items()}
            elif isinstance(value, type) and value.__module__ == module_name:
                for attribute, method in list(vars(value).items()):
                    if isinstance(method, (types.FunctionType, property, staticmethod, classmethod)):
                        found[f"{module_name}.{name}.{attribute}"] = _identity(method)
    return found


def of_torch() -> dict[str, Any]:
    """The identity of torch's own functions, and of its tensors' methods: an attribute that is put into the class
    Tensor hides the one of its base, and counts as another one."""
    methods = {name: value for base in reversed(torch.Tensor.__mro__) for name, value in vars(base).items()}
    found = {f"torch.{name}": _identity(value) for name, value in vars(torch).items() if _is_function(value)}
    return found | {f"torch.Tensor.{name}": Same(method) for name, method in methods.items()}


def _is_function(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, types.BuiltinFunctionType))


def _is_table(value: Any) -> bool:
    """A dictionary, or one of transformers' tables of functions; others of its mappings import what they are asked."""
    return type(value) is dict or any(base.__name__ == "GeneralInterface" for base in type(value).__mro__)


def _identity(value: Any) -> tuple[Same, Same]:
    return Same(value), Same(getattr(value, "__code__", None))


def attributes(*objects: Any) -> dict[tuple[int, str], Same]:
    """What each object's own attributes are just now."""
    return {(i, name): Same(value) for i, one in enumerate(objects) for name, value in vars(one).items()}


class Same:
    """Equal to another one of the very same object. It holds the object: an address alone may be given out again."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def of_arm(arm: Arm) -> dict[str, Any]:
    """What would make an arm's trial do something else or take longer: its model, and of each step what it consists of,
    its batches' inputs and its optimizer."""
    found = of_model(arm.model)
    for step in arm.steps:
        inner, optimizer = step.innermost, step.optimizer
        job = f" of the job {step.name}" if step.name else ""
        found[f"the step{job}"] = Same(step), type(inner), _callables(inner)
        found[f"the batches{job}"] = [
            {n: tuple(x.shape) if isinstance(x, torch.Tensor) else Same(x) for n, x in batch.inputs.items()}
            for batch in inner.batches
        ]
        hooks = tuple(len(hooks) for name, hooks in vars(optimizer).items() if name.endswith("_hooks"))
        found[f"the optimizer{job}"] = type(optimizer), _callables(optimizer), hooks
        found[f"the optimizer's settings{job}"] = [
            {n: Same(x) if isinstance(x, torch.Tensor) else x for n, x in group.items() if n != "params"}
            for group in optimizer.param_groups
        ]
    for number, turn in enumerate(arm.turns, 1):
        found[f"what is stepped in turn {number}"] = Same(turn), type(turn.innermost), _callables(turn.innermost)
    return found


def _callables(one: Any) -> dict[str, Same]:
    """The functions that an object has beside its class's."""
    return {name: Same(value) for name, value in vars(one).items() if callable(value)}


def of_model(model: nn.Module) -> dict[str, Any]:
    """What would make a model's forward or backward do something else or take longer: its configuration, its modules,
    their hooks, what is trained, how its tensors lie in memory."""
    config = getattr(model, "config", None)
    found = {f"config.{name}": copy.copy(value) for name, value in (vars(config) if config else {}).items()}
    for name, module in model.named_modules():
        hooks = tuple(len(getattr(module, attribute)) for attribute in HOOKS if hasattr(module, attribute))
        found[name or "the model"] = type(module), Same(vars(module).get("forward")), hooks, module.training
    for name, param in model.named_parameters():
        hooks = len(param._backward_hooks or ()) + len(getattr(param, "_post_accumulate_grad_hooks", None) or ())
        found[name] = param.requires_grad, hooks, param.shape, param.stride(), param.dtype, param.device
    return found


def state_of(model: nn.Module) -> dict[str, Any]:
    """What a toggle can have changed in a model: of every module its class, its own attributes, its tensors, its hooks;
    of every tensor its hooks and whether it is trained."""
    parts_of: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = vars(module)
        parts = (own.get(d, {}) for d in ("_parameters", "_buffers", "_modules", *HOOKS))
        values = tuple((k, Same(v)) for part in (own, *parts) for k, v in part.items() if not isinstance(v, dict))
        parts_of[name] = type(module), values
    return {"parts": parts_of} | of_model(model)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """The first name whose value is another one now; what only came to be is no change."""
    return next((name for name, value in before.items() if name not in after or after[name] != value), None)


# What no toggle may change, not even one that has its processes to itself: what is counted, what runs between the
# trials, and, unless it declares torch's own switch for that, in which precision.
NEVER = (
    "time.",
    "gc.callbacks",
    "torch.cuda.",
    "torch's default dtype",
    "torch.set_float32",
    "TF32",
    "reduced precision",
    "flushing of denormals",
)


class Guard:
    """Notes how the process is before any toggle was asked in it, and says what is not so any more."""

    def __init__(self, alone: bool) -> None:
        """`alone`: this process measures one arm, whose toggles may patch what is the whole process's."""
        self.alone = alone
        self.declared: set[str] = set()  # settings that this one arm's toggles say they set
        # What torch's compiler wraps for the whole process when it is first used (optimizers' methods, the construction
        # of modules) it wraps here: some seconds, of a process that measures only.
        torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1))
        self.settings, self.functions = settings(), functions()
        self.arms: dict[str, tuple[Arm, dict[str, Any]]] = {}
        self.threads = {thread.native_id for thread in threading.enumerate()}
        self.children = {child.pid for child in psutil.Process().children(recursive=True)}

    def watch(self, name: str, arm: Arm) -> None:
        """From now on others are built beside this arm, and have to leave it as it is."""
        self.arms[name] = arm, of_arm(arm)
        self.threads |= backward_threads(arm.device)

    def forget(self, name: str) -> None:
        """The arm has left."""
        self.arms.pop(name, None)

    def declare(self, toggles: Sequence[Ablation]) -> None:
        """The toggles of the arm that is built next, which say what they set of a process that is theirs alone."""
        if self.alone:
            self.declared |= {name for t in toggles for switch in t.switches for name in SWITCHES[switch]}

    def check(self) -> None:
        """After every trial: raises Untrusted where a setting of the process has changed."""
        held = [n for n in self.settings if n not in self.declared and (not self.alone or n.startswith(NEVER))]
        before = {n: self.settings[n] for n in held}
        if changed := difference(before, settings()):
            raise Untrusted(f"a toggle changed {changed} for the whole process{self._undeclared(changed)}")

    def check_all(self) -> None:
        """Before and after the trials: what takes some milliseconds to look through, too. Raises Untrusted."""
        self.check()
        before = {n: v for n, v in self.functions.items() if not self.alone or n.startswith(OURS)}
        if name := difference(before, functions()):
            raise Untrusted(f"a toggle replaced {name} for the whole process{self._instead()}")
        for other, (arm, as_it_was) in self.arms.items():
            if name := difference(as_it_was, of_arm(arm)):
                raise Untrusted(f"the candidate changed the {other}: {name}")

    def _instead(self) -> str:
        return "" if self.alone else "; one that has to says global_patch = True"

    def _undeclared(self, setting: str) -> str:
        """What a toggle has to say that sets it on purpose."""
        switch = next((name for name, sets in SWITCHES.items() if setting in sets), None)
        return f"; one that has to says switches = ({switch!r},)" if switch and self.alone else self._instead()

    def busy(self) -> Iterator[tuple[str, float]]:
        """(what, seconds computed so far) of each Python thread and each child process that came after this guard. Not
        of autograd's own thread: Python knows it once something in it asks, and every arm's backward runs there. Nor of
        Inductor's compile workers: they begin anew when something is compiled after a minute of rest."""
        yield from self.helpers().items()
        for child in psutil.Process().children(recursive=True):
            if child.pid not in self.children:
                try:
                    times, command = child.cpu_times(), child.cmdline()
                except psutil.Error:
                    continue
                if not any(COMPILE_WORKER in word for word in command[:2]):
                    yield f"the process {child.pid}", times.user + times.system

    def helpers(self) -> dict[str, float]:
        """The threads among those that are `busy`. Without any, nothing is asked of the system."""
        here = [t for t in threading.enumerate() if t.native_id is not None and t.native_id not in self.threads]
        spent = {t.id: t.user_time + t.system_time for t in psutil.Process().threads()} if here else {}
        return {f"the thread {t.name}": spent.get(t.native_id or 0, 0.0) for t in here}


def backward_threads(device: torch.device) -> set[int]:
    """The native ids of the threads in which a backward on this device runs: autograd has one a GPU."""
    met: set[int] = set()
    out = torch.ones((), device=device, requires_grad=True) * 1
    out.register_hook(lambda grad: met.add(threading.get_native_id()))
    out.backward()
    return met


def check_busy(beside: Mapping[str, float], seconds: float) -> None:
    """Raises Untrusted where a thread or a child of the candidate's computed while the trials ran, for `seconds`."""
    for name, used in beside.items():
        if used > BUSY * seconds and used > TICKS_S:
            raise Untrusted(f"{name} computed for {used:.2g} s of the trials' {seconds:.2g} s beside the arms")


def check_clock(name: str, trials: Sequence[Trial], unseen_s: float = 0.0) -> None:
    """Raises Disturbed where work went on after the device's clock was read, or before it began. The last mark is made
    after the host's last call, so the device's clock sees at least what the host's does. `unseen_s`: that the runner's
    clock saw of all turns beyond what they can have taken. Of all together: a busy machine delays one or another."""
    if unseen_s > UNSEEN_S:
        raise Disturbed(
            f"the turns of {name} took {unseen_s:.3g} s longer by the runner's clock than its own can explain"
        )
    for number, done in enumerate(trials, start=1):
        wall = 1000 * (done.ended - done.began)
        if wall > OUTSIDE_SHARE * done.total_ms + OUTSIDE_MS:
            raise Disturbed(
                f"trial {number} of the {name} took {wall:.3g} ms of which its clock saw {done.total_ms:.3g}: "
                "work outside the clock"
            )
        if not all(ms > 0 for ms in done.device_ms.values()):
            raise Disturbed(f"trial {number} of the {name} has a phase of {min(done.device_ms.values()):g} ms")
    late = [done for done in trials if done.late_ms > max(LATE_SHARE * done.total_ms, LATE_MS)]
    if len(late) > LATE_TRIALS * len(trials):
        ms, total = (statistics.median(t) for t in zip(*((d.late_ms, d.total_ms) for d in late), strict=True))
        raise Disturbed(
            f"the device worked for {ms:.2g} ms after the end of the {name}'s trials of {total:.3g} ms, on a stream "
            "that nothing waits for: work outside the clock"
        )
