"""FastAttention for vLLM: attention for hardware that FlashAttention left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastattention_vllm.attention.functional import fast_attn_func, fast_attn_varlen_func

__version__ = "0.1.0"

__all__ = ["__version__", "fast_attn_func", "fast_attn_varlen_func"]


def __getattr__(name: str) -> Any:
    """Import lazily, so that code which only describes kernels, such as their compilation, does not need torch."""
    if name not in ("fast_attn_func", "fast_attn_varlen_func"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fastattention_vllm.attention import functional

    return getattr(functional, name)
