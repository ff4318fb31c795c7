"""The KV cache of host layers: slabs of pages in host memory, indexed by vLLM's own block ids.

vLLM assigns block ids to block tables (its KV cache groups); a model with one kind of layer has one table. Layers of
different tables never use the same block at the same time. So the first host layers of all tables share the first slab,
the second ones share the second slab, and so on, as vLLM does on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fastattention_vllm.attention.cpu import memory as cpu_memory
from fastattention_vllm.placement import host_memory, stored_rows
from fastattention_vllm.placement.host_memory import GIB
from fastattention_vllm.placement.pinning import Pinning


@dataclass(frozen=True)
class PageShape:
    """The shape of one layer's cache, in kernel blocks (vLLM's blocks may be larger)."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        tokens = self.num_blocks * self.block_size
        return tokens * self.num_kv_heads * stored_rows.token_bytes(self.head_size, self.dtype)


@dataclass(frozen=True)
class HostPool:
    """The memory of host layers, and its placement."""

    memory: torch.Tensor
    """uint8, all of it."""
    caches: Mapping[str, torch.Tensor]
    """By layer name: contiguous, in the shape of :func:`stored_rows.page_shape`."""
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
    say: Callable[[str], object] = lambda line: None,
) -> HostPool:
    """Allocate, place and (if there is a device) pin the memory of all host layers.

    Args:
        shapes: the shape of each layer, by name.
        slabs: the slab of each layer (:func:`assign_slabs`).
        budget: limit in bytes.
        nodes: NUMA nodes for the memory; several nodes are interleaved.
        pin: pins the memory for the device, so that copies run at full speed.
        say: called with a line of text every few seconds.

    Raises:
        MemoryError: more than ``budget``, more than the machine has, or more than can be pinned; one sentence.
    """
    sizes = [0] * (1 + max(slabs.values()))
    for name, shape in shapes.items():
        sizes[slabs[name]] = max(sizes[slabs[name]], shape.nbytes)
    total = sum(sizes)
    if total > budget:
        blocks = max(shape.num_blocks for shape in shapes.values())
        raise MemoryError(
            f"the host layers' KV cache needs {total / GIB:.2f} GiB ({blocks} blocks, {len(sizes)} slabs), but "
            f"the limit for host memory is {budget / GIB:.2f} GiB; raise host_kv_gib, or lower the number of blocks"
        )
    try:
        memory, placements = host_memory.commit(total, nodes, pin=pin, say=say)
    except MemoryError as error:
        raise MemoryError(f"the host layers' KV cache needs {total / GIB:.2f} GiB, but {error}") from error
    offsets = [sum(sizes[:slab]) for slab in range(len(sizes))]
    caches = {}
    for name, shape in shapes.items():
        begin = offsets[slabs[name]]
        flat = memory[begin : begin + shape.nbytes].view(shape.dtype)
        caches[name] = flat.view(
            stored_rows.page_shape(shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_size, shape.dtype)
        )
    return HostPool(memory, caches, placements, pin is not None)
