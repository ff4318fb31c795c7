"""Chooses the host layers: passes the options, the model and the memory to ``placement.plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastattention_vllm.integration import drafter, support
from fastattention_vllm.integration.compat import BACKEND_NAME
from fastattention_vllm.integration.kv_size import kv_size_of, layers_of
from fastattention_vllm.integration.options import decide_host_layers, options_of
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.support import FP8_CACHES
from fastattention_vllm.placement.budget import host_kv_bytes
from fastattention_vllm.placement.host_memory import GIB, available_bytes
from fastattention_vllm.placement.kv_size import KvSize
from fastattention_vllm.placement.plan import LayerPlacement, Layers, Limits, PlacementError, plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check(vllm_config: VllmConfig) -> None:
    """Refuse features that ignore, or would lose, a KV cache outside vLLM's own cache.

    Raises:
        Refusal: names the flag to change.
    """
    # Not at the top: this module is imported while vLLM resolves its platform.
    from vllm import envs

    cache, parallel, attention = vllm_config.cache_config, vllm_config.parallel_config, vllm_config.attention_config
    refused = {
        "a KV connector": (
            vllm_config.kv_transfer_config is not None or getattr(cache, "kv_offloading_size", None) is not None,
            "it would transfer only the device layers' part of the cache",
            "remove --kv-transfer-config and --kv-offloading-size",
        ),
        "sleep mode": (
            vllm_config.model_config.enable_sleep_mode,
            "it would not release the host layers' memory",
            "remove --enable-sleep-mode",
        ),
        "--kv-sharing-fast-prefill": (
            cache.kv_sharing_fast_prefill,
            "it would skip the prompts of host layers",
            "remove it",
        ),
        "data parallelism": (
            parallel.data_parallel_size > 1,
            "fastattention divides the host's memory and CPUs among the ranks of a single engine",
            "start one server per replica",
        ),
        "pipeline parallelism": (
            parallel.pipeline_parallel_size > 1,
            "the division into host and device layers is tested for engines whose ranks hold all layers",
            "use --tensor-parallel-size instead",
        ),
        "--prefix-match-unit below the block size, beside linear-attention layers,": (
            vllm_config.model_config.is_hybrid
            and 0 < (getattr(cache, "prefix_match_unit", None) or 0) < cache.block_size,
            "a request that shares a part of a block gets a copy of it, which vLLM makes in its own cache only",
            "remove it",
        ),
        "another backend in --attention-config.backend_per_kind": (
            any(one.name != BACKEND_NAME for one in getattr(attention, "backend_per_kind", {}).values()),
            "a host layer needs this package's backend",
            f"name only {BACKEND_NAME} there",
        ),
        "--enable-dbo": (
            getattr(parallel, "enable_dbo", False) or getattr(parallel, "ubatch_size", 0) > 1,
            "host layers compute a whole batch at a time",
            "remove it and --ubatch-size",
        ),
        "VLLM_BATCH_INVARIANT": (
            envs.VLLM_BATCH_INVARIANT,
            "what the CPU computes of a request depends on the others of its batch",
            "unset it",
        ),
        "a drafter with KV heads of another number or size": (
            drafter.model_of(vllm_config) is not None and not drafter.has_equal_layers(vllm_config),
            "vLLM then has no block table that layers of the model can share",
            "use a drafter with as many KV heads and the same head size as the model",
        ),
        "adaptive verification": (
            getattr(getattr(vllm_config, "speculative_config", None), "enable_adaptive_verification", False),
            "a step is divided by the lengths that the host has, which differ from the device's",
            "turn it off in --speculative-config",
        ),
        "context parallelism": (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "a host layer holds all tokens of its KV heads",
            "use --tensor-parallel-size instead",
        ),
    }
    for name, (asked, why, instead) in refused.items():
        if asked:
            raise Refusal(f"{name} is not supported with host layers: {why}; {instead}, or set host_kv_layers to 0.")
    stored = options_of(vllm_config).host_kv_dtype
    dtype = support.kv_cache_dtype(vllm_config) if stored != "auto" else "auto"
    if dtype in FP8_CACHES:
        named = support.name_of_cache(dtype, vllm_config)
        instead = "remove one of the two" if named.startswith("--") else "set host_kv_dtype to auto"
        raise Refusal(
            f"host_kv_dtype is {stored}, but {named} already stores the keys and values of all layers in 8 bits; "
            f"{instead}."
        )


def plan_without_gpu(vllm_config: VllmConfig) -> LayerPlacement:
    """Choose the host layers in the API server, where all numbers are known and an error is one sentence.

    Raises:
        Refusal: the model has no such layers.
    """
    wanted, layers = options_of(vllm_config).host_kv_layers, layers_of(vllm_config)
    # All memory is host memory, so "auto" uses no host layers: a second pool would add no capacity.
    placement = plan_layers(layers, vllm_config, 0 if wanted == "auto" else wanted, Limits(0, 0, 0))
    decide_host_layers(vllm_config, list(placement.host))
    if placement.host:
        check(vllm_config)
    return placement


def length_is_automatic(vllm_config: VllmConfig) -> bool:
    """``--max-model-len auto``: the length is fitted to the cache, not the cache to the length."""
    automatic: bool = vllm_config.model_config.original_max_model_len == -1
    return automatic


def longest_request(placement: LayerPlacement, vllm_config: VllmConfig, kv_bytes: int, weight_bytes: int) -> int:
    """The longest request, in tokens, for ``kv_bytes`` on the device and the host layers' limit of host memory.

    Args:
        placement: the same on all ranks.
        kv_bytes: bytes per rank that are not allocated yet.
        weight_bytes: bytes of all ranks together that are not in memory yet.

    Raises:
        Refusal: host_kv_gib is too small for any request.
    """
    if not placement.host:
        return placement.device_size.longest_request(kv_bytes)
    asked, ranks = options_of(vllm_config).host_kv_gib, vllm_config.parallel_config.local_world_size
    budget = host_budget(asked, ranks, kv_bytes + weight_bytes // ranks)
    longest = placement.device_size.longest_request(placement.usable(kv_bytes, budget))
    if not longest:
        raise Refusal(
            f"the limit for host memory is {budget / GIB:.2f} GiB, in which the {len(placement.host)} host layers "
            f"cannot hold one block of {placement.device_size.block_size} tokens; raise host_kv_gib."
        )
    return longest


def plan_layers(layers: Layers, vllm_config: VllmConfig, wanted: Any, limits: Limits) -> LayerPlacement:
    try:
        return plan(layers, size_of(layers, vllm_config), wanted, limits)
    except PlacementError as error:
        raise Refusal(str(error)) from error


def size_of(layers: Layers, vllm_config: VllmConfig) -> KvSize:
    """Of all layers, as if none was on the host."""
    return kv_size_of(vllm_config, layers)


def host_budget(asked_gib: float | None, local_ranks: int, spoken_for: int) -> int:
    """Limit of one rank's host memory in bytes: the user's value, or half of what remains free.

    ``spoken_for``: bytes that this rank will still allocate for other purposes.
    """
    if asked_gib is not None:
        return int(asked_gib * GIB)
    return host_kv_bytes(available_bytes() // local_ranks, spoken_for)
