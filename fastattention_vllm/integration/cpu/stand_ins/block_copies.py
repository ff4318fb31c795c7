"""Copies whole blocks where vLLM copies the part of them that a linear-attention layer uses.

Why: with ``--prefix-match-unit`` below the block size, a request that shares a part of a block with another one gets a
copy of it. Layers of different kinds share their blocks' memory. vLLM copies each address once, for the first layer
that begins there. A state is smaller than its block, so the rest of an attention layer's block is lost.
Remove when: vLLM copies the longest view of each address.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def copy_whole_blocks() -> None:
    """Idempotent."""
    from vllm.v1.worker import gpu_model_runner

    gpu_model_runner.copy_kv_cache_blocks_inplace = _longest_views_first


def _longest_views_first(kv_caches: Iterable[torch.Tensor], *what: Any) -> None:
    from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

    copy_kv_cache_blocks_inplace(sorted(kv_caches, key=lambda cache: -cache.nbytes), *what)
