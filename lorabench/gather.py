"""Records of several results folders into one: of machines or GPUs that shared a sweep, or of sessions apart.

    python -m lorabench.gather results/all results/gpu0 results/gpu1
    python -m lorabench.report results/all

The first folder takes the records of the others; it need not exist. A cell that it has already from another session is
kept beside it, as another session of that cell. A record that it has already is left where it is, so the same command
may be run again. Nothing is written unless every folder can be read. Exit code 0; 2 for bad input.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # as in sweep.py
    from lorabench.cli import main as entry

    raise SystemExit(entry(["gather", *sys.argv[1:]]))

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lorabench.contract.names import one_line
from lorabench.record.schema import ArmRecord

if TYPE_CHECKING:
    from lorabench.record.store import Line


def gathered(here: Sequence[Line], more: Sequence[Line]) -> Iterator[Line]:
    """What `here` lacks of `more`, which come from one folder. A session of a family (in schemas 1 and 2: of a cell)
    that `here` has already of another run becomes the next one."""
    known = {(r.session, *_question(r)) for r in here}
    became = {(_question(r)[0], r.session): r.replicate for r in here}
    taken: dict[str, set[int]] = {}
    for (question, _), replicate in became.items():
        taken.setdefault(question, set()).add(replicate)
    places: dict[tuple[str, int], int] = {}
    for record in more:
        question, arm = _question(record)
        if (record.session, question, arm) in known:
            continue
        own = taken.setdefault(question, set())
        place = question, record.replicate
        if place not in places:
            free = record.replicate if record.replicate not in own else max(own) + 1
            places[place] = became.get((question, record.session), free)
            own.add(places[place])
        yield record.model_copy(update={"replicate": places[place]})


def _question(record: Line) -> tuple[str, str]:
    """What is measured again in every session, and which part of it the record is."""
    return (record.family, record.arm) if isinstance(record, ArmRecord) else (record.key, "")


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser("python -m lorabench.gather", None, __doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path, metavar="INTO", help="the results folder that takes the records")
    parser.add_argument("folders", type=Path, metavar="FROM", nargs="+", help="a results folder that is read")
    options = parser.parse_args(arguments)

    from lorabench.record.store import RecordError, Store, StoreError, read_lines, read_sessions

    try:
        found = [(folder, read_lines(folder), read_sessions(folder)) for folder in options.folders]
        with Store(options.into) as store:
            here = read_lines(options.into)
            for folder, records, sessions in found:
                new = list(gathered(here, records))
                named = {record.session for record in new}
                for session in sessions:
                    if session["id"] in named:
                        store.add_session(session)
                for record in new:
                    store.append(record)
                here += new
                print(f"{folder}: {len(new)} of {len(records)} records are new in {options.into}")
    except (RecordError, StoreError) as error:
        print(f"lorabench: {one_line(error)}", file=sys.stderr)
        return 2
    return 0
