"""What becomes of the zoo's toggles, as a table: `PYTHONPATH=.:kernels:tests python -m zoo [NAME …]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from lorabench.record.contrast import contrast_of
from lorabench.record.schema import TOTAL
from zoo.cheat import Cheat
from zoo.menagerie import animals, groups, measured, settled


def main(names: list[str]) -> None:
    known = animals()
    with tempfile.TemporaryDirectory() as scratch:
        env = settled(Path(scratch))
        for number, group in enumerate(groups(names or known)):
            for name, record in measured(group, Path(scratch) / str(number), env).items():
                what = "cheat" if issubclass(known[name], Cheat) else "honest"
                found = contrast_of(record, (TOTAL,))
                speedup = f"{found.centre:7.2f} x" if found else 9 * " "
                print(f"{what:7}{name:30}{record.status:15}{speedup}  {record.reason or ''}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
