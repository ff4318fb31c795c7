"""The KV cache bytes of one request, counted like vLLM's block manager."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

PADDING_TOLERATED = 1.5
"""If the kinds' layer counts differ by less than this factor, vLLM pads to the larger (get_kv_cache_groups)."""

HOST_DTYPES = ("fp8_e4m3", "fp8_e5m2", "int8")
"""The 8-bit dtypes in which host layers can store keys and values."""
FACTOR_BYTES = 4
"""An int8 row of one token and KV head has a factor of this size."""


def host_token_bytes(head_size: int, dtype: str) -> int:
    """Bytes of one token's K and V of one KV head in a dtype of :data:`HOST_DTYPES`."""
    return 2 * (head_size + (FACTOR_BYTES if dtype == "int8" else 0))


@dataclass(frozen=True)
class KvSize:
    """The KV cache of one model on one rank, without layers that share another layer's cache."""

    block_size: int
    """Tokens per block."""
    bytes_per_block: int
    """K and V of one layer's block."""
    full_layers: int
    windowed_layers: int = 0
    window: int = 0
    """Number of tokens that a windowed layer sees, if all of them see the same number."""
    tokens_per_step: int = 0
    """Maximum number of tokens of one request per step. A windowed layer holds them in addition to its window."""
    state_layers: int = 0
    """Linear-attention layers. Each keeps a state of constant size, which vLLM pads to one block."""
    state_blocks: int = 0
    """States that a request keeps in each of these layers, in blocks."""
    draft_layers: int = 0
    """Full-attention layers of a speculative decoder's drafter, of the same size. They always stay on the device."""
    draft_bytes: int = 0
    """Bytes of a block in all of the drafter's layers, if these have another size, beside full attention alone."""
    host_bytes_per_block: int | None = None
    """``bytes_per_block`` of a layer in host memory, where that differs."""
    windows: tuple[int, ...] = ()
    """The window of each windowed layer, if these differ; otherwise empty. Each length is a kind of its own."""

    def __post_init__(self) -> None:
        assert len(self.windows) in (0, self.windowed_layers)

    def windowed(self) -> dict[int, int]:
        """Number of layers for each length of window."""
        return Counter(self.windows) if self.windows else {self.window: self.windowed_layers}

    def of_request(self, tokens: int) -> int:
        """Bytes that a request of ``tokens`` tokens needs, including vLLM's null block."""
        if not self.full_layers + self.windowed_layers + self.draft_layers:
            return 0
        full, states, *windowed = self._padded_layers()
        blocks = full * -(-tokens // self.block_size) + states * self.state_blocks
        blocks += sum(
            count * self._blocks_of_window(window, tokens)
            for window, count in zip(self.windowed(), windowed, strict=True)
        )
        drafted = -(-tokens // self.block_size) * self.draft_bytes
        return blocks * self.bytes_per_block + drafted + self.null_block()

    def _blocks_of_window(self, window: int, tokens: int) -> int:
        in_window = min(window - 1 + self.tokens_per_step, tokens)
        # One more block, because a window rarely begins at the beginning of a block. vLLM asks for it even if the whole
        # request is in the window.
        return -(-in_window // self.block_size) + 1

    def null_block(self) -> int:
        """Bytes of one block, such as vLLM's reserved null block, which replaces those that a window leaves behind."""
        return self.layers_per_group() * self.bytes_per_block + self.draft_bytes

    def longest_request(self, budget: int) -> int:
        """The longest request, in tokens, that fits in ``budget`` bytes: a multiple of the block size, or 0.

        The cache of windowed layers stops growing. If all layers are windowed, length is not limited, and the result
        is only a number of tokens that is larger than the budget's blocks.
        """
        low, high = 0, budget // self.bytes_per_block + 1  # in blocks: low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.of_request(middle * self.block_size) <= budget else (low, middle)
        return low * self.block_size

    def groups(self) -> int:
        """Number of block tables that vLLM keeps for a request."""
        return sum(self._padded_layers()) // self.layers_per_group()

    def states_of_request(self) -> int:
        """Bytes of one request that do not depend on its length, without padding layers."""
        return self.state_layers * self.state_blocks * self.bytes_per_block

    def layers_per_group(self) -> int:
        """Number of layers that share a block table in vLLM. Each kind of layers fills whole groups."""
        counts = sorted(count for count in self._kinds() if count) or [1]
        return counts[-1] if counts[-1] < PADDING_TOLERATED * counts[0] else counts[0]

    def full_tables(self) -> int:
        """Number of block tables of full-attention layers."""
        return -(-self._kinds()[0] // self.layers_per_group())

    def _kinds(self) -> tuple[int, ...]:
        return self.full_layers + self.draft_layers, self.state_layers, *self.windowed().values()

    def _padded_layers(self) -> tuple[int, ...]:
        group = self.layers_per_group()
        return tuple(-(-count // group) * group for count in self._kinds())
