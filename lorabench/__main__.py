"""python -m lorabench: the same as the console script `lorabench`."""

from __future__ import annotations

from lorabench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
