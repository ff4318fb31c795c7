"""Host layers beside linear-attention layers."""

from __future__ import annotations

from tests.conformance.hybrid_block_tables import (  # noqa: F401  collected here for the installed vLLM
    test_a_state_fills_less_than_a_block_and_half_a_block_is_too_small,
    test_bytes_and_blocks_are_vllms,
)
