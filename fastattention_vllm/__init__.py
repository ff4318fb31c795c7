"""FastAttention for vLLM: attention for hardware that FlashAttention left behind."""

from fastattention_vllm.attention.functional import fast_attn_func, fast_attn_varlen_func

__version__ = "0.1.0"

__all__ = ["__version__", "fast_attn_func", "fast_attn_varlen_func"]
