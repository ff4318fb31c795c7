"""Sampled tokens against the method in float64, and against the distribution that they are drawn from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.cpu.sampling import sample

PIECE = 8 * 1024  # kTokensPerSample
TOLERANCE = 2e-5
"""Of a score. Two tokens that are closer may be exchanged by rounding."""


def noise_bits(seed: int, vocabulary: int) -> np.ndarray:
    """32 random bits of each token, as ``noise_of`` in kernels/cpu/src/sampling.h defines them."""
    word, half = (1 << 64) - 1, (1 << 32) - 1
    z = (seed + 0x9E3779B97F4A7C15) & word
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & word
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & word
    z ^= z >> 31
    h = np.arange(vocabulary, dtype=np.uint64) * 0x9E3779B1 & half
    for key in (z & half, z >> 32):
        h = h + key & half
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            h = (h ^ h >> shift) * factor & half
        h ^= h >> 16
    return h


def scores(logits: torch.Tensor, seed: int) -> np.ndarray:
    """Of one row, in float64."""
    v = ((noise_bits(seed, len(logits)) >> 1) + 0.5) / 2**31
    return logits.double().numpy() - np.log(-np.log1p(-v))


def check(logits: torch.Tensor, seeds: list[int]) -> None:
    tokens = sample(logits, torch.tensor(seeds)).tolist()
    for row, seed, token in zip(logits, seeds, tokens, strict=True):
        expected = scores(row, seed)
        assert expected[token] >= expected.max() - TOLERANCE * max(1, abs(expected.max())), (token, expected.argmax())


@given(
    rows=st.integers(1, 5),
    vocabulary=st.sampled_from([1, 2, 31, 32, 33, 100, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 77]),
    scale=st.sampled_from([0.0, 0.5, 5.0, 50.0]),
    seed=st.integers(-(2**63), 2**63 - 6),
)
@settings(max_examples=60, deadline=None)
def test_tokens_are_those_of_the_method_in_float64(rows: int, vocabulary: int, scale: float, seed: int) -> None:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed % 1000)) * scale
    check(logits, [seed + row for row in range(rows)])


def test_on_every_instruction_set(isa: str) -> None:
    check(torch.randn(3, 2 * PIECE + 5), [1, 2, 2**62])


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations by which the statistic exceeds its mean, nearly normal for many degrees of freedom."""
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("neighbours", [True, False], ids=["neighbouring seeds", "random seeds"])
@pytest.mark.parametrize("scale", [0.0, 2.0])
def test_the_distribution_is_softmax(scale: float, neighbours: bool) -> None:
    draws, vocabulary = 400_000, 200
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0)) * scale
    seeds = torch.arange(draws) if neighbours else torch.randint(0, 2**31, (draws,))
    tokens = sample(logits.expand(draws, -1), seeds)
    counts = torch.bincount(tokens, minlength=vocabulary).double().numpy()
    assert abs(chi_square(counts, draws * logits.double().softmax(0).numpy())) < 5


def test_tokens_of_neighbouring_seeds_are_independent() -> None:
    draws, vocabulary = 400_000, 16
    tokens = sample(torch.zeros(1, vocabulary).expand(draws, -1), torch.arange(draws))
    pairs = torch.bincount(tokens[:-1] * vocabulary + tokens[1:], minlength=vocabulary**2).double().numpy()
    assert abs(chi_square(pairs, np.full(vocabulary**2, (draws - 1) / vocabulary**2))) < 5


def test_neighbouring_tokens_of_a_large_vocabulary_are_drawn_alike() -> None:
    draws, vocabulary, bins = 4_000, 151_936, 32
    tokens = sample(torch.zeros(1, vocabulary).expand(draws, -1), torch.arange(draws))
    for groups in (tokens * bins // vocabulary, tokens % bins):
        counts = torch.bincount(groups, minlength=bins).double().numpy()
        assert abs(chi_square(counts, np.full(bins, draws / bins))) < 5


def test_a_token_depends_on_its_row_and_seed_alone() -> None:
    logits, seeds = torch.randn(9, 50_000), torch.arange(9)
    together = sample(logits, seeds)
    assert torch.equal(together, torch.cat([sample(logits[i : i + 1], seeds[i : i + 1]) for i in range(9)]))
    threads = cpu.num_threads()
    try:
        cpu.set_num_threads(1 if threads > 1 else 3)
        assert torch.equal(together, sample(logits, seeds))
    finally:
        cpu.set_num_threads(threads)
    wide = torch.randn(9, 60_000)
    wide[:, :50_000] = logits
    assert torch.equal(together, sample(wide[:, :50_000], seeds))


def test_excluded_tokens_are_never_drawn() -> None:
    logits = torch.full((2000, 40_000), -math.inf)
    allowed = torch.tensor([0, 31, PIECE, 39_999])
    logits[:, allowed] = 0
    tokens = sample(logits, torch.arange(2000))
    assert set(tokens.tolist()) == set(allowed.tolist())


def test_values_that_are_not_finite(isa: str) -> None:
    logits = torch.zeros(6, PIECE + 100)
    logits[0, PIECE + 50] = math.nan
    logits[0, PIECE + 60] = math.nan
    logits[1, 7] = math.nan
    logits[1, PIECE + 1] = math.inf
    logits[2, 3] = math.inf
    logits[3] = -math.inf
    logits[4] = -math.inf
    logits[4, 9000 - 900] = -3e38
    logits[5] = math.nan
    assert sample(logits, torch.arange(6)).tolist() == [PIECE + 50, 7, 3, 0, 8100, 0]


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 10), torch.zeros(0, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize(
    ("logits", "seeds", "named"),
    [
        (torch.zeros(2, 3, dtype=torch.float16), torch.zeros(2, dtype=torch.int64), "float16"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), r"\[3\]"),
        (torch.zeros(3, 2).T, torch.zeros(2, dtype=torch.int64), "strides"),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), r"seeds must be \[2\]"),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32), "int32"),
        (torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64), "vocabulary must be at least 1"),
    ],
)
def test_tensors_that_do_not_match_are_refused(logits: torch.Tensor, seeds: torch.Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        sample(logits, seeds)
