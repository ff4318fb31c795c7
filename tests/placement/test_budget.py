"""How much memory the KV cache may take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.attention.volta import launch
from fastattention_vllm.placement.budget import (
    NUM_BUFFERS,
    STAGING_BYTES,
    WORKSPACE,
    activation_bytes,
    decoding_bytes,
    device_kv_bytes,
    host_kv_bytes,
)
from kernels.volta import variants

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


@pytest.mark.parametrize("sequences", [256, 1024])
@pytest.mark.parametrize(
    ("head_size", "group", "kv_heads", "longest"),
    [(128, 1, 32, 32768), (128, 4, 8, 131072), (256, 6, 4, 262144), (96, 1, 32, 131072)],
)
def test_parts_of_decoding_are_what_the_backend_allocates(
    head_size: int, group: int, kv_heads: int, longest: int, sequences: int
) -> None:
    found = decoding_bytes(head_size=head_size, group=group, kv_heads=kv_heads, sequences=sequences, longest=longest)
    assert found == 4 * launch.partial_floats(variants.prefill(head_size), group, kv_heads, sequences, longest)
    assert found > 190 << 20


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_host_layers_take_half_of_what_remains(available: int, spoken_for: int) -> None:
    assert host_kv_bytes(available, spoken_for) == max(0, (available - spoken_for) // 2)
