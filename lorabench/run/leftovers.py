"""What the fork server does last: it outlives a sweep that is killed, and removes the sweep's temporary folder.

Preloaded before anything that takes time, so that it does so whenever the sweep ends.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from lorabench.run.session import scratch_prefix


def remove(sweep: int) -> None:
    """Remove the temporary folders of the sweep with this process id."""
    for folder in Path(tempfile.gettempdir()).glob(f"{scratch_prefix(sweep)}*"):
        shutil.rmtree(folder, ignore_errors=True)


atexit.register(remove, os.getppid())
