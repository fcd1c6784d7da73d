"""The rows of a text workload: the lines of a JSONL file or the rows of a hub data set, and what their fields are.

A wrong row is said with its file and line, the fields that it has and those that were expected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from lorabench.contract.hooks import first_line
from lorabench.contract.workload import Drawn, Workload, WorkloadError
from lorabench.plan import hub

# What a row may have where no fields are named, in this order.
MESSAGES = "messages"
PROMPT_COMPLETION = "prompt_completion"
FORMATS = {MESSAGES: (MESSAGES,), PROMPT_COMPLETION: ("prompt", "completion"), "text": ("text",)}
EXPECTED = "messages, prompt and completion, or text (or name them: {FILE.jsonl: {fields: [question, answer]}})"
SUFFIXES = (".jsonl", ".ndjson")
SHAREGPT = {"from", "value"}  # the fields of its turns
OTHERS = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant"}
IN_OUR_WORDS = "rename from to role (human to user, gpt to assistant) and value to content"
ALPACA = ("instruction", "input", "output")


# Who speaks in a chat, in the words of published templates.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment", "context")


class Rows:
    """Rows by number. `source` is their file or data set."""

    def __init__(self, source: str, items: Sequence[Any], numbers: Sequence[int], digest: str) -> None:
        self.source, self.items, self.numbers, self.digest = source, items, numbers, digest
        # A plan is made more than once, and a file may be long.
        self.checked: set[Any] = set()
        self.chosen: dict[Any, Drawn] = {}

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Raises WorkloadError for a line that is no JSON object."""
        item = self.items[index]
        if not isinstance(item, bytes):
            return item
        try:
            row = json.loads(item)
        except UnicodeDecodeError:
            raise WorkloadError(f"{self.place(index)} is not UTF-8; expected JSON lines in UTF-8") from None
        except (ValueError, RecursionError):
            raise WorkloadError(f"{self.place(index)} is not JSON; expected one object a line") from None
        if not isinstance(row, dict):
            raise WorkloadError(f"{self.place(index)} is {_kind(row)}; expected one JSON object a line")
        return row

    def place(self, index: int) -> str:
        return f"{self.source} {'line' if isinstance(self.items[index], bytes) else 'row'} {self.numbers[index]}"


def rows_of(workload: Workload) -> Rows:
    """Raises WorkloadError for a file that is not there, and for a data set that cannot be had."""
    if workload.path is None:
        return _data_set(workload.dataset or "", workload.subset, workload.split)
    return file_rows(Path(workload.path))


def file_rows(path: Path) -> Rows:
    """The lines of a JSONL file that are not blank. Raises WorkloadError."""
    try:
        seen = path.stat()
        if path.is_dir():
            raise WorkloadError(f"{path} is a folder; expected a file of JSON lines with {EXPECTED}")
        if not path.is_file():
            raise FileNotFoundError
        return _lines(path, seen.st_size, seen.st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        raise WorkloadError(f"{path}: no such file; expected JSON lines with {EXPECTED}") from None
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}") from None


@lru_cache(maxsize=4)
def _lines(path: Path, _size: int, _changed: int) -> Rows:
    content = path.read_bytes()
    lines = [(number, line) for number, line in enumerate(content.splitlines(), start=1) if line.strip()]
    if not lines:
        raise WorkloadError(f"{path} has no rows; expected JSON lines with {EXPECTED}")
    digest = hashlib.sha256(content).hexdigest()
    return Rows(str(path), [line for _, line in lines], [number for number, _ in lines], digest)


@lru_cache(maxsize=4)
def _data_set(name: str, subset: str | None, split: str) -> Rows:
    try:
        from datasets import load_dataset  # an extra: lorabench[data]
    except ImportError:
        raise WorkloadError(f"{name} needs the package datasets: pip install 'lorabench[data]'") from None
    try:
        with hub.connected(name, "dataset") as answers:
            table: Any = load_dataset(name, subset, split=split)  # by their type, any rows
    except hub.HubError as error:
        raise WorkloadError(str(error)) from None
    except Exception as error:  # of a subset or a split that it has not, of no network, of files that are no table
        why = first_line(error) if answers else "the hub cannot be reached, and its cache has it not"
        raise WorkloadError(f"the data set {name} cannot be loaded: {why}") from None
    return Rows(name, table, range(1, len(table) + 1), f"{len(table)} {table[0]!r} {table[-1]!r}" if len(table) else "")


def found(rows: Rows, fields: Sequence[str]) -> tuple[list[str], str | None]:
    """(fields, format) of rows: of named `fields` only whether the one that there is holds a chat, or the two that
    there are a chat's two parts. Raises WorkloadError."""
    first = rows[0]
    if not fields:
        name = next((f for f, own in FORMATS.items() if set(own) <= set(first)), None)
        if name is None:
            have = f"{rows.place(0)} has the fields {', '.join(first) or 'none'};"
            raise WorkloadError(f"{have} {_remedy(first)}")
        return list(FORMATS[name]), name
    of_chats = {1: MESSAGES, 2: PROMPT_COMPLETION}.get(len(fields))
    return list(fields), of_chats if all(isinstance(first.get(field), list) for field in fields) else None


def _remedy(row: Mapping[str, Any]) -> str:
    """What to do with a row that has none of our fields."""
    for field, value in row.items():
        turn = value[0] if isinstance(value, list) and value else None
        if isinstance(turn, Mapping) and set(turn) >= SHAREGPT:
            return f"these are ShareGPT's: rename {field} to {MESSAGES}, and in its turns {IN_OUR_WORDS}"
        if isinstance(turn, Mapping) and "role" in turn:
            return f"name the one that holds the chat: {{FILE.jsonl: {{fields: [{field}]}}}}"
    named = [field for field in ALPACA if field in row]
    if named[:1] + named[-1:] == [ALPACA[0], ALPACA[-1]]:
        return f"these are Alpaca's: name them: {{FILE.jsonl: {{fields: [{', '.join(named)}]}}}}"
    near = [field for own in FORMATS.values() for field in own if _close(field, row)]
    return f"{f'did you mean {near[0]}? ' if near else ''}expected {EXPECTED}"


def check(rows: Rows, fields: Sequence[str], format: str | None) -> None:
    """Every row has the fields, and in them what the format needs. Raises WorkloadError for the first that has not."""
    if (what := (*fields, format)) not in rows.checked:
        for index in range(len(rows)):
            check_row(rows[index], rows.place(index), fields, format)
        rows.checked.add(what)


def check_row(row: Mapping[str, Any], place: str, fields: Sequence[str], format: str | None) -> None:
    for field in fields:
        if field not in row:
            near = _close(field, row)
            hint = f"; did you mean {near[0]}?" if near else ""
            have = f"its fields are {', '.join(row) or 'none'}, expected {', '.join(fields)}"
            raise WorkloadError(f"no field named {field!r} in {place}{hint}; {have}")
        if format == MESSAGES or in_turns(row, fields, format):
            _check_chat(row[field], f"{place}, {field}")
        elif not isinstance(row[field], str):
            raise WorkloadError(f"{place}: {field} is {_kind(row[field])}; expected text")


def in_turns(row: Mapping[str, Any], fields: Sequence[str], format: str | None) -> bool:
    """Whether a row's prompt and completion are lists of a chat's turns, as the first of them says."""
    return format == PROMPT_COMPLETION and isinstance(row[fields[0]], list)


def _close(field: str, row: Mapping[str, Any]) -> list[str]:
    return get_close_matches(field, row, n=1, cutoff=0.6)


def _check_chat(messages: Any, place: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise WorkloadError(f"{place} is {_kind(messages)}; expected a list of messages with role and content")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise WorkloadError(f"{place}: message {number} is {_kind(message)}; expected an object with role, content")
        if not isinstance(message.get("role"), str) or not {"content", "tool_calls"} & set(message):
            fields = ", ".join(map(str, message)) or "none"
            remedy = f": {IN_OUR_WORDS}" if set(message) >= SHAREGPT else ""
            raise WorkloadError(f"{place}: message {number} has the fields {fields}; expected role and content{remedy}")
        _check_role(message["role"], f"{place}: message {number}")


def _check_role(role: str, place: str) -> None:
    if role not in ROLES:
        near = get_close_matches(OTHERS.get(role, role), ROLES, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(ROLES)}"
        raise WorkloadError(f"{place} has the role {role!r}; {hint}")


def _kind(value: Any) -> str:
    named = {dict: "an object", list: "a list", str: "text", type(None): "null", int: "a number", float: "a number"}
    return "an empty list" if value == [] else named.get(type(value), f"a {type(value).__name__}")
