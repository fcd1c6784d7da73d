"""Runs a command and keeps what it printed, beside the machine, the versions and the commit that it ran on.

usage: python -m lorabench.log_command FILE COMMAND...

    python -m lorabench.log_command results/h200/memcheck.log compute-sanitizer --tool memcheck python tests/x.py

For what is measured outside a sweep (a memory check, a profile, a table of kernels): environment.json beside FILE is
the same as a sweep's, with FILE's name as the session. FILE is written anew. Exit code: the command's own; 2 where it
could not be started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lorabench.cli import complain
from lorabench.contract.names import one_line
from lorabench.measure.machine import describe
from lorabench.record.store import RecordError, Store, StoreError
from lorabench.run.session import new_session
from lorabench.run.signals import handled


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) < 2 or arguments[0].startswith("-"):
        print(__doc__)
        return 0 if {"-h", "--help"} & set(arguments) else 2
    file, command = Path(arguments[0]), arguments[1:]
    try:
        return run(file, command)
    except (StoreError, RecordError) as error:
        reason = one_line(error)
    except OSError as error:
        reason = f"{error.filename or command[0]}: {error.strerror or error}"
    return complain(f"{reason}; expected a file to write and a command that can be started")


def run(file: Path, command: Sequence[str]) -> int:
    """The command's exit code, after its output has gone to the console and to the file and the session is stored.

    Raises OSError where the file cannot be written or the command not be started; the last run's log then stays."""
    file.parent.mkdir(parents=True, exist_ok=True)
    store = Store(file.parent)
    store.sessions()  # a file that could not be added to must cost no run
    session, began = new_session(list(command)), time.monotonic()
    sys.stdout.flush()
    unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}  # where either is killed, the log says how far it came
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=unbuffered) as process:
        assert process.stdout is not None
        # A command whose time is up has a session, too.
        ended = handled({signal.SIGTERM: lambda *_: process.terminate()})
        with ended, open(file, "wb", buffering=0) as log:
            for line in process.stdout:
                log.write(line)
                print(line.decode(errors="replace"), end="", flush=True)
    session |= {"id": file.name, "exit_code": process.returncode, "wall_s": round(time.monotonic() - began, 1)}
    # Only now: looking at a GPU takes memory on it, and the command had a claim to all there was.
    store.add_session(session | {"machine": describe().model_dump(mode="json")})
    return process.returncode


if __name__ == "__main__":
    raise SystemExit(main())
