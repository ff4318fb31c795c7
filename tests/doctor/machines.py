"""Typical machines as the doctor's facts. None of them is probed."""

from __future__ import annotations

from dataclasses import replace

from fastattention_vllm.doctor.hardware import Hardware
from fastattention_vllm.doctor.kernels import Kernels
from fastattention_vllm.doctor.links import HostLink, Links, PeerLink
from fastattention_vllm.doctor.memory import Memory
from fastattention_vllm.doctor.nvidia import Driver, Gpu
from fastattention_vllm.doctor.report import Facts
from fastattention_vllm.doctor.software import PLUGIN_GROUPS, Software

GIB = 1 << 30
V100 = Gpu("Tesla V100-SXM2-32GB", (7, 0), 32 * GIB, "0000:3b:00.0")
T4 = Gpu("Tesla T4", (7, 5), 15 * GIB, "0000:00:1e.0")
RTX_4090 = Gpu("NVIDIA GeForce RTX 4090", (8, 9), 24 * GIB, "0000:01:00.0")
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB, "0000:0a:00.0")
GTX_1080 = Gpu("NVIDIA GeForce GTX 1080", (6, 1), 8 * GIB, "0000:01:00.0")

CODE_CU128 = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
"""torch 2.10.0+cu128."""
CODE_CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
"""torch 2.11.0+cu130."""

CPU = Facts(
    hardware=Hardware(
        cpu="AMD EPYC 7763 64-Core Processor",
        machine="x86_64",
        cores=16,
        quota=None,
        flags=frozenset("avx2 fma f16c sse4_2".split()),
        driver=None,
        visible_gpus=None,
        pci_gpus=0,
        pci_npus=0,
        npus=0,
    ),
    software=Software(
        python="3.11.7",
        package="0.1.0",
        torch="2.13.0+cpu",
        torch_cuda=None,
        torch_code=(),
        vllm="0.32.0",
        vllm_torch="",
        vllm_flash=False,
        registered=PLUGIN_GROUPS,
        allowed_plugins=None,
        target_device=None,
        torch_npu=None,
        vllm_ascend=None,
    ),
    kernels=Kernels(isas=("avx2", "scalar"), cpu_error="", images=78),
    memory=Memory(
        total=128 * GIB,
        available=100 * GIB,
        cgroup_left=None,
        huge_pages="madvise",
        shared=64 * GIB,
        bandwidth=120e9,
        threads=16,
        load=0.5,
    ),
    links=Links(),
)


def with_gpus(*gpus: Gpu, driver: str = "580.82.07", cuda: tuple[int, int] = (13, 0), rate: float = 25e9) -> Facts:
    """GPUs with torch 2.11.0 for CUDA 13 and vLLM 0.23.0, as pip installs them."""
    hardware = replace(CPU.hardware, driver=Driver(driver, cuda, gpus), pci_gpus=len(gpus))
    software = replace(
        CPU.software,
        torch="2.11.0+cu130",
        torch_cuda="13.0",
        torch_code=CODE_CU130,
        vllm="0.23.0",
        vllm_torch="==2.11.0",
        vllm_flash=True,
    )
    links = Links(
        tuple(HostLink(index, rate, rate, 16, 16) for index in range(len(gpus))),
        tuple(PeerLink((0, index), True, 200e9) for index in range(1, len(gpus))),
    )
    return replace(CPU, hardware=hardware, software=software, links=links)


def as_the_extra_volta(facts: Facts) -> Facts:
    software = replace(
        facts.software,
        torch="2.10.0+cu128",
        torch_cuda="12.8",
        torch_code=CODE_CU128,
        vllm="0.19.1",
        vllm_torch="==2.10.0",
    )
    return replace(facts, software=software)


def ascend(torch_npu: str | None = None, vllm_ascend: str | None = None) -> Facts:
    hardware = replace(
        CPU.hardware, cpu="Kunpeng-920", machine="aarch64", cores=192, flags=frozenset(["asimd"]), pci_npus=8, npus=8
    )
    software = replace(CPU.software, torch="2.10.0", vllm="0.23.0", torch_npu=torch_npu, vllm_ascend=vllm_ascend)
    return replace(CPU, hardware=hardware, software=software, kernels=Kernels(("neon", "scalar"), ""))
