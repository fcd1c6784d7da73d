"""What is given away, really built and installed: an sdist that passes its tests, and two wheels that stand alone.

No index is asked: the environments see what this one has installed, except for our own distributions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).resolve().parents[1]
OURS = ("lorabench", "lorakernels", "__editable__")
MADE = ("__pycache__", "*.egg-info", "build", "dist", "output", "site", ".*_cache", ".git", ".venv", ".hypothesis")
QUICK = ("test_packaging.py", "test_layers.py", "test_cli.py", "plan/test_compose.py", "lorakernels/test_swiglu.py")

MEASURED = {"ok", "untrusted"}  # the second where others keep the machine busy beside a trial


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints, in an environment that knows nothing of this checkout; raises with it when it fails."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"COLUMNS": "200"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def build(what: str, source: Path, into: Path) -> Path:
    """The one file that building an sdist or wheel of `source` makes."""
    run(sys.executable, "-m", "build", f"--{what}", "--no-isolation", "--outdir", into, source, cwd=source)
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The unpacked sdist of lorabench."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "checkout", ignore=shutil.ignore_patterns(*MADE))
    with tarfile.open(build("sdist", folder / "checkout", folder / "built")) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # since 3.11.4
    (unpacked,) = folder.glob("lorabench-*")
    return unpacked


@pytest.fixture(scope="module")
def wheels(sdist, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    sources = {"lorabench": sdist, "lorakernels": sdist / "kernels"}
    return {name: build("wheel", source, folder / name) for name, source in sources.items()}


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> Path:
    """Everything that is installed here except our own distributions, as links."""
    folder = tmp_path_factory.mktemp("others")
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(site).iterdir():
            if not entry.name.startswith(OURS) and entry.suffix != ".pth":
                (folder / entry.name).symlink_to(entry)
    return folder


class Environment:
    """A virtual environment that has what `others` has."""

    def __init__(self, folder: Path, others: Path) -> None:
        venv.create(folder, with_pip=False)
        self.folder, self.python = folder, folder / "bin/python"
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "others.pth").write_text(f"{others}\n")

    def pip(self, *arguments: str | Path, cwd: Path | None = None) -> None:
        run(sys.executable, "-m", "pip", "--python", self.python, *arguments, cwd=cwd or self.folder)

    def __call__(self, *arguments: str | Path, cwd: Path | None = None) -> str:
        return run(self.python, *arguments, cwd=cwd or self.folder)


@pytest.fixture
def environment(tmp_path, others) -> Environment:
    return Environment(tmp_path / "venv", others)


def inside(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def files(folder: Path, package: str) -> set[str]:
    found = (f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    return {f"{package}/{f.relative_to(folder).as_posix()}" for f in found}


def test_the_sdist_is_the_checkout(sdist):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("the files of a checkout are known to git, and this is none")
    missing = [name for name in tracked.stdout.splitlines() if (ROOT / name).exists() and not (sdist / name).exists()]
    assert not missing


def test_each_wheel_holds_its_own_packages_in_full(wheels):
    harness = files(ROOT / "lorabench", "lorabench") | files(ROOT / "ablations", "lorabench_ablations")
    assert inside(wheels["lorabench"]) == harness
    assert inside(wheels["lorakernels"]) == files(ROOT / "kernels/lorakernels", "lorakernels")


def statuses(environment: Environment, output: str) -> list[str]:
    """Of the two rows of a tiny sweep: the reference against itself, and our kernels."""
    tiny = ("models=[tiny-llama@2x16]", "ablations=[lora_kernels]", "trials=4", "dtype=float32")
    environment("-m", "lorabench.sweep", *tiny, f"output={output}")
    code = f"import lorabench; print(*lorabench.load_results('{output}').sort_values('toggles')['status'])"
    return environment("-c", code).split()


def test_wheels_work_outside_the_checkout_and_one_without_the_other(wheels, environment):
    environment.pip("install", "--no-index", *wheels.values())
    assert f"lorabench {environment('-c', 'import lorabench; print(lorabench.__version__)')}" == run(
        environment.folder / "bin/lorabench", "--version", cwd=environment.folder
    )
    assert set(statuses(environment, "both")) <= MEASURED

    environment.pip("uninstall", "--yes", "lorakernels")
    kernels, itself = statuses(environment, "alone")
    assert itself in MEASURED and kernels == "unsupported"
    assert "pip install lorakernels" in (environment.folder / "alone/summary.md").read_text()

    environment.pip("install", "--no-index", "--no-deps", wheels["lorakernels"])
    environment.pip("uninstall", "--yes", "lorabench")
    gone = "from importlib.util import find_spec as f; print(f('lorabench'), f('lorabench_ablations'), f('ablations'))"
    assert environment("-c", gone) == "None None None\n"
    environment("-c", "import lorakernels; assert callable(lorakernels.apply) and lorakernels.__version__")


def test_the_sdist_passes_its_own_tests(sdist, environment):
    environment.pip("install", "--no-index", "--no-build-isolation", "-e", "./kernels", "-e", ".", cwd=sdist)
    quick = [f"tests/{name}" for name in QUICK]
    said = environment("-m", "pytest", "-m", "not exhaustive", "-p", "no:cacheprovider", *quick, cwd=sdist)
    assert " passed" in said and "failed" not in said, said
