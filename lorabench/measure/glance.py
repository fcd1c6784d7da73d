"""This machine without torch, whose import takes seconds: for a list of toggles, where nothing is measured.

GPUs are asked of the CUDA driver itself, which counts and orders them for torch too (CUDA_VISIBLE_DEVICES included).
"""

from __future__ import annotations

import ctypes
import runpy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lorabench.contract.machine import Machine
from lorabench.measure.machine import Gpus, describe, machine_of

DRIVER = "libcuda.so.1"
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h
BFLOAT16 = (
    {"avx512vl", "avx512bw", "avx512dq"},
    {"bf16"},
)  # of x86, of Arm: what oneDNN, torch's CPU library, asks for


def glance() -> Machine:
    """The machine as `describe` finds it, but for what nobody decides by: a GPU's details and its driver's version."""
    try:
        build = torch_build()
        if build["cuda"] is None and any(build.get(other) for other in ("hip", "xpu")):
            return describe()  # other makers' GPUs are torch's to find
        gpus = cuda_gpus(build["cuda"]) if build["cuda"] else None
        return machine_of(gpus, native_bfloat16=gpus.capability >= (8, 0) if gpus else _cpu_bfloat16())
    except (OSError, LookupError, ValueError, AttributeError):  # a torch, a driver or a system unlike those known here
        return describe()


def torch_build() -> dict[str, Any]:
    """What the installed torch says of itself in its version.py (`cuda`: "13.0", or None), which imports nothing."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise LookupError("torch")
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))


def cuda_gpus(runtime: str) -> Gpus | None:
    """The GPUs that a torch built for this CUDA `runtime` ("13.0") can use; None where there are none, no driver, or
    one of an older major version. Raises OSError where the driver does not answer."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None
    if driver.cuInit(0):
        return None
    version, count, device = (ctypes.c_int() for _ in range(3))
    _ask(driver.cuDriverGetVersion, ctypes.byref(version))
    _ask(driver.cuDeviceGetCount, ctypes.byref(count))
    if not count.value or version.value // 1000 < int(runtime.partition(".")[0]):
        return None
    _ask(driver.cuDeviceGet, ctypes.byref(device), 0)
    name = ctypes.create_string_buffer(256)
    _ask(driver.cuDeviceGetName, name, len(name), device)
    capability = [ctypes.c_int() for _ in range(2)]
    for value, attribute in zip(capability, (MAJOR, MINOR), strict=True):
        _ask(driver.cuDeviceGetAttribute, ctypes.byref(value), attribute, device)
    return Gpus(name.value.decode(), (capability[0].value, capability[1].value), count.value)


def _ask(function: Callable[..., int], *arguments: Any) -> None:
    if error := function(*arguments):
        raise OSError(f"the CUDA driver answered {error}")


def _cpu_bfloat16() -> bool:
    flags = {
        flag
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.lower().startswith(("flags", "features"))
        for flag in line.partition(":")[2].split()
    }
    return any(needed <= flags for needed in BFLOAT16)
