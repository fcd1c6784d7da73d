"""What becomes of the zoo's toggles, as a table: `PYTHONPATH=.:kernels:tests python -m zoo [NAME …]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from zoo.cheat import Cheat
from zoo.menagerie import animals, groups, measured, settled


def main(names: list[str]) -> None:
    known = animals()
    with tempfile.TemporaryDirectory() as scratch:
        env = settled(Path(scratch))
        for number, group in enumerate(groups(names or known)):
            for name, record in measured(group, Path(scratch) / str(number), env).items():
                what = "cheat" if issubclass(known[name], Cheat) else "honest"
                total = (record.phases or {}).get("total")
                speedup = f"{total.speedup:7.2f} x" if total and total.speedup else 9 * " "
                print(f"{what:7}{name:30}{record.status:15}{speedup}  {record.reason or ''}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
