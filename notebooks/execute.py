"""The notebooks, executed again and saved with their output: python -m notebooks.execute [NAME …]

Run it at the root of the project, where the package is installed with its `notebook` extra. Each notebook runs in a
kernel of its own, from the first cell to the last. A notebook in which a cell fails is left as it was, and the exit
code is 1. Two runs over the same results save the same files, but for what a notebook measures itself (the cheats
of 4_can_i_trust_it): times, ids and the kernel's version are not kept.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from lorabench.contract.names import nearest
from lorabench.record.store import write_atomically

HERE = Path(__file__).resolve().parent
EXTRA = "pip install 'lorabench[notebook]'"
CELL_S = 300  # the longest that one cell may take, on a machine that has other work


def notebooks() -> dict[str, Path]:
    """Name → file, in their order."""
    return {path.stem: path for path in sorted(HERE.glob("*.ipynb"))}


def executed(path: Path) -> Any:
    """The notebook after a run in a fresh kernel, without what differs from run to run. Raises
    nbclient.exceptions.CellExecutionError where a cell fails, ImportError without the extra."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_S,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    return stripped(notebook)


def stripped(notebook: Any) -> Any:
    """Changes the notebook: its metadata are the kernel's name, its cells are named by their place."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook["metadata"] = {"kernelspec": kernel, "language_info": {"name": "python"}}
    for place, cell in enumerate(notebook["cells"]):
        cell["id"], cell["metadata"] = f"cell-{place:02d}", {}
        if "outputs" in cell:  # what a library warns of is this machine's, and no result
            cell["outputs"] = [output for output in cell["outputs"] if output.get("name") != "stderr"]
        for output in cell.get("outputs", ()):
            if "metadata" in output:
                output["metadata"] = {}
    return notebook


def save(notebook: Any, path: Path) -> None:
    import nbformat

    nbformat.validate(notebook)
    write_atomically(path, (nbformat.writes(notebook).rstrip("\n") + "\n").encode())


def main(arguments: list[str] | None = None) -> int:
    known = notebooks()
    parser = argparse.ArgumentParser(prog="python -m notebooks.execute", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}; all unless given")
    names = parser.parse_args(arguments).names or list(known)
    if wrong := next((name for name in names if name not in known), None):
        print(nearest("notebook", wrong, known), file=sys.stderr)
        return 2
    try:
        from nbclient.exceptions import CellExecutionError, CellTimeoutError
    except ImportError as error:
        print(f"{error}; install the extra: {EXTRA}", file=sys.stderr)
        return 2
    for name in names:
        began = time.monotonic()
        try:
            save(executed(known[name]), known[name])
        except (CellExecutionError, CellTimeoutError) as error:
            print(f"{name} is left as it was: {error}", file=sys.stderr)
            return 1
        print(f"{known[name].name}: {known[name].stat().st_size / 1000:.0f} kB, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
