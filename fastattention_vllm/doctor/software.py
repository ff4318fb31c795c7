"""Python packages: torch and whether it has code for these GPUs, vLLM and whether this plugin is registered with it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util

import torch
from packaging.requirements import Requirement
from packaging.version import Version

import fastattention_vllm
from fastattention_vllm.attention.kernels import OLDEST_GPU, vllm_has_flash
from fastattention_vllm.doctor.findings import Finding
from fastattention_vllm.doctor.hardware import Hardware
from fastattention_vllm.doctor.nvidia import LAST_VOLTA_BRANCH
from fastattention_vllm.integration.compat import SUPPORTED_VLLM

PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
PLUGIN = "fastattention"
V100_VLLM, V100_TORCH = "0.19.1", "2.10.0"
"""The last wheels on PyPI with code for compute capability 7.0; torch's there is built for CUDA 12.8."""
GPU_VLLM = "0.23.0"
"""The one that ran on H100 and H200."""
ASCEND_VLLM = "0.23.0"
CPU_VLLM = "0.32.0"
SUPPORTED = ", ".join(sorted(map(str, SUPPORTED_VLLM), reverse=True))
HIDE_GPU = "set CUDA_VISIBLE_DEVICES= (empty) to use the CPU alone"


@dataclass(frozen=True)
class Software:
    python: str
    package: str
    """Version of fastattention-vllm."""
    torch: str
    torch_cuda: str | None
    """CUDA that torch was built for; None for a build without."""
    torch_code: tuple[str, ...]
    """What torch contains code for: sm_80 is machine code, compute_90 is PTX."""
    vllm: str | None
    vllm_torch: str
    """The version of torch that vLLM asks for, as in ==2.10.0; empty if any."""
    vllm_flash: bool
    """Whether vLLM contains compiled FlashAttention."""
    registered: tuple[str, ...]
    """Groups of entry points in which vLLM finds this plugin."""
    allowed_plugins: str | None
    """VLLM_PLUGINS."""
    target_device: str | None
    """VLLM_TARGET_DEVICE."""
    torch_npu: str | None
    vllm_ascend: str | None


def probe() -> Software:
    return Software(
        python=platform.python_version(),
        package=fastattention_vllm.__version__,
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        torch_code=_torch_code(),
        vllm=_version("vllm"),
        vllm_torch=_torch_of_vllm(),
        vllm_flash=vllm_has_flash(),
        registered=tuple(
            group for group in PLUGIN_GROUPS if any(one.name == PLUGIN for one in metadata.entry_points(group=group))
        ),
        allowed_plugins=os.environ.get("VLLM_PLUGINS"),
        target_device=os.environ.get("VLLM_TARGET_DEVICE"),
        torch_npu=_version("torch-npu") or ("of unknown version" if util.find_spec("torch_npu") else None),
        vllm_ascend=_version("vllm-ascend"),
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch_code() -> tuple[str, ...]:
    """As ``torch.cuda.get_arch_list``, which lists nothing where torch finds no GPU."""
    flags = getattr(torch._C, "_cuda_getArchFlags", None)
    return tuple((flags() or "").split()) if flags is not None and torch.version.cuda else ()


def _torch_of_vllm() -> str:
    try:
        asked = [Requirement(text) for text in metadata.requires("vllm") or ()]
    except metadata.PackageNotFoundError:
        return ""
    return next((str(one.specifier) for one in asked if one.name == "torch" and one.marker is None), "")


def has_code(torch_code: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether torch runs on a GPU: by machine code of its major version, not newer, or by PTX that is not newer."""
    for one in torch_code:
        kind, _, number = one.partition("_")
        if not number.isdigit():
            continue  # sm_90a and its like run on that very GPU; torch has the plain one beside it
        built_for = (int(number[:-1]), int(number[-1]))
        if kind == "sm" and built_for[0] == capability[0] and built_for[1] <= capability[1]:
            return True
        if kind == "compute" and built_for <= capability:
            return True
    return False


def install_command(hardware: Hardware) -> str:
    """What installs vLLM and its torch for this machine."""
    if hardware.has_npu:
        return f"pip install vllm=={ASCEND_VLLM} vllm-ascend=={ASCEND_VLLM}"
    if hardware.has_volta:
        return f"pip install torch=={V100_TORCH} vllm=={V100_VLLM}"
    if hardware.gpus:
        return f"pip install vllm=={GPU_VLLM}"
    return f"VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE={CPU_VLLM} pip install --no-binary vllm vllm=={CPU_VLLM}"


def findings(software: Software, hardware: Hardware) -> list[Finding]:
    return [
        Finding("OK", "Python", f"{software.python}, fastattention-vllm {software.package}"),
        *_torch(software, hardware),
        *_vllm(software, hardware),
        *_plugin(software),
        *(_ascend(software, hardware) if hardware.has_npu else ()),
    ]


def _torch(software: Software, hardware: Hardware) -> Iterator[Finding]:
    built = "CUDA " + software.torch_cuda if software.torch_cuda else "CPUs"
    text = f"{software.torch}, built for {built}"
    command = install_command(hardware)
    gpus = [gpu for gpu in hardware.gpus if gpu.capability >= OLDEST_GPU]
    if not gpus:
        yield Finding("OK", "torch", text)
        return
    if software.torch_cuda is None:
        fix = f"Install a torch for CUDA, or {HIDE_GPU}."
        yield Finding("problem", "torch", f"{text}, so it cannot use the GPU", fix, command)
        return
    bad = sorted({gpu.capability for gpu in gpus if not has_code(software.torch_code, gpu.capability)})
    for major, minor in bad:
        has = ", ".join(software.torch_code) or "nothing"
        yield Finding(
            "problem",
            "torch",
            f"{text}, has no code for compute capability {major}.{minor}; it has code for {has}",
            f"Install torch {V100_TORCH} (CUDA 12.8) and vLLM {V100_VLLM}, the last wheels on PyPI with code for the "
            "V100."
            if (major, minor) == (7, 0)
            else "Install a torch with code for this GPU.",
            command,
        )
    if not bad:
        codes = ", ".join(f"{major}.{minor}" for major, minor in sorted({gpu.capability for gpu in gpus}))
        yield Finding("OK", "torch", f"{text}, with code for compute capability {codes}")
    newest = hardware.driver.cuda if hardware.driver else (0, 0)
    if int(software.torch_cuda.partition(".")[0]) > newest[0]:
        yield Finding(
            "problem",
            "NVIDIA driver",
            f"it supports CUDA {newest[0]}.{newest[1]}, torch needs {software.torch_cuda}",
            f"Install a driver of branch {LAST_VOLTA_BRANCH}, or a torch for CUDA {newest[0]}."
            if hardware.has_volta
            else f"Install a newer driver, or a torch for CUDA {newest[0]}.",
        )


def _vllm(software: Software, hardware: Hardware) -> Iterator[Finding]:
    command = install_command(hardware)
    if software.vllm is None:
        yield Finding(
            "problem",
            "vLLM",
            "not installed, so nothing can be served; fast_attn_func works without it",
            "Install it.",
            command,
        )
        return
    found = Version(software.vllm)
    if not SUPPORTED_VLLM.contains(Version(found.base_version), prereleases=True):
        newer = "older" if found < min(Version(one.version) for one in SUPPORTED_VLLM) else "newer"
        text = f"{software.vllm} is {newer} than what this plugin supports ({SUPPORTED})"
        yield Finding("problem", "vLLM", text, "Install a supported version.", command)
        return
    if hardware.has_volta and Version(found.base_version) > Version(V100_VLLM):
        yield Finding(
            "warning" if found.local else "problem",
            "vLLM",
            f"{software.vllm}: wheels after {V100_VLLM} have no code for the V100",
            f"Install vLLM {V100_VLLM}, unless you have built this one from source with CUDA 12.6.",
            command,
        )
    elif hardware.gpus and not software.vllm_flash:
        yield Finding(
            "problem",
            "vLLM",
            f"{software.vllm} contains no GPU kernels",
            f"Install the wheel with CUDA, or {HIDE_GPU}.",
            command,
        )
    else:
        yield Finding("OK", "vLLM", f"{software.vllm}, supported ({SUPPORTED})")
    asked = software.vllm_torch
    if asked and not Requirement(f"torch{asked}").specifier.contains(Version(software.torch).public, prereleases=True):
        text = f"vLLM {software.vllm} needs torch{asked}, but {software.torch} is installed"
        yield Finding("problem", "torch", text, "Install both again.", command)


def _plugin(software: Software) -> Iterator[Finding]:
    missing = [group for group in PLUGIN_GROUPS if group not in software.registered]
    allowed = software.allowed_plugins
    if missing:
        yield Finding(
            "problem",
            "plugin",
            f"vLLM does not find it: no entry point in {' and '.join(missing)}",
            "Install fastattention-vllm into this Python with pip; a folder on PYTHONPATH has no entry points.",
        )
    elif allowed is not None and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        fix = f"Unset VLLM_PLUGINS, or add {PLUGIN} to it."
        yield Finding("problem", "plugin", f"VLLM_PLUGINS={allowed} excludes it", fix)
    elif software.target_device == "cpu":
        yield Finding(
            "problem",
            "plugin",
            "VLLM_TARGET_DEVICE=cpu makes vLLM ignore it",
            "Unset VLLM_TARGET_DEVICE; it is needed at install time only.",
        )
    else:
        yield Finding("OK", "plugin", "registered; use it with `vllm serve MODEL --attention-backend fastattention`")


def _ascend(software: Software, hardware: Hardware) -> Iterator[Finding]:
    command = install_command(hardware)
    for name, found in (("torch_npu", software.torch_npu), ("vllm-ascend", software.vllm_ascend)):
        if found is None:
            text = "not installed, so the NPU cannot be used"
            yield Finding("problem", name, text, f"Install vllm-ascend {ASCEND_VLLM}, which brings torch_npu.", command)
    if software.torch_npu is not None:
        yield Finding("OK", "torch_npu", software.torch_npu)
    if software.vllm_ascend is not None:
        found = software.vllm_ascend
        if Version(found).release[:2] == Version(ASCEND_VLLM).release[:2]:
            yield Finding("OK", "vllm-ascend", found)
        else:
            text = f"{found}; this plugin was checked against {ASCEND_VLLM}"
            yield Finding("problem", "vllm-ascend", text, f"Install {ASCEND_VLLM}.", command)
