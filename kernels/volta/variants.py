"""The list of kernels: for each, the source, the macros that it is compiled with, and its launch parameters.

Standard library only, because ``make volta`` needs neither torch nor the package that launches the kernels. The
launcher reads the output of :func:`describe` from the manifest in the folder of the images.
"""

from __future__ import annotations

from dataclasses import dataclass

CACHES = ("", "e5m2", "e4m3", "int8")
"""The formats of stored keys and values. An index is the format's number in ``cache.cuh``. The first is fp16."""
HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
DECODE_ROWS = 8
"""Maximum number of packed rows (query tokens times query heads per KV head) in the decode kernel."""
WIDE_ROWS = 32
"""The same in the wide decode kernel, whose warps have ``DECODE_ROWS`` each."""
COMPILER_OPTIONS = ("--device-as-default-execution-space",)
"""Options for NVRTC. Without them, generic lambdas count as host code."""
VOLTA, TURING = 70, 75
"""The architectures: 10 times the compute capability."""
CHUNK = 8
"""fp16 numbers in 16 bytes. Strides are multiples of it."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One cubin."""

    source: str
    kernel: str
    head_size: int
    warps: int
    tile: int
    """Number of keys in shared memory at a time, per CTA; in the decode kernel, per warp."""
    ctas_per_sm: int
    adjusted: bool = False
    """Whether it supports soft cap and ALiBi. The decode kernel always does."""
    cache: str = ""
    """One of ``CACHES``."""
    architecture: int = VOLTA
    paired: bool = False
    """Whether two warps of the prefill kernel share their rows, and each has half of the columns (``pair.cuh``)."""

    @property
    def kind(self) -> str:
        """``prefill``, ``decode``, ``decode_wide``, ``combine`` or ``write_kv``."""
        return self.source.removesuffix(".cu")

    @property
    def name(self) -> str:
        parts = (f"d{self.head_size}" * bool(self.head_size), "adjusted" * self.adjusted, self.cache)
        return "_".join([self.kind, *filter(None, parts)])

    def image(self, suffix: str) -> str:
        """The file name of its image. ``suffix``: ``cubin`` or ``ptx``."""
        return f"{self.name}.sm_{self.architecture}.{suffix}"

    @property
    def defines(self) -> dict[str, str | int]:
        cache: dict[str, str | int] = {"KV_CACHE": CACHES.index(self.cache)}
        if not self.head_size:
            return cache
        shape = {"HEAD_SIZE": self.head_size, "WARPS": self.warps, "BLOCKS_PER_SM": self.ctas_per_sm}
        if self.source != "prefill.cu":
            return cache | shape
        return (
            cache
            | shape
            | {
                "TILE": self.tile,
                "ADJUSTED": int(self.adjusted),
                "PAIRED": int(self.paired),
            }
        )

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows(self) -> int:
        """Packed query rows per CTA."""
        if self.source == "decode.cu":
            return DECODE_ROWS
        if self.source == "decode_wide.cu":
            return WIDE_ROWS
        return (32 if self.head_size <= 128 else 16) * self.warps

    @property
    def shared_bytes(self) -> int:
        if not self.head_size:
            return 0
        row = 16 * self.pitch
        if self.source == "decode.cu":
            return (DECODE_ROWS + self.warps * self.tile) * row
        return (self.rows + 2 * self.tile) * row

    @property
    def pitch(self) -> int:
        """Distance between rows in shared memory in chunks: a power of two, or (decoding, V100) a multiple of 8."""
        if self.source == "decode.cu" and self.architecture == VOLTA and self.head_size > 128:
            return -(-self.head_size // CHUNK // 8) * 8
        return max(8, 1 << (self.head_size // CHUNK - 1).bit_length())


def prefill(head_size: int, *, adjusted: bool = False, cache: str = "", architecture: int = VOLTA) -> Variant:
    """The V100's tiles were chosen with the simulated V100 (benchmarks/notes/volta.md). Turing's are the largest that
    fit into its 64 KiB of shared memory; they have not been timed on a Turing GPU."""
    if head_size <= 64:
        shape = (4, 64, 2)
    elif architecture == TURING:
        shape = (4, 32, 1)
    elif head_size <= 96:
        shape = (4, 32, 2)
    else:
        shape = (8, 32, 1)
    paired = head_size == 256 and architecture == VOLTA
    return Variant("prefill.cu", "fa_volta_prefill", head_size, *shape, adjusted, cache, architecture, paired)


def decode(head_size: int, cache: str = "", architecture: int = VOLTA) -> Variant:
    """The V100 gets small CTAs, as many as registers and memory allow: while one starts or ends, the others read."""
    warps, ctas = 2, {64: 8, 128: 5, 192: 3, 256: 2}.get(head_size, 4)
    if architecture == TURING:
        warps, ctas = 4 if head_size <= 128 else 2, 2 if head_size <= 64 else 1
    return Variant("decode.cu", "fa_volta_decode", head_size, warps, 32, ctas, cache=cache, architecture=architecture)


def decode_wide(head_size: int, cache: str = "", architecture: int = VOLTA) -> Variant:
    """A warp for each ``DECODE_ROWS``. On the V100, the busiest SM has four CTAs of one sequence of 64K keys."""
    warps, ctas = WIDE_ROWS // DECODE_ROWS, 7 if head_size <= 64 else 4 if head_size <= 128 else 2
    if cache and 64 < head_size < 128:  # registers
        ctas = 3
    if architecture == TURING:
        ctas = 4 if head_size <= 64 else 2 if head_size <= 128 else 1
    return Variant(
        "decode_wide.cu", "fa_volta_decode_wide", head_size, warps, 32, ctas, cache=cache, architecture=architecture
    )


def write_kv(cache: str = "") -> Variant:
    """The variant for all head sizes."""
    return Variant("write_kv.cu", "fa_volta_write_kv", 0, 4, 0, 8, cache=cache)


COMBINE = Variant("combine.cu", "fa_volta_combine", 0, 0, 0, 8)
"""The variant for all head sizes, with a thread for each ``CHUNK`` of its numbers."""

VARIANTS = (
    COMBINE,
    *map(write_kv, CACHES),
    *(
        prefill(head_size, adjusted=adjusted, cache=cache, architecture=architecture)
        for architecture in (VOLTA, TURING)
        for cache in CACHES
        for head_size in HEAD_SIZES
        for adjusted in (False, True)
    ),
    *(
        make(head_size, cache, architecture)
        for make in (decode, decode_wide)
        for architecture in (VOLTA, TURING)
        for cache in CACHES
        for head_size in HEAD_SIZES
    ),
)


def describe(variant: Variant) -> dict[str, str | int]:
    """The manifest's entry for a variant, which the launcher reads."""
    return {
        "name": f"{variant.name}.sm_{variant.architecture}",
        "kind": variant.kind,
        "kernel": variant.kernel,
        "head_size": variant.head_size,
        "adjusted": variant.adjusted,
        "cache": variant.cache,
        "architecture": variant.architecture,
        "threads": variant.threads,
        "rows": variant.rows,
        "tile": variant.tile,
        "ctas_per_sm": variant.ctas_per_sm,
        "shared_bytes": variant.shared_bytes,
    }
