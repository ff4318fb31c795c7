"""How much memory host layers and the device's own KV cache may take. Pure functions over numbers."""

from __future__ import annotations

from fastattention_vllm.attention.volta import launch

WORKSPACE = 1 << 30
"""Device memory that "auto" reserves, in addition to activations, for libraries' workspaces and captured graphs."""
STAGING_BYTES = 128 << 20
"""Size of each staging buffer, unless a block is larger. There are two per device, whatever the number of layers."""
NUM_BUFFERS = 2
WIDENED_BYTES = 2 * STAGING_BYTES
"""Device memory for one buffer's keys and values in 16 bits, where host layers store 8."""
HOST_BLOCK = 128
"""Tokens per block on GPUs. With blocks of 16 tokens, the CPU reaches 0.9 of the rate
(benchmarks/notes/host_layers.md)."""


def activation_bytes(
    *,
    tokens: int,
    sequences: int,
    hidden: int,
    intermediate: int,
    vocabulary: int,
    heads: int,
    head_size: int,
    ranks: int,
) -> int:
    """An estimate of one rank's activations in a step of ``tokens`` tokens.

    ``heads`` are the rank's share. All other sizes are the model's.
    """
    wide = 3 * intermediate // ranks
    # A host layer merges partial results in fp32: two of them, and two in the model's dtype.
    merged = 12 * tokens * heads * head_size
    return 2 * tokens * (4 * hidden + wide) + 8 * sequences * vocabulary + merged


def decoding_bytes(*, head_size: int, group: int, kv_heads: int, sequences: int, longest: int) -> int:
    """One rank's memory for the parts of decoding requests with the V100 and Turing kernels, without drafts.

    ``group``: query heads per KV head; ``kv_heads``: the rank's; ``longest``: tokens of a request.
    """
    rows = launch.decoding_rows(group, kv_heads, sequences, longest)
    return 4 * launch.floats_of_parts(head_size, rows)


def device_kv_bytes(total: int, used: int, activations: int, utilization: float) -> int:
    """Device memory that is left for the KV cache, given ``used`` bytes with only the weights loaded."""
    return int(max(0, total * utilization - used - activations - WORKSPACE - NUM_BUFFERS * STAGING_BYTES))


def host_kv_bytes(available: int, spoken_for: int = 0) -> int:
    """Limit of one rank's host layers if the user sets none: half of what remains free.

    ``spoken_for``: bytes that this rank will still allocate for other purposes.
    """
    return max(0, available - spoken_for) // 2
