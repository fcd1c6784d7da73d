"""Tables, plots and page again from the records of a results folder: python -m lorabench.report RUN

Exit code 2 and one line where the folder cannot be read or written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from lorabench.report.write import Report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lorabench.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="folder with records.jsonl, the output of a sweep")
    folder = parser.parse_args(arguments).run
    try:
        report = Report.of(folder)
        written = report.write()
    except (OSError, ValueError) as error:  # RecordError is a ValueError, StoreError an OSError
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    console = Console()
    console.print(report.terminal(console.width))
    print("\n".join(str(path) for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
