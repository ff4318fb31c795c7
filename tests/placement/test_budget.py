"""How much memory the KV cache may take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.placement.budget import (
    NUM_BUFFERS,
    STAGING_BYTES,
    WORKSPACE,
    activation_bytes,
    device_kv_bytes,
    host_kv_bytes,
)

GIB = 1 << 30


def test_what_a_device_has_left() -> None:
    assert device_kv_bytes(32 * GIB, 10 * GIB, GIB, 0.5) == 5 * GIB - WORKSPACE - NUM_BUFFERS * STAGING_BYTES
    assert device_kv_bytes(8 * GIB, 10 * GIB, GIB, 0.9) == 0, "not less than nothing"


def test_activations_of_an_8b_model_on_two_ranks() -> None:
    found = activation_bytes(
        tokens=8192, sequences=256, hidden=4096, intermediate=14336, vocabulary=128256, heads=16, head_size=128, ranks=2
    )
    rows = 2 * 8192 * (4 * 4096 + 3 * 14336 // 2)
    assert found == rows + 8 * 256 * 128256 + 12 * 8192 * 16 * 128


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_host_layers_take_half_of_what_remains(available: int, spoken_for: int) -> None:
    assert host_kv_bytes(available, spoken_for) == max(0, (available - spoken_for) // 2)
