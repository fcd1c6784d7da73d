"""The sweeps below a folder such as results/: their names, and each analysed."""

from __future__ import annotations

from pathlib import Path

from lorabench.contract.names import nearest
from lorabench.record.store import RECORDS
from lorabench.report.analysis import Analysis


def sweeps(root: str | Path) -> list[str]:
    """The names of all folders below `root` that hold records, relative to it and in order of the alphabet.

    Raises FileNotFoundError where there is no such folder.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected one with the output of sweeps below it")
    return sorted(path.parent.relative_to(folder).as_posix() for path in folder.rglob(RECORDS))


def analyses(root: str | Path, only: list[str] | None = None) -> dict[str, Analysis]:
    """Name → analysis, of every sweep below `root` or of those named. Each draws its intervals' rounds by itself, so
    that what is said of several does not share their errors.

    Raises NameUnknown (a ValueError) for a name that is none of them, RecordError for records that cannot be read.
    """
    known = sweeps(root)
    for name in only or ():
        if name not in known:
            raise nearest("sweep", name, known)
    return {name: Analysis.read(Path(root) / name, salt=name) for name in (known if only is None else only)}
