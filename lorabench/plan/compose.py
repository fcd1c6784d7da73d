"""From command-line overrides to a checked plan: Hydra composes, pydantic checks, wrong names get their nearest."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from lorabench.contract.ablation import Ablation
from lorabench.contract.cell import Cell
from lorabench.contract.hooks import Faulty, described, first_line, printable
from lorabench.contract.job import Job, jobs_of
from lorabench.contract.kind import kind, registered
from lorabench.contract.model import Lora, ModelSpec
from lorabench.contract.names import NameUnknown, nearest
from lorabench.contract.workload import Workload, WorkloadError, fixed
from lorabench.plan import architecture, registry, samples, weights
from lorabench.plan.architecture import ModelError
from lorabench.plan.design import DESIGNS, DesignError, Subject, cells
from lorabench.plan.weights import WeightsError
from lorabench.plan.yaml_file import YamlError, read

CONF = "lorabench.conf"
LORA = "lora"  # the key under which the adapter's fields stand
LONGEST, DEEPEST = 20_000, 12  # characters and brackets of an override; Hydra's parser takes minutes for deeper ones


Checked = TypeVar("Checked", bound=BaseModel)


class ConfigError(ValueError):
    """A configuration that cannot be used. One line, with what was expected; the exit code is 2."""


class SweepConfig(BaseModel):
    """The keys of conf/sweep.yaml, checked."""

    model_config = ConfigDict(extra="forbid")

    kind: str
    models: list[Any] = Field(min_length=1)  # a single name is taken for a list of one
    workload: str | dict[str, Any]
    lora: Lora
    dtype: str
    weights: str
    ablations: list[Any] | None
    own_ablations: dict[str, list[Any]]
    reference: str | list[Any]
    design: str
    baselines: dict[str, list[Any]]
    trials: int | None = Field(ge=1, le=100_000)
    warmup: int | None = Field(ge=1, le=100_000)
    seed: int = Field(ge=0, lt=1 << 63)
    repeat: int = Field(ge=1, le=10_000)
    world_size: int = Field(ge=1, le=1024)
    queue: Literal["local", "ray"]
    timeout_s: float = Field(gt=0, le=10_000_000, allow_inf_nan=False)
    output: Path
    resume: bool | Literal["failed"]
    list: bool
    dry_run: bool

    @field_validator("models", "ablations", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class RecommendConfig(SweepConfig):
    """The keys of conf/recommend.yaml, checked: a sweep's, and for how long to measure."""

    budget_minutes: float = Field(gt=0, le=1_000_000, allow_inf_nan=False)


# What of a sweep's keys `recommend` decides itself.
OF_A_SWEEP = ("kind", "design", "repeat", "queue", "own_ablations", "list", "dry_run")
Configured = TypeVar("Configured", bound=SweepConfig)


@dataclass(frozen=True)
class Defaults:
    """What `null` and `auto` stand for on a device."""

    workload: str
    trials: int
    warmup: int


DEFAULTS = {"cuda": Defaults("4x2048", 30, 5), "cpu": Defaults("short_samples", 10, 1)}


def names_in(group: str) -> list[str]:
    """The names under conf/GROUP."""
    files = resources.files(CONF).joinpath(group).iterdir()
    return sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml"))


def load_config(overrides: Sequence[str]) -> SweepConfig:
    """Compose conf/sweep.yaml with the overrides. Raises ConfigError."""
    return _composed("sweep", SweepConfig, [*SweepConfig.model_fields, "suite"], overrides)


def load_recommend_config(overrides: Sequence[str]) -> RecommendConfig:
    """Compose conf/recommend.yaml, a sweep's configuration, with the overrides. Raises ConfigError."""
    known = [key for key in RecommendConfig.model_fields if key not in OF_A_SWEEP]
    return _composed("recommend", RecommendConfig, known, overrides)


def _composed(name: str, cls: type[Configured], known: Sequence[str], overrides: Sequence[str]) -> Configured:
    """conf/NAME.yaml with the overrides of these keys, checked."""
    for override in overrides:
        _check_override(override, known)
    try:
        with initialize_config_module(CONF, version_base="1.3"):
            composed = OmegaConf.to_container(compose(name, list(overrides)), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(" ".join(str(error).split("\n")[0].split())) from None
    except Exception as error:  # Hydra checks its grammar, and not everything that can be said in it
        raise ConfigError(f"the overrides cannot be composed: {described(error)}; see --help") from None
    try:
        return cls.model_validate(composed)
    except ValidationError as error:
        raise ConfigError(_first(error)) from None


def _check_override(override: str, known: Sequence[str]) -> None:
    """The two slips that Hydra would answer with several lines: an unknown key, an unknown suite."""
    if printable(override) != override or "\0" in override:
        raise ConfigError(f"{override!a} is not understood: expected text in UTF-8")
    if len(override) > LONGEST or _depth(override) > DEEPEST:
        raise ConfigError(f"{override[:40]}… is not understood: it is longer or nested deeper than any sweep needs")
    key, equals, value = override.lstrip("+~").partition("=")
    if override.startswith("-"):
        raise ConfigError(f"{override!r} is not understood: keys are given as key=value, without dashes; see --help")
    root = key.partition(".")[0].partition("@")[0]
    if root not in known:
        close = difflib.get_close_matches(root, known, n=1)
        raise ConfigError(f"no key named {root!r}; " + (f"did you mean {close[0]}?" if close else "see --help"))
    if (part := key.partition(".")[2]) and root == LORA and part not in Lora.model_fields:
        raise ConfigError(str(nearest("key", part, Lora.model_fields, where=f" in {LORA}")))
    if not equals and not override.startswith("~"):
        raise ConfigError(f"{override!r} is not understood: expected {override}=VALUE")
    try:
        OverridesParser.create().parse_override(override)
    except Exception as error:  # Hydra's, and ANTLR's own
        raise ConfigError(
            f"{reprlib.repr(override)} is not understood: {first_line(error)[:200]}; see --help"
        ) from None
    if root == "suite" and value not in names_in("suite"):
        raise ConfigError(str(nearest("suite", value, names_in("suite"))))


def _depth(text: str) -> int:
    """How deep its brackets go."""
    depth = deepest = 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        deepest = max(deepest, depth)
    return deepest


def _validated(cls: type[Checked], values: Mapping[str, Any], what: str) -> Checked:
    """Raises ConfigError that says of which model or workload it speaks."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{what}: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    """The first of a ValidationError's findings in words; of a wrong name with the nearest right one."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        named = {c.__name__: c for c in (SweepConfig, RecommendConfig, ModelSpec, Workload, Lora)}
        of = {(): named.get(error.title), (LORA,): Lora}.get(first["loc"][:-1])
        if of is not None:
            return str(
                nearest("field", str(first["loc"][-1]), of.model_fields, where=f" in {LORA}" if of is Lora else "")
            )
    got = "" if isinstance(first["input"], dict) else f", not {reprlib.repr(first['input'])}"
    if got.removeprefix(", not ") in first["msg"]:  # a validator of ours has said it already
        got = ""
    return f"{where}: {first['msg'].removeprefix('Value error, ')}{got}"


@dataclass(frozen=True)
class Plan:
    """A checked sweep: its cells, in the order in which they are measured."""

    config: SweepConfig
    cells: list[Cell]


def plan(config: SweepConfig, device: str) -> Plan:
    """Names to classes and files, defaults to numbers, the design to cells. Raises ConfigError."""
    try:
        default = DEFAULTS[device]
        if config.design not in DESIGNS:
            raise nearest("design", config.design, DESIGNS)
        subjects = [_subject(item, config, default, device) for item in config.models]
        toggles = [_together(item) for item in _ablations(config, subjects)]
        counts = {"trials": config.trials or default.trials, "warmup": config.warmup or default.warmup}
        counts |= {"seed": config.seed, "world_size": config.world_size}
        made = [
            cell
            for reference in references(config)
            for cell in cells(subjects, reference, toggles, design=config.design, **counts)
        ]
    except ValidationError as error:
        raise ConfigError(_first(error)) from None
    except (NameUnknown, DesignError, WorkloadError, ModelError, WeightsError) as error:
        raise ConfigError(str(error)) from None
    return Plan(config, made)


def references(config: SweepConfig) -> list[list[Ablation]]:
    """What the candidates are measured against: one baseline, several of them, or a list of ablations."""
    items = config.reference
    names = [items] if isinstance(items, str) else items
    if isinstance(items, str) or any(isinstance(n, str) and n in config.baselines for n in names):
        for name in names:
            if name not in config.baselines:
                raise nearest("baseline", str(name), config.baselines)
        return [[registry.ablation(item) for item in config.baselines[name]] for name in names]
    return [[registry.ablation(item) for item in items]]


def _ablations(config: SweepConfig, subjects: Sequence[Subject]) -> list[Any]:
    """What the command line gives, or what each of the measured kinds has of its own, once."""
    if config.ablations is not None:
        return config.ablations
    kinds = dict.fromkeys(subject.kind for subject in subjects)
    own = [item for name in kinds for item in config.own_ablations.get(name, ())]
    return [item for i, item in enumerate(own) if item not in own[:i]]


def _together(item: Any) -> tuple[Ablation, ...]:
    """One item of `ablations=`: one toggle, or a list of toggles that make one candidate."""
    parts: list[Any] = item if isinstance(item, list) and item else [item]
    return tuple(registry.ablation(part) for part in parts)


def _subject(item: Any, config: SweepConfig, default: Defaults, device: str) -> Subject:
    """A model of the list `models=` with its workload and kind: NAME, NAME@WORKLOAD, KIND:either, or {any of these:
    {field of `lora`: value}}."""
    lora: Any = None
    if isinstance(item, Mapping) and len(item) == 1:
        item, lora = next(iter(item.items()))
    if not isinstance(item, str) or not isinstance(lora, Mapping | None):
        raise NameUnknown(f"a model is a name, NAME@WORKLOAD, a YAML file, or {{either: {{r: 8, …}}}}, not {item!r}")
    prefix, colon, rest = item.partition(":")
    name, _, own = (rest if colon else item).partition("@")
    of_name = next((k.name for k in registered().values() if k.model(name)), None)
    chosen, spec = kind(prefix if colon else of_name or config.kind), model(name, config, lora)
    wanted = own or config.workload
    auto = chosen.default_workload(device) or default.workload
    made = workload(auto if wanted == "auto" else wanted)
    subject = Subject(chosen.name, spec, made)
    jobs = jobs_of(spec, made, config.seed)  # a job's fields are wrong now, not in a worker
    for job in jobs:
        _check_job(job)
    if chosen.model(name) is None:
        architecture.check(spec, [job.lora for job in jobs])
        weights.check(spec)
    return subject


def _check_job(job: Job) -> None:
    """What a job names has to be there. Raises NameUnknown and WorkloadError."""
    samples.check(job.workload)
    made = registry.ablation(job.optimizer) if job.optimizer else None
    if isinstance(made, Faulty):
        raise NameUnknown(made.fault)


def model(name: str, config: SweepConfig, lora: Mapping[str, Any] | None = None) -> ModelSpec:
    """A model by name (conf/model), from a YAML file with `source` and `config`, or one that only a kind knows
    (`linear-4096x14336`). `lora` changes the sweep's adapter for it, and is part of its label. Raises NameUnknown."""
    of_a_kind = next((fields for k in registered().values() if (fields := k.model(name))), None)
    fields, label = (of_a_kind, name) if of_a_kind else _read("model", name)
    common = {"dtype": config.dtype, "weights": config.weights, "lora": config.lora.model_dump() | dict(lora or {})}
    return _validated(ModelSpec, {"name": label + _changes(lora or {}), **common, **fields}, f"the model {label}")


def _changes(values: Mapping[str, Any]) -> str:
    return "(" + ", ".join(f"{k}={v}" for k, v in values.items()) + ")" if values else ""


def workload(item: str | Mapping[str, Any]) -> Workload:
    """A workload by name, `BATCHxLENGTH`, a YAML file, or {NAME: {field: value}}. Raises NameUnknown."""
    changes: dict[str, Any] = {}
    if isinstance(item, Mapping):
        if len(item) != 1 or not isinstance(next(iter(item.values())), Mapping):
            raise NameUnknown("a workload is a name, BATCHxLENGTH, a YAML file or {NAME: {field: value}}")
        name, values = next(iter(item.items()))
        item, changes = str(name), dict(values)
    if made := fixed(item):
        fields, label = made.model_dump(exclude={"name"}), item
    else:
        fields, label = _read("workloads", item)
    return _validated(Workload, {"name": label + _changes(changes), **fields, **changes}, f"the workload {label}")


def _read(group: str, name: str) -> tuple[dict[str, Any], str]:
    """(fields, name) from conf/GROUP/NAME.yaml or from a YAML file of the user's."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise NameUnknown(f"{name}: no such file; expected a YAML file like those under conf/{group}")
        try:
            fields, label = read(path), path.stem
        except YamlError as error:
            raise NameUnknown(f"{name}: {error}; expected a YAML file like those under conf/{group}") from None
    else:
        known = names_in(group)
        if name not in known:
            raise nearest(group.removesuffix("s"), name, known)
        with initialize_config_module(CONF, version_base="1.3"):
            fields, label = OmegaConf.to_container(compose(f"{group}/{name}")[group], resolve=True), name
    if not isinstance(fields, dict):
        raise NameUnknown(f"{name}: expected a YAML mapping like those under conf/{group}")
    return {str(k): v for k, v in fields.items()}, label
