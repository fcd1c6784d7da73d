"""From command-line overrides to a checked plan: Hydra composes, pydantic checks, wrong names get their nearest."""

from __future__ import annotations

import copy
import difflib
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import resources
from importlib.metadata import entry_points
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
from lorabench.contract.kind import GROUP as KINDS
from lorabench.contract.kind import kind, registered
from lorabench.contract.model import Lora, ModelSpec
from lorabench.contract.names import NameUnknown, complaint, nearest
from lorabench.contract.parameters import Folder
from lorabench.contract.workload import Workload, WorkloadError, fixed
from lorabench.plan import architecture, registry, samples, user_model, weights
from lorabench.plan.architecture import ModelError
from lorabench.plan.design import DESIGNS, NOTHING, DesignError, Known, Subject, cells, fits, once
from lorabench.plan.hub import HubError, is_name
from lorabench.plan.weights import WeightsError
from lorabench.plan.yaml_file import YamlError, read

CONF = "lorabench.conf"
MODELS = "model"  # the folder of the named models under conf
OR_ELSE = {
    MODELS: "a folder, a config.json or ORG/NAME",
    "workloads": "BATCHxLENGTH as 4x2048, FILE.jsonl, FILE.yaml or ORG/DATASET",
}
LORA = "lora"  # the key under which the adapter's fields stand
# PEFT's other fields, of which users ask; PEFT is not imported for a word, it takes seconds.
NOT_MEASURED = frozenset((
    "modules_to_save", "init_lora_weights", "rank_pattern", "alpha_pattern", "layers_to_transform",
    "layers_pattern", "exclude_modules", "target_parameters", "lora_bias", "fan_in_fan_out", "trainable_token_indices",
    "loftq_config", "eva_config", "corda_config", "layer_replication", "megatron_config",
))  # fmt: skip
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
    design: list[str] = Field(min_length=1)  # a single one is taken for a list of one
    baselines: dict[str, list[Any]]
    trials: int | None = Field(ge=1, le=100_000)
    warmup: int | None = Field(ge=1, le=100_000)
    seed: int = Field(ge=0, lt=1 << 63)
    repeat: int = Field(ge=1, le=10_000)
    part: str | None
    isolate: bool
    budget_minutes: float | None = Field(gt=0, le=1_000_000, allow_inf_nan=False)
    world_size: int = Field(ge=1, le=1024)
    queue: Literal["local", "ray"]
    timeout_s: float = Field(gt=0, le=10_000_000, allow_inf_nan=False)
    output: Folder
    estimate_from: list[Path]
    resume: Literal[True, False, "failed"]
    report: bool
    list: bool
    dry_run: bool

    @field_validator("models", "ablations", "design", "estimate_from", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("part", mode="before")
    @classmethod
    def _one_of_several(cls, value: Any) -> Any:
        if value is not None:
            number, _, of = str(value).partition("/")
            if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
                raise ValueError(f"{reprlib.repr(value)} is no part; expected one of several, as 1/2 and 2/2")
        return value

    def is_own(self, place: int) -> bool:
        """Whether the candidate at this place of the plan, from 0, is of this sweep's part."""
        number, of = map(int, self.part.split("/")) if self.part else (1, 1)
        return place % of == number - 1


class RecommendConfig(SweepConfig):
    """The keys of conf/recommend.yaml, checked: a sweep's, and for how long to measure."""

    budget_minutes: float = Field(gt=0, le=1_000_000, allow_inf_nan=False)  # pyright: ignore[reportIncompatibleVariableOverride]


# What of a sweep's keys `recommend` decides itself.
OF_A_SWEEP = ("kind", "design", "repeat", "part", "queue", "own_ablations", "isolate", "report", "list", "dry_run")
Configured = TypeVar("Configured", bound=SweepConfig)


@dataclass(frozen=True)
class Defaults:
    """What `null` and `auto` stand for on a device; of a user's own text, how many rows make a step, and a batch."""

    workload: str
    trials: int
    warmup: int
    rows: int
    batch_size: int


DEFAULTS = {"cuda": Defaults("4x2048", 30, 5, 16, 4), "cpu": Defaults("short_samples", 10, 1, 2, 2)}
AUTO = "auto"  # of weights: a user's model has its own; of target_modules: all of its linears


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
        composed = _of_conf(name, tuple(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(" ".join(str(error).split("\n")[0].split())) from None
    except Exception as error:  # Hydra checks its grammar, and not everything that can be said in it
        raise ConfigError(f"the overrides cannot be composed: {described(error)}; see --help") from None
    try:
        return cls.model_validate(composed)
    except ValidationError as error:
        raise ConfigError(_first(error)) from None


def _of_conf(name: str, overrides: tuple[str, ...] = ()) -> Any:
    """conf/NAME.yaml as Hydra composes it with the overrides. Once a process where nothing in them is looked up: it
    takes a tenth of a second, and a plan asks for each model and workload."""
    return copy.deepcopy((_composed_once if "$" not in "".join(overrides) else _compose)(name, overrides))


def _compose(name: str, overrides: tuple[str, ...]) -> Any:
    with initialize_config_module(CONF, version_base="1.3"):
        return OmegaConf.to_container(compose(name, list(overrides)), resolve=True)


_composed_once = lru_cache(maxsize=256)(_compose)


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
    if root not in known and not equals and not override.startswith("~"):
        raise ConfigError(f"{override!r} is not understood: expected key=value, as in models={override}; see --help")
    if root not in known:
        close = difflib.get_close_matches(root, known, n=1)
        raise ConfigError(f"no key named {root!r}; " + (f"did you mean {close[0]}?" if close else "see --help"))
    if (part := key.partition(".")[2]) and root == LORA and part not in Lora.model_fields:
        raise ConfigError(_no_field("key", part, Lora))
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
            return _no_field("field", str(first["loc"][-1]), of)
    return f"{where}: {complaint(first)}"


def _no_field(what: str, name: str, of: type[BaseModel]) -> str:
    """Of a name that is no field of a class."""
    if of is Lora and name in NOT_MEASURED:
        return f"PEFT's {name} is not measured; expected of {LORA}: {', '.join(Lora.model_fields)}"
    return str(nearest(what, name, of.model_fields, where=f" in {LORA}" if of is Lora else ""))


@dataclass(frozen=True)
class Plan:
    """A checked sweep: its cells, in the order in which they are measured."""

    config: SweepConfig
    cells: list[Cell]


@contextmanager
def _one_line() -> Iterator[None]:
    """Whatever is wrong with what a user wrote as a ConfigError."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError(_first(error)) from None
    except (NameUnknown, DesignError, WorkloadError, ModelError, WeightsError, HubError) as error:
        raise ConfigError(str(error)) from None


def check_names(config: SweepConfig) -> None:
    """What can be said of names and files without torch, which takes seconds to import, and without the hub. `plan`
    says the rest. Raises ConfigError."""
    with _one_line():
        _check_designs(config)
        references(config)
        for item in config.ablations or ():
            _together(item)
        wanted = {config.workload if isinstance(config.workload, str) else None: config.workload}
        for item in config.models:
            _, name, own = _parts(_model_item(item)[0])
            _check_model(name)
            wanted |= {own: own} if own else {}
        for item in wanted.values():
            if item != AUTO:
                samples.check_file(workload(item))


def _check_model(name: str) -> None:
    """A name or file that is none. Raises NameUnknown and ModelError. A name with numbers may be a kind's, and kinds
    import torch."""
    if weights.local(name) or name.endswith((".yaml", ".yml", ".json")) or not is_name(name):
        try:
            _read(MODELS, name)
        except NameUnknown:
            if not re.search(r"\d", name) and all(p.value.startswith("lorabench.") for p in entry_points(group=KINDS)):
                raise


def _check_designs(config: SweepConfig) -> None:
    if (wrong := next((design for design in config.design if design not in DESIGNS), None)) is not None:
        raise nearest("design", wrong, DESIGNS)


def plan(config: SweepConfig, device: str, known: Known = NOTHING) -> Plan:
    """Names to classes and files, defaults to numbers, the design to cells, by what is `known` of some of them. Raises
    ConfigError."""
    with _one_line():
        default = DEFAULTS[device]
        _check_designs(config)
        subjects = _told_apart([_subject(item, config, default, device) for item in config.models])
        toggles = _toggles(config, subjects)
        counts = {"trials": config.trials or default.trials, "warmup": config.warmup or default.warmup}
        counts |= {"seed": config.seed, "world_size": config.world_size}
        stacks = references(config)
        of_design = partial(cells, subjects, ablations=toggles, known=known, **counts)
        designs = [design for design in DESIGNS if design in config.design]
        made = once([cell for base in stacks for name in designs for cell in of_design(base, design=name)])
    return Plan(config, made)


def references(config: SweepConfig) -> list[list[tuple[Ablation, ...]]]:
    """What the candidates are measured against: one baseline, several of them, or a list of ablations. Several toggles
    in place of one are those of which a model gets the first that it can have."""
    items = config.reference
    names = [items] if isinstance(items, str) else items
    if isinstance(items, str) or any(isinstance(n, str) and n in config.baselines for n in names):
        for name in names:
            if name not in config.baselines:
                raise nearest("baseline", str(name), config.baselines)
        return [[_together(item) for item in config.baselines[name]] for name in names]
    return [[_together(item) for item in items]]


def _toggles(config: SweepConfig, subjects: Sequence[Subject]) -> list[tuple[Ablation, ...]]:
    """What the command line gives; or what each of the measured kinds has of its own, once, where a subject can take
    it."""
    if config.ablations is not None:
        return [_together(item) for item in config.ablations]
    kinds = dict.fromkeys(subject.kind for subject in subjects)
    own = [item for name in kinds for item in config.own_ablations.get(name, ())]
    toggles = [_together(item) for i, item in enumerate(own) if item not in own[:i]]
    return [together for together in toggles if any(fits(together, subject) for subject in subjects)]


def _together(item: Any) -> tuple[Ablation, ...]:
    """One item of `ablations=` or `reference=`: one toggle, or a list of them."""
    parts: list[Any] = item if isinstance(item, list) and item else [item]
    return tuple(registry.ablation(part) for part in parts)


def _subject(item: Any, config: SweepConfig, default: Defaults, device: str) -> Subject:
    """A model of the list `models=` with its workload and kind: NAME, NAME@WORKLOAD, KIND:either, or {any of these:
    {field of `lora`: value}}."""
    item, lora = _model_item(item)
    prefix, name, own = _parts(item)
    of_name = next((k.name for k in registered().values() if k.model(name)), None)
    chosen, spec = kind(prefix or of_name or config.kind), model(name, config, lora)
    wanted = own or config.workload
    auto = chosen.default_workload(device) or default.workload
    made = workload(auto if wanted == AUTO else wanted, default)
    jobs = jobs_of(spec, made, config.seed)  # a job's fields are wrong now, not in a worker
    for job in jobs:
        _check_job(job)
    if chosen.model(name) is None:
        architecture.check(spec, [job.lora for job in jobs])
        weights.check(spec)
        made = samples.settled(made, spec, config.seed)
    elif any(job.workload.kind == samples.TEXT for job in jobs):
        raise WorkloadError(f"the workload {made.name} has text, which {name} cannot read; expected BATCHxLENGTH")
    return Subject(chosen.name, spec, made)


def _model_item(item: Any) -> tuple[str, Mapping[str, Any] | None]:
    """(what it names, fields of its adapter). Raises NameUnknown."""
    lora: Any = None
    if isinstance(item, Mapping) and len(item) == 1:
        item, lora = next(iter(item.items()))
    if not isinstance(item, str) or not isinstance(lora, Mapping | None):
        either = "a name, a folder, ORG/NAME, a YAML file, either@WORKLOAD, or {either: {r: 8, …}}"
        raise NameUnknown(f"a model is {either}, not {item!r}")
    return item, lora


def _told_apart(subjects: Sequence[Subject]) -> list[Subject]:
    """Two folders, or two files, of one name in a sweep are called by their paths: the tables go by names."""
    models = {(s.model.name, s.model.location) for s in subjects}
    texts = {(s.workload.name, s.workload.path) for s in subjects}
    made = []
    for subject in subjects:
        spec, text = subject.model, subject.workload
        if spec.location and [name for name, _ in models].count(spec.name) > 1:
            spec = spec.model_copy(update={"name": spec.name.replace(Path(spec.location).name, spec.location, 1)})
        if text.path and [name for name, _ in texts].count(text.name) > 1:
            text = text.model_copy(update={"name": text.name.replace(Path(text.path).name, text.path, 1)})
        made.append(Subject(subject.kind, spec, text))
    return made


def _parts(item: str) -> tuple[str, str, str]:
    """(kind, name, workload) of KIND:NAME@WORKLOAD, the first and the last "" where they are not said. A folder's name
    may have such characters too. Raises NameUnknown."""
    if weights.local(item):
        return "", item, ""
    prefix, colon, rest = item.partition(":")
    if not colon or prefix.startswith((".", "/", "~")):
        prefix, rest = "", item
    name, at, own = rest.partition("@")
    if item.startswith(":") or not name or (at and not own):
        raise NameUnknown(
            f"{item!r} is no model; expected KIND:MODEL@WORKLOAD, KIND: and @WORKLOAD where they are wanted"
        )
    return prefix, name, own


def _check_job(job: Job) -> None:
    """What a job names has to be there. Raises NameUnknown."""
    made = registry.ablation(job.optimizer) if job.optimizer else None
    if isinstance(made, Faulty):
        raise NameUnknown(made.fault)


def model(name: str, config: SweepConfig, lora: Mapping[str, Any] | None = None) -> ModelSpec:
    """A model by name (conf/model), from a YAML file with `source` and `config`, a user's own (a folder, config.json,
    hub name), or one that only a kind knows (`linear-4096x14336`). `lora` changes the sweep's adapter for it, and is
    part of its label. Raises NameUnknown, ModelError and HubError."""
    of_a_kind = next((fields for k in registered().values() if (fields := k.model(name))), None)
    fields, label = (of_a_kind, name) if of_a_kind else _read("model", name)
    location = fields.get("location")
    adapter = config.lora.model_dump() | dict(lora or {})
    if adapter["target_modules"] == AUTO:
        adapter["target_modules"] = architecture.ALL_LINEAR if location else Lora().target_modules
    common = {"dtype": config.dtype, "weights": config.weights, "lora": adapter}
    if config.weights == AUTO:
        common["weights"] = location or weights.RANDOM
    made = {"name": label + _changes(lora or {}), "source": label, **common, **fields}
    spec = _validated(ModelSpec, made, f"the model {label}")
    return spec.model_copy(update={"fingerprint": weights.fingerprint(spec.weights)})


def _changes(values: Mapping[str, Any]) -> str:
    """What was changed, as a name has it: of a folder its own name, for where it lies is nobody else's business."""
    shown = {k: found.name if isinstance(v, str) and (found := weights.local(v)) else v for k, v in values.items()}
    return "(" + ", ".join(f"{k}={v}" for k, v in shown.items()) + ")" if shown else ""


def workload(item: str | Mapping[str, Any], default: Defaults = DEFAULTS["cuda"]) -> Workload:
    """A workload by name, `BATCHxLENGTH`, a YAML file, a user's own text (a JSONL file, a hub data set), or {NAME:
    {field: value}}. Raises NameUnknown and WorkloadError."""
    changes: dict[str, Any] = {}
    if isinstance(item, Mapping):
        if len(item) != 1 or not isinstance(next(iter(item.values())), Mapping):
            either = "a name, BATCHxLENGTH, a JSONL or YAML file, ORG/DATASET"
            raise NameUnknown(f"a workload is {either}, or {{either: {{field: value}}}}")
        name, values = next(iter(item.items()))
        item, changes = str(name), dict(values)
    if made := fixed(item):
        fields, label = made.model_dump(exclude={"name"}), item
    elif found := samples.own_text(item, default.rows, default.batch_size):
        fields, label = found, Path(item).name if "path" in found else item
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
    elif name not in (known := names_in(group)):
        own = user_model.read(name) if group == MODELS else None
        if own is None:
            raise nearest(group.removesuffix("s"), name, known, or_else=OR_ELSE[group])
        return own
    else:
        fields, label = _of_conf(f"{group}/{name}")[group], name
    if not isinstance(fields, dict):
        raise NameUnknown(f"{name}: expected a YAML mapping like those under conf/{group}")
    return {str(k): v for k, v in fields.items()}, label
