"""A look at the machine without torch: the same that torch finds, and torch itself where it is anything unusual."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from lorabench.measure import glance as module
from lorabench.measure.glance import cuda_gpus, glance, torch_build
from lorabench.measure.machine import Gpus, describe

DECIDED_BY = ("device", "name", "capability", "gpus", "native_bfloat16", "cpu", "cores", "memory_bytes", "packages")


def test_it_finds_what_torch_finds():
    mine, torchs = glance(), describe()
    assert [getattr(mine, fact) for fact in DECIDED_BY] == [getattr(torchs, fact) for fact in DECIDED_BY]


def test_what_torch_was_built_for_is_read_without_it():
    import torch

    assert torch_build()["cuda"] == torch.version.cuda


class Driver:
    """libcuda.so with two H200s; `fails` names the call that does not answer."""

    def __init__(self, version=13_000, count=2, fails=""):
        self.version, self.count, self.fails = version, count, fails

    def __getattr__(self, name):
        def call(*arguments):
            values = {"cuDriverGetVersion": self.version, "cuDeviceGetCount": self.count, "cuDeviceGet": 0}
            if name in values:
                arguments[0]._obj.value = values[name]
            elif name == "cuDeviceGetName":
                arguments[0].value = b"NVIDIA H200"
            elif name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = {75: 9, 76: 0}[arguments[1]]
            return 100 if name == self.fails else 0

        return call


@pytest.fixture
def driver(monkeypatch):
    def pretend(**given):
        monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(**given))

    return pretend


def test_gpus_are_asked_of_the_driver(driver, monkeypatch):
    driver()
    assert cuda_gpus("12.8") == Gpus("NVIDIA H200", (9, 0), 2)
    monkeypatch.setattr(module, "torch_build", lambda: {"cuda": "13.0"})
    found = glance()
    assert (found.device, found.name, found.gpus, found.capability) == ("cuda", "NVIDIA H200", 2, (9, 0))
    assert found.native_bfloat16


@pytest.mark.parametrize("given", [{"fails": "cuInit"}, {"count": 0}, {"version": 12_080}])
def test_no_gpu_that_torch_could_use(driver, given):
    driver(**given)
    assert cuda_gpus("13.0") is None


def test_without_a_driver_there_is_none(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert cuda_gpus("13.0") is None


@pytest.mark.parametrize("build", [{"cuda": None, "hip": "6.4"}, {"cuda": "13.0"}, {}])
def test_whatever_is_unusual_is_left_to_torch(driver, monkeypatch, build):
    driver(fails="cuDeviceGetName")
    asked = SimpleNamespace(name="as torch says")
    monkeypatch.setattr(module, "torch_build", lambda: build)
    monkeypatch.setattr(module, "describe", lambda: asked)
    assert glance() is asked
