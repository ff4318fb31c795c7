"""V100 and T4 on the PCI bus. A driver that does not support a GPU hides it from CUDA, but not from there."""

from __future__ import annotations

from pathlib import Path

from fastattention_vllm.placement.cgroups import read_text

DEVICES = Path("/sys/bus/pci/devices")
NVIDIA = "0x10de"
VOLTA = {
    "0x1d81": "TITAN V",
    "0x1db1": "Tesla V100 SXM2 16GB",
    "0x1db2": "Tesla V100 DGXS 16GB",
    "0x1db3": "Tesla V100 FHHL 16GB",
    "0x1db4": "Tesla V100 PCIe 16GB",
    "0x1db5": "Tesla V100 SXM2 32GB",
    "0x1db6": "Tesla V100 PCIe 32GB",
    "0x1db7": "Tesla V100 DGXS 32GB",
    "0x1db8": "Tesla V100 SXM3 32GB",
    "0x1dba": "Quadro GV100",
    "0x1df0": "Tesla PG500-216",
    "0x1df2": "Tesla PG503-216",
    "0x1df5": "Tesla V100 SXM2 16GB",
    "0x1df6": "Tesla V100S PCIe 32GB",
}
"""GPUs of compute capability 7.0 by PCI device ID, from the PCI ID database (https://pci-ids.ucw.cz, 2023-04-10)."""
T4 = {"0x1eb8": "Tesla T4"}
"""From the same database."""
OF_A_VIRTUAL_MACHINE = "vfio-pci"
"""The kernel driver of a device that is passed through to a virtual machine."""


def named(names: dict[str, str]) -> tuple[str, ...]:
    """The names of this machine's NVIDIA devices that ``names`` lists, one per device, in the order of the bus."""
    paths = sorted(DEVICES.glob("*")) if DEVICES.is_dir() else []
    return tuple(
        names[device]
        for path in paths
        if read_text(path / "vendor", "") == NVIDIA
        and (device := read_text(path / "device", "")) in names
        and (path / "driver").resolve().name != OF_A_VIRTUAL_MACHINE
    )
