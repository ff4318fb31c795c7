"""NVIDIA's driver, called through ctypes, with a stand-in for the few functions that are used."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from fastattention_vllm.doctor import nvidia
from fastattention_vllm.doctor.nvidia import Driver, Gpu


class StandIn:
    """A driver for CUDA 12.8 with a T4 and a V100."""

    capabilities = ((7, 5), (7, 0))

    def __init__(self, status: int = 0) -> None:
        self.status = status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12080
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.capabilities)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = f"GPU of {device.value}".encode()
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = self.capabilities[device.value][attribute - 75]
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: Any) -> int:
        size._obj.value = 16 << 30
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, size: int, device: Any) -> int:
        text.value = b"0000:3B:00.0"
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"unknown error"
        return 0


@pytest.fixture(autouse=True)
def module_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text("535.183.01\n")
    monkeypatch.setattr(nvidia, "MODULE", tmp_path / "version")


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: StandIn())
    gpus = tuple(Gpu(f"GPU of {index}", (7, minor), 16 << 30, "0000:3b:00.0") for index, minor in ((0, 5), (1, 0)))
    assert nvidia.probe() == Driver("535.183.01", (12, 8), gpus)


def test_a_driver_without_gpus_or_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: StandIn(100))
    assert nvidia.probe() == Driver("535.183.01", (12, 8), ())
    monkeypatch.setattr(ctypes, "CDLL", lambda name: StandIn(999))
    found = nvidia.probe()
    assert found is not None
    assert found.error == "the driver does not start: unknown error (CUDA error 999)"


def test_a_module_that_is_not_loaded_has_the_version_of_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 0 08:01 7 /usr/lib/x86_64-linux-gnu/libcuda.so.595.71.05\n")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: StandIn(100))
    monkeypatch.setattr(nvidia, "MODULE", tmp_path / "absent")
    monkeypatch.setattr(nvidia, "MAPS", maps)
    found = nvidia.probe()
    assert found is not None
    assert (found.version, found.branch) == ("595.71.05", 595)
    maps.write_text("")
    assert nvidia.probe() == Driver("", (12, 8), ())
    assert Driver("", (12, 8), ()).branch is None


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "LIBRARY", "libnone.so.1")
    assert nvidia.probe() is None
