"""What this machine is: device, driver, clocks, versions, commit. Everything that a published figure has to carry."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from lorabench.contract.machine import Machine

PACKAGES = (
    "torch", "triton", "transformers", "peft", "accelerate", "bitsandbytes", "liger-kernel", "flash-attn", "unsloth",
    "axolotl", "torchao", "numpy", "hydra-core", "lorabench",
)  # fmt: skip


class Gpus(NamedTuple):
    """The GPUs of this machine; the first one measures."""

    name: str
    capability: tuple[int, int]
    count: int


def describe() -> Machine:
    """Look at this machine. Initializes CUDA where there is a GPU: call it in a process that may do so."""
    import torch

    if not torch.cuda.is_available():
        return machine_of(None, native_bfloat16=bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))
    cuda = torch.cuda
    gpus = Gpus(cuda.get_device_name(0), cuda.get_device_capability(0), cuda.device_count())
    return machine_of(gpus, native_bfloat16=gpus.capability >= (8, 0), gpu=_gpu(), driver=_driver())


def machine_of(gpus: Gpus | None, **of_device: Any) -> Machine:
    """The machine with these GPUs, and what else is known `of_device`; torch is not asked."""
    cpu = _cpu_name()
    return Machine(
        device="cuda" if gpus else "cpu",
        name=gpus.name if gpus else cpu,
        capability=gpus.capability if gpus else None,
        gpus=gpus.count if gpus else 0,
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        os=platform.platform(),
        python=platform.python_version(),
        packages=_versions(),
        **of_device,
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def nvml_handle(uuid: str | None = None) -> tuple[Any, Any] | None:
    """(pynvml, handle of the GPU of this id), or None where NVML or its binding is not there. Without an id torch's GPU
    0, for which torch starts the driver in this process."""
    try:
        import pynvml

        if uuid is None:
            import torch

            uuid = str(torch.cuda.get_device_properties(0).uuid)
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    except Exception:  # NVML is a courtesy: telemetry stays empty without it
        return None


def _gpu() -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    gpu: dict[str, Any] = {
        "uuid": str(properties.uuid),
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }
    if nvml := nvml_handle():
        library, handle = nvml
        gpu["power_cap_w"] = library.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
        gpu["max_sm_clock_mhz"] = library.nvmlDeviceGetMaxClockInfo(handle, library.NVML_CLOCK_SM)
        gpu["max_memory_clock_mhz"] = library.nvmlDeviceGetMaxClockInfo(handle, library.NVML_CLOCK_MEM)
    return gpu


def _driver() -> str | None:
    if nvml := nvml_handle():
        version = nvml[0].nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else version
    return None


def commit() -> tuple[str | None, bool | None]:
    """(git commit, whether the tree differs from it) of this lorabench; (None, None) outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    given = os.environ.get("LORABENCH_COMMIT")  # for a copy of the tree that travelled without its .git
    if not (root / ".git").exists():
        return (given.removesuffix("-dirty"), given.endswith("-dirty")) if given else (None, None)
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return head.stdout.strip(), bool(changed.stdout.strip())
