"""Sweeps from a process that has imported what they import, which takes each of them six seconds otherwise.

A sweep, or another module that is run so, is a fork of it: its arguments, folder, environment and output are its own,
and the module runs as `python -m` does. Where the environment says anything that counts at import, helpers.module
starts a whole command instead. The server of the sweep's workers, which Python would start as a command that imports
for as long again, is a fork of it too: made before the sweep begins, so that nothing of the sweep is in it. (What
starts a whole command sees to the real one: tests/run/test_faults.py.) The first sweep ends as a command does,
interpreter and all; the others, and their servers of workers, leave as soon as all that was registered for the end is
done, which saves two seconds each. The workers of a run of the tests share one: whoever comes first starts it.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from select import select
from typing import Any

IMPORTS = (
    "torch", "transformers", "peft", "pandas", "scipy.stats", "matplotlib.figure", "lorabench.report.write",
    "lorabench.run.local_queue", "lorabench.run.runner", "lorabench.plan.compose",
    # what lorabench.run.preload imports, which itself says at its import whose server it is in
    "torch.profiler", "torch._inductor.compile_fx", "transformers.models.llama.modeling_llama",
    "lorabench.measure.build", "lorabench.measure.judging.gold_cache", "lorabench.measure.kinds.train",
    "lorabench.measure.seat", "lorabench.run.worker",
)  # fmt: skip
SWEEP = "lorabench.sweep"
FORKS = not Path("/dev/nvidia0").exists()  # peft may have asked for the GPU, which a fork cannot use then
LOOKS_S = 0.02  # between two looks at a sweep that runs
STARTS_S = 300.0  # in which a server has imported, on a machine however busy
RUN, WORKER = "PYTEST_XDIST_TESTRUNUID", "PYTEST_XDIST_WORKER"
LATER = {"PYTHONPATH", "COLUMNS", "TMPDIR", "PYTEST_CURRENT_TEST", WORKER}  # variables that count where they are read


class Server:
    """The process, asked from here. One sweep at a time."""

    def __init__(self) -> None:
        name = f"lorabench-sweeps-{os.environ.get(RUN, os.getpid())}"
        # Ends at once where there is one of that name, and else with this process. Libraries may have set variables
        # behind Python's back (readline does), which no sweep is asked for with.
        command, known = [sys.executable, __file__, name], dict(os.environ)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, env=known)
        self.process.wait()  # the server is a fork of it
        self.asking, late = socket.socket(socket.AF_UNIX), time.monotonic() + STARTS_S
        while self.asking.connect_ex(f"\0{name}"):
            assert time.monotonic() < late, "no server of sweeps has started"
            time.sleep(LOOKS_S)
        self.lines = self.asking.makefile("rw")
        self.environment = json.loads(self.lines.readline())

    def can(self, environment: Mapping[str, str]) -> bool:
        """Whether what it has imported is what a command in that environment would."""
        names = (self.environment.keys() | environment.keys()) - LATER
        return all(self.environment.get(name) == environment.get(name) for name in names)

    def run(
        self,
        arguments: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        timeout: float,
        killed_when: Callable[[], bool] = lambda: False,
        module: str = SWEEP,
    ) -> subprocess.CompletedProcess[str]:
        """As subprocess.run of `python -m MODULE`. Raises TimeoutExpired, then with the sweep killed; so it is
        too as soon as `killed_when` says so."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            asked: dict[str, Any] = {"module": module, "arguments": list(arguments), "cwd": str(cwd)}
            asked["environment"] = dict(environment)
            pid = self._answer({**asked, "out": str(out), "err": str(err)})
            deadline = time.monotonic() + timeout
            over = late = False
            while not (over or late or killed_when()):
                over = bool(select([self.asking], [], [], LOOKS_S)[0])
                late = not over and time.monotonic() > deadline
            if not over:
                os.kill(pid, signal.SIGKILL)
            code = self._answer()
            if late:
                raise subprocess.TimeoutExpired(list(arguments), timeout)
            return subprocess.CompletedProcess(list(arguments), code, out.read_text(), err.read_text())

    def _answer(self, asked: dict[str, Any] | None = None) -> int:
        if asked is not None:
            self.lines.write(json.dumps(asked) + "\n")
            self.lines.flush()
        return int(self.lines.readline())


class End:
    """The end of this process without the interpreter's own, which takes two seconds after these imports."""

    code = 1  # of what raises

    def leave(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.code)


END = End()


def listen(name: str) -> None:
    """Serves whoever asks, each in a fork, until the process that has started this one ends."""
    asked, environment = socket.socket(socket.AF_UNIX), dict(os.environ)
    try:
        asked.bind(f"\0{name}")
    except OSError:
        return  # another worker was here first
    asked.listen()
    atexit.register(END.leave)  # before what the imports register, and so after it
    gc.disable()
    for module in IMPORTS:
        importlib.import_module(module)
    gc.freeze()  # what was there before a sweep it need not walk
    gc.enable()
    while sys.stdin not in (ready := select([asked, sys.stdin], [], [])[0]):
        asker = ready[0].accept()[0]
        if not os.fork():
            asked.close()
            serve(asker, environment)
        asker.close()


def serve(asker: socket.socket, environment: dict[str, str]) -> None:
    """The environment; then a line for each sweep: its process's id at its start, its exit code at its end. Does not
    return."""
    lines = asker.makefile("rw")
    print(json.dumps(environment), file=lines, flush=True)
    first = True  # of the sweeps, whose end is whole
    for line in iter(lines.readline, ""):
        asked = json.loads(line)
        whole = first and asked["module"] == SWEEP
        first = first and not whole
        pid = os.fork()
        if not pid:
            lines.close(), asker.close()
            if whole:
                atexit.unregister(END.leave)
                gc.unfreeze()
            become(**asked)
        print(pid, file=lines, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=lines, flush=True)
    raise SystemExit


def become(module: str, arguments: list[str], cwd: str, environment: dict[str, str], out: str, err: str) -> None:
    """The command itself; does not return."""
    os.chdir(cwd)
    for number, path in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    if FORKS:
        fork_server_from_here()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    added = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    sys.path[:1] = [cwd, *added]
    sys.argv[1:] = arguments
    importlib.invalidate_caches()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        END.code = stop.code if isinstance(stop.code, int) else 1
        raise
    END.code = 0  # a sweep ends with its exit code
    raise SystemExit


def fork_server_from_here() -> None:
    """A fork of this process waits until multiprocessing starts its fork server, and becomes it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        ours.close()
        become_fork_server(theirs)
    theirs.close()
    spawn = util.spawnv_passfds

    def start(executable: Any, words: list[str], descriptors: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in words[-1] or ours.fileno() < 0:
            return spawn(executable, words, descriptors)
        told = {"code": words[-1], "environment": dict(os.environ), "descriptors": [1, 2, *descriptors]}
        socket.send_fds(ours, [json.dumps(told).encode()], told["descriptors"])
        ours.close()
        return pid

    util.spawnv_passfds = start


def become_fork_server(asked: socket.socket) -> None:
    """What the command would be, with its environment and its descriptors and no others; does not return."""
    message, given, *_ = socket.recv_fds(asked, 1 << 20, 16)
    if not message:
        os._exit(0)  # the sweep has ended without a worker
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as the sweep holds it back where it starts a command
    told = json.loads(message)
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, 1000) for number in given]
    os.closerange(3, 1000)
    for number, target in zip(high, told["descriptors"], strict=True):
        os.dup2(number, target, inheritable=target < 3)
        os.close(number)
    os.environ.clear()
    os.environ.update(told["environment"])
    sys.argv = ["-c"]
    importlib.invalidate_caches()
    exec(told["code"], {})
    END.code = 0
    raise SystemExit(0)


# Nobody's child: what it computes for one worker would be work beside the arms that another one measures.
if __name__ == "__main__" and not os.fork():
    listen(sys.argv[1])
