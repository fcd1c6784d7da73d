"""What `lorabench recommend` found, as it stands in a results folder beside the records, and as text."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lorabench.record.store import RecordError

FILE = "recommendation.json"


class Tried(BaseModel):
    """A contender: its toggles, what became of it in a word or two, and why."""

    model_config = ConfigDict(extra="forbid")

    toggles: str
    outcome: str
    why: str


class Recommendation(BaseModel):
    """One answer. `paragraph` says all of it in prose; `code` are blocks to paste: (title, language, text)."""

    model_config = ConfigDict(extra="forbid")

    title: str  # model @ workload, and where
    switch_on: list[str]  # labels of toggles; empty: leave everything as it is
    paragraph: str
    tried: list[Tried]
    left_out: list[str]  # for want of time
    code: list[tuple[str, str, str]]
    command: str
    made: str  # when
    spent_s: float = 0.0  # measuring; of a run that found all of it measured, next to nothing
    more: str = ""  # what more time would tell, and how much; "": every question has its answer


def read(folder: Path) -> Recommendation | None:
    """None where the folder has none. Raises RecordError where it cannot be read."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        return Recommendation.model_validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        words = str(error).splitlines()[0]
        raise RecordError(f"{path} is no recommendation: {words}; remove it") from None


def markdown(found: Recommendation) -> str:
    """recommendation.md."""
    rows = [f"| {_cell(t.toggles)} | {_cell(t.outcome)} | {_cell(t.why)} |" for t in found.tried]
    blocks = [f"## {title}\n\n```{language}\n{text.rstrip()}\n```" for title, language, text in found.code]
    table = ["| toggles | outcome | why |", "| --- | --- | --- |", *rows]
    parts = [f"# {found.title}", found.paragraph, *blocks, "## What was tried", "\n".join(table)]
    return "\n\n".join([*parts, f"`{found.command}`, {found.made}"]) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
