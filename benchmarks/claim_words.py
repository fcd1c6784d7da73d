"""A published number in words, for the tables of readme_tables.py: as its source prints it, and what it is of."""

from __future__ import annotations

import re

from lorabench.report.claims import AS_RATIO, TIMES, Claim
from lorabench.report.tables import md
from lorabench.report.words import number


def printed(claim: Claim) -> str:
    """The number as the source prints it; a percentage of time or speed as a ratio too."""
    said = "–".join(f"{n:g}" for n in claim.printed)
    least = {"at least": "at least ", "maximum": "up to "}.get(claim.statistic, "")
    if claim.unit == "$":
        return f"${said}"
    if claim.ratio_to:
        how = "as fast as" if claim.quantity in TIMES else "of"
        return f"{said} {claim.unit} ({number(claim.low)} × {how} {claim.ratio_to})"
    if claim.unit not in AS_RATIO:
        return f"{least}{said} {claim.unit}"
    if claim.unit == "x":
        return f"{least}{said} ×"
    as_ratio = "–".join(f"{AS_RATIO[claim.unit](n):.3g}" for n in claim.printed)
    return f"{least}{said} {claim.unit} ({as_ratio} ×)"


def what(claim: Claim) -> str:
    quantity = re.sub(r"_(pct|gb|usd|h|days|s)$", "", claim.quantity).replace("_", " ")
    about = ", ".join(filter(None, (claim.model, quantity, claim.of)))
    caveat = f"; {claim.caveat}" if claim.caveat else ""
    return md(f"{about}, against {claim.baseline}{caveat}")
