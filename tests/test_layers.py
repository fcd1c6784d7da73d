"""The layers, read from the source: who may import whom, and what must not stand in the code at all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "lorabench": ROOT / "lorabench",
    "lorabench_ablations": ROOT / "ablations",
    "lorakernels": ROOT / "kernels/lorakernels",
}
# What each package must not import. `lorabench_ablations` may import both others.
FORBIDDEN = {
    "lorabench": {"lorabench_ablations", "lorakernels"},
    "lorakernels": {"lorabench", "lorabench_ablations"},
    "lorabench_ablations": set(),
}
UNPICKLING = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib"}
NEVER_TRUE = {"retain_graph", "shell", "trust_remote_code"}
LONGEST = 600  # lines; as a feeling files are of about 250


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(top-level name, line) of every absolute import, `import_module("…")` and `__import__("…")` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module).partition(".")[0], node.lineno
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value.partition(".")[0], node.lineno


def called(node: ast.Call) -> str:
    """The last name of what is called: `load` of `torch.load(…)`."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def is_(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def unsafe(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(what, line) of everything that none of the packages may do."""
    yield from ((f"import {name}", line) for name, line in imports(tree) if name in UNPICKLING)
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in NEVER_TRUE and not is_(value, False):
                    yield f"{key.value!r}: …", node.lineno
        if not isinstance(node, ast.Call):
            continue
        given = {k.arg: k.value for k in node.keywords if k.arg}
        yield from ((f"{name}=…", node.lineno) for name in NEVER_TRUE & set(given) if not is_(given[name], False))
        function = ast.unparse(node.func)
        if function == "torch.load" and not is_(given.get("weights_only"), True):
            yield "torch.load without weights_only=True", node.lineno
        if function in ("os.system", "os.popen", "eval", "exec"):
            yield f"{function}(…)", node.lineno


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_one_above_it(package):
    files = sources(PACKAGES[package])
    assert files
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files
        for name, line in imports(ast.parse(file.read_text()))
        if name in FORBIDDEN[package]
    ]
    assert not wrong, wrong


# The flow of the data through lorabench: each folder imports only from those before it (and any file at the top, such
# as sweep.py, from all of them). Nothing in a folder imports a file at the top.
FLOW = ("contract", "schedule", "plan", "record", "measure", "train", "run", "report", "advice")


def modules() -> dict[str, Path]:
    """Every module of lorabench by its dotted name."""
    named = {}
    for file in sources(PACKAGES["lorabench"]):
        parts = file.relative_to(ROOT).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return named


def imported(tree: ast.AST, known: dict[str, Path]) -> set[str]:
    """Modules of lorabench that a file imports, wherever the import stands: in a function or under TYPE_CHECKING
    too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {full if (full := f"{node.module}.{a.name}") in known else node.module for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(f"a relative import in line {node.lineno}")
    return {name for name in found if name in known or name.startswith("a relative")}


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imported(ast.parse(file.read_text()), known) - {name} for name, file in known.items()}


def place(module: str) -> int:
    """Where in the flow a module stands; what lies at the top comes last."""
    parts = module.split(".")
    return FLOW.index(parts[1]) if len(parts) > 1 and parts[1] in FLOW else len(FLOW)


def test_every_import_goes_with_the_flow():
    wrong = [f"{a} imports {b}" for a, bs in graph().items() for b in bs if place(b) > place(a)]
    assert not wrong, wrong


def test_no_circle_of_files():
    edges = graph()

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(edges[start])
        while todo:
            module = todo.pop()
            if module not in seen:
                seen.add(module)
                todo += edges.get(module, ())
        return seen

    assert not sorted(module for module in edges if module in reached(module))


def test_every_folder_says_what_belongs_there_and_what_it_may_import():
    for name in FLOW:
        words = ast.get_docstring(ast.parse((PACKAGES["lorabench"] / name / "__init__.py").read_text())) or ""
        assert "Belongs here" in words and "May import" in words, name


# What only the kinds may know, in the files that are common to all of them.
COMMON = (
    *FLOW,
    "listing.py",
    "sweep.py",
    "recommend.py",
    "simulate.py",
    "jobs.py",
    "compare.py",
    "doctor.py",
    "cli.py",
    "log_command.py",
)
READS_OLDER = (
    "lorabench/record/older.py"  # schema 1 had these names as fields: it has to know them, and nothing else has
)


# Where such a word is something else, or says only what a default is.
OTHER_MEANINGS = {
    ("lorabench/contract/ablation.py", "train"): "the kind of a toggle that says no other",
    ("lorabench/contract/workload.py", "train"): "the split of a data set",
    ("lorabench/measure/judging/gold_cache.py", "loss"): "a field of an outcome",
    ("lorabench/contract/ablation.py", "loss"): "a field of Tolerance",
    ("lorabench/plan/samples.py", "batch_size"): "a field of a workload",
    ("lorabench/measure/build.py", "batch_size"): "a field of a workload",
    ("lorabench/advice/result.py", "batch_size"): "a field of a workload",
    ("lorabench/advice/paste.py", "batch_size"): "a field of a workload",
    ("lorabench/measure/judging/depth_noise.py", "loss"): "a field of the noise",
    ("lorabench/measure/fairness.py", "forward"): "the method of a module",
    ("lorabench/measure/gradient_kind.py", "optimizer"): "a field of ArmMemory",
    ("lorabench/plan/jobs_file.py", "linear"): "a schedule of the learning rate",
    ("lorabench/plan/jobs_file.py", "batch_size"): "a field of a workload",
    ("lorabench/train/crew.py", "batch_size"): "a field of a workload",
    ("lorabench/train/job.py", "batch_size"): "a key of a job's entry, and a field of a workload",
    ("lorabench/train/state.py", "step"): "how many steps a job has made",
    ("lorabench/train/trainer.py", "step"): "how many steps a job has made",
    ("lorabench/train/trainer.py", "loss"): "a field of losses.jsonl",
    ("lorabench/plan/jobs_file.py", "scheduler"): "a key of the file, as way is",
    ("lorabench/jobs.py", "scheduler"): "a key of the file, as way is",
    ("lorabench/jobs.py", "loss"): "a column of the table",
    ("lorabench/doctor.py", "load"): "the machine's load average",
    ("lorabench/report/plots.py", "o"): "matplotlib's circle",
    ("lorabench/report/paste.py", "batch_size"): "a toggle's note of what it found",
}
# Slots that have the name of a field of workloads and records, which is what every file means by the word.
FIELDS_TOO = {"jobs"}


def names_of_kinds() -> set[str]:
    from lorabench.contract.kind import registered
    from lorabench.plan.registry import ablation_class
    from lorabench.plan.registry import registered as toggles

    kinds = registered().values()
    own = {k.name for k in kinds} | {phase for k in kinds for phase in k.phases}
    classes = [ablation_class(name) for name in toggles() if ":" in toggles()[name].value]
    slots = {c.slot for c in classes}
    families = {f for c in classes for f in c.requires.families or ()}
    return (own | slots | families) - FIELDS_TOO


def decided(tree: ast.AST, names: set[str]) -> Iterator[tuple[str, int]]:
    """(name, line) of every string that is one of `names` and stands where a program can act on it: compared, looked
    up, passed on, collected or given a name."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Compare, ast.Subscript, ast.Call, ast.Dict, ast.Tuple, ast.List, ast.Set)):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.Constant) and child.value in names:
                    yield str(child.value), child.lineno
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if isinstance(value, ast.Constant) and value.value in names:
            yield str(value.value), node.lineno


def test_no_name_of_a_kind_family_slot_or_phase_decides_anything_outside_the_kinds():
    names, wrong = names_of_kinds(), []
    assert {"train", "read", "forward", "step", "loading", "llama", "linear"} <= names
    for folder in COMMON:
        place = PACKAGES["lorabench"] / folder
        for file in sources(place) if place.is_dir() else [place]:
            where = str(file.relative_to(ROOT))
            if "measure/kinds" in where or where == READS_OLDER:
                continue
            found = decided(ast.parse(file.read_text()), names)
            wrong += [f"{where}:{line} {name!r}" for name, line in found if (where, name) not in OTHER_MEANINGS]
    assert not wrong, wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_unsafe_and_no_second_backward(package):
    wrong = [
        f"{file.relative_to(ROOT)}:{line} {what}"
        for file in sources(PACKAGES[package])
        for what, line in unsafe(ast.parse(file.read_text()))
    ]
    assert not wrong, wrong


def test_no_file_is_too_long():
    folders = [*PACKAGES.values(), ROOT / "tests", ROOT / "benchmarks"]
    lengths = {f: len(f.read_text().splitlines()) for folder in folders for f in sources(folder)}
    assert not {str(f.relative_to(ROOT)): n for f, n in lengths.items() if n > LONGEST}


def test_our_toggles_are_found_by_entry_point_alone():
    """Every class with a name in ablations/ is registered, and every one of ours that is registered exists."""
    import tomllib

    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["lorabench.ablations"]
    named = set()
    for file in sources(PACKAGES["lorabench_ablations"]):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and (name := class_name(node)):
                named.add((name, f"lorabench_ablations.{file.stem}:{node.name}"))
    assert named == set(points.items())


def class_name(node: ast.ClassDef) -> str | None:
    """The value of `name: ClassVar[str] = "…"` in a class body."""
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and getattr(line.target, "id", "") == "name":
            return str(ast.literal_eval(line.value)) if line.value else None
    return None


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import lorabench_ablations.batching", "lorabench_ablations"),
        ("from lorabench_ablations import batching", "lorabench_ablations"),
        ("import importlib; importlib.import_module('lorabench_ablations.liger')", "lorabench_ablations"),
        ("def f():\n    from lorabench_ablations.liger import Liger", "lorabench_ablations"),
    ],
)
def test_the_checker_sees_imports(code, found):
    assert found in {name for name, _ in imports(ast.parse(code))}


@pytest.mark.parametrize(
    "code",
    [
        "loss.backward(retain_graph=True)",
        "subprocess.run(line, shell=True)",
        "read(name, trust_remote_code=flag)",
        "read(name, **{'trust_remote_code': True})",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "from pickle import loads",
        "os.system(line)",
    ],
)
def test_the_checker_sees_what_is_unsafe(code):
    assert list(unsafe(ast.parse(code)))


def test_the_checker_passes_what_is_safe():
    safe = "torch.load(path, weights_only=True); read(name, trust_remote_code=False); run(command)"
    assert not list(unsafe(ast.parse(safe)))


def test_nothing_beside_a_script_hides_a_package():
    """A script's own folder comes first on the path, and an editable install's packages come last: a mere folder
    `benchmarks/lorakernels` once was the `lorakernels` that the scripts imported."""
    beside = {p.stem for script in (ROOT / "benchmarks").glob("*.py") for p in script.parent.iterdir()}
    assert not beside & set(PACKAGES)
