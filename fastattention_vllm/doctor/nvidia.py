"""NVIDIA GPUs as the driver lists them, without torch: a torch that has no code for a GPU must not hide it."""

from __future__ import annotations

import ctypes
import re
from ctypes import byref, c_char_p, c_int, c_size_t
from dataclasses import dataclass
from pathlib import Path

from fastattention_vllm.placement.cgroups import read_text

LIBRARY = "libcuda.so.1"
MODULE = Path("/sys/module/nvidia/version")
MAJOR, MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""
NO_DEVICE = 100
MAPS = Path("/proc/self/maps")
LAST_VOLTA_BRANCH = 580
"""The last driver branch for compute capability 7.0:
https://docs.nvidia.com/datacenter/tesla/drivers/cuda-toolkit-driver-and-architecture-matrix.html"""


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    memory: int
    """Bytes."""
    pci: str
    """Address on the PCI bus, as in /sys/bus/pci/devices."""


@dataclass(frozen=True)
class Driver:
    version: str
    """As in 580.82.07; empty where the system does not say."""
    cuda: tuple[int, int]
    """The newest CUDA that it supports."""
    gpus: tuple[Gpu, ...]
    error: str = ""
    """Why it lists no GPU."""

    @property
    def branch(self) -> int | None:
        """580 of 580.82.07."""
        first = self.version.partition(".")[0]
        return int(first) if first.isdigit() else None


def probe() -> Driver | None:
    """None where there is no driver. Respects CUDA_VISIBLE_DEVICES."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    version = read_text(MODULE, "") or _version_of_library()
    number = c_int()
    driver.cuDriverGetVersion(byref(number))
    cuda = (number.value // 1000, number.value % 1000 // 10)
    status = driver.cuInit(0)
    if status == NO_DEVICE:
        return Driver(version, cuda, ())
    if status:
        return Driver(version, cuda, (), f"the driver does not start: {_error(driver, status)}")
    count = c_int()
    driver.cuDeviceGetCount(byref(count))
    return Driver(version, cuda, tuple(_gpu(driver, index) for index in range(count.value)))


def _version_of_library() -> str:
    """By its file's name. A kernel module that finds no GPU it supports is not loaded, so it has no version to read."""
    found = re.search(r"/libcuda\.so\.(\d+\.[\d.]+)", read_text(MAPS, ""))
    return found[1] if found else ""


def _gpu(driver: ctypes.CDLL, index: int) -> Gpu:
    device, major, minor, memory = c_int(), c_int(), c_int(), c_size_t()
    name, pci = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
    driver.cuDeviceGet(byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceGetAttribute(byref(major), MAJOR, device)
    driver.cuDeviceGetAttribute(byref(minor), MINOR, device)
    driver.cuDeviceTotalMem_v2(byref(memory), device)
    driver.cuDeviceGetPCIBusId(pci, len(pci), device)
    return Gpu(name.value.decode(), (major.value, minor.value), memory.value, pci.value.decode().lower())


def _error(driver: ctypes.CDLL, status: int) -> str:
    text = c_char_p()
    driver.cuGetErrorString(status, byref(text))
    return f"{text.value.decode() if text.value else 'unknown error'} (CUDA error {status})"
