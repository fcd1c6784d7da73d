"""Tables, plots and page again, from the records of a results folder.

    python -m lorabench.report results/h200/first_sweep
    python -m lorabench.report results/h200/mlora_ways against=processes

Nothing is measured: summary.md, .csv and .tex, plots/ and report.html are written anew into the folder, its records
stay as they are; rounds of a sweep that was ended before it wrote its records become records that say so.
against=NAME shows every arm over the arm of that name, which shared its rounds, instead of over the reference, in the
same files; without it the next report shows them over the reference again. Exit code 2 and one line where the folder
cannot be read or written, has no record, or no arm has that name.
"""

from __future__ import annotations

import contextlib
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from lorabench.contract.names import complain
from lorabench.report import against


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser("python -m lorabench.report", None, __doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder with records.jsonl, the output of a sweep")
    parser.add_argument("against", nargs="?", type=against, metavar="against=NAME", help="show every arm over this one")
    asked = parser.parse_intermixed_args(arguments)
    folder = asked.run
    from lorabench.record.store import RECORDS, RecordError, Store, StoreError, check_folder
    from lorabench.run.journal import JOURNAL, kept

    try:
        check_folder(folder)
    except RecordError as error:
        return complain(error)
    from rich.console import Console

    console = Console()
    console.print(f"reading {folder} …", highlight=False, markup=False, style="dim", soft_wrap=True)
    from lorabench.report.write import Report  # only now: pandas, scipy and matplotlib take seconds

    try:
        if (folder / JOURNAL).exists():
            with contextlib.suppress(StoreError), Store(folder) as store:  # else the sweep that writes there still runs
                if (rounds := kept(store)) is not None:
                    words = f"a sweep was ended after {rounds} rounds of a family: they are kept"
                    console.print(words, highlight=False)
        report = Report.of(folder, asked.against)
        if not report.analysis.arms:
            raise RecordError(f"{folder / RECORDS} has no record; expected one at least (no report was written)")
        written = report.write()
    except (OSError, ValueError) as error:  # RecordError is a ValueError, StoreError an OSError
        return complain(error)
    report.show(console)
    print("\n".join(str(path) for path in written))
    if asked.against:
        print(f"these show every arm over {asked.against}; the same command without against= shows the reference again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
