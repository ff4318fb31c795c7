"""Chooses the size of the KV cache for this machine's memory."""

from __future__ import annotations

import os
from pathlib import Path

from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.placement.host_memory import GIB, available_bytes
from fastattention_vllm.placement.kv_size import KvSize

DEFAULT_KV_BYTES = 4 * GIB
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"


def checkpoint_bytes(model: str) -> int:
    """Size of the weights in a local model directory, which share memory with the KV cache; 0 if it is not local."""
    files = (path for suffix in ("safetensors", "bin") for path in Path(model).glob(f"*.{suffix}"))
    return sum(path.stat().st_size for path in files)


def kv_bytes_per_rank(
    requested: int | None,
    size: KvSize,
    max_model_len: int | None,
    weight_bytes: int,
    ranks: int,
) -> int:
    """KV cache bytes per rank: the user's value, or a default that fits this machine.

    The default is 4 GiB over all ranks, but at most a quarter of the memory that the weights leave. If one request of
    ``max_model_len`` tokens needs more, it is up to half of that memory. vLLM's own default (92 % of all RAM) aborts on
    a busy machine.

    Args:
        requested: ``--kv-cache-memory-bytes``, or None.
        size: the size of a request on one rank.
        max_model_len: maximum tokens of one request; None if vLLM fits it to the cache.
        weight_bytes: bytes of the checkpoint, over all ranks.
        ranks: number of processes that share this machine's memory.

    Raises:
        Refusal: one request of ``max_model_len`` does not fit; names the largest length that does. Or the user's value
            is more than the free memory: Linux would end the process while it fills the cache.
    """
    one_request = 0 if max_model_len is None else size.of_request(max_model_len)
    available = max(0, available_bytes() - weight_bytes) // ranks
    space = os.environ.get(KV_SPACE)  # in vLLM, this variable has priority over the option
    option = KV_SPACE if space else "--kv-cache-memory-bytes"
    if requested is not None:
        if requested > available and size.of_request(1):
            raise Refusal(
                f"{option} {space or requested} is {_size(requested)} of KV cache per rank, but only "
                f"{_size(available)} per rank remain free after the weights; lower {option}, or give this server more "
                "memory."
            )
        budget, source = requested, f"{option} {space or requested} is"
    else:
        budget = max(min(DEFAULT_KV_BYTES // ranks, available // 4), min(one_request, available // 2))
        source = f"half of the {_size(available)} that remain free after the weights is"
    if one_request > budget:
        fits = size.longest_request(budget)
        shorter = f"pass --max-model-len {fits} or less, or " if fits > 0 else ""
        raise Refusal(
            f"one request of max_model_len {max_model_len} needs {_size(one_request)} of KV cache per rank, but "
            f"{source} {_size(budget)}; {shorter}raise {option}."
        )
    return budget


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / (1 << 20):.2f} MiB"
