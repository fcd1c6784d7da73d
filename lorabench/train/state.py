"""What a killed training goes on from: one safetensors file with every job's adapter and optimizer, and in its header,
as JSON, how far each has come. It is written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lorabench.contract.hooks import first_line
from lorabench.record.store import RECORDS, StoreError, write_atomically
from lorabench.train.job import Progress, Training

STATE, LOSSES, ADAPTERS = "state.safetensors", "losses.jsonl", "adapters"
MAY_CHANGE = ("arrives_after",)  # of a job's entry, once it has begun
RANDOM = ".random"  # no job's name begins so


class StateError(ValueError):
    """A state that is not of this file; the message is one line."""


@dataclass
class Saved:
    """What a state file holds. `tick`: steps that the trainer had made; `jobs`: by name, what `save` wrote."""

    tick: int
    base: dict[str, Any]
    jobs: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def others(self, jobs: Sequence[Training]) -> Saved:
        """What it holds of jobs that are not among these."""
        told = {name: own for name, own in self.jobs.items() if name not in {job.name for job in jobs}}
        tensors = {name: tensor for name, tensor in self.tensors.items() if name.partition(".")[0] in told}
        return replace(self, jobs=told, tensors=tensors)


def save(
    folder: Path, tick: int, base: Mapping[str, Any], jobs: Sequence[Training], random: Sequence[torch.Tensor],
    others: Saved | None,
) -> None:  # fmt: skip
    """`others`: jobs of earlier starts that the file does not name now, which may come back. Raises StoreError."""
    from safetensors.torch import save as encoded

    tensors = {f"{RANDOM}.{i}": state for i, state in enumerate(random)}
    told: dict[str, Any] = {}
    if others is not None:
        tensors, told = tensors | others.tensors, dict(others.jobs)
    for job in jobs:
        state = job.optimizer.state_dict()
        plain: dict[str, dict[str, Any]] = {}
        for index, parameter in enumerate(job.parameters):
            tensors[f"{job.name}.{index}.parameter"] = parameter.detach()
            for key, value in state["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{job.name}.{index}.{key}"] = value
                else:
                    plain.setdefault(str(index), {})[key] = value
        told[job.name] = {
            "entry": job.entry.model_dump(mode="json"), "rows": job.rows, "progress": asdict(job.progress),
            "rate": job.rate.state_dict(), "rates": job.rate.get_last_lr(), "plain": plain,
        }  # fmt: skip
    header = {"lorabench": json.dumps({"schema": 1, "tick": tick, "base": dict(base), "jobs": told})}
    write_atomically(
        folder / STATE, encoded({n: t.detach().cpu().clone().contiguous() for n, t in tensors.items()}, header)
    )


def read(folder: Path) -> Saved | None:
    """None where nothing was saved. Raises StateError for a file that is no state."""
    from safetensors import SafetensorError, safe_open

    path = folder / STATE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as opened:
            told = json.loads(opened.metadata()["lorabench"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        return Saved(told["tick"], told["base"], told["jobs"], tensors)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path} cannot be read: {first_line(error)}; expected what lorabench jobs wrote") from None


def check(
    folder: Path, saved: Saved | None, base: Mapping[str, Any], jobs: Mapping[str, Any], rows: Mapping[str, str]
) -> None:  # fmt: skip
    """Whether these jobs (their entries, and the fingerprints of their rows, by name) can go on from what is saved, and
    write over nothing that it does not hold. Raises StateError."""
    if saved is None and (folder / RECORDS).exists():
        raise StateError(f"{folder} has the {RECORDS} of a sweep; expected another output")
    unknown = [folder / ADAPTERS / name for name in jobs if saved is None or name not in saved.jobs]
    unknown += [folder / LOSSES] if saved is None else []
    if there := next((path for path in unknown if path.exists()), None):
        raise StateError(
            f"{there} is of a run whose state is not in {folder / STATE}; expected that state, or another output"
        )
    if saved is None:
        return
    if saved.base != dict(base):
        key = next(key for key in base if saved.base.get(key) != base[key])
        raise StateError(
            f"the jobs in output were trained with {key} {saved.base.get(key)}, not {base[key]}; expected another "
            "output"
        )
    for name, entry in jobs.items():
        if (before := saved.jobs.get(name)) is None or not before["progress"]["step"]:
            continue
        begun = f"job {name} has made {before['progress']['step']} steps with"
        changed = [key for key in entry if key not in MAY_CHANGE and before["entry"].get(key) != entry[key]]
        if changed:
            raise StateError(
                f"{begun} {changed[0]} {before['entry'].get(changed[0])}, not {entry[changed[0]]}; expected the entry "
                "as it was, another name or another output"
            )
        if before.get("rows", rows[name]) != rows[name]:
            raise StateError(
                f"{begun} other rows than {entry['data']} has now; expected those, another name or another output"
            )


def restore(saved: Saved, job: Training) -> None:
    """Put a job back to where it was; one that the state does not have stays as it is."""
    if (told := saved.jobs.get(job.name)) is None:
        return
    states: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(job.parameters):
        before = f"{job.name}.{index}."
        own = {n.removeprefix(before): t for n, t in saved.tensors.items() if n.startswith(before)}
        with torch.no_grad():
            parameter.copy_(own.pop("parameter"))
        if own := own | told["plain"].get(str(index), {}):
            states[index] = own
    groups = job.optimizer.state_dict()["param_groups"]
    for group, rate in zip(groups, told["rates"], strict=True):
        group["lr"] = rate
    job.optimizer.load_state_dict({"state": states, "param_groups": groups})
    job.rate.load_state_dict(told["rate"])
    job.progress = Progress(**told["progress"])


def cut(folder: Path, tick: int) -> None:
    """Leave in losses.jsonl only what belongs to the state. Raises StoreError."""
    path = folder / LOSSES
    if not path.is_file():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if json.loads(line)["tick"] <= tick:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            break  # cut off while it was written
    write_atomically(path, b"".join(kept))


def append(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises StoreError."""
    path = folder / LOSSES
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}") from None
