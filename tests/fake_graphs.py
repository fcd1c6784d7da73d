"""A recorder for a CPU that keeps a CUDA graph's promises: recording changes no tensor and draws no random number; a
replay changes nothing but tensors (what a function does to objects happens when it is recorded, once), and its outputs
are the recording's own, overwritten."""

from __future__ import annotations

import contextlib
import sys

import torch
from lorakernels.capturing.graph import LOOKS_AWAY, NotCaptured
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Undone(TorchDispatchMode):
    """Keeps a copy of every tensor that is written to, to write it back."""

    def __init__(self):
        super().__init__()
        self.before = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for i, schema in enumerate(function._schema.arguments):
            if schema.alias_info is not None and schema.alias_info.is_write:
                given = args[i] if i < len(args) else kwargs.get(schema.name)
                for t in tree_leaves(given):
                    if isinstance(t, torch.Tensor) and id(t) not in self.before:
                        self.before[id(t)] = t, t.detach().clone()
        return function(*args, **kwargs)

    def undo(self):
        with torch.no_grad():
            for t, value in reversed(self.before.values()):
                t.data.copy_(value)  # what a backward has saved bears no mark of it


class _Copied(TorchFunctionMode):
    """Finds the numbers that are copied to the device, for which the host waits."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        place = sys._getframe(1)  # whoever called torch
        copies = func is torch.tensor and args[0] != [] and (kwargs or {}).get("device")
        if copies and not place.f_code.co_filename.endswith(LOOKS_AWAY):
            self.found.append(f"it copies {args[0]} at {place.f_code.co_filename}:{place.f_lineno}")
        return func(*args, **(kwargs or {}))


class FakeRecording:
    def __init__(self, fake, function, outputs):
        self.fake, self.function, self.outputs = fake, function, outputs

    def replay(self):
        self.fake.replays += 1
        with self.fake.same_objects():
            new = self.function()
        with torch.no_grad():
            for name, static in self.outputs.items():
                static.copy_(new[name])
        return self.outputs


class FakeGraphs:
    """params: of the model whose `.grad` no replay may replace; needs, fails: what a step is found to need of the host,
    and why captures fail."""

    def __init__(self, params=()):
        self.params, self.needs, self.fails, self.device = list(params), [], None, torch.device("cpu")
        self.replays = self.branches = 0

    def aside(self):
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def needs_of_host(self):
        found = list(self.needs)
        with _Copied(found):
            yield found

    def in_branches(self, functions):
        self.branches += len(functions)
        for function in reversed(functions):  # the order of branches is nobody's
            function()

    def random_state(self):
        return torch.get_rng_state()

    @contextlib.contextmanager
    def same_objects(self):
        grads = [p.grad for p in self.params]
        yield
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad

    def record(self, function):
        if self.fails:
            raise NotCaptured(self.fails)
        state, undone = torch.get_rng_state(), _Undone()
        with undone:
            outputs = {name: t.detach().clone() for name, t in function().items()}
        undone.undo()
        torch.set_rng_state(state)
        for t in outputs.values():
            t.fill_(torch.nan if t.is_floating_point() else -1)  # a capture has no values before the first replay
        return FakeRecording(self, function, outputs)
