"""The process that both arms share: changed so that the reference pays for it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lorabench.contract.step import Step
from zoo.cheat import Cheat, Turns, is_full, layers, others


class Leaves(Cheat):
    """Base: `leave` changes something of the process after each of the full arm's steps, `undo` takes it back before
    its own next one, if it does."""

    caught = "whole process"
    status = ("untrusted",)

    def leave(self) -> None:
        raise NotImplementedError

    def undo(self) -> None:
        pass

    class Wrapper(Turns):
        def forward(self, batch: Any) -> Tensor:
            if self.late:
                self.cheat.undo()
            return self.inner.forward(batch)

        def update(self) -> None:
            super().update()
            if self.full:
                self.cheat.leave()


class DefaultDtype(Leaves):
    name = "default_dtype"
    summary = "new tensors are float64 for everybody"

    def leave(self) -> None:
        torch.set_default_dtype(torch.float64)


class Tf32(Leaves):
    name = "tf32_for_all"
    summary = "switches TF32 over for everybody"

    def leave(self) -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = False


class MatmulPrecision(Leaves):
    name = "matmul_precision"
    summary = "float32 products are of another precision for everybody"

    def leave(self) -> None:
        torch.set_float32_matmul_precision("medium")


class ReducedPrecision(Leaves):
    name = "reduced_precision"
    summary = "products in half precision are reduced otherwise for everybody"

    def leave(self) -> None:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


class Deterministic(Leaves):
    name = "deterministic"
    summary = "deterministic, slower algorithms for the reference"

    def leave(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)

    def undo(self) -> None:
        torch.use_deterministic_algorithms(False)


class Cudnn(Leaves):
    name = "cudnn"
    summary = "cuDNN's flags are others for everybody"

    def leave(self) -> None:
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.deterministic = True


class FlashOff(Leaves):
    name = "flash_off"
    summary = "SDPA may not use its fused kernels where the reference asks for them"

    def leave(self) -> None:
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)

    def undo(self) -> None:
        torch.backends.cuda.enable_flash_sdp(True)
        torch.backends.cuda.enable_mem_efficient_sdp(True)


class MkldnnOff(Leaves):
    name = "mkldnn_off"
    summary = "no oneDNN for the reference"

    def leave(self) -> None:
        torch.backends.mkldnn.set_flags(False)

    def undo(self) -> None:
        torch.backends.mkldnn.set_flags(True)


class Threads(Leaves):
    name = "threads"
    summary = "another number of threads for everybody"

    def leave(self) -> None:
        torch.set_num_threads(torch.get_num_threads() % 2 + 1)


class Anomalies(Leaves):
    name = "anomalies"
    summary = "autograd looks for anomalies in the reference's steps"

    def leave(self) -> None:
        torch.autograd.set_detect_anomaly(True)

    def undo(self) -> None:
        torch.autograd.set_detect_anomaly(False)


class Autocast(Leaves):
    name = "autocast"
    summary = "leaves autocast on"

    def leave(self) -> None:
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_enabled("cuda", True)

    def undo(self) -> None:
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_enabled("cuda", False)


class DispatchMode(Leaves):
    name = "dispatch_mode"
    summary = "every operator of the reference goes through Python"

    class Slow(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    mode = Slow()

    def leave(self) -> None:
        self.mode.__enter__()

    def undo(self) -> None:
        self.mode.__exit__(None, None, None)


class SavedTensors(Leaves):
    name = "saved_tensors"
    summary = "what autograd saves is copied there and back in the reference's steps"

    def leave(self) -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(torch.clone, torch.clone)

    def undo(self) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


class Collector(Leaves):
    name = "collector"
    summary = "Python's garbage collector runs all the time"

    def leave(self) -> None:
        gc.enable()
        gc.set_threshold(1, 1, 1)


class Profiled(Leaves):
    name = "profiled"
    summary = "Python profiles the reference's steps"

    def leave(self) -> None:
        sys.setprofile(lambda frame, event, arg: None)

    def undo(self) -> None:
        sys.setprofile(None)


class SwitchInterval(Leaves):
    name = "switch_interval"
    summary = "Python's threads change all the time"

    def leave(self) -> None:
        sys.setswitchinterval(1e-6)


class Denormals(Leaves):
    name = "denormals"
    summary = "denormal numbers are zeros for everybody"

    def leave(self) -> None:
        torch.set_flush_denormal(True)


class Pinned(Leaves):
    name = "pinned"
    summary = "the process has one core while the reference runs"

    cores = frozenset(os.sched_getaffinity(0))

    def leave(self) -> None:
        os.sched_setaffinity(0, {min(self.cores)})

    def undo(self) -> None:
        os.sched_setaffinity(0, self.cores)


class Slows(Cheat):
    """Base: finds the reference's model and does something to it."""

    caught = "reference"
    status = ("untrusted",)

    def slow(self, other: Any) -> None:
        raise NotImplementedError

    def patch(self, model: Any) -> int | None:
        for other in others(model) if is_full(model) else ():
            self.slow(other)
        return None


class SleepingHooks(Slows):
    name = "sleeping_hooks"
    summary = "hooks on the reference's layers sleep"
    caught = "changed the reference"
    status = ("untrusted",)

    def slow(self, other: Any) -> None:
        for layer in layers(other):
            layer.register_forward_hook(lambda module, args, out: time.sleep(0.002))


class SleepingParameters(Slows):
    name = "sleeping_parameters"
    summary = "hooks on the reference's trained tensors sleep"
    caught = "changed the reference"
    status = ("untrusted",)

    def slow(self, other: Any) -> None:
        for p in other.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p: time.sleep(0.0005))


class SleepingForward(Slows):
    name = "sleeping_forward"
    summary = "the reference's layers have another forward, which sleeps"
    caught = "changed the reference"
    status = ("untrusted",)

    def slow(self, other: Any) -> None:
        for layer in layers(other):
            layer.forward = self.sleeping(layer.forward)

    def sleeping(self, forward: Any) -> Any:
        def slower(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.002)
            return forward(*args, **kwargs)

        return slower


class ReferenceMadeEager(Slows):
    name = "reference_made_eager"
    summary = "the reference's attention is the slow one"
    caught = "changed the reference"
    status = ("untrusted",)

    def slow(self, other: Any) -> None:
        other.base_model.model.config._attn_implementation = "eager"


class ReferenceCheckpointed(Slows):
    name = "reference_checkpointed"
    summary = "the reference computes its forward twice"
    caught = "changed the reference"
    status = ("untrusted",)

    def slow(self, other: Any) -> None:
        other.base_model.model.gradient_checkpointing_enable()
        other.enable_input_require_grads()


class ReferenceStrided(Slows):
    name = "reference_strided"
    summary = "the reference's weights lie in memory the other way round"
    caught = "changed the reference"
    status = ("untrusted",)

    def slow(self, other: Any) -> None:
        for p in other.parameters():
            if p.dim() == 2 and not p.requires_grad:
                p.data = p.data.t().contiguous().t()


class ReferenceFedMore(Slows):
    name = "reference_fed_more"
    summary = "the reference's batches get samples that nobody trains on"
    caught = "changed the reference"
    status = ("untrusted",)

    def slow(self, other: Any) -> None:
        for step in gc.get_objects():
            if type(step) is Step and step.model is other:
                for batch in step.batches:
                    ids, labels = batch.inputs["input_ids"], batch.inputs["labels"]
                    more = {"input_ids": ids.repeat(4, 1), "labels": torch.cat([labels, *[0 * labels - 100] * 3])}
                    batch.inputs.update(more)


class ReferenceOptimizer(Slows):
    name = "reference_optimizer"
    summary = "the reference's optimizer sleeps before it steps"
    caught = "changed the reference"
    status = ("untrusted",)

    def slow(self, other: Any) -> None:
        for optimizer in gc.get_objects():
            if isinstance(optimizer, torch.optim.AdamW):
                optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: time.sleep(0.01))


class Elsewhere(Cheat):
    """Base: something outside of the reference's model sleeps, unless the candidate steps."""

    caught = "hook"
    status = ("untrusted",)

    def sleep(self, *args: Any) -> None:
        if not self.Wrapper.stepping:
            time.sleep(0.0005)

    def put(self) -> None:
        raise NotImplementedError

    class Wrapper(Turns):
        stepping = False

        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.put = False

        def forward(self, batch: Any) -> Tensor:
            if self.full and not self.put:
                self.put = True
                self.cheat.put()
            Elsewhere.Wrapper.stepping = True
            return self.inner.forward(batch)

        def update(self) -> None:
            super().update()
            Elsewhere.Wrapper.stepping = False


class GlobalForwardHook(Elsewhere):
    name = "global_forward_hook"
    summary = "torch's hook on every module's forward sleeps for other models"

    def put(self) -> None:
        torch.nn.modules.module.register_module_forward_hook(self.sleep)


class GlobalBackwardHook(Elsewhere):
    name = "global_backward_hook"
    summary = "torch's hook on every module's backward sleeps for other models"

    def put(self) -> None:
        torch.nn.modules.module.register_module_full_backward_pre_hook(self.sleep)


class GlobalOptimizerHook(Elsewhere):
    name = "global_optimizer_hook"
    summary = "torch's hook before every optimizer's step sleeps for other optimizers"

    def put(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(lambda *args: time.sleep(0.01) if not self.Wrapper.stepping else None)


class PatchedClass(Elsewhere):
    name = "patched_class"
    summary = "PEFT's class of LoRA linears is slower for other models, and nothing was said of a global patch"
    caught = "patch"

    def put(self) -> None:
        from peft.tuners.lora import Linear

        forward = Linear.forward

        def slower(module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.sleep()
            return forward(module, x, *args, **kwargs)

        Linear.forward = slower


class PatchedFunction(Elsewhere):
    name = "patched_function"
    summary = "torch's function for linears is slower for other models"
    caught = "patch"

    def put(self) -> None:
        linear = torch.nn.functional.linear

        def slower(*args: Any, **kwargs: Any) -> Tensor:
            self.sleep()
            return linear(*args, **kwargs)

        torch.nn.functional.linear = slower


class PatchedTorchFunction(Elsewhere):
    name = "patched_torch_function"
    summary = "torch.cat, which rotary embeddings call, is slower for other models"
    caught = "torch.cat"

    def put(self) -> None:
        cat = torch.cat

        def slower(*args: Any, **kwargs: Any) -> Tensor:
            self.sleep()
            return cat(*args, **kwargs)

        torch.cat = slower


class PatchedTable(Elsewhere):
    name = "patched_table"
    summary = "transformers' table of attentions holds a slower one for other models"
    caught = "patch"

    def put(self) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as table

        fast = table["sdpa"]

        def slower(*args: Any, **kwargs: Any) -> Any:
            self.sleep()
            return fast(*args, **kwargs)

        table["sdpa"] = slower


class Burner(Cheat):
    """Base: something burns the CPU from the end of the candidate's step to the beginning of its next one."""

    caught = "reference"
    status = ("untrusted",)

    class Wrapper(Turns):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            if self.full:
                self.light()

        def light(self) -> None:
            raise NotImplementedError

        def burn(self, on: bool) -> None:
            raise NotImplementedError

        def forward(self, batch: Any) -> Tensor:
            if self.full:
                self.burn(False)
            return self.inner.forward(batch)

        def update(self) -> None:
            super().update()
            if self.full:
                self.burn(True)


class BurningThread(Burner):
    name = "burning_thread"
    summary = "a thread holds Python's lock while the reference runs"
    caught = "thread"

    class Wrapper(Burner.Wrapper):
        def light(self) -> None:
            self.on = threading.Event()
            threading.Thread(target=self.run, daemon=True).start()

        def run(self) -> None:
            while self.on.wait():
                sum(range(100_000))
                time.sleep(0.001)

        def burn(self, on: bool) -> None:
            self.on.set() if on else self.on.clear()


class BurningChild(Burner):
    name = "burning_child"
    summary = "child processes take the cores while the reference runs"
    caught = "process"

    class Wrapper(Burner.Wrapper):
        code = "import time\nend = time.time() + 20\nwhile time.time() < end: pass"

        def light(self) -> None:
            self.children = [subprocess.Popen([sys.executable, "-c", self.code]) for _ in range(os.cpu_count() or 1)]
            self.burn(False)

        def burn(self, on: bool) -> None:
            for child in self.children:
                child.send_signal(signal.SIGCONT if on else signal.SIGSTOP)


class Interrupted(Burner):
    name = "interrupted"
    summary = "a timer's signal interrupts the reference every millisecond"
    caught = "timer"

    class Wrapper(Burner.Wrapper):
        def light(self) -> None:
            signal.signal(signal.SIGALRM, lambda number, frame: time.sleep(0.001))

        def burn(self, on: bool) -> None:
            every = 0.002 if on else 0.0
            signal.setitimer(signal.ITIMER_REAL, every, every)
