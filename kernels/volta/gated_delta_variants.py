"""The list of kernels for the gated delta rule, like ``variants.py`` for attention. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 64
"""Tokens."""
SIZE = 128
"""Of keys and values."""
MATRICES = 3
"""Of CHUNK x CHUNK, of a chunk and value head, in fp16."""
FACTORS = 4 * CHUNK + 4
"""fp32 numbers of a chunk and value head."""
CONSTANTS = {"chunk": CHUNK, "size": SIZE, "matrices": MATRICES, "factors": FACTORS}
"""What scratch memory and the launcher depend on, besides the structure of ``gated_delta.h``."""


@dataclass(frozen=True, slots=True)
class GatedDeltaVariant:
    """One cubin."""

    kind: str
    """``chunk`` or ``scan``."""
    warps: int
    ctas_per_sm: int
    values: int
    """Of a head, in a CTA; 0 for the kernel of chunks, which has none."""
    architecture: int = 70

    @property
    def source(self) -> str:
        return f"gated_delta_{self.kind}.cu"

    @property
    def kernel(self) -> str:
        return f"fa_volta_gated_delta_{self.kind}"

    @property
    def name(self) -> str:
        return f"gated_delta_{self.kind}" + f"_v{self.values}" * bool(self.values)

    @property
    def defines(self) -> dict[str, str | int]:
        return {"WARPS": self.warps, "BLOCKS_PER_SM": self.ctas_per_sm}

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        tiles = 2 * 2 * CHUNK * SIZE  # keys and queries
        if self.kind == "chunk":
            return tiles + 4 * 5 * CHUNK
        return tiles + 2 * CHUNK * self.values + 2 * MATRICES * CHUNK * CHUNK + 4 * FACTORS

    def image(self, suffix: str) -> str:
        """The file name of its image. ``suffix``: ``cubin`` or ``ptx``."""
        return f"{self.name}.sm_{self.architecture}.{suffix}"


CHUNKS = GatedDeltaVariant("chunk", warps=4, ctas_per_sm=2, values=0)
SCANS = tuple(GatedDeltaVariant("scan", warps=values // 16, ctas_per_sm=1, values=values) for values in (64, 128))
ALL = (CHUNKS, *SCANS)


def describe(variant: GatedDeltaVariant) -> dict[str, str | int]:
    """The manifest's entry for a variant, which the launcher reads."""
    names = ("kind", "kernel", "values", "threads", "shared_bytes", "ctas_per_sm", "architecture")
    return {"name": f"{variant.name}.sm_{variant.architecture}"} | {name: getattr(variant, name) for name in names}
