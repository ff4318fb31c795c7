"""What a launch of the Volta kernels takes: parameter blocks, grids, workspaces. Needs no GPU and no torch.

The sources are ``kernels/volta/src``; ``problem.h`` there has the structures that are mirrored here. What is mirrored
is compared with the manifest of the compiled images before any of them is loaded (:func:`disagreement`).
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int32, c_int64, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
DECODE_ROWS = 8
"""Most packed rows (query tokens times query heads per KV head) of the decode kernel."""
VOLTA, TURING = 70, 75
"""Architectures: 10 times the compute capability."""
DECODE_PARTS = 64
"""The most parts that a sequence is cut into to be decoded."""
LONGEST_PART = 1024
"""Keys up to which parts grow for speed alone."""
FEW_CTAS = 64
"""A sequence that is decoded alone has as many, if it is long enough for parts of more than 128 keys."""
SMS = 80
"""Of a V100. Taken on any GPU, so that results do not depend on it."""
PREFILL_WAVES = 4
"""The most that a prompt's keys are cut for: bounds what its parts need of memory, to 21 MB."""
PART_KEYS = 128
"""What a prompt's part costs beside its keys, as a number of keys (benchmarks/NOTES.md)."""
CHUNK = 8
"""Numbers in 16 bytes: strides are multiples of it."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel, as the manifest beside its image describes it (``kernels/volta/variants.py``)."""

    name: str
    kind: str
    """``prefill``, ``decode``, ``combine`` or ``write_kv``."""
    kernel: str
    head_size: int
    """0: of every one."""
    adjusted: bool
    """Prefill with soft cap or ALiBi."""
    cache: str
    """How keys and values are stored: empty for fp16, else ``e5m2``, ``e4m3`` or ``int8``."""
    architecture: int
    threads: int
    """Of a CTA."""
    rows: int
    """Packed query rows of a CTA."""
    tile: int
    """Keys that are in shared memory at a time: of a CTA, in the decode kernel of each warp."""
    ctas_per_sm: int
    shared_bytes: int

    def image(self, suffix: str) -> str:
        """Its file: ``suffix`` is ``cubin`` or ``ptx``."""
        return f"{self.name}.{suffix}"


class Divisor(ctypes.Structure):
    """Divides numbers from 0 to 2^31 - 1: ``(n * multiplier) >> (31 + shift)``."""

    _fields_ = [("divisor", c_uint32), ("multiplier", c_uint32), ("shift", c_uint32)]

    @classmethod
    def by(cls, divisor: int) -> Divisor:
        """``ValueError`` below 1 or above 2^30."""
        if not 1 <= divisor <= 1 << 30:
            raise ValueError(f"a divisor must lie between 1 and 2^30, but is {divisor}.")
        shift = (divisor - 1).bit_length()
        return cls(divisor, -(-(1 << (31 + shift)) // divisor), shift)

    def __call__(self, number: int) -> int:
        """As the kernels do it."""
        quotient: int = (number * self.multiplier) >> (31 + self.shift)
        return quotient


class AttentionParams(ctypes.Structure):
    """``fastattention::AttentionParams``. Addresses are of the device; strides in elements."""

    _fields_ = [
        *((name, c_uint64) for name in ("query", "key", "value", "out", "lse", "query_start_loc", "seq_lens")),
        *((name, c_uint64) for name in ("block_table", "kv_start_loc", "alibi_slopes", "sinks")),
        *((name, c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, c_int64) for name in ("kv_block_stride", "kv_token_stride", "kv_head_stride")),
        *((name, c_int64) for name in ("out_token_stride", "out_head_stride", "lse_token_stride", "lse_head_stride")),
        ("page", Divisor),
        ("group", Divisor),
        ("block_table_stride", c_int32),
        ("window_left", c_int32),
        ("window_right", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("value_scale", c_float),
        ("scale_over_softcap", c_float),
    ]


class Split(ctypes.Structure):
    """``fastattention::Split``."""

    _fields_ = [
        ("problem", AttentionParams),
        ("partial_out", c_uint64),
        ("partial_lse", c_uint64),
        ("parts", Divisor),
        ("rows", c_int32),
        ("min_parts", c_int32),
    ]


class WriteKv(ctypes.Structure):
    """``fastattention::WriteKv``."""

    _fields_ = [
        *((name, c_uint64) for name in ("key", "value", "key_cache", "value_cache", "slot_mapping")),
        *((name, c_int64) for name in ("key_token_stride", "key_head_stride")),
        *((name, c_int64) for name in ("value_token_stride", "value_head_stride")),
        *((name, c_int64) for name in ("block_stride", "page_token_stride", "page_head_stride")),
        *((name, c_int32) for name in ("page_size", "num_kv_heads", "head_size")),
        *((name, c_float) for name in ("key_scale", "value_scale")),
    ]


def min_parts(num_kv_heads: int) -> int:
    """``Split.min_parts`` to decode."""
    return -(-FEW_CTAS // num_kv_heads)


def part_length(kv_len: int, minimum: int) -> int:
    """Keys of one part of a sequence that is decoded; the kernels have it from ``problem.h``."""
    length = 128
    while DECODE_PARTS * length < kv_len or (length < LONGEST_PART and kv_len // (2 * length) >= minimum):
        length *= 2
    return length


def decode_parts(longest: int, minimum: int) -> int:
    """The most of any sequence of at most ``longest`` keys: shorter ones may have more parts than the longest."""
    lengths, length = [max(longest, 1)], 128
    while length < longest:
        grows_at = DECODE_PARTS * length + 1
        if length < LONGEST_PART:
            grows_at = min(grows_at, 2 * length * minimum)
        lengths.append(min(longest, grows_at - 1))
        length *= 2
    return max(-(-kv_len // part_length(kv_len, minimum)) for kv_len in lengths)


def prefill_grid(variant: Variant, max_rows: int, num_kv_heads: int, num_seqs: int) -> tuple[int, int, int]:
    """Where keys are not in parts. ``max_rows``: of any sequence, query tokens times query heads per KV head."""
    return num_kv_heads, -(-max_rows // variant.rows), num_seqs


def prefill_parts(variant: Variant, grid: tuple[int, int, int], longest: int) -> int:
    """Into how many parts the keys of each block of rows are cut, that a launch with few CTAs keeps the GPU busy.

    1 where ``grid`` fills the GPU one and a half times. The number that costs the least time otherwise, in waves of
    CTAs times tiles; ``longest``: keys of any sequence. Where a part ends then depends on how many CTAs there are, so
    the last bits of a result may depend on which other sequences are computed with it.
    """
    at_once = SMS * variant.ctas_per_sm
    ctas, tiles = math.prod(grid), -(-longest // variant.tile)
    if 2 * ctas >= 3 * at_once:
        return 1

    def cost(parts: int) -> int:
        own_tiles = -(-tiles // parts) + (PART_KEYS // variant.tile if parts > 1 else 0)
        return -(-ctas * parts // at_once) * own_tiles

    room = max(1, longest // PART_KEYS)
    limits = [max(1, min(room, waves * at_once // ctas)) for waves in range(1, PREFILL_WAVES + 1)]
    fewest = [-(-tiles // -(-tiles // parts)) for parts in limits]  # for so many tiles in the largest part
    return min((1, *fewest), key=cost)


def floats_of_parts(head_size: int, rows: int) -> int:
    """fp32 numbers that take so many rows' means, in fp16, and log-sum-exps."""
    return rows * (head_size // 2 + 1)


def bytes_of_means(head_size: int, rows: int) -> int:
    """Where in a workspace the log-sum-exps of so many rows begin: behind their means."""
    return 2 * rows * head_size


def partial_floats(prefill: Variant, group: int, num_kv_heads: int, max_seqs: int, longest: int) -> int:
    """fp32 numbers that any launch needs at most for its parts. ``prefill``: the V100's, of this head size; ``group``:
    query heads per KV head; ``longest``: keys of any of up to ``max_seqs`` sequences."""
    tokens = max(1, DECODE_ROWS // group)
    parts = decode_parts(longest, min_parts(num_kv_heads))
    decoding = max_seqs * num_kv_heads * parts * min(DECODE_ROWS, tokens * group)
    cut = PREFILL_WAVES * SMS * prefill.ctas_per_sm * prefill.rows
    return floats_of_parts(prefill.head_size, max(decoding, cut))


STRUCTURES: tuple[type[ctypes.Structure], ...] = (Divisor, AttentionParams, Split, WriteKv)
"""Those of ``problem.h``."""


def layout(structure: type[ctypes.Structure]) -> dict[str, tuple[int, int]]:
    """Of each field, its offset and its size in bytes; under "" those of the whole."""
    fields = {name: getattr(structure, name) for name, *_ in structure._fields_}
    return {"": (0, ctypes.sizeof(structure))} | {name: (at.offset, at.size) for name, at in fields.items()}


CONSTANTS = {
    "chunk": CHUNK,
    "decode_rows": DECODE_ROWS,
    "shortest_part": 128,
    "longest_part": LONGEST_PART,
    "max_parts": DECODE_PARTS,
    "bytes_of_mean": 2,
    "bytes_of_lse": 4,
}
"""What :func:`part_length`, :func:`floats_of_parts` and :func:`bytes_of_means` go by."""


def disagreement(constants: object, structures: object) -> str:
    """What a manifest's ``constants`` and ``structures`` say otherwise than this launcher; empty if nothing.

    Images that were compiled for other arguments or another workspace would read and write elsewhere.
    """
    ours = {structure.__name__: {name: [*at] for name, at in layout(structure).items()} for structure in STRUCTURES}
    pairs: tuple[tuple[str, dict[str, Any], object], ...] = (
        ("constants", CONSTANTS, constants),
        ("structures", ours, structures),
    )
    for kind, here, there in pairs:
        if not isinstance(there, dict):
            return kind
        for name in sorted({*here, *there}):
            if here.get(name) != there.get(name):
                return str(name)
    return ""
