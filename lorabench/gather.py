"""Records of several results folders into one: of machines or GPUs that shared a sweep, or of sessions apart.

    python -m lorabench.gather results/all results/gpu0 results/gpu1
    python -m lorabench.report results/all

The first folder takes the records of the others; it need not exist. A cell that it has already from another session is
kept beside it, as another session of that cell. A record that it has already is left where it is, so the same command
may be run again. Nothing is written unless every folder can be read. What another machine measured stands in the report
beside the same stacks, in a column of its own. Exit code 0; 2 for bad input, folders without any record included.
"""

from __future__ import annotations

from lorabench.cli import complain, entry

if __name__ == "__main__":  # as in sweep.py
    entry("gather")

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from pathlib import Path

from lorabench.record.schema import ArmRecord


def gathered(here: Sequence[ArmRecord], more: Sequence[ArmRecord]) -> Iterator[ArmRecord]:
    """What `here` lacks of `more`, which come from one folder. A session of a family that `here` has already of another
    run becomes the next one."""
    known = {(r.session, r.family, r.arm) for r in here}
    became = {(r.family, r.session): r.replicate for r in here}
    taken: dict[str, set[int]] = {}
    for (family, _), replicate in became.items():
        taken.setdefault(family, set()).add(replicate)
    places: dict[tuple[str, int], int] = {}
    for record in more:
        if (record.session, record.family, record.arm) in known:
            continue
        own = taken.setdefault(record.family, set())
        place = record.family, record.replicate
        if place not in places:
            free = record.replicate if record.replicate not in own else max(own) + 1
            places[place] = became.get((record.family, record.session), free)
            own.add(places[place])
        yield record.model_copy(update={"replicate": places[place]})


def main(arguments: list[str]) -> int:
    parser = ArgumentParser("python -m lorabench.gather", None, __doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path, metavar="INTO", help="the results folder that takes the records")
    parser.add_argument("folders", type=Path, metavar="FROM", nargs="+", help="a results folder that is read")
    options = parser.parse_args(arguments)

    from lorabench.record.store import RECORDS, RecordError, Store, StoreError, read_arms, read_sessions

    try:
        found = [(folder, read_arms(folder), read_sessions(folder)) for folder in options.folders]
        if not any(records for _, records, _ in found):
            empty = " and ".join(str(folder / RECORDS) for folder in options.folders)
            have = "have" if len(options.folders) > 1 else "has"
            raise RecordError(f"{empty} {have} no record; expected one at least (nothing was written)")
        with Store(options.into) as store:
            here = read_arms(options.into)
            for folder, records, sessions in found:
                new = list(gathered(here, records))
                named = {record.session for record in new}
                for session in sessions:
                    if session["id"] in named:
                        store.add_session(session)
                for record in new:
                    store.append(record)
                here += new
                taken = f"{len(new)} of {len(records)} records are new in {options.into}"
                print(f"{folder}: {taken if records else 'it has no record'}")
    except (RecordError, StoreError) as error:
        return complain(error)
    return 0
