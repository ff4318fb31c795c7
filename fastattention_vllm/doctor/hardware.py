"""Processor, GPUs and NPUs, and the NVIDIA driver."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastattention_vllm.doctor import nvidia, pci
from fastattention_vllm.doctor.findings import Finding
from fastattention_vllm.placement import cgroups, cpus
from fastattention_vllm.placement.cgroups import read_text

GIB = 1 << 30
DEVICES = Path("/dev")
CPUINFO = Path("/proc/cpuinfo")
HUAWEI = "0x19e5"
DISPLAY, ACCELERATOR = "0x03", "0x1200"
"""PCI classes begin with these."""
INSTRUCTION_SETS = {
    "AMX": ("amx_tile", "amx_bf16"),
    "AVX-512 BF16": ("avx512_bf16",),
    "AVX-512": ("avx512f", "avx512bw", "avx512vl"),
    "AVX2": ("avx2", "fma", "f16c"),
    "NEON": ("asimd",),
}
"""The flags of /proc/cpuinfo that each one needs."""


@dataclass(frozen=True)
class Hardware:
    cpu: str
    machine: str
    """x86_64 or aarch64."""
    cores: int
    """Physical cores that this process may use."""
    quota: int | None
    """CPUs whose time the control groups allow."""
    flags: frozenset[str]
    driver: nvidia.Driver | None
    """Of NVIDIA."""
    visible_gpus: str | None
    """CUDA_VISIBLE_DEVICES."""
    pci_gpus: int
    """NVIDIA GPUs on the PCI bus, whether a driver runs them or not."""
    pci_npus: int
    """Huawei accelerators there."""
    npus: int
    """Ascend NPUs that the driver offers: /dev/davinci0 and so on."""
    pci_volta: tuple[str, ...] = ()
    """Names of the GPUs of compute capability 7.0 on the PCI bus, whether a driver runs them or not."""
    pci_t4: tuple[str, ...] = ()
    """The same for T4."""

    @property
    def gpus(self) -> tuple[nvidia.Gpu, ...]:
        return () if self.driver is None else self.driver.gpus

    @property
    def has_volta(self) -> bool:
        """Whether the software should fit compute capability 7.0: such a GPU is visible, or its driver is wrong."""
        visible = any(gpu.capability == (7, 0) for gpu in self.gpus)
        return visible or (self.volta_is_unsupported and not self.gpus)

    @property
    def volta_is_unsupported(self) -> bool:
        """Whether the driver's branch has dropped a GPU of this machine."""
        branch = self.driver.branch if self.driver else None
        return bool(self.pci_volta) and branch is not None and branch > nvidia.LAST_VOLTA_BRANCH

    @property
    def has_npu(self) -> bool:
        return self.npus > 0 or self.pci_npus > 0


def probe() -> Hardware:
    lines = [line.split(":", 1) for line in read_text(CPUINFO, "").splitlines() if ":" in line]
    known = {name.strip().lower(): value.strip() for name, value in reversed(lines)}
    return Hardware(
        cpu=known.get("model name", "") or platform.processor() or platform.machine(),
        machine=platform.machine(),
        cores=len(cpus.physical_cpus()),
        quota=cgroups.cpus(),
        flags=frozenset((known.get("flags") or known.get("features") or "").split()),
        driver=nvidia.probe(),
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        pci_gpus=_on_pci(pci.NVIDIA, DISPLAY),
        pci_npus=_on_pci(HUAWEI, ACCELERATOR),
        npus=sum(path.name.removeprefix("davinci").isdigit() for path in DEVICES.glob("davinci*")),
        pci_volta=pci.named(pci.VOLTA),
        pci_t4=pci.named(pci.T4),
    )


def _on_pci(vendor: str, kind: str) -> int:
    devices = pci.DEVICES.glob("*") if pci.DEVICES.is_dir() else iter(())
    return sum(
        read_text(path / "vendor", "") == vendor and read_text(path / "class", "").startswith(kind) for path in devices
    )


def instruction_sets(flags: frozenset[str]) -> list[str]:
    return [name for name, needed in INSTRUCTION_SETS.items() if flags.issuperset(needed)]


def findings(hardware: Hardware) -> list[Finding]:
    return [_cpu(hardware), *_gpus(hardware), *_npus(hardware)]


def _cpu(hardware: Hardware) -> Finding:
    count = "1 core" if hardware.cores == 1 else f"{hardware.cores} cores"
    limit = "" if hardware.quota is None else f", of which a control group allows the time of {hardware.quota}"
    sets = ", ".join(instruction_sets(hardware.flags))
    text = f"{hardware.cpu}, {count}{limit}"
    if sets:
        return Finding("OK", "CPU", f"{text}; {sets}")
    if hardware.machine in ("x86_64", "AMD64"):
        return Finding(
            "warning",
            "CPU",
            f"{text}; it has no AVX2, so attention runs on portable code, several times slower",
            "Use a machine with AVX2 (Intel since 2013, AMD since 2015); in a virtual machine, choose the host's CPU "
            "model.",
        )
    return Finding("warning", "CPU", f"{text}; attention runs on portable code, several times slower")


def _gpus(hardware: Hardware) -> Iterator[Finding]:
    driver = hardware.driver
    if driver is not None and hardware.volta_is_unsupported:
        yield Finding(
            "problem",
            "NVIDIA driver",
            f"a {hardware.pci_volta[0]} is in this machine, but driver {driver.version} does not support it",
            f"Install a driver of branch {nvidia.LAST_VOLTA_BRANCH}, the last one for compute capability 7.0.",
        )
        if not driver.gpus:
            return
    if driver is None or driver.error:
        if hardware.pci_gpus:
            why = "no NVIDIA driver is visible" if driver is None else driver.error
            known = ", ".join(sorted({*hardware.pci_volta, *hardware.pci_t4}))
            which = f" ({known})" if known else ""
            branch = f" of branch {nvidia.LAST_VOLTA_BRANCH} or older" if hardware.pci_volta else ""
            yield Finding(
                "problem" if driver else "warning",
                "NVIDIA GPU",
                f"{hardware.pci_gpus} on the PCI bus{which}, but {why}",
                f"Install NVIDIA's driver{branch}; in a container, start it with `docker run --gpus all`."
                if driver is None
                else "Run `nvidia-smi`; after an update of the driver, restart the machine.",
            )
        elif driver and driver.error:
            yield Finding("problem", "NVIDIA GPU", driver.error, "Run `nvidia-smi` to see more.")
        elif not hardware.has_npu:
            yield Finding("OK", "GPU", "none")
        return
    if not driver.gpus:
        visible = hardware.visible_gpus
        why = "the driver lists none" if visible is None else f"CUDA_VISIBLE_DEVICES={visible} hides all"
        yield Finding("OK", "GPU", f"none: {why}")
        return
    version = f"{driver.version}, " if driver.version else ""
    yield Finding("OK", "NVIDIA driver", f"{version}CUDA {driver.cuda[0]}.{driver.cuda[1]}")
    for index, gpu in enumerate(driver.gpus):
        capability = f"compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        text = f"{gpu.name}, {capability}, {gpu.memory / GIB:.0f} GiB"
        yield Finding("OK", f"GPU {index}", text)


def _npus(hardware: Hardware) -> Iterator[Finding]:
    if hardware.npus:
        yield Finding("OK", "Ascend NPU", f"{hardware.npus} offered by the driver")
    elif hardware.pci_npus:
        yield Finding(
            "problem",
            "Ascend NPU",
            f"{hardware.pci_npus} on the PCI bus, but there is no /dev/davinci*",
            "Install Huawei's driver and firmware; in a container, pass --device /dev/davinci0, /dev/davinci_manager, "
            "/dev/devmm_svm and /dev/hisi_hdc.",
        )
