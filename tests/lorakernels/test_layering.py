"""The package stands on torch and Triton alone, and imports without a GPU and without touching one."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "kernels" / "lorakernels"


def test_imports_only_torch_and_triton():
    foreign = set()
    for file in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            foreign |= {n.split(".")[0] for n in names} - set(sys.stdlib_module_names) - {"torch", "triton"}
    assert not foreign, foreign


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
        for f in PACKAGE.glob("*.py")
        if "_kernel(" in f.read_text() and "@kernel" in f.read_text() and f.stem != "glu"
    ]
    assert len(kernels) >= 7
    for stem in [*kernels, "swiglu", "geglu"]:
        assert (root / "tests" / "lorakernels" / f"test_{stem}.py").exists(), stem
        assert (root / "benchmarks" / "micro" / f"bench_{stem}.py").exists(), stem
