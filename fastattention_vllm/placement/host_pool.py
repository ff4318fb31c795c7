"""The KV cache of host layers: one slab of pages per layer in host memory, indexed by vLLM's own block ids.

vLLM allots block ids to block tables (its KV cache groups), of which a model with one kind of layer has one. Layers of
different tables never use the same block at a time, so the first host layer of each table shares the first slab, the
second ones the second, and so on, as vLLM does on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fastattention_vllm.attention.cpu import memory as cpu_memory
from fastattention_vllm.placement import host_memory
from fastattention_vllm.placement.host_memory import GIB
from fastattention_vllm.placement.pinning import Pinning


@dataclass(frozen=True)
class PageShape:
    """One layer's part of the cache, as attention sees it: kernel blocks, not vLLM's larger ones."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return 2 * self.num_blocks * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class HostPool:
    """Memory for host layers, and where it lies."""

    memory: torch.Tensor
    """uint8, all of it."""
    caches: Mapping[str, torch.Tensor]
    """By layer name: ``[num_blocks, num_kv_heads, block_size, K | V]``, contiguous."""
    placements: Sequence[cpu_memory.MemoryPlacement]
    pinned: bool


def assign_slabs(tables: Sequence[Sequence[str]]) -> dict[str, int]:
    """The slab of each host layer, given the layers of each block table."""
    return {name: slab for names in tables for slab, name in enumerate(names)}


def create(
    shapes: Mapping[str, PageShape],
    slabs: Mapping[str, int],
    budget: int,
    nodes: Sequence[int] = (),
    *,
    pin: Pinning | None,
) -> HostPool:
    """Commit, place and (beside a device) pin the memory of all host layers.

    Args:
        shapes: of each layer, by name.
        slabs: of each layer (:func:`assign_slabs`).
        budget: bytes that may be taken.
        nodes: NUMA nodes for it; several are used in turn.
        pin: how it is made known to the device, for transfers at full speed.

    Raises:
        MemoryError: more than ``budget``, more than the machine has, or more than may be pinned; one sentence.
    """
    sizes = [0] * (1 + max(slabs.values()))
    for name, shape in shapes.items():
        sizes[slabs[name]] = max(sizes[slabs[name]], shape.nbytes)
    total = sum(sizes)
    if total > budget:
        blocks = max(shape.num_blocks for shape in shapes.values())
        raise MemoryError(
            f"the host layers' KV cache needs {total / GIB:.2f} GiB ({blocks} blocks, {len(sizes)} slabs), but "
            f"{budget / GIB:.2f} GiB of host memory may be used; raise host_kv_gib or lower the number of blocks"
        )
    try:
        memory, placements = host_memory.commit(total, nodes, pin=pin)
    except MemoryError as error:
        raise MemoryError(f"the host layers' KV cache needs {total / GIB:.2f} GiB, but {error}") from error
    offsets = [sum(sizes[:slab]) for slab in range(len(sizes))]
    caches = {}
    for name, shape in shapes.items():
        begin = offsets[slabs[name]]
        flat = memory[begin : begin + shape.nbytes].view(shape.dtype)
        caches[name] = flat.view(shape.num_blocks, shape.num_kv_heads, shape.block_size, 2 * shape.head_size)
    return HostPool(memory, caches, placements, pin is not None)
