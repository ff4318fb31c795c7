"""The plan's bytes and blocks for models with linear-attention layers, against this vLLM's own block tables.

The shapes are those of Qwen3.5-27B and Qwen3.5-35B-A3B in bf16: 48 Gated DeltaNet layers beside 16 full ones, and 30
beside 10. Blocks have the number of tokens that vLLM chooses so that one holds a state: a multiple of 128, or of 16 in
0.19.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from fastattention_vllm.integration import compat
from fastattention_vllm.placement.host_memory import GIB
from fastattention_vllm.placement.kv_size import KvSize
from fastattention_vllm.placement.plan import Layers, Limits, blocks_needed, plan

TOKENS = 262144
HOST_BYTES = 1 << 50


@dataclass(frozen=True)
class Shape:
    layers: int
    kv_heads: int
    value_heads: int
    block_size: int
    alignment: int = 128
    """The block size is a multiple of this."""

    @property
    def full(self) -> tuple[int, ...]:
        """Every fourth layer."""
        return tuple(range(3, self.layers, 4))

    @property
    def page(self) -> int:
        """K and V of one block: 256 elements of 2 bytes per head."""
        return self.block_size * 2 * self.kv_heads * 256 * 2


SHAPES = {
    "27B": Shape(64, 4, 48, 896),
    "27B, 0.19": Shape(64, 4, 48, 784, alignment=16),
    "35B-A3B": Shape(40, 2, 32, 1152),
}
MODES = {"none": ("none", 0), "prefix caching": ("align", 0), "prefix caching and MTP": ("align", 3)}
"""How states are kept, and the number of speculated tokens."""
HOST_LAYERS = {"27B": (0, 1, 8, 12, 15), "27B, 0.19": (0, 8, 12), "35B-A3B": (0, 4, 8, 9)}


def state_spec(shape: Shape, mode: str, drafted: int) -> MambaSpec:
    channels = 2 * 16 * 128 + shape.value_heads * 128
    arguments: dict[str, Any] = {
        "block_size": shape.block_size if mode == "align" else TOKENS,
        "shapes": ((3 + drafted, channels), (shape.value_heads, 128, 128)),
        "dtypes": (torch.bfloat16, torch.float32),
        "page_size_padded": shape.page,
        "mamba_cache_mode": mode,
        "num_speculative_blocks": drafted,
    }
    known = {field.name for field in dataclasses.fields(MambaSpec)}
    return MambaSpec(**{name: value for name, value in arguments.items() if name in known})


def layer_specs(shape: Shape, mode: str, drafted: int) -> dict[str, Any]:
    full = FullAttentionSpec(
        block_size=shape.block_size, num_kv_heads=shape.kv_heads, head_size=256, dtype=torch.bfloat16
    )
    state = state_spec(shape, mode, drafted)
    specs = {f"model.layers.{index}": full if index in shape.full else state for index in range(shape.layers)}
    return specs | ({"mtp.layers.0": full} if drafted else {})


def vllm_config(shape: Shape, mode: str, drafted: int) -> Any:
    """What the grouping of 0.19.1 to 0.32.0 reads of a configuration."""
    cache = SimpleNamespace(
        block_size=shape.block_size,
        mamba_block_size=shape.block_size,
        mamba_cache_mode=mode,
        enable_prefix_caching=mode == "align",
        num_gpu_blocks_override=None,
        num_gpu_blocks=None,
        hash_block_size=None,
        prefix_cache_retention_interval=None,
        cache_dtype="auto",
        gpu_memory_utilization=0.9,
        kv_cache_memory_bytes=None,
    )
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        cache.get_resolved_kv_cache_layout = lambda: KVCacheLayout.LBHNC
    except ImportError:  # <= 0.28
        pass
    one = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    return SimpleNamespace(
        cache_config=cache,
        parallel_config=SimpleNamespace(**one, decode_context_parallel_size=1, prefill_context_parallel_size=1),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=False,
            max_num_batched_tokens=8192,
            max_num_seqs=64,
            max_model_len=TOKENS,
            async_scheduling=True,
        ),
        model_config=SimpleNamespace(
            max_model_len=TOKENS,
            original_max_model_len=TOKENS,
            hf_config=SimpleNamespace(model_type="qwen3_5"),
            use_mla=False,
            is_hybrid=True,
            dtype=torch.bfloat16,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        device_config=SimpleNamespace(device_type="cuda"),
        speculative_config=None,
        kv_transfer_config=None,
        max_in_flight_tokens=8192,
        num_speculative_tokens=drafted,
        num_prefill_lookahead_tokens=0,
    )


CASES = [
    (shape, host, mode)
    for shape in SHAPES
    for host in HOST_LAYERS[shape]
    for mode, (_, drafted) in MODES.items()
    # The states of drafted tokens fit into the larger blocks only.
    if SHAPES[shape].alignment == 128 or not drafted
]


@pytest.mark.parametrize(("name", "host", "how"), CASES)
def test_bytes_and_blocks_are_vllms(name: str, host: int, how: str) -> None:
    shape, (mode, drafted) = SHAPES[name], MODES[how]
    size = KvSize(
        block_size=shape.block_size,
        bytes_per_block=shape.page,
        full_layers=len(shape.full),
        state_layers=shape.layers - len(shape.full),
        state_blocks=1 + (mode == "align") + drafted,
        draft_layers=1 if drafted else 0,
    )
    layers = Layers(shape.full)
    placement = plan(layers, size, host, Limits(0, 0, 0))
    config, specs = vllm_config(shape, mode, drafted), layer_specs(shape, mode, drafted)
    left = {name: spec for name, spec in specs.items() if name not in {f"model.layers.{one}" for one in placement.host}}

    groups = kv_cache_utils.get_kv_cache_groups(config, dict(left))
    device = placement.device_size
    assert len(groups) == device.groups()
    assert max(len(group.layer_names) for group in groups) == device.layers_per_group()
    assert kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups) == (
        device.of_request(TOKENS) - device.null_block()
    )
    available = 20 * GIB + 12345
    (cache,) = kv_cache_utils.get_kv_cache_configs(config, [dict(left)], [available])
    assert cache.num_blocks == placement.max_blocks(available, HOST_BYTES)
    limits = Limits(available, HOST_BYTES, TOKENS)
    assert blocks_needed(placement, limits) <= cache.num_blocks
    # All host layers use the block table of the full layers.
    assert placement.slabs == host


def test_every_block_holds_a_state() -> None:
    """The next smaller block would not."""
    for shape in SHAPES.values():
        state = dataclasses.replace(state_spec(shape, "align", 0), page_size_padded=None).page_size_bytes
        assert shape.page - shape.alignment * shape.page // shape.block_size < state <= shape.page


def test_host_layers_survive_the_pass_over_the_caches_strides() -> None:
    """Up to 0.23. Layer 7 shares the cache of layer 3, and is not among the caches yet."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not hasattr(GPUModelRunner, "_update_hybrid_attention_mamba_layout"):
        pytest.skip("this vLLM has no such pass")
    compat.add_shared_caches_before_layout(GPUModelRunner)
    update: Any = GPUModelRunner._update_hybrid_attention_mamba_layout
    arguments = [[16]] if "kernel_block_sizes" in signature(update).parameters else []
    spec = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=256, dtype=torch.float16)
    backend = SimpleNamespace(get_kv_cache_block_dim=lambda *_, **__: 1)
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[name], backend=backend, kv_cache_group_id=0)
        for name in ("model.layers.3", "model.layers.7")
    ]
    runner = SimpleNamespace(
        _kv_cache_spec_attn_group_iterator=lambda: iter(groups),
        shared_kv_cache_layers={"model.layers.7": "model.layers.3"},
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    cache = torch.zeros(2, 5, 16, 4, 256)
    caches = {"model.layers.3": cache}
    update(runner, caches, *arguments)
    assert caches["model.layers.7"] is cache
    block = 16 * 4 * 256
    assert cache.stride() == (block, 2 * block, 4 * 256, 256, 1), "K and V of a block side by side"
