"""The package stands on torch and Triton alone, and imports without a GPU and without touching one."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "kernels" / "lorakernels"


def test_imports_only_torch_and_triton():
    foreign = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            foreign |= {n.split(".")[0] for n in names} - set(sys.stdlib_module_names) - {"torch", "triton"}
    assert not foreign, foreign


FOLDERS = ("", "ops", "tuning", "nodes", "model", "capturing")  # each imports those before it; "" is the package's own


def test_each_folder_imports_only_those_before_it():
    wrong = []
    for file in PACKAGE.rglob("*.py"):
        here = file.parent.name if file.parent != PACKAGE else ""
        if file == PACKAGE / "__init__.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            folder = str(node.module or "").partition(".")[0]
            there = here if here and node.level == 1 else folder if folder in FOLDERS else ""
            if FOLDERS.index(there) > FOLDERS.index(here):
                wrong.append(f"{file.relative_to(PACKAGE)} imports from {there}")
    assert not wrong, wrong
    assert {f.parent.name for f in PACKAGE.glob("*/__init__.py")} == set(FOLDERS[1:])


def test_import_touches_no_gpu_and_no_peft():
    code = (
        "import sys, torch, lorakernels\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'peft' not in sys.modules and 'transformers' not in sys.modules\n"
        "assert torch.version.cuda or 'triton' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_kernel_has_a_test_and_a_benchmark():
    root = PACKAGE.parents[1]
    kernels = [
        f.stem
        for f in PACKAGE.rglob("*.py")
        if "_kernel(" in f.read_text() and "@kernel" in f.read_text() and f.stem != "glu"
    ]
    assert len(kernels) >= 7
    for stem in [*kernels, "swiglu", "geglu"]:
        assert (root / "tests" / "lorakernels" / f"test_{stem}.py").exists(), stem
        assert (root / "benchmarks" / "micro" / f"bench_{stem}.py").exists(), stem
