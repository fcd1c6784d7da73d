"""The file that `lorabench jobs` trains from: one base model, and under `jobs` what is trained on it. Read and checked
without torch, so that a wrong entry costs a second."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from lorabench.contract.ablation import Ablation, conflict
from lorabench.contract.hooks import Faulty
from lorabench.contract.model import ModelSpec
from lorabench.contract.names import NameUnknown, complaint, nearest
from lorabench.contract.parameters import Folder
from lorabench.contract.workload import MOST_JOBS, Workload
from lorabench.plan import compose, registry, samples
from lorabench.plan.weights import INDEXED, RANDOM
from lorabench.plan.yaml_file import YamlError
from lorabench.plan.yaml_file import read as read_yaml

AUTO = "auto"
LAYS_OUT = ("batch", "join", "schedule")  # hooks of a toggle that makes micro-batches
PLAIN = ["sdpa", "adamw_foreach"]  # what else is on unless the file says: torch's attention, AdamW


class JobsFileError(ValueError):
    """A file that cannot be trained from. One line, with what was expected; the exit code is 2."""


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class EarlyStop(_Checked):
    """Of a job's rows so large a share is held out. Every so many steps the loss on it is taken, and the job ends when
    it has not become lower by more than `min_delta` for `patience` times."""

    held_out: float = Field(default=0.1, gt=0, lt=1)
    every: int = Field(default=50, ge=1)
    patience: int = Field(default=3, ge=1)
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class Entry(_Checked):
    """One job. `batch_size` samples make one optimizer step, in micro-batches of `micro_batch_size` (None: all of them
    at once). It ends after `epochs`, or after `steps` where these are fewer. It begins when the other jobs have made
    `arrives_after` steps. `data` is what a sweep's `workload` takes for text: FILE.jsonl, ORG/DATASET, or {either:
    {fields: […]}}."""

    name: str = Field(max_length=100)
    data: str | dict[str, Any]
    lora: dict[str, Any] = {}
    learning_rate: float = Field(default=1e-4, gt=0, le=1000)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    batch_size: int = Field(default=8, ge=1, le=1 << 16)
    micro_batch_size: int | None = Field(default=None, ge=1)
    epochs: float = Field(default=1.0, gt=0, le=100_000, allow_inf_nan=False)
    steps: int | None = Field(default=None, ge=1)
    early_stop: EarlyStop | None = None
    seed: int = Field(default=0, ge=0, lt=1 << 32)
    arrives_after: int = Field(default=0, ge=0)

    @field_validator("name")
    @classmethod
    def _right(cls, value: str) -> str:
        if not (value.isascii() and value.isidentifier()):
            raise ValueError(f"expected letters (A to Z), digits and _, and no digit first, not {value!r}")
        if value == "default":
            raise ValueError("PEFT keeps the name default for an adapter that is alone; expected another name")
        return value


class JobsFile(_Checked):
    """One base `model` and its `jobs`. `way`: a toggle that trains jobs together, or auto: the fastest by published
    results. `scheduler`: who shares a micro-batch, with its budget of tokens. `ablations`: what else is switched on.
    State is written every `save_every` steps."""

    model: str
    jobs: list[Entry] = Field(min_length=1, max_length=MOST_JOBS)
    weights: str = AUTO
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    way: str | dict[str, Any] = AUTO
    scheduler: str | dict[str, Any] = AUTO
    ablations: list[Any] = PLAIN
    output: Folder = Path("output/jobs")
    save_every: int = Field(default=100, ge=1)
    seed: int = Field(default=0, ge=0, lt=1 << 32)

    @field_validator("jobs")
    @classmethod
    def _names_differ(cls, value: list[Entry]) -> list[Entry]:
        names = [entry.name for entry in value]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two jobs are named {twice!r}; expected a name of its own for each")
        return value

    @property
    def spec(self) -> ModelSpec:
        """The base model. Raises JobsFileError for an architecture of which no weights are named."""
        spec = compose.model(self.model, self._config())
        if self.weights == AUTO and spec.weights == RANDOM:
            own = next((name for name, (*_, model) in INDEXED.items() if model == self.model), "a hub name or a folder")
            raise JobsFileError(
                f"the model {self.model} is an architecture without weights; expected weights: {own}, or {RANDOM}"
            )
        return spec

    def adapted(self, entry: Entry) -> ModelSpec:
        """The same with a job's adapter."""
        return compose.model(self.model, self._config(), entry.lora)

    def _config(self) -> compose.SweepConfig:
        return compose.load_config([]).model_copy(update={"weights": self.weights, "dtype": self.dtype})


def read(path: Path, changes: dict[str, Any] | None = None) -> JobsFile:
    """The file, with these of its keys changed; what torch is not needed for is checked. Raises JobsFileError."""
    if not path.is_file():
        raise JobsFileError(f"{path}: no such file; expected a YAML file with model and jobs")
    try:
        found = read_yaml(path)
        if not isinstance(found, dict):
            raise YamlError("it has no keys")
        file = JobsFile.model_validate(found | (changes or {}))
        _check(file)
        return file
    except YamlError as error:
        raise JobsFileError(f"{path}: {error}; expected YAML with model and jobs") from None
    except ValidationError as error:
        raise JobsFileError(f"{path}: {_words(error, found)}") from None
    except (ValueError, compose.ConfigError) as error:
        raise JobsFileError(f"{path}: {error}") from None


def _check(file: JobsFile) -> None:
    """Names of toggles, the model, each job's adapter and rows. Raises ValueError."""
    config = file._config().model_copy(update={"models": [file.model], "workload": "1x2", "ablations": None})
    compose.check_names(config)
    _ = file.spec
    toggles(file, None if file.way == AUTO else file.way)
    for entry in file.jobs:
        with_name = f"job {entry.name}: "
        try:
            bias = file.adapted(entry).lora.bias
            samples.check_file(text_of(entry))
        except ValueError as error:
            raise JobsFileError(f"{with_name}{error}") from None
        if bias != "none":
            raise JobsFileError(f"{with_name}bias {bias!r} would be shared by all jobs; expected none")


def text_of(entry: Entry) -> Workload:
    """A job's rows as a workload. Raises ValueError for what is no text."""
    size = entry.micro_batch_size or entry.batch_size
    made = compose.workload(entry.data)
    if made.kind != samples.TEXT:
        raise JobsFileError(f"data {reprlib.repr(entry.data)} is no text; expected FILE.jsonl or ORG/DATASET")
    return made.model_copy(update={"name": entry.name, "batch_size": size, "samples": entry.batch_size, "jobs": []})


def toggles(file: JobsFile, way: Any) -> tuple[Ablation, ...]:
    """What is switched on with this way to train the jobs (None: one after the other). Raises ValueError."""
    made = [registry.ablation(item) for item in file.ablations]
    if way is not None:
        made.append(joins(way))
    if file.scheduler != AUTO:
        made.append(scheduler(file.scheduler))
    for toggle in made:
        if isinstance(toggle, Faulty):
            raise NameUnknown(toggle.fault)
        if toggle.parallel or file._config().kind not in toggle.kinds:
            raise NameUnknown(f"{toggle.name} is no toggle for jobs that train on one GPU; leave it out of ablations")
    if reason := conflict(made):
        raise NameUnknown(f"way, scheduler and ablations: {reason}")
    return tuple(made)


def budgets(toggles: Sequence[Ablation]) -> list[tuple[Ablation, int]]:
    """Those of these toggles that lay micro-batches out under a number of tokens, and the number."""
    found = ((t, getattr(t, "tokens", None)) for t in toggles if any(_decides(type(t), hook) for hook in LAYS_OUT))
    return [(toggle, tokens) for toggle, tokens in found if isinstance(tokens, int)]


def joins(way: Any) -> Ablation:
    """The toggle of a way. Raises NameUnknown for one that does not say how jobs are trained."""
    return _named("way", way, ways())


def scheduler(item: Any) -> Ablation:
    """The toggle of a scheduler. Raises NameUnknown for one that does not say who shares a micro-batch."""
    return _named("scheduler", item, [name for name, cls in _all().items() if _decides(cls, "schedule")])


def _named(what: str, item: Any, known: Sequence[str]) -> Ablation:
    name = next(iter(item), None) if isinstance(item, dict) else item
    if name not in known:
        raise nearest(what, str(name), known)
    return registry.ablation(item)


def ways(file: JobsFile | None = None) -> list[str]:
    """Every toggle that says how several jobs are trained on one device, and goes with the file's scheduler."""
    found = [name for name, cls in _all().items() if _decides(cls, "join") and not cls.parallel]
    if file is None or file.scheduler == AUTO:
        return found
    return [name for name in found if not conflict([joins(name), scheduler(file.scheduler)])]


def _decides(cls: type[Ablation], hook: str) -> bool:
    return getattr(cls, hook) is not getattr(Ablation, hook)


def _all() -> dict[str, type[Ablation]]:
    return {name: registry.ablation_class(name) for name in registry.registered()}


def _words(error: ValidationError, found: Any) -> str:
    """The first finding, with the name of the job that it is in."""
    first = error.errors(include_url=False)[0]
    place = list(first["loc"])
    said = ""
    if place[:1] == ["jobs"] and len(place) > 1 and isinstance(place[1], int):
        entry = found["jobs"][place[1]]
        name = entry.get("name") if isinstance(entry, dict) else None
        said, place = f"job {name or place[1] + 1}: ", place[2:]
    if first["type"] == "extra_forbidden":
        of = EarlyStop if place[:-1] else Entry if said else JobsFile
        return said + str(nearest("key", str(place[-1]), of.model_fields))
    where = ".".join(map(str, place))
    return f"{said}{where}{': ' if where else ''}{complaint(first)}"
