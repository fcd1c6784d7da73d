"""The store of a sweep: records.jsonl and environment.json in the folder `output`, and the lock on it.

A line is appended and fsynced at once, so a killed sweep keeps all that it was told. Nothing that stands in the folder
is ever overwritten: a half-written last line is set aside before the next append.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lorabench.record import older
from lorabench.record.environment import Environment
from lorabench.record.pairs import Place, pairs, place_of
from lorabench.record.schema import SCHEMA, ArmRecord, Record

RECORDS = "records.jsonl"
ENVIRONMENT = "environment.json"
TODAYS = b'{"schema":%d,' % SCHEMA  # how a line begins that `append` wrote


class RecordError(ValueError):
    """A records file that cannot be read; the message names the file, the line and what was expected."""


class StoreError(OSError):
    """The folder cannot be used or written; the message is one line for the user."""


def check_folder(folder: Path) -> None:
    """Whether a sweep wrote here: asked before what takes seconds to import. Raises RecordError."""
    if not (folder / RECORDS).exists():
        raise RecordError(f"{folder.resolve()} has no {RECORDS}; expected the folder that a sweep had as output=")


def read_records(path: Path, against: str | None = None) -> list[Record]:
    """The pairs of arms in a folder (or in a records.jsonl): a cell that was measured in several sessions has several.

    against: the name of an arm over which all others of its family are shown, see `pairs`. Raises NameUnknown where
    there is none, and RecordError as `read_arms` does.
    """
    return records_of(read_arms(path), against)


def records_of(arms: Sequence[ArmRecord], against: str | None = None) -> list[Record]:
    """The pairs of these arms."""
    try:
        return pairs(arms, against)
    except ValidationError as error:  # each arm is right by itself, and lacks what its kind asks of a pair
        raise RecordError(f"two arms do not make a pair: {_first(error, 'the pair')}") from None


def read_arms(path: Path) -> list[ArmRecord]:
    """All arms of a folder (or of a records.jsonl), in the order of its lines; one of schema 1 or 2 has two.

    Raises RecordError for a line that is no record. A last line without its newline is a write that was cut off:
    it is left out here and repaired by `Store`; either says so.
    """
    try:
        path = path / RECORDS if path.is_dir() else path
        if not path.is_file():  # a pipe of that name would be waited for
            there = "no regular file" if path.exists() else "no such file"
            raise RecordError(f"{path}: {there}; expected the {RECORDS} that a sweep writes into its output")
        *lines, fragment = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    if fragment:
        _half_written(path, fragment, "left out")
    found: list[ArmRecord] = []
    measured: Counter[Place] = Counter()  # older lines of one cell and session: none replaces another
    for number, line in enumerate(lines, start=1):
        arms = _parse(line, path, number)
        if not line.startswith(TODAYS) and older.is_made_of(arms[0].family):
            place = place_of(arms[0])
            if again := measured[place]:
                arms = [arm.model_copy(update={"family": f"{arm.family}, again {again}"}) for arm in arms]
            measured[place] += 1
        found += arms
    return found


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """The sweep runs in environment.json, oldest first; [] without that file. Raises RecordError."""
    path = folder / ENVIRONMENT
    try:
        if not path.exists():
            return []
        content = path.read_bytes()
        Environment.model_validate_json(content)
        return json.loads(content)["sessions"]
    except ValidationError as error:
        words = _first(error, "expected a JSON object with `sessions`")
        raise RecordError(f"{path} is not an environment file: {words}") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None


@cache
def _half_written(path: Path, fragment: bytes, became: str) -> None:
    """Told by whoever meets the line, once where it is read twice, through Python's logging: where nobody set that up,
    on stderr."""
    told = f"{path} was half written ({len(fragment)} bytes, {became}); the same sweep measures again what it was of"
    logging.getLogger("lorabench").warning(f"lorabench: the last line of {told}")


def _first(error: ValidationError, otherwise: str) -> str:
    """The first field that is wrong, and how; `otherwise` where it is the whole."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or otherwise
    return f"{where}: {first['msg']}"


def _parse(line: bytes, path: Path, number: int) -> list[ArmRecord]:
    try:
        if line.startswith(TODAYS) or (other := _other(line)) is None:
            return [ArmRecord.model_validate_json(line)]
        if (schema := other[0].get("schema", SCHEMA)) == SCHEMA:
            return [ArmRecord.model_validate(arm) for arm in other]
        wrong = f"schema {schema}: this lorabench reads schemas 1 to {SCHEMA}"
    except ValidationError as error:
        wrong = _first(error, "the line")
    except older.NoPair as error:
        wrong = str(error)
    raise RecordError(
        f"{path} line {number} is not a record: {wrong}; expected one JSON record a line "
        f"(repair or remove that line; nothing was changed)"
    )


def _other(line: bytes) -> list[dict[str, Any]] | None:
    """The arms of an older line, and one that another program wrote as it is; None where the line is none, which the
    schema then says."""
    try:
        found = json.loads(line)
        return older.arms(found) if isinstance(found, dict) else None
    except older.NoPair:
        raise
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None


def _encoded(record: ArmRecord) -> bytes:
    """The record's line, proved to be readable: a toggle's notes may hold what JSON cannot."""
    try:
        line = record.model_dump_json(by_alias=True, exclude_none=True).encode()
        ArmRecord.model_validate_json(line)
        return line
    except (ValueError, TypeError, RecursionError) as error:  # pydantic's and Unicode's errors are ValueErrors
        own = ["replicate", *(name for name, field in ArmRecord.model_fields.items() if field.is_required())]
        words = " ".join(str(error).split())[:300].encode(errors="replace").decode()
        reason = f"it was measured, but its record cannot be written as JSON (its notes?): {words}"
        fields: dict[str, Any] = {name: getattr(record, name) for name in own}
        fields |= {"status": "crash", "reason": reason}
        crash = ArmRecord(**fields)
        return crash.model_dump_json(by_alias=True, exclude_none=True).encode()


@contextlib.contextmanager
def locked(folder: Path, who: str = "process") -> Iterator[None]:
    """The folder is this process's alone; whoever finds it taken says that another of `who` is there. Raises
    StoreError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a")  # noqa: SIM115 (closed below, which releases the lock)
    except OSError as error:
        raise StoreError(f"output {folder} cannot be written: {error.strerror}; name another folder") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(f"another {who} is writing into {folder}; wait for it or name another output") from None
        yield


class Store:
    """One sweep's hold on a folder. Use as a context manager; a second holder gets a StoreError at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Store:
        with contextlib.ExitStack() as held:
            held.enter_context(locked(self.folder, "sweep"))
            try:
                self._repair()
            except OSError as error:
                raise StoreError(f"{self.folder / RECORDS} cannot be written: {error.strerror}") from None
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _repair(self) -> None:
        """Set a half-written last line aside (nothing is lost) and cut the file back to its last whole line."""
        for partial in self.folder.glob(".*.partial"):  # of a sweep that was killed; we hold the lock
            partial.unlink(missing_ok=True)
        path = self.folder / RECORDS
        with open(path, "ab+") as file:  # also proves, before the first cell, that the file can be written
            file.seek(0)
            content = file.read()
            end = content.rfind(b"\n") + 1
            fragment = content[end:]
            if not fragment:
                return
            with open(self.folder / f"{RECORDS}.fragment", "ab") as aside:
                aside.write(fragment + b"\n")
                aside.flush()
                os.fsync(aside.fileno())
            file.truncate(end)
            os.fsync(file.fileno())
        _half_written(path, fragment, f"kept in {RECORDS}.fragment")

    def records(self) -> list[Record]:
        return read_records(self.folder)

    def arms(self) -> list[ArmRecord]:
        return read_arms(self.folder)

    def append(self, record: ArmRecord) -> None:
        """Add one line and wait until it is on the disk. On failure the file is cut back to what it was. A record that
        could not be read again is stored as a crash that says so."""
        line = _encoded(record) + b"\n"
        path = self.folder / RECORDS
        size = None
        try:
            with open(path, "ab", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                while line:
                    line = line[file.write(line) or 0 :]
                os.fsync(file.fileno())
        except OSError as error:
            if size is not None:
                os.truncate(path, size)
            raise StoreError(
                f"{path} cannot be written: {error.strerror}; the {len(self.arms())} records in it are "
                f"safe, run the same command again to continue"
            ) from None

    def sessions(self) -> list[dict[str, Any]]:
        return read_sessions(self.folder)

    def last_device(self) -> str | None:
        """Where the last session measured, "cuda" or "cpu"; None where it does not say."""
        machine = next((s.get("machine") for s in reversed(self.sessions())), None)
        device = machine.get("device") if isinstance(machine, dict) else None
        return device if device in ("cuda", "cpu") else None

    def add_session(self, session: dict[str, Any]) -> None:
        """Add or replace one session (by its id), atomically."""
        others = [s for s in self.sessions() if s["id"] != session["id"]]
        text = json.dumps({"schema": 1, "sessions": [*others, session]}, indent=1, sort_keys=True) + "\n"
        write_atomically(self.folder / ENVIRONMENT, text.encode())


def write_atomically(path: Path, content: bytes) -> Path:
    """Write a whole file or leave the old one: temporary neighbour, fsync, rename. Returns the path; or StoreError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(exist_ok=True)
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        return path
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise StoreError(f"{path} cannot be written: {error.strerror}; what was there is unchanged") from None
