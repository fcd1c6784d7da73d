"""What the fork server does last: it outlives a sweep that is killed, and removes the sweep's temporary folders.

Preloaded before anything that takes time, so that it does so whenever the sweep ends.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from lorabench.run.session import SERVER_FOLDER, scratch_prefix
from lorabench.run.signals import has_ended

DYING_S = 5.0  # in which a sweep whose pipes are closed has ended


def remove(sweep: int, server_folder: str | None) -> None:
    """Remove the temporary folders of the sweep with this process id, if it has ended: a server that only ends itself
    leaves them to it, and to the server that it starts next."""
    if not has_ended(sweep, DYING_S):
        return
    own = Path(tempfile.gettempdir()).glob(f"{scratch_prefix(sweep)}*")
    for folder in (*own, *([server_folder] if server_folder else [])):
        shutil.rmtree(folder, ignore_errors=True)


atexit.register(remove, os.getppid(), os.environ.get(SERVER_FOLDER))
