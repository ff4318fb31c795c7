"""Rotary position embedding against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.cpu.rotary import rotate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
POSITIONS = 50


def table(rotary_size: int, dtype: torch.dtype) -> torch.Tensor:
    angles = torch.arange(POSITIONS)[:, None] * 100.0 ** -(torch.arange(rotary_size // 2) / (rotary_size // 2))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


def expected(states: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, first: int) -> torch.Tensor:
    """``states [tokens, heads, head size]`` as complex numbers times those of the table."""
    result, half = states.double().clone(), cos_sin.shape[1] // 2
    cos, sin = cos_sin.double()[positions].chunk(2, dim=-1)
    x = torch.complex(result[..., first : first + half], result[..., first + half : first + 2 * half])
    turned = x * torch.complex(cos, sin)[:, None]
    result[..., first : first + half], result[..., first + half : first + 2 * half] = turned.real, turned.imag
    return result


def close(ours: torch.Tensor, exact: torch.Tensor, states: torch.Tensor) -> bool:
    rounding = torch.finfo(ours.dtype).eps / 2 * exact.abs() + 2**-23 * states.double().abs().sum(dim=-1, keepdim=True)
    return bool(((ours.double() - exact).abs() <= rounding).all())


def random_states(tokens: int, heads: int, head_size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, heads, head_size, generator=torch.Generator().manual_seed(heads)).to(dtype)


def check(
    tokens: int,
    heads: int,
    kv_heads: int,
    half: int,
    before: int,
    after: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> None:
    head_size, cos_sin = before + 2 * half + after, table(2 * half, cache_dtype)
    positions = torch.randint(POSITIONS, (tokens,), generator=torch.Generator().manual_seed(tokens))
    query, key = (random_states(tokens, count, head_size, dtype) for count in (heads, kv_heads))
    both = torch.cat((query.flatten(1), key.flatten(1)), dim=-1)  # as a model's projection has them
    rotate(
        positions,
        both[:, : heads * head_size],
        both[:, heads * head_size :],
        head_size,
        cos_sin,
        first_dimension=before,
    )
    ours = both.view(tokens, heads + kv_heads, head_size)
    for part, states in ((ours[:, :heads], query), (ours[:, heads:], key)):
        assert close(part, expected(states, positions, cos_sin, before), states)


@given(
    tokens=st.integers(0, 9),
    heads=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    half=st.integers(1, 40),
    before=st.integers(0, 20),
    after=st.integers(0, 20),
    dtype=st.sampled_from(DTYPES),
    cache_dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=100, deadline=None)
def test_any_shape(
    tokens: int,
    heads: int,
    kv_heads: int,
    half: int,
    before: int,
    after: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> None:
    check(tokens, heads, kv_heads, half, before, after, dtype, cache_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [3, 300])
def test_on_every_instruction_set(isa: str, tokens: int, dtype: torch.dtype) -> None:
    check(tokens, 4, 2, 39, 2, 0, dtype, dtype)


def test_the_inverse_rotates_back() -> None:
    positions, cos_sin, states = torch.arange(7), table(16, torch.float32), random_states(7, 3, 16, torch.float32)
    turned = states.flatten(1).clone()
    rotate(positions, turned, None, 16, cos_sin)
    assert (turned - states.flatten(1)).abs().max() > 0.1
    rotate(positions, turned, None, 16, cos_sin, inverse=True)
    torch.testing.assert_close(turned, states.flatten(1))


@pytest.mark.parametrize("position", [-1, POSITIONS])
def test_a_position_outside_of_the_table_is_refused(position: int) -> None:
    states = torch.ones(2, 16)
    with pytest.raises(ValueError, match=f"position {position} of token 1 is not in \\[0, {POSITIONS}\\)"):
        rotate(torch.tensor([0, position]), states, None, 16, table(16, torch.float32))
    assert (states == 1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.zeros(3, dtype=torch.int64)}, "must be \\[3, heads \\* 16\\]"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, "positions must be int64"),
        ({"query": torch.ones(2, 24)}, "24 is not a multiple of the head size"),
        ({"key": torch.ones(2, 16).half()}, "of one dtype"),
        ({"query": torch.ones(2, 16).double(), "key": None}, "float32, float16 or bfloat16"),
        ({"query": torch.ones(16, 2).T}, "contiguous rows"),
        ({"cos_sin": table(16, torch.float32).T}, "contiguous rows"),
        ({"cos_sin": table(16, torch.float32)[:, :15]}, "must be even"),
        ({"first_dimension": 1}, "no 16 from dimension 1 on"),
    ],
)
def test_what_does_not_match_is_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "positions": torch.zeros(2, dtype=torch.int64),
        "query": torch.ones(2, 16),
        "key": torch.ones(2, 16),
        "head_size": 16,
        "cos_sin": table(16, torch.float32),
    }
    with pytest.raises(ValueError, match=message):
        rotate(**(arguments | change))  # type: ignore[arg-type]
