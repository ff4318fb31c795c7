"""What attention computes: one problem description and the kernel families that solve it."""

from __future__ import annotations

from fastattention_vllm.attention.kernels import kernels_for

__all__ = ["kernels_for"]
