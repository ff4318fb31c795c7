"""Set the instruction set of the CPU kernels in this process; users set FASTATTENTION_CPU_ISA before the start."""

from __future__ import annotations

from fastattention_vllm.attention.cpu.library import check, library


def set_isa(name: str) -> None:
    """Raises ``ValueError`` if the instruction set is not usable here."""
    check(library().fa_cpu_set_isa(name.encode()))
