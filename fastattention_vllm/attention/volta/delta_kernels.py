"""The gated delta rule over prompts by kernels for V100, for heads of 128.

It is the rule of ``gated_delta.py`` in two launches for each segment of tokens. The first computes, for all chunks at
once, what needs no state: the inverse of the triangular matrix, and the weights of a chunk's own tokens. In the second,
one CTA goes through all chunks of a request with a part of one head's state in registers. So keys, queries and values
are read in fp16, and nothing else of their size is written than the output.

``kernels/volta/src/gated_delta.h`` defines the structure that is mirrored here.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_int32, c_uint64
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from fastattention_vllm import cuda_driver
from fastattention_vllm.attention.volta import images
from fastattention_vllm.attention.volta.gated_delta import CHUNK, WORKSPACE_BYTES, refuse_wrong_shapes
from fastattention_vllm.attention.volta.kernels import target
from fastattention_vllm.attention.volta.launch import SMS

SIZE = 128
"""Of keys and values."""
MATRICES = 3
"""Matrices of ``CHUNK`` x ``CHUNK`` in fp16 that the first kernel passes to the second, for each chunk and head."""
FACTORS = 4 * CHUNK + 4
"""Numbers in fp32 that it passes."""
SCRATCH_BYTES = 2 * MATRICES * CHUNK * CHUNK + 4 * FACTORS
"""Of a chunk and value head."""
ALIGNED = 16
"""Bytes. Rows of queries, keys and values begin at multiples of it."""
CONSTANTS = {"chunk": CHUNK, "size": SIZE, "matrices": MATRICES, "factors": FACTORS}


class GatedDelta(ctypes.Structure):
    """``fastattention::GatedDelta``."""

    _fields_ = [
        *((name, c_uint64) for name in ("q", "k", "v", "g", "beta", "before", "after", "out")),
        *((name, c_uint64) for name in ("matrices", "factors", "chunks", "pieces")),
        *((name, c_int32) for name in ("key_heads", "value_heads")),
        *((name, c_int32) for name in ("q_stride", "k_stride", "v_stride", "out_stride", "normalise")),
    ]


STRUCTURES = (GatedDelta,)


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel, as described by the manifest (``kernels/volta/gated_delta_variants.py``)."""

    name: str
    kind: str
    """``chunk`` or ``scan``."""
    kernel: str
    values: int
    """Of a head, in a CTA of the scan."""
    threads: int
    shared_bytes: int
    ctas_per_sm: int
    architecture: int

    def image(self, suffix: str) -> str:
        """The file name of its image. ``suffix``: ``cubin`` or ``ptx``."""
        return f"{self.name}.{suffix}"


@dataclass(frozen=True)
class Segment:
    """Chunks that are computed together.

    ``chunks``: int32 ``[chunks, 2]``, the first token of each, and its end.
    ``pieces``: int32 ``[pieces, 4]``, of each request: the first token in this segment, the end, the number of its
    first chunk in the segment, and the request.
    """

    chunks: torch.Tensor
    pieces: torch.Tensor


class Plan:
    """The segments of a batch, which follow each other.

    Args:
        starts: the first token of each request, and the end of the last.
        at_once: chunks of a segment, at most.
        device: where the segments are to be.
    """

    def __init__(self, starts: Sequence[int], at_once: int, device: torch.device) -> None:
        self.requests, self.total = len(starts) - 1, starts[-1]
        self.segments: list[Segment] = []
        chunks, pieces = list[tuple[int, int]](), list[tuple[int, int, int, int]]()

        def finish() -> None:
            if chunks:
                tables = (torch.tensor(table, dtype=torch.int32).to(device) for table in (chunks, pieces))
                self.segments.append(Segment(*tables))
                chunks.clear()
                pieces.clear()

        spans = list(enumerate(pairwise(starts)))
        # CTAs of the longest requests start first, so that the last ones are short.
        for request, (first, end) in sorted(spans, key=lambda span: span[1][0] - span[1][1]):
            while first < end:
                if len(chunks) == at_once:
                    finish()
                until = min(end, first + CHUNK * (at_once - len(chunks)))
                pieces.append((first, until, len(chunks), request))
                chunks += [(at, min(at + CHUNK, until)) for at in range(first, until, CHUNK)]
                first = until
        finish()


def chunks_at_once(value_heads: int) -> int:
    """Chunks whose scratch memory has ``WORKSPACE_BYTES``."""
    return max(1, WORKSPACE_BYTES // (SCRATCH_BYTES * value_heads))


def fits(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernels compute heads like those of ``q`` and ``v``."""
    return q.dtype == v.dtype == torch.float16 and q.shape[-1] == v.shape[-1] == SIZE


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    plan: Plan,
    *,
    normalise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like the function of this name in ``gated_delta.py``, with ``plan`` instead of its schedule.

    q, k and v are fp16; they are copied if heads do not follow each other, or rows are not 16 bytes aligned. Keys are
    at most 1 long, or ``normalise`` makes them so. Values and states are numbers of fp16's range, below 65504.

    Runs on torch's current stream, without synchronisation.
    """
    refuse_wrong_shapes(q, k, v, g, beta, states, plan.requests, plan.total)
    if not fits(q, v) or k.dtype != q.dtype:
        raise ValueError(
            f"Heads of {q.shape[2]} and {v.shape[2]} in {q.dtype} do not fit the kernels, which have {SIZE} in float16."
        )
    q, k, v = map(_aligned, (q, k, v))
    g, beta = (x.float().contiguous() for x in (g, beta))
    after = states.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    heads = v.shape[1]
    most = max((len(segment.chunks) for segment in plan.segments), default=0)
    matrices = q.new_empty(most * heads * MATRICES * CHUNK * CHUNK)
    factors = g.new_empty(most * heads * FACTORS)
    stream = torch.cuda.current_stream(q.device).cuda_stream
    for segment in plan.segments:
        argument = GatedDelta(
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            g=g.data_ptr(),
            beta=beta.data_ptr(),
            before=after.data_ptr(),
            after=after.data_ptr(),
            out=out.data_ptr(),
            matrices=matrices.data_ptr(),
            factors=factors.data_ptr(),
            chunks=segment.chunks.data_ptr(),
            pieces=segment.pieces.data_ptr(),
            key_heads=k.shape[1],
            value_heads=heads,
            q_stride=q.stride(0),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            out_stride=out.stride(0),
            normalise=normalise,
        )
        chunk, scan = _variant("chunk", 0), scan_for(heads * len(segment.pieces))
        for variant, grid in (
            (chunk, (heads, len(segment.chunks), 1)),
            (scan, (heads * (SIZE // scan.values), len(segment.pieces), 1)),
        ):
            _kernel(variant).launch(grid, (variant.threads, 1, 1), variant.shared_bytes, argument, stream)
    return out, after


def _aligned(x: torch.Tensor) -> torch.Tensor:
    follows = x.stride(2) == 1 and x.stride(1) == SIZE
    if follows and x.stride(0) % (ALIGNED // 2) == 0 and x.data_ptr() % ALIGNED == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def scan_for(heads: int) -> Variant:
    """The scan that takes the fewest values at a time without a second wave of CTAs. ``heads``: of all requests."""
    slices = 2 if 2 * heads <= SMS else 1
    return _variant("scan", SIZE // slices)


def load() -> None:
    """Load all kernels.

    Raises:
        ImageError: the kernels are not built, or do not match this code.
        DriverError: the driver cannot load them.
    """
    for variant in variants(images.IMAGES):
        _kernel(variant)


@functools.cache
def variants(folder: Path) -> tuple[Variant, ...]:
    """The compiled kernels in ``folder``. Raises ``ImageError`` like :func:`load`."""
    return tuple(images.described(folder, "gated_delta", Variant, STRUCTURES, CONSTANTS))


def _variant(kind: str, values: int) -> Variant:
    return next(one for one in variants(images.IMAGES) if (one.kind, one.values) == (kind, values))


def _kernel(variant: Variant) -> cuda_driver.Kernel:
    return _loaded(variant, target().suffix)


@functools.cache
def _loaded(variant: Variant, suffix: str) -> cuda_driver.Kernel:
    return images.load(images.IMAGES, variant, suffix)
