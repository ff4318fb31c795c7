"""Host layers beside linear-attention layers: the plan against vLLM's block tables, and answers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import Platform, current_platform

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.cpu.backend import FastAttentionBackend
from fastattention_vllm.integration.cuda.device import CudaRuntime
from fastattention_vllm.integration.cuda.flash import HostLayerFlashBackend
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.host_layers.accelerator import AcceleratorRuntime
from fastattention_vllm.integration.kv_size import kv_size_of, layers_of
from fastattention_vllm.placement.host_memory import GIB
from fastattention_vllm.placement.stream_split import StreamSplit
from fastattention_vllm.plan.hardware import machine
from fastattention_vllm.plan.memory import Request, plan_memory
from tests import reference_models as reference
from tests.conformance.hybrid_block_tables import (  # noqa: F401  collected here for the installed vLLM
    test_bytes_and_blocks_are_vllms,
    test_every_block_holds_a_state,
)
from tests.hybrid_references import hybrid_answers
from tests.integration.engine import MAX_TOKENS, check, engine, generate
from tests.integration.host_layers.test_placing import layer
from tests.plan.shapes import folder, shape
from tests.reference_models import random_prompts, save_random

needs_replacement = pytest.mark.skipif(
    not compat.has_cpu_linear_attention(), reason="this vLLM's operator for states is not replaced"
)
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}


def config_of_27b(path: Path, **arguments: Any) -> VllmConfig:
    text = json.loads((Path(folder("qwen3.5-27b")) / "config.json").read_text())["text_config"]
    (path / "config.json").write_text(json.dumps(text | {"architectures": ["Qwen3_5ForCausalLM"]}))
    settings: dict[str, Any] = {"attention_backend": "fastattention", "dtype": "bfloat16", "enforce_eager": True}
    settings |= {"kv_cache_memory_bytes": 24 * GIB, "skip_tokenizer_init": True, "max_num_batched_tokens": 8192}
    with mock.patch("fastattention_vllm.integration.cpu.resources.available_bytes", return_value=64 * GIB):
        return EngineArgs(model=str(path), **settings, **arguments).create_engine_config()


@pytest.mark.more
@needs_replacement
@pytest.mark.parametrize(
    ("arguments", "states", "drafts"),
    [({"enable_prefix_caching": False}, 1, 0), ({}, 2, 0), (MTP, 5, 1)],
    ids=["no prefix caching", "prefix caching", "prefix caching and MTP"],
)
def test_the_sizes_of_vllms_configuration_are_the_planners(
    arguments: dict[str, Any], states: int, drafts: int, tmp_path: Path
) -> None:
    """Qwen3.5-27B: `fastattention plan` reads config.json alone, the engine what vLLM makes of it."""
    config = config_of_27b(tmp_path, **arguments)
    planned = plan_memory(shape("qwen3.5-27b"), machine("h200-141g", 1), Request(1 << 18))
    assert layers_of(config) == planned.layers
    assert kv_size_of(config) == dataclasses.replace(planned.size, state_blocks=states, draft_layers=drafts)


@pytest.mark.more
@needs_replacement
@pytest.mark.parametrize("cached", [False, True], ids=["no prefix caching", "prefix caching"])
def test_tokens_and_logprobs_equal_hugging_face(cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two full layers is in host memory, in blocks that vLLM has enlarged."""
    lines: list[str] = []
    monkeypatch.setattr(host_layers.logger, "info", lambda text, *values, **named: lines.append(text % values))
    model, prompts = save_random(reference.qwen3_5(layers=8), tmp_path), random_prompts((1, 31, 65, 130, 300))
    expected = hybrid_answers(model, prompts, MAX_TOKENS)
    options = {"additional_config": {"fastattention": {"host_kv_layers": 1}}}
    with engine(model, block_size=16, enable_prefix_caching=cached, **options) as llm:
        placed = host_layers.find(llm.llm_engine.vllm_config)
        assert placed is not None
        assert placed.placement.host == (7,)
        cache = llm.llm_engine.vllm_config.cache_config
        assert cache.block_size == placed.placement.device_size.block_size == 32
        blocks = placed.placement.max_blocks(cache.kv_cache_memory_bytes, placed.budget)
        assert cache.num_gpu_blocks == blocks
        check(generate(llm, prompts), expected)
        placed.set_stream_split(StreamSplit(1 / 3))
        again = generate(llm, prompts)
        check(again, expected)
    for output in again:
        assert (output.num_cached_tokens >= 32) == (cached and len(output.prompt_token_ids) > 32)
    log = "\n".join(lines)
    assert "6 linear-attention layers keep " in log
    assert f"  {blocks} blocks of 32 tokens; " in log


@needs_replacement
@pytest.mark.skipif(
    "prefix_match_unit" not in {field.name for field in dataclasses.fields(EngineArgs)}, reason="vLLM 0.32 and newer"
)
def test_hits_inside_a_block_are_refused(tmp_path: Path) -> None:
    """vLLM then copies blocks of its own cache, and not those of the pool."""
    host: dict[str, Any] = {"additional_config": {"fastattention": {"host_kv_layers": 1}}}
    with pytest.raises(ValueError, match=r"--prefix-match-unit below the block size, .*; remove it, or set host_kv_la"):
        config_of_27b(tmp_path, prefix_match_unit=128, **host)
    config_of_27b(tmp_path, prefix_match_unit=128)
    config_of_27b(tmp_path, prefix_match_unit=config_of_27b(tmp_path).cache_config.block_size, **host)


@needs_replacement
def test_blocks_are_as_large_on_a_gpu_before_and_after_vllms_own_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is made between the two. One of two layers is on the host."""
    monkeypatch.setattr(AcceleratorRuntime, "prepare", lambda self: None)
    config = config_of_27b(tmp_path, additional_config={"fastattention": {"host_kv_layers": 1}})
    cache = config.cache_config
    cache.block_size, cache.mamba_page_size_padded, cache.user_specified_block_size = 16, None, False
    plain, on_host = layer(), layer()
    on_host.attn_backend = HostLayerFlashBackend
    config.compilation_config.static_forward_context = {"model.layers.3": plain, "model.layers.7": on_host}
    runtime = CudaRuntime.__new__(CudaRuntime)
    runtime.vllm_config, runtime.host_backend = config, HostLayerFlashBackend
    page = 896 * 4096
    with set_current_vllm_config(config):
        runtime.settle_block_size()
        assert (cache.block_size, kv_size_of(config).bytes_per_block) == (896, page)
        runtime.prepare()
        Platform.update_block_size_for_backend.__func__(type(current_platform), config)  # type: ignore[attr-defined]
    assert (cache.block_size, cache.mamba_page_size_padded) == (896, page)


@pytest.mark.more
@needs_replacement
def test_pages_of_the_pool_are_those_of_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLASH_ATTN takes pages of at most 64 tokens beside states in fp32, so vLLM divides its larger blocks."""
    monkeypatch.setattr(FastAttentionBackend, "get_supported_kernel_block_sizes", lambda kv_cache_spec=None: [16])
    # The CPU runner of 0.32 takes the blocks' ids for pages' ids here.
    monkeypatch.setattr("vllm.v1.worker.cpu_model_runner.CPUModelRunner._zero_block_ids", lambda self, ids: None)
    model, prompts = save_random(reference.qwen3_5(layers=8), tmp_path), random_prompts((1, 31, 65, 130, 300))
    expected = hybrid_answers(model, prompts, MAX_TOKENS)
    with engine(model, block_size=16, additional_config={"fastattention": {"host_kv_layers": 1}}) as llm:
        placed = host_layers.find(llm.llm_engine.vllm_config)
        assert placed is not None
        assert placed.pool is not None
        (cache,) = placed.pool.caches.values()
        blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        assert (placed.placement.device_size.block_size, cache.shape[2]) == (32, 16)
        assert cache.shape[0] == 2 * blocks
        for share in (0.0, 1 / 3):
            placed.set_stream_split(StreamSplit(share))
            check(generate(llm, prompts), expected)
