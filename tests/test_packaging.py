"""What the project says of itself in several files is one thing: versions, addresses, packages, pages of the site."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lorakernels
import pytest
import yaml
from packaging.requirements import Requirement

import lorabench
import lorabench_ablations

ROOT = Path(__file__).resolve().parents[1]
HARNESS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KERNELS = tomllib.loads((ROOT / "kernels/pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_one_version():
    assert lorabench.__version__ == lorakernels.__version__ == CITATION["version"] == version("lorabench")
    (needed,) = [r for r in map(Requirement, HARNESS["dependencies"]) if r.name == "lorakernels"]
    assert needed.specifier.contains(lorakernels.__version__) and not needed.specifier.contains("99")


def test_both_distributions_say_the_same_of_the_project():
    for field in ("requires-python", "license", "authors"):
        assert HARNESS[field] == KERNELS[field], field
    assert HARNESS["urls"]["Source"] == KERNELS["urls"]["Source"] == CITATION["repository-code"]
    assert HARNESS["license"] == CITATION["license"]
    assert (ROOT / "LICENSE").read_bytes() == (ROOT / "kernels/LICENSE").read_bytes()
    torch = [[r for r in p["dependencies"] if Requirement(r).name == "torch"] for p in (HARNESS, KERNELS)]
    assert torch[0] == torch[1] != []


@pytest.mark.parametrize("module", [lorabench, lorakernels, lorabench_ablations])
def test_each_package_ships_its_types(module):
    assert Path(module.__file__).with_name("py.typed").exists()


def test_the_three_packages_come_from_this_tree():
    """The installed finder of another checkout would have the tests pass for code that lies elsewhere."""
    folders = {"lorabench": lorabench, "kernels/lorakernels": lorakernels, "ablations": lorabench_ablations}
    wrong = {name: m.__file__ for name, m in folders.items() if Path(m.__file__).resolve().parent != ROOT / name}
    assert not wrong, f"of another tree: {wrong}; install this one: pip install -e ./kernels -e ."


def test_the_workflow_runs_what_ci_runs_on_versions_that_the_project_names():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    job = yaml.safe_load(workflow)["jobs"]["ci"]
    assert {".ci/run", "make test-all"} <= {step.get("run") for step in job["steps"]}
    for python in job["strategy"]["matrix"]["python"]:
        assert f"Programming Language :: Python :: {python}" in HARNESS["classifiers"]
    used = re.findall(r"uses: (\S+)", workflow)
    assert used and all(re.fullmatch(r"[\w/-]+@v\d+\.\d+\.\d+", action) for action in used), used


@pytest.mark.parametrize("name", ["bug", "new_toggle", "wrong_figure"])
def test_an_issue_template_asks_each_thing_once_and_something_for_sure(name):
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    asked = [field["id"] for field in form["body"]]
    assert form["name"] and form["description"] and len(asked) == len(set(asked))
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def pages(nav: Any) -> set[str]:
    """The files that a navigation of mkdocs names, however deep."""
    if isinstance(nav, str):
        return {nav}
    return set().union(*map(pages, nav.values() if isinstance(nav, dict) else nav))


def test_every_page_of_docs_has_its_place_in_the_site():
    named = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    there = {str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")}
    assert not there - named, f"add a line for {sorted(there - named)} to nav in mkdocs.yml"
    brought = {
        "index.md": "lorabench/report/leaderboard.py",  # made of results/
        "about.md": "README.md",
        "kernels/index.md": "kernels/README.md",
        "results/index.md": "results/README.md",
    }
    lost = {page for page in named - there if not (ROOT / brought.get(page, page)).exists()}
    assert not lost, f"mkdocs.yml names {sorted(lost)}, and there is no such file"
