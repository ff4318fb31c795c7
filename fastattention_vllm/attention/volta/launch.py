"""The parameters of a launch of the Volta kernels: parameter blocks, grids, workspaces. Needs no GPU and no torch.

The sources are in ``kernels/volta/src``; ``problem.h`` there defines the structures that are mirrored here. Before an
image is loaded, the mirrored structures are compared with the manifest of the compiled images (``images.py``).
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int32, c_int64, c_uint32, c_uint64
from dataclasses import dataclass

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
DECODE_ROWS = 8
"""Maximum number of packed rows (query tokens times query heads per KV head) in the decode kernel."""
WIDE_ROWS = 32
"""The same in the wide decode kernel."""
VOLTA, TURING = 70, 75
"""The architectures: 10 times the compute capability."""
DECODE_PARTS = 64
"""Maximum number of parts into which a decoding sequence is split."""
LONGEST_PART = 1024
"""Number of keys up to which parts grow for speed alone."""
FEW_CTAS = 64
"""Number of CTAs of a single decoding sequence that is long enough for parts of more than 128 keys."""
SMS = 80
"""Number of SMs of a V100. This number is used on every GPU, so that results do not depend on the GPU."""
PREFILL_WAVES = 4
"""Maximum number of waves for which a prompt's keys are split. This limits the memory of its parts to 21 MB."""
PART_KEYS = 128
"""The fixed cost of a prompt's part, as a number of keys (benchmarks/notes/volta.md)."""
CHUNK = 8
"""fp16 numbers in 16 bytes. Strides are multiples of it."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel, as described by the manifest (``kernels/volta/variants.py``)."""

    name: str
    kind: str
    """``prefill``, ``decode``, ``decode_wide``, ``combine`` or ``write_kv``."""
    kernel: str
    head_size: int
    """0: all head sizes."""
    adjusted: bool
    """Whether it is a prefill kernel with soft cap or ALiBi."""
    cache: str
    """The format of stored keys and values: empty for fp16, otherwise ``e5m2``, ``e4m3`` or ``int8``."""
    architecture: int
    threads: int
    """Threads per CTA."""
    rows: int
    """Packed query rows per CTA."""
    tile: int
    """Number of keys in shared memory at a time, per CTA; in the decode kernel, per warp."""
    ctas_per_sm: int
    shared_bytes: int

    def image(self, suffix: str) -> str:
        """The file name of its image. ``suffix``: ``cubin`` or ``ptx``."""
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
        """Divide like the kernels do."""
        quotient: int = (number * self.multiplier) >> (31 + self.shift)
        return quotient


class AttentionParams(ctypes.Structure):
    """``fastattention::AttentionParams``. Addresses are device addresses; strides are in elements."""

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


def kind_of(max_rows: int) -> str:
    """The kind of kernel for sequences of up to ``max_rows`` packed rows."""
    return "decode" if max_rows <= DECODE_ROWS else "decode_wide" if max_rows <= WIDE_ROWS else "prefill"


def decode_tokens(group: int, speculated: int = 0) -> int:
    """Maximum number of query tokens of a decoding sequence, at least one.

    ``group``: query heads per KV head; ``speculated``: tokens that are proposed for a sequence and step. Sequences with
    such tokens are decoded as well if the wide kernel has enough rows.
    """
    tokens = max(1, DECODE_ROWS // group)
    return max(tokens, 1 + speculated) if (1 + speculated) * group <= WIDE_ROWS else tokens


def min_parts(num_kv_heads: int) -> int:
    """``Split.min_parts`` for decoding."""
    return -(-FEW_CTAS // num_kv_heads)


def part_length(kv_len: int, minimum: int) -> int:
    """Number of keys per part of a decoding sequence. ``problem.h`` has the same function."""
    length = 128
    while DECODE_PARTS * length < kv_len or (length < LONGEST_PART and kv_len >= 2 * length * minimum):
        length *= 2
    below, above = _longer_part(length, minimum)
    return length // 2 * 3 if length < LONGEST_PART and below < kv_len <= above else length


def _longer_part(length: int, minimum: int) -> tuple[int, int]:
    """Above which number of keys, and up to which, parts are half as long again as ``length``."""
    longer = length // 2 * 3
    return longer * (-(-15 * minimum // 16) - 1), longer * (5 * minimum // 4)


def decode_parts(longest: int, minimum: int) -> int:
    """Maximum number of parts of any sequence with at most ``longest`` keys. Shorter ones may have more parts."""
    candidates, length = {max(longest, 1)}, 128
    while length < 2 * longest:
        grows_at = DECODE_PARTS * length + 1
        if length < LONGEST_PART:
            grows_at = min(grows_at, 2 * length * minimum)
        # The last sequence with parts of this length, the last before they are longer, and the last with longer ones.
        ends = (grows_at - 1, *_longer_part(length, minimum))
        candidates.update(max(1, min(longest, grows_at - 1, end)) for end in ends)
        length *= 2
    return max(-(-kv_len // part_length(kv_len, minimum)) for kv_len in candidates)


def prefill_grid(variant: Variant, max_rows: int, num_kv_heads: int, num_seqs: int) -> tuple[int, int, int]:
    """The grid without parts. ``max_rows``: maximum of query tokens times query heads per KV head of a sequence."""
    return num_kv_heads, -(-max_rows // variant.rows), num_seqs


def prefill_parts(variant: Variant, grid: tuple[int, int, int], longest: int) -> int:
    """Number of parts into which the keys of each block of rows are split, so that few CTAs keep the GPU busy.

    It is 1 if ``grid`` fills the GPU one and a half times, otherwise the number with the lowest cost in waves of CTAs
    times tiles. ``longest``: maximum number of keys of a sequence. The end of a part depends on the number of CTAs, so
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
    """Number of fp32 elements that hold the means (in fp16) and log-sum-exps of so many rows."""
    return rows * (head_size // 2 + 1)


def bytes_of_means(head_size: int, rows: int) -> int:
    """Offset of the log-sum-exps in a workspace, after the means of so many rows."""
    return 2 * rows * head_size


def partial_floats(
    prefill: Variant, group: int, num_kv_heads: int, max_seqs: int, longest: int, speculated: int = 0
) -> int:
    """Maximum number of fp32 elements that any launch needs for its parts.

    ``prefill``: the V100's variant for this head size; ``group`` and ``speculated``: as in :func:`decode_tokens`;
    ``longest``: maximum number of keys of up to ``max_seqs`` sequences.
    """
    cut = PREFILL_WAVES * SMS * prefill.ctas_per_sm * prefill.rows
    return floats_of_parts(
        prefill.head_size, max(decoding_rows(group, num_kv_heads, max_seqs, longest, speculated), cut)
    )


def decoding_rows(group: int, num_kv_heads: int, max_seqs: int, longest: int, speculated: int = 0) -> int:
    """Maximum number of rows, of all parts together, that decoding needs. As in :func:`partial_floats`."""
    rows = decode_tokens(group, speculated) * group
    parts = decode_parts(longest, min_parts(num_kv_heads))
    return max_seqs * num_kv_heads * parts * (rows if rows <= WIDE_ROWS else 0)


STRUCTURES: tuple[type[ctypes.Structure], ...] = (Divisor, AttentionParams, Split, WriteKv)
"""The structures of ``problem.h``."""


def layout(structure: type[ctypes.Structure]) -> dict[str, tuple[int, int]]:
    """Offset and size of each field in bytes. The key "" holds those of the whole structure."""
    fields = {name: getattr(structure, name) for name, *_ in structure._fields_}
    return {"": (0, ctypes.sizeof(structure))} | {name: (at.offset, at.size) for name, at in fields.items()}


CONSTANTS = {
    "chunk": CHUNK,
    "decode_rows": DECODE_ROWS,
    "wide_rows": WIDE_ROWS,
    "shortest_part": 128,
    "longest_part": LONGEST_PART,
    "max_parts": DECODE_PARTS,
    "bytes_of_mean": 2,
    "bytes_of_lse": 4,
}
"""The constants that :func:`part_length`, :func:`floats_of_parts` and :func:`bytes_of_means` depend on."""
