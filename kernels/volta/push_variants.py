"""The list of kernels that sum over GPUs by push, like ``variants.py`` for attention. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

NUMBERS = ("fp16", "bf16", "fp32")
"""The types of numbers. An index is the type's number in ``push.cu``."""
MOST_RANKS = 8
CHUNK_BYTES = 8
CONSTANTS = {"most_ranks": MOST_RANKS, "chunk_bytes": CHUNK_BYTES}
"""What boards and launches depend on, besides the structure of ``push.h``."""


@dataclass(frozen=True, slots=True)
class PushVariant:
    """One cubin."""

    number: str
    """One of ``NUMBERS``."""
    threads: int = 128
    """Of a CTA."""
    source: str = "push.cu"
    kernel: str = "fa_volta_push"
    ctas_per_sm: int = 1
    architecture: int = 70
    shared_bytes: int = 0

    @property
    def name(self) -> str:
        return f"push_{self.number}"

    @property
    def defines(self) -> dict[str, str | int]:
        return {"NUMBER": NUMBERS.index(self.number), "THREADS": self.threads}

    def image(self, suffix: str) -> str:
        """The file name of its image. ``suffix``: ``cubin`` or ``ptx``."""
        return f"{self.name}.sm_{self.architecture}.{suffix}"


ALL = tuple(map(PushVariant, NUMBERS))


def describe(variant: PushVariant) -> dict[str, str | int]:
    """The manifest's entry for a variant, which the launcher reads."""
    names = ("kernel", "number", "threads", "architecture")
    return {"name": f"{variant.name}.sm_{variant.architecture}"} | {name: getattr(variant, name) for name in names}
