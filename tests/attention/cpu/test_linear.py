"""Linear layers against float64, for few tokens and many, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.cpu.linear import FEW_TOKENS, linear

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Sums are fp32 in some order, and the result is rounded once."""
    y = linear(x, weight, bias)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    magnitude = torch.nn.functional.linear(x.double().abs(), weight.double().abs(), None)
    if bias is not None:
        magnitude += bias.double().abs()
    depth = x.shape[-1]
    allowed = torch.finfo(y.dtype).eps / 2 * exact.abs() + (depth**0.5 + 8) * 2**-24 * magnitude
    if y.dtype == torch.float16:
        allowed += 2**-25  # of subnormal numbers
    assert y.shape == exact.shape
    assert y.dtype == x.dtype
    assert ((y.double() - exact).abs() <= allowed).all(), ((y.double() - exact).abs() / allowed).max()


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    tokens=st.one_of(st.integers(1, FEW_TOKENS + 8), st.sampled_from([95, 96, 97, 200])),
    inputs=st.one_of(st.integers(1, 70), st.sampled_from([511, 512, 513, 1030])),
    outputs=st.one_of(st.integers(1, 70), st.sampled_from([95, 96, 97, 193])),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_any_shape(tokens: int, inputs: int, outputs: int, dtype: torch.dtype, biased: bool, seed: int) -> None:
    x, weight = random(tokens, inputs, dtype=dtype, seed=seed), random(outputs, inputs, dtype=dtype, seed=seed + 1)
    check(x, weight, random(outputs, dtype=dtype, seed=seed + 2) if biased else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [*range(1, 9), FEW_TOKENS, FEW_TOKENS + 1, 130])
def test_on_every_instruction_set(isa: str, tokens: int, dtype: torch.dtype) -> None:
    weight = random(101, 590, dtype=dtype)
    check(random(tokens, 590, dtype=dtype, seed=1), weight, random(101, dtype=dtype, seed=2))


@pytest.mark.parametrize("tokens", [3, 40])
def test_rows_may_lie_apart(tokens: int) -> None:
    x, weight = random(tokens, 300, dtype=torch.bfloat16), random(50, 300, dtype=torch.bfloat16)
    check(x[:, 70:200], weight[::2, 30:160], random(50, dtype=torch.bfloat16)[::2])
    check(x.T.contiguous().T[:, :130], weight[:, :130])
    check(x.view(1, tokens, 300), weight)
    check(x[0], weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("together", [(1, FEW_TOKENS), (FEW_TOKENS + 1, 150)])
def test_a_token_depends_on_no_other_one(dtype: torch.dtype, together: tuple[int, int], restore_threads: None) -> None:
    """Nor do bits depend on threads, which cut the weight into other items."""
    fewest, most = together
    x, weight = random(most, 333, dtype=dtype), random(301, 333, dtype=dtype)
    whole = linear(x, weight)
    for number in (1, 2, 5):
        cpu.set_num_threads(number)
        for tokens in {fewest, (fewest + most) // 2, most - 1, most}:
            assert torch.equal(linear(x[:tokens], weight), whole[:tokens]), (number, tokens)


@pytest.mark.parametrize("tokens", [2, 40])
@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_damage_stays_where_it_is(tokens: int, damage: float) -> None:
    x, weight = random(tokens, 77, dtype=torch.bfloat16), random(40, 77, dtype=torch.bfloat16)
    healthy = linear(x, weight)
    x[1, 76], weight[39, 3] = damage, damage
    y = linear(x, weight)
    assert not y[1].isfinite().any()
    assert not y[:, 39].isfinite().any()
    others = [token for token in range(tokens) if token != 1]
    assert torch.equal(y[others, :39], healthy[others, :39])


def test_no_tokens() -> None:
    assert linear(torch.empty(0, 8), torch.ones(4, 8)).shape == (0, 4)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        (torch.ones(2, 8), torch.ones(4, 9), None, "must be \\[..., in_features\\]"),
        (torch.ones(2, 8), torch.ones(8, 4).T, None, "contiguous rows"),
        (torch.ones(2, 8), torch.ones(4, 8).bfloat16(), None, "the same dtype"),
        (torch.ones(2, 8).double(), torch.ones(4, 8).double(), None, "the same dtype"),
        (torch.ones(2, 8), torch.ones(4, 8), torch.ones(5), "bias must be \\[4\\]"),
        (torch.ones(2, 8), torch.ones(4, 8), torch.ones(4).half(), "bias must be \\[4\\] torch.float32"),
        (torch.ones(2, 8, device="meta"), torch.ones(4, 8), None, "on cpu"),
        (torch.ones(2, 0), torch.ones(4, 0), None, "least 1"),
    ],
)
def test_wrong_tensors_are_refused(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        linear(x, weight, bias)
