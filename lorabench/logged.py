"""The older name of lorabench.log_command: python -m lorabench.logged FILE COMMAND...

Kept because published commands and notes call it so. Its name did not say what it does, so the code has another.
"""

from __future__ import annotations

from lorabench.log_command import main

if __name__ == "__main__":
    raise SystemExit(main())
