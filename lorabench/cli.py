"""The command line: lorabench SUBCOMMAND [ARGUMENT ...], or python -m lorabench.

    lorabench sweep 'ablations=[lora_kernels]' output=output/first
    lorabench doctor
    lorabench --help

Each subcommand is the module that `python -m lorabench.NAME` runs. It is imported when it is called, so that help is
instant. Exit codes are the subcommand's own; 2 for a wrong one, 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import NamedTuple

from lorabench.contract.names import complain, nearest
from lorabench.run.signals import handled

HELP = {"-h", "--help", "help"}

LIST_HELP = """\
lorabench list: the optimizations, their slots, and what each lacks on this machine.

usage: lorabench list            the same as python -m lorabench.sweep list=true

Of each: the name that goes into ablations=[...], the slot that only one of them may fill, whether this machine can
have it ("available", or what is lacking, with the command that installs it), and under that what it does.

examples
  lorabench list
  lorabench list | grep -A 1 attention
"""


class Command(NamedTuple):
    """A subcommand: the module whose `main(arguments)` it is, one line of help, arguments that it always gives, and its
    help where that is not the module's."""

    module: str
    summary: str
    first: tuple[str, ...] = ()
    help: str = ""


COMMANDS = {
    "sweep": Command("lorabench.sweep", "measure optimizations, each against its reference, and write the report"),
    "recommend": Command("lorabench.recommend", "which few of them to switch on, for a model, data and this machine"),
    "jobs": Command("lorabench.jobs", "train several adapters on one base, each from its own data"),
    "list": Command(
        "lorabench.sweep", "the optimizations, and what each lacks on this machine", ("list=true",), LIST_HELP
    ),
    "report": Command("lorabench.report.__main__", "tables, plots and page again, from a results folder"),
    "compare": Command("lorabench.compare", "two results folders against each other"),
    "gather": Command("lorabench.gather", "records of several results folders into one"),
    "simulate": Command(
        "lorabench.simulate", "how long a pipeline's stages wait when several adapters train on one base"
    ),
    "doctor": Command("lorabench.doctor", "what this machine can run, and why not the rest"),
    "log": Command("lorabench.log_command", "run a command; keep its output and the environment it ran in"),
}


def help_text() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "lorabench: measures what optimizations of LoRA fine-tuning buy, each checked and timed in pairs.",
            "",
            "usage: lorabench SUBCOMMAND [ARGUMENT ...]",
            "       lorabench SUBCOMMAND --help",
            "       lorabench --version",
            "",
            *lines,
            "",
            "examples",
            "  lorabench doctor",
            "  lorabench sweep 'ablations=[lora_kernels,packing]' output=output/first",
            "  lorabench report output/first",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit code. argparse inside it may raise SystemExit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else None
    if name is None or name in HELP:
        print(help_text(), file=sys.stdout if name else sys.stderr)
        return 0 if name else 2
    if name == "--version":
        from importlib.metadata import version

        print(f"lorabench {version('lorabench')}")
        return 0
    if name not in COMMANDS:
        return complain(nearest("subcommand", name, COMMANDS))
    # What libraries are going to change is their users' business, and these are we: not of who runs a sweep.
    warnings.simplefilter("ignore", FutureWarning)
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # in the workers
    # bitsandbytes, which peft imports, warns where the package `kernels` is not installed: for 4 bits on a CPU it has
    # a kernel of its own then.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    command = COMMANDS[name]
    if command.help and HELP & set(arguments[1:]):
        print(command.help, end="")
        return 0
    with _quiet_stop():
        module = import_module(command.module)
    with _terminated_like_interrupted():
        try:
            return module.main([*command.first, *arguments[1:]])
        except KeyboardInterrupt as stop:  # which the sweep catches itself, where it has more to say
            print("lorabench: stopped", file=sys.stderr)
            return exit_code(stop)


def entry(name: str) -> None:
    """`python -m lorabench.NAME`: the subcommand of that name."""
    raise SystemExit(main([name, *sys.argv[1:]]))


def exit_code(stop: KeyboardInterrupt) -> int:
    """What a shell says of a process that this signal ended."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


class Terminated(KeyboardInterrupt):
    """SIGTERM: as Ctrl-C is, so that what was started is ended and what was made for a while is gone."""


@contextlib.contextmanager
def _quiet_stop() -> Iterator[None]:
    """A signal while modules are imported ends the process at once, with one line: nothing is begun yet, and an
    exception in the middle of an import could come out of it as any other."""

    def stop(number: int, _: object) -> None:
        os.write(2, b"lorabench: stopped before it began\n")
        os._exit(128 + number)

    with handled({signal.SIGINT: stop, signal.SIGTERM: stop}):
        yield


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Terminated

    with handled({signal.SIGTERM: stop}):
        yield
