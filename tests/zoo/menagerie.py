"""The zoo as a package of a third party's toggles: found, built into a wheel, installed, measured in sweeps."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from helpers import installed, sweep

from lorabench.record.schema import Record
from lorabench.record.store import read_records
from zoo.cheat import Animal

HERE = Path(__file__).parent
COMMON = (
    "models=[tiny-llama]",
    "workload=2x16",
    "dtype=float32",
    "trials=4",
    "warmup=1",
    "timeout_s=60",
    "isolate=true",
    "report=false",
)
# Those of make test, in a sweep of their own: one that a seat's audit catches, and one that the numbers do. Who gives
# fewer tokens or old answers is caught there by tests/measure/test_evaluate.py, too, without a sweep.
QUICK = ("a_shorter_text", "metrics_of_an_earlier_trial")
AT_ONCE = 20  # in one sweep: it has to end within the tests' patience


def animals() -> dict[str, type[Animal]]:
    """Every toggle of the zoo by its name: each class that gives itself one, in any module here."""
    for module in pkgutil.iter_modules([str(HERE)]):
        if not module.name.startswith(("test_", "conftest", "__")):
            importlib.import_module(f"zoo.{module.name}")
    found: dict[str, type[Animal]] = {}
    for cls in below(Animal):
        if "name" in vars(cls):
            assert cls.name not in found, f"{cls} and {found[cls.name]} have one name"
            found[cls.name] = cls
    return found


def below(cls: type[Animal]) -> Iterator[type[Animal]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from below(sub)


def settled(folder: Path) -> dict[str, str]:
    """The environment in which the zoo is installed."""
    files = {f"zoo/{file.name}": file for file in HERE.glob("*.py")}
    points = {name: f"{cls.__module__}:{cls.__qualname__}" for name, cls in animals().items()}
    return installed(folder, "zoo", files, points)


def command(cls: type[Animal]) -> tuple[str, ...]:
    """The overrides that this one is measured under: the common ones, its own in their place."""
    own = {override.partition("=")[0]: override for override in cls.command}
    common = {override.partition("=")[0]: override for override in COMMON}
    return tuple({**common, **own}.values())


def groups(names: Iterable[str]) -> list[list[str]]:
    """Those that one sweep can measure together. Those that need a GPU have sweeps of their own: beside others all of
    these would be measured there, too."""
    known, made = animals(), defaultdict(list)
    for name in sorted(names):
        cls = known[name]
        made[command(cls), name if cls.alone else "", cls.requires.device, name in QUICK].append(name)
    return [group[i : i + AT_ONCE] for group in made.values() for i in range(0, len(group), AT_ONCE)]


def measured(group: list[str], folder: Path, env: dict[str, str]) -> dict[str, Record]:
    """The records of one sweep over these, by name."""
    folder.mkdir()
    overrides = command(animals()[group[0]])
    done = sweep(*overrides, f"ablations=[{','.join(group)}]", f"output={folder}", cwd=folder, env=env, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    return {record.ablations[0]: record for record in read_records(folder) if record.ablations}
