"""Links: between host memory and each GPU, and among GPUs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fastattention_vllm.doctor import pci
from fastattention_vllm.doctor.findings import Finding
from fastattention_vllm.doctor.hardware import Hardware
from fastattention_vllm.placement.cgroups import read_text

SIZE = 256 << 20
ROUNDS = 5
SLOW = 10e9
"""Bytes per second. PCIe 3.0 x16, the V100's link, carries about 12e9."""


@dataclass(frozen=True)
class HostLink:
    gpu: int
    to_device: float
    """Bytes per second from pinned host memory."""
    to_host: float
    width: int | None = None
    """PCIe lanes in use."""
    max_width: int | None = None
    """PCIe lanes of the GPU."""


@dataclass(frozen=True)
class PeerLink:
    gpus: tuple[int, int]
    direct: bool
    """Whether they read each other's memory."""
    rate: float
    """Bytes per second of a copy from the first to the second."""


@dataclass(frozen=True)
class Links:
    host: tuple[HostLink, ...] = ()
    peers: tuple[PeerLink, ...] = ()
    not_measured: str = ""
    """Why."""
    errors: dict[int, str] = field(default_factory=dict)
    """By GPU: why its link was not measured."""


def probe(hardware: Hardware) -> Links:
    """Copies need no kernels, so a torch without code for the GPU measures too."""
    if not hardware.gpus:
        return Links()
    if not torch.cuda.is_available():
        return Links(not_measured="torch cannot use the GPUs")
    host, errors = [], {}
    count = min(torch.cuda.device_count(), len(hardware.gpus))
    try:
        pinned = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return Links(not_measured=str(error).splitlines()[0])
    usable = {}
    for index in range(count):
        try:
            on_gpu = torch.empty(SIZE, dtype=torch.uint8, device=f"cuda:{index}")
            rates = _rate(on_gpu, pinned), _rate(pinned, on_gpu)
        except RuntimeError as error:
            errors[index] = str(error).splitlines()[0]
            continue
        usable[index] = on_gpu
        folder = pci.DEVICES / hardware.gpus[index].pci
        host.append(HostLink(index, *rates, _lanes(folder / "current_link_width"), _lanes(folder / "max_link_width")))
    peers = [
        PeerLink((one, other), torch.cuda.can_device_access_peer(one, other), _rate(usable[other], usable[one]))
        for one in usable
        for other in usable
        if one < other
    ]
    return Links(tuple(host), tuple(peers), errors=errors)


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    devices = [tensor.device for tensor in (target, source) if tensor.is_cuda]
    best = float("inf")
    for _ in range(ROUNDS):
        for device in devices:
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return SIZE / best


def _lanes(path: Path) -> int | None:
    text = read_text(path, "")
    return int(text) if text.isdigit() and int(text) > 0 else None


def findings(links: Links) -> list[Finding]:
    found = [Finding("warning", "GPUs", f"not measured: {links.not_measured}")] if links.not_measured else []
    found += [Finding("warning", f"GPU {gpu}", f"not measured: {text}") for gpu, text in links.errors.items()]
    found += [_host(link) for link in links.host]
    return found + [_peer(link) for link in links.peers]


def _host(link: HostLink) -> Finding:
    text = f"{link.to_device / 1e9:.1f} GB/s from host memory, {link.to_host / 1e9:.1f} GB/s to it"
    subject = f"GPU {link.gpu}"
    if link.width and link.max_width and link.width < link.max_width:
        text += f"; {link.width} of {link.max_width} PCIe lanes in use"
        return Finding(
            "warning", subject, text, "Put the GPU into a slot with all its lanes; host layers read over it."
        )
    if min(link.to_device, link.to_host) < SLOW:
        text += ", which is slow for host layers"
        return Finding("warning", subject, text, "Check the slot: PCIe 3.0 x16 carries about 12 GB/s.")
    return Finding("OK", subject, text)


def _peer(link: PeerLink) -> Finding:
    subject = f"GPUs {link.gpus[0]}-{link.gpus[1]}"
    if link.direct:
        return Finding("OK", subject, f"{link.rate / 1e9:.1f} GB/s, directly (P2P)")
    text = f"{link.rate / 1e9:.1f} GB/s through host memory: no P2P"
    return Finding("OK", subject, f"{text}; with tensor parallelism, try tiling_all_reduce (doctor --tp)")
