"""How many bytes of KV cache one request takes, as vLLM's block manager counts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastattention_vllm.integration import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PADDING_TOLERATED = 1.5
"""Kinds of layers whose counts are closer than this are padded to the larger one (vLLM's get_kv_cache_groups)."""


@dataclass(frozen=True)
class KvSize:
    """The KV cache of one model on one rank. Layers that share another one's cache are not counted."""

    block_size: int
    """Tokens per block."""
    bytes_per_block: int
    """K and V of one layer's block."""
    full_layers: int
    windowed_layers: int = 0
    window: int = 0
    """Tokens a windowed layer sees."""
    tokens_per_step: int = 0
    """Most tokens of one request that one step computes; a windowed layer holds them beside its window."""

    def of_request(self, tokens: int) -> int:
        """Bytes that a request of ``tokens`` tokens takes, vLLM's null block included."""
        if not self.full_layers + self.windowed_layers:
            return 0
        full, windowed = self._padded_layers()
        in_window = min(self.window - 1 + self.tokens_per_step, tokens)
        # A window seldom begins where a block does: one block more.
        windowed_blocks = min(-(-in_window // self.block_size) + 1, -(-tokens // self.block_size))
        blocks = full * -(-tokens // self.block_size) + windowed * windowed_blocks
        return blocks * self.bytes_per_block + self.null_block()

    def null_block(self) -> int:
        """Bytes of the block that vLLM holds back: it stands for what a windowed layer no longer needs."""
        return self._layers_per_group() * self.bytes_per_block

    def longest_request(self, budget: int) -> int:
        """The most tokens, a multiple of the block size, of one request in ``budget`` bytes; 0 if none fit.

        Windowed layers stop growing; where they are the only ones, there is no longest request and the answer is only
        "more than the budget has blocks".
        """
        low, high = 0, budget // self.bytes_per_block + 1  # in blocks: low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.of_request(middle * self.block_size) <= budget else (low, middle)
        return low * self.block_size

    def _layers_per_group(self) -> int:
        """vLLM gives each group of this many layers one block table; both kinds of layers fill whole groups."""
        counts = sorted(count for count in (self.full_layers, self.windowed_layers) if count)
        return counts[-1] if counts[-1] < PADDING_TOLERATED * counts[0] else counts[0]

    def _padded_layers(self) -> tuple[int, int]:
        group = self._layers_per_group()
        return -(-self.full_layers // group) * group, -(-self.windowed_layers // group) * group


def kv_size_of(vllm_config: VllmConfig) -> KvSize:
    # Not at the top: while vLLM (seen in 0.28) imports that module, it resolves the platform, which imports this one.
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    scheduler = vllm_config.scheduler_config
    text: Any = model.hf_text_config
    layers = model.get_num_layers_by_block_type(parallel) - (getattr(text, "num_kv_shared_layers", None) or 0)
    if model.attn_type == "encoder_only":
        layers = 0
    # A model that alternates without saying which layers have a window is taken to have none.
    window = 0 if getattr(text, "interleaved_sliding_window", None) else model.get_sliding_window() or 0
    kinds = (getattr(text, "layer_types", None) or ["sliding_attention"] * layers)[:layers]
    windowed = sum("sliding" in kind for kind in kinds) if window else 0
    if scheduler.disable_hybrid_kv_cache_manager and windowed < layers:
        windowed = 0  # then vLLM keeps whole sequences for windowed layers too
    dtype = kv_cache_dtype_str_to_dtype(cache.cache_dtype, model)
    heads = model.get_num_kv_heads(parallel)
    return KvSize(
        block_size=cache.block_size,
        bytes_per_block=2 * cache.block_size * heads * model.get_head_size() * dtype.itemsize,
        full_layers=layers - windowed,
        windowed_layers=windowed,
        window=window,
        tokens_per_step=compat.most_tokens_in_flight(vllm_config),
    )
