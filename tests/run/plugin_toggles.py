"""Toggles of a third party's package, for the tests: one that works, and one for each way to fail."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import ClassVar

import torch

from lorabench.contract.ablation import Ablation, Unsupported
from lorabench.contract.step import Wrapped
from lorabench_ablations.parallel import Ddp


@dataclass(frozen=True, kw_only=True)
class Polite(Ablation):
    name: ClassVar[str] = "polite"
    slot: ClassVar[str] = "third_party"
    summary: ClassVar[str] = "somebody else's toggle"
    times: int = 1

    def patch(self, model):
        model.polite = True
        return self.times * sum("lora_A" in name for name, _ in model.named_parameters())


@dataclass(frozen=True, kw_only=True)
class Compiles(Polite):
    """Its children work while it is prepared and wait afterwards, as those of torch's compiler do."""

    name: ClassVar[str] = "compiles"

    def patch(self, model):
        code = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ntime.sleep(10_000)"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        return super().patch(model)


@dataclass(frozen=True, kw_only=True)
class Leaky(Polite):
    name: ClassVar[str] = "leaky"
    global_patch: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Grumpy(Polite):
    name: ClassVar[str] = "grumpy"
    excludes: ClassVar[dict] = {"attention": "it wants to be alone"}


@dataclass(frozen=True, kw_only=True)
class Greedy(Polite):
    name: ClassVar[str] = "greedy"

    def patch(self, model):
        model.too_much = torch.ones(1 << 50)
        return 1


@dataclass(frozen=True, kw_only=True)
class Lengthy(Polite):
    """Of a device that has room for 100 tokens."""

    name: ClassVar[str] = "lengthy"

    def patch(self, model):
        def check(module, args, kwargs):
            if kwargs["input_ids"].numel() > 100:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        model.register_forward_pre_hook(check, with_kwargs=True)
        return super().patch(model)


@dataclass(frozen=True, kw_only=True)
class Hang(Polite):
    name: ClassVar[str] = "hang"

    def patch(self, model):
        threading.Thread(target=time.sleep, args=(10_000,), daemon=True).start()  # whose stack says nothing
        time.sleep(10_000)
        return 1


@dataclass(frozen=True, kw_only=True)
class Killed(Polite):
    name: ClassVar[str] = "killed"

    def patch(self, model):
        os.kill(os.getpid(), signal.SIGKILL)
        return 1


class Dies(Wrapped):
    calls = 0

    def forward(self, batch):
        self.calls += 1
        if self.calls == 9:  # with warmup=1 no more than 7 are before the rounds, of which the slowest arm takes six
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner.forward(batch)


@dataclass(frozen=True, kw_only=True)
class KilledLater(Polite):
    """In the middle of the rounds, however many trials its turns have."""

    name: ClassVar[str] = "killed_later"

    def step(self, step):
        return Dies(super().step(step))


@dataclass(frozen=True, kw_only=True)
class Raises(Polite):
    name: ClassVar[str] = "raises"

    def patch(self, model):
        print("what it printed before")
        raise LookupError("nobody expected this")


@dataclass(frozen=True, kw_only=True)
class Wrong(Polite):
    name: ClassVar[str] = "wrong"

    def patch(self, model):
        params = [p for n, p in model.named_parameters() if "lora_A" in n]
        params[-1].register_hook(lambda grad: 1.5 * grad)
        return 1


@dataclass(frozen=True, kw_only=True)
class NotANumber(Polite):
    name: ClassVar[str] = "not_a_number"

    def patch(self, model):
        params = [p for n, p in model.named_parameters() if "lora_A" in n]
        params[-1].register_hook(lambda grad: grad * float("nan"))
        return 1


@dataclass(frozen=True, kw_only=True)
class OddNotes(Polite):
    """Right in everything but what it says of itself, which JSON cannot hold."""

    name: ClassVar[str] = "odd_notes"

    def notes(self, evidence):
        return {"odd": {torch.float32: b"\xff"}}


@dataclass(frozen=True, kw_only=True)
class DeepWrong(Polite):
    """Wrong below the shallow model's second layer: only the full arms' agreement can see it."""

    name: ClassVar[str] = "deep_wrong"

    def patch(self, model):
        params = [p for n, p in model.named_parameters() if "layers.2" in n and p.requires_grad]
        for p in params:
            p.register_hook(lambda grad: 3 * grad)
        return 1


@dataclass(frozen=True, kw_only=True)
class Nothing(Polite):
    name: ClassVar[str] = "nothing"

    def patch(self, model):
        return 0


@dataclass(frozen=True, kw_only=True)
class Refuses(Polite):
    name: ClassVar[str] = "refuses"

    def patch(self, model):
        raise Unsupported("it does not like this model")


@dataclass(frozen=True, kw_only=True)
class Absent(Polite):
    name: ClassVar[str] = "absent"
    from lorabench.contract.ablation import Requires

    requires: ClassVar = Requires(packages={"no_such_package": "pip install no-such-package"})


@dataclass(frozen=True, kw_only=True)
class RankRaises(Ddp):
    """`go_wrong` happens on rank 1 alone, while the model is divided; the other ranks wait for it in a collective."""

    name: ClassVar[str] = "rank_raises"

    def go_wrong(self):
        raise LookupError("only here")

    def step(self, step):
        if os.environ["RANK"] == "1":
            self.go_wrong()
        return super().step(step)


@dataclass(frozen=True, kw_only=True)
class RankHangsEarly(RankRaises):
    name: ClassVar[str] = "rank_hangs_early"

    def go_wrong(self):
        time.sleep(10_000)


@dataclass(frozen=True, kw_only=True)
class RankKilled(RankRaises):
    name: ClassVar[str] = "rank_killed"

    def go_wrong(self):
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class RankGreedy(RankRaises):
    name: ClassVar[str] = "rank_greedy"

    def go_wrong(self):
        torch.ones(1 << 50)


@dataclass(frozen=True, kw_only=True)
class RankHangs(Ddp):
    """Rank 1 never comes back from the forward of a later trial."""

    name: ClassVar[str] = "rank_hangs"

    def step(self, step):
        return Sleeper(super().step(step))


class Sleeper(Wrapped):
    calls = 0

    def forward(self, batch):
        Sleeper.calls += 1
        if os.environ["RANK"] == "1" and Sleeper.calls == 5:
            time.sleep(10_000)
        return self.inner.forward(batch)


@dataclass(frozen=True, kw_only=True)
class Unsummed(Ddp):
    """DDP that forgets that its ranks' gradients are averaged: they are half as large as one process's."""

    name: ClassVar[str] = "unsummed"

    def step(self, step):
        return super().step(step).inner


@dataclass(frozen=True, kw_only=True)
class RankFails(Ablation):
    """Beside any parallel toggle: rank 1 alone goes wrong in the forward of its `call`-th batch."""

    name: ClassVar[str] = "rank_fails"
    slot: ClassVar[str] = "third_party"
    how: str = "raise"
    call: int = 3

    def step(self, step):
        return Fails(step, self.how, self.call)

    def audit(self, evidence):
        return 1


@dataclass(frozen=True, kw_only=True)
class RankSlow(Ablation):
    """Beside any parallel toggle: rank 1 alone takes 0.15 s more for each micro-batch."""

    name: ClassVar[str] = "rank_slow"
    slot: ClassVar[str] = "third_party"

    def step(self, step):
        return Slow(step)

    def audit(self, evidence):
        return 1


class Slow(Wrapped):
    def forward(self, batch):
        if os.environ.get("RANK") == "1":
            time.sleep(0.15)
        return self.inner.forward(batch)


@dataclass(frozen=True, kw_only=True)
class RankWrong(Polite):
    """Rank 1 alone has a wrong gradient."""

    name: ClassVar[str] = "rank_wrong"

    def patch(self, model):
        if os.environ.get("RANK") == "1":
            next(p for n, p in model.named_parameters() if "lora_A" in n).register_hook(lambda grad: 1.5 * grad)
        return 1


class Fails(Wrapped):
    def __init__(self, inner, how, call):
        super().__init__(inner)
        self.how, self.left = how, call

    def forward(self, batch):
        self.left -= 1
        if os.environ.get("RANK") == "1" and not self.left:
            fail(self.how)
        return self.inner.forward(batch)


def fail(how):
    match how:
        case "raise":
            raise LookupError("only here")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(10_000)
        case "exit":
            os._exit(0)
        case "oom":
            torch.ones(1 << 50)
