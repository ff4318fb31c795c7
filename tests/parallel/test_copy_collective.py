"""Sums made of copies between boards, with CPU copies instead of a GPU's copy engines."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.parallel.copy_collective import Copies, CopyCollective
from tests.parallel import tasks
from tests.parallel.ranks import Ranks

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def compare(ranks: Ranks, *arguments: object) -> int:
    pieces = set()
    for found, expected, count in ranks.run(tasks.copied_sums, *arguments):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        pieces.add(count)
    (count,) = pieces
    return count


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    st.integers(1, 3),
    st.integers(3 * 256, 6000),
    st.integers(0, 99),
)
def test_two_ranks_sum_as_gloo_does(
    two_ranks: Ranks, sizes: list[int], dtype: torch.dtype, channels: int, board_bytes: int, seed: int
) -> None:
    compare(two_ranks, sizes, dtype, channels, board_bytes, seed)


def test_large_blocks_go_in_pieces_over_all_channels(two_ranks: Ranks) -> None:
    """A board of 2048 bytes holds a piece of 1024 numbers of two bytes."""
    count = compare(two_ranks, [1024, 10 * 1024 + 1], torch.float16, 3, 2048, 5)
    assert count == 1 + 11


@pytest.mark.parametrize("size", [3, pytest.param(5, marks=pytest.mark.more)])
def test_more_ranks_sum_as_gloo_does(size: int) -> None:
    with Ranks(size) as ranks:
        for seed, numbers in enumerate(([1], [size * 128 + 1, 7])):
            compare(ranks, numbers, torch.float16, 2, 4096, seed)
        slices = 4096 // (size + 1) // 256 * 256 * size // 2
        assert compare(ranks, [40_000], torch.float16, 2, 4096, 9) == -(-40_000 // slices)


class Recorded(Copies):
    """Copies of one rank of two, recorded instead of executed."""

    rank, size, channels, board_bytes = 0, 2, 3, 512

    def __init__(self) -> None:
        self.steps: list[tuple[object, ...]] = []

    def begin(self, channel: int) -> None:
        self.steps.append(("begin", channel))

    def put(self, channel: int, offset: int, tensor: torch.Tensor) -> None:
        self.steps.append(("put", channel))

    def fetch(self, channel: int, peer: int, offset: int, tensor: torch.Tensor) -> None:
        self.steps.append(("fetch", channel))

    def add(self, channel: int, tensor: torch.Tensor, peer: int, offset: int) -> None:
        self.steps.append(("add", channel))

    def tell(self, channel: int, phase: int) -> None:
        pass

    def hear(self, channel: int, phase: int) -> None:
        pass

    def end(self, channel: int) -> int:
        self.steps.append(("end", channel))
        return channel

    def wait(self, ended: int) -> None:
        self.steps.append(("wait", ended))


def test_each_channel_begins_and_ends_once_for_a_block() -> None:
    """Every used channel first waits for the block, and every used channel is waited for at the end."""
    copies = Recorded()
    collective = CopyCollective(copies)
    collective.wait(collective.start(torch.zeros(5 * 256, dtype=torch.float16)))  # five pieces
    begun, ended = set(), set()
    for step, channel in copies.steps:
        if step == "begin":
            assert channel not in begun
            begun.add(channel)
        elif step == "end":
            ended.add(channel)
        elif step == "wait":
            ended.remove(channel)
        else:
            assert channel in begun
            assert channel not in ended
    assert begun == {0, 1, 2}
    assert not ended
    assert [step for step, _ in copies.steps].count("put") == 5
