"""The page on making a toggle, followed to the letter: its files, its package, its commands."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from helpers import installed, sweep

from lorabench.record.schema import Status
from lorabench.record.store import read_arms

PAGE = (Path(__file__).resolve().parents[2] / "docs/add-an-ablation.md").read_text()
SMALL = ("workload=2x16", "trials=2", "warmup=1", "report=false")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def commands(word: str) -> list[list[str]]:
    lines = [line for block in blocks("bash") for line in block.splitlines() if word in line]
    return [shlex.split(line) for line in lines]


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> dict[str, str]:
    """The environment in which both of the page's toggles are installed: its files, its pyproject's entry point."""
    folder = tmp_path_factory.mktemp("tutorial")
    project = tomllib.loads(blocks("toml")[0])
    points = dict(project["project"]["entry-points"]["lorabench.ablations"])
    assert project["tool"]["setuptools"]["py-modules"] == list(points) == ["addmm_epilogue"]
    points["float32_matmul"] = "float32_matmul:Float32Matmul"  # "registered as above"
    for name in points:
        (code,) = [block for block in blocks("python") if points[name].replace(f"{name}:", "class ") in block]
        (folder / f"{name}.py").write_text(code)
    return installed(folder, "tutorial", {f"{name}.py": folder / f"{name}.py" for name in points}, points)


def run(command, packages, folder, *more):
    assert command[:3] == ["python", "-m", "lorabench.sweep"]
    done = sweep(*command[3:], *more, cwd=folder, env=packages, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)])
def test_its_rows_are_ok(packages, tmp_path, dtype):
    (command,) = commands("in_place:false")
    run(command, packages, tmp_path, f"dtype={dtype}", "output=rows", *SMALL)
    found = {arm.arm: arm for arm in read_arms(tmp_path / "rows")}
    assert {name: arm.status for name, arm in found.items()} == dict.fromkeys(
        ("reference", "reference again", "addmm_epilogue", "addmm_epilogue(in_place=False)"), "ok"
    )
    assert found["addmm_epilogue"].notes["addmm_epilogue"] == {"in_place": 21, "out_of_place": 0}


@pytest.mark.exhaustive
def test_what_it_says_of_float32_adapters_is_so(packages, tmp_path):
    (command,) = commands("output/left_alone")
    run(command, packages, tmp_path, *SMALL)
    (arm,) = [arm for arm in read_arms(tmp_path / "output/left_alone") if arm.arm == "addmm_epilogue"]
    assert f"{arm.status}  {arm.reason}" in PAGE


@pytest.mark.exhaustive
def test_a_declared_switch_of_torch_s_is_trusted(packages, tmp_path):
    (command,) = commands("output/switch")
    run(command, packages, tmp_path, "dtype=float32", *SMALL)
    (arm,) = [arm for arm in read_arms(tmp_path / "output/switch") if arm.arm == "float32_matmul"]
    assert arm.status == "ok", arm.reason
    assert "float32_matmul" in arm.applied


@pytest.mark.exhaustive
def test_it_lists_both_toggles(packages, tmp_path):
    (command,) = commands("list=true")
    listed = run(command, packages, tmp_path)
    assert "addmm_epilogue" in listed and "float32_matmul" in listed


def test_it_names_every_status():
    table = PAGE[PAGE.index("## What follows from what") :]
    assert not [status for status in get_args(Status) if f"`{status}`" not in table]
