"""Which layers become host layers: the options, the model and the memory, put to ``placement.plan``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastattention_vllm.integration.kv_size import kv_size_of, layers_of
from fastattention_vllm.integration.options import decide_host_layers, options_of
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.placement.host_memory import GIB, available_bytes
from fastattention_vllm.placement.plan import LayerPlacement, Layers, Limits, PlacementError, plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check(vllm_config: VllmConfig) -> None:
    """Refuse what does not see, or would lose, a cache outside vLLM's own.

    Raises:
        Refusal: names the flag to change.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    refused = {
        "a KV connector": (
            vllm_config.kv_transfer_config is not None or getattr(cache, "kv_offloading_size", None) is not None,
            "it would transfer the device layers' part of the cache only",
            "remove --kv-transfer-config and --kv-offloading-size",
        ),
        "sleep mode": (
            vllm_config.model_config.enable_sleep_mode,
            "it would keep the host layers' memory",
            "remove --enable-sleep-mode",
        ),
        "--kv-sharing-fast-prefill": (
            cache.kv_sharing_fast_prefill,
            "it would skip the host layers' prompts",
            "remove it",
        ),
        "data parallelism": (
            parallel.data_parallel_size > 1,
            "the host's memory and CPUs are divided among the ranks of one engine only",
            "start one server per replica",
        ),
        "--enable-dbo": (
            getattr(parallel, "enable_dbo", False),
            "host layers compute a whole batch at a time",
            "remove it",
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


def plan_without_gpu(vllm_config: VllmConfig) -> LayerPlacement:
    """Decide in the API server already, where all numbers are known and a wrong one ends in one sentence.

    Raises:
        Refusal: there are no such layers.
    """
    wanted, layers = options_of(vllm_config).host_kv_layers, layers_of(vllm_config)
    # All memory is the host's: a second pool would hold nothing that vLLM's own cache could not.
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
    """The most tokens of one request in ``kv_bytes`` on the device and in what the host layers may take beside them.

    Args:
        placement: of all ranks.
        kv_bytes: of each rank, not taken yet.
        weight_bytes: of all ranks together, not in memory yet.

    Raises:
        Refusal: host_kv_gib is too little for any.
    """
    if not placement.host:
        return placement.device_size.longest_request(kv_bytes)
    asked, ranks = options_of(vllm_config).host_kv_gib, vllm_config.parallel_config.local_world_size
    budget = host_budget(asked, ranks, kv_bytes + weight_bytes // ranks)
    longest = placement.device_size.longest_request(placement.usable(kv_bytes, budget))
    if not longest:
        raise Refusal(
            f"{budget / GIB:.2f} GiB of host memory may be used, in which the {len(placement.host)} host layers cannot "
            f"hold one block of {placement.device_size.block_size} tokens; raise host_kv_gib."
        )
    return longest


def plan_layers(layers: Layers, vllm_config: VllmConfig, wanted: Any, limits: Limits) -> LayerPlacement:
    size = replace(kv_size_of(vllm_config), full_layers=len(layers.full), windowed_layers=len(layers.windowed))
    try:
        return plan(layers, size, wanted, limits)
    except PlacementError as error:
        raise Refusal(str(error)) from error


def host_budget(asked_gib: float | None, local_ranks: int, spoken_for: int) -> int:
    """Bytes of host memory that one rank may take: what was asked for, else a part that leaves the machine alive.

    ``spoken_for``: bytes that this rank is still going to take for something else.
    """
    if asked_gib is not None:
        return int(asked_gib * GIB)
    return max(0, available_bytes() // local_ranks - spoken_for) // 2
