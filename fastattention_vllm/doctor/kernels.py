"""Which attention kernels run on each device, and whether the compiled V100 and T4 kernels fit this code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.kernels import OLDEST_GPU, Device, family_of
from fastattention_vllm.attention.volta import images
from fastattention_vllm.attention.volta import kernels as volta
from fastattention_vllm.attention.volta.launch import TURING, VOLTA, Variant
from fastattention_vllm.doctor.findings import Finding
from fastattention_vllm.doctor.hardware import Hardware
from fastattention_vllm.doctor.software import Software
from fastattention_vllm.linear.volta import kernels as linear
from fastattention_vllm.linear.volta import launch as linear_launch

TESTED = {
    VOLTA: "tested on a simulated V100, not yet run on hardware",
    TURING: "tested through their PTX on a newer GPU, not yet run on a T4",
}


@dataclass(frozen=True)
class Kernels:
    isas: tuple[str, ...]
    """Instruction sets of the CPU kernels that run here, the one in use first."""
    cpu_error: str
    """Why the CPU kernels do not run."""
    images: int = 0
    """Compiled V100 and T4 kernels that the manifest names."""
    image_errors: dict[int, str] = field(default_factory=dict)
    """By architecture, ``VOLTA`` and ``TURING``: why its images cannot be used. Absent if they can."""


def probe(folder: Path | None = None) -> Kernels:
    """``folder``: of the compiled V100 and T4 kernels."""
    isas: tuple[str, ...] = ()
    error = ""
    try:
        chosen = cpu.isa()
        isas = (chosen, *(one for one in cpu.usable_isas() if one != chosen))
    except (OSError, RuntimeError, ValueError) as failed:
        error = str(failed)
    folder = folder or images.IMAGES
    errors: dict[int, str] = {}
    variants: list[Variant | linear_launch.Variant] = []
    try:
        variants = [*images.variants(folder).values(), *linear.variants(folder)]
    except images.ImageError as failed:
        errors = dict.fromkeys((VOLTA, TURING), str(failed))
    for architecture in (VOLTA, TURING):
        try:
            for variant in variants:
                # Kernels without matrix products have V100 machine code alone, which the T4 runs too.
                everywhere = isinstance(variant, Variant) and variant.kind in ("write_kv", "combine")
                if variant.architecture == architecture or everywhere:
                    images.read(folder, variant, "cubin")
        except images.ImageError as failed:
            errors[architecture] = str(failed)
    return Kernels(isas, error, len(variants), errors)


def findings(kernels: Kernels, hardware: Hardware, software: Software) -> list[Finding]:
    return [
        _cpu(kernels),
        *(_gpu(index, gpu.capability, kernels, software) for index, gpu in enumerate(hardware.gpus)),
        *_unused_images(kernels, hardware),
        *(_npu(software) if hardware.has_npu else ()),
    ]


def _cpu(kernels: Kernels) -> Finding:
    if kernels.cpu_error:
        return Finding("problem", "CPU", kernels.cpu_error.rstrip("."), "Install fastattention-vllm again.")
    chosen, *others = kernels.isas
    text = f"this package's CPU kernels, instruction set {chosen}"
    if chosen == "scalar":
        return Finding("warning", "CPU", f"{text}: portable code, several times slower than with AVX2 or NEON")
    return Finding("OK", "CPU", f"{text}; usable here: {', '.join([chosen, *others])}")


def _gpu(index: int, capability: tuple[int, int], kernels: Kernels, software: Software) -> Finding:
    subject = f"GPU {index}"
    try:
        family = family_of(Device("cuda", capability, software.vllm_flash))
    except ValueError:
        oldest = f"{OLDEST_GPU[0]}.{OLDEST_GPU[1]} (V100)"
        text = f"no kernels: compute capability {capability[0]}.{capability[1]} is below {oldest}"
        return Finding("warning", subject, text, "Use the CPU of this machine: set CUDA_VISIBLE_DEVICES= (empty).")
    if family.name == "volta":
        architecture = volta.target_of(capability).architecture
        error = kernels.image_errors.get(architecture)
        if error:
            return Finding("problem", subject, error.rstrip("."))
        text = f"this package's kernels, machine code for sm_{architecture}; {TESTED[architecture]}"
        return Finding("OK", subject, text)
    why = f"compute capability {capability[0]}.{capability[1]} is 8.0 or newer"
    if family.name == "torch_flash":
        text = f"{family.title} in fast_attn_func ({why}); vLLM is missing or has no GPU kernels"
        return Finding("warning", subject, text)
    return Finding("OK", subject, f"{family.title} ({why}); this package adds host layers and tiling-AllReduce")


def _unused_images(kernels: Kernels, hardware: Hardware) -> Iterator[Finding]:
    """Of kernels that no GPU here needs; a wheel that lacks them is worth a word all the same."""
    if hardware.has_volta or any(OLDEST_GPU <= gpu.capability < (8, 0) for gpu in hardware.gpus):
        return
    errors = set(kernels.image_errors.values())
    if errors:
        yield Finding("OK", "V100 and T4", "the compiled kernels are missing or outdated; no GPU here needs them")
    else:
        yield Finding("OK", "V100 and T4", f"{kernels.images} compiled kernels match this code; no GPU here needs them")


def _npu(software: Software) -> Iterator[Finding]:
    if software.torch_npu is None or software.vllm_ascend is None:
        missing = "torch_npu" if software.torch_npu is None else "vllm-ascend"
        yield Finding("problem", "NPU", f"no attention kernels: {missing} is missing", f"Install {missing}.")
    else:
        yield Finding("OK", "NPU", "torch_npu's fused attention; not yet run on hardware")
