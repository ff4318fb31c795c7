"""How many bytes of KV cache one request takes, as vLLM's block manager counts them."""

from __future__ import annotations

from dataclasses import dataclass

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
        return self.layers_per_group() * self.bytes_per_block

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

    def groups(self) -> int:
        """Block tables that vLLM keeps for a request."""
        full, windowed = self._padded_layers()
        return (full + windowed) // self.layers_per_group()

    def layers_per_group(self) -> int:
        """vLLM gives each group of this many layers one block table; both kinds of layers fill whole groups."""
        counts = sorted(count for count in (self.full_layers, self.windowed_layers) if count) or [1]
        return counts[-1] if counts[-1] < PADDING_TOLERATED * counts[0] else counts[0]

    def _padded_layers(self) -> tuple[int, int]:
        group = self.layers_per_group()
        return -(-self.full_layers // group) * group, -(-self.windowed_layers // group) * group
