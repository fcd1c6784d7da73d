"""Sweeps from a process that has imported what they import, which takes each of them six seconds otherwise.

A sweep is a fork of it: its arguments, folder, environment and output are its own, and the module runs as `python -m`
does. Where the environment says anything that counts at import, helpers.sweep starts a whole command instead.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from select import select
from typing import Any

IMPORTS = (
    "torch", "transformers", "peft", "pandas", "scipy.stats", "matplotlib.figure", "lorabench.report.write",
    "lorabench.run.local_queue", "lorabench.run.runner", "lorabench.plan.compose",
)  # fmt: skip
LATER = {"PYTHONPATH", "COLUMNS", "TMPDIR", "PYTEST_CURRENT_TEST"}  # variables that count where they are read


class Server:
    """The process, asked from here. One sweep at a time."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.environment = dict(os.environ)

    def can(self, environment: Mapping[str, str]) -> bool:
        """Whether what it has imported is what a command in that environment would."""
        names = (self.environment.keys() | environment.keys()) - LATER
        return all(self.environment.get(name) == environment.get(name) for name in names)

    def run(
        self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """As subprocess.run of `python -m lorabench.sweep`. Raises TimeoutExpired, then with the sweep killed."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            asked = {"arguments": list(arguments), "cwd": str(cwd), "environment": dict(environment)}
            pid = self._answer({**asked, "out": str(out), "err": str(err)})
            assert self.process.stdout is not None
            if not select([self.process.stdout], [], [], timeout)[0]:
                os.kill(pid, 9)
                self._answer()
                raise subprocess.TimeoutExpired(list(arguments), timeout)
            code = self._answer()
            return subprocess.CompletedProcess(list(arguments), code, out.read_text(), err.read_text())

    def _answer(self, asked: dict[str, Any] | None = None) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        if asked is not None:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
        return int(self.process.stdout.readline())


def serve() -> None:
    """A line for each sweep: its process's id at its start, its exit code at its end."""
    for name in IMPORTS:
        importlib.import_module(name)
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if not pid:
            become(**json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def become(arguments: list[str], cwd: str, environment: dict[str, str], out: str, err: str) -> None:
    """The command itself; does not return."""
    os.chdir(cwd)
    for number, path in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    added = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    sys.path[:1] = [cwd, *added]
    sys.argv[1:] = arguments
    importlib.invalidate_caches()
    runpy.run_module("lorabench.sweep", run_name="__main__", alter_sys=True)
    raise SystemExit(0)


if __name__ == "__main__":
    serve()
