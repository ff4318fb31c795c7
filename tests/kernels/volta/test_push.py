"""Sums over GPUs by push: the kernel's source on the emulator, each rank a process, with boards in shared memory."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy
import numpy.typing
import pytest

from fastattention_vllm.parallel.push_launch import Push, layout_of
from kernels.volta.emulator import Emulation
from kernels.volta.manifest import SOURCES
from kernels.volta.push_variants import ALL, CHUNK_BYTES, MOST_RANKS

Array = numpy.typing.NDArray[Any]
VARIANTS = {variant.number: variant for variant in ALL}
STORED = {"fp16": numpy.float16, "bf16": numpy.uint16, "fp32": numpy.float32}
CTAS, SLOTS = 3, 1000


def drawn(number: str, length: int, seed: int) -> Array:
    """Numbers of all sizes, as they are stored."""
    source = numpy.random.default_rng(seed)
    values = (source.standard_normal(length) * numpy.exp2(source.integers(-12, 12, length))).astype(numpy.float32)
    return (values.view(numpy.uint32) >> 16).astype(numpy.uint16) if number == "bf16" else values.astype(STORED[number])


def widened(number: str, stored: Array) -> Array:
    if number == "bf16":
        return (stored.astype(numpy.uint32) << 16).view(numpy.float32)
    return stored.astype(numpy.float32)


def rounded(number: str, values: Array) -> Array:
    if number != "bf16":
        return values.astype(STORED[number])
    bits = values.view(numpy.uint32)
    nan = numpy.isnan(values)
    return numpy.where(nan, 0x7FFF, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(numpy.uint16)


def expected(number: str, parts: Sequence[Array]) -> Array:
    """Added in the order of ranks, in fp32."""
    total = widened(number, parts[0])
    with numpy.errstate(invalid="ignore", over="ignore"):
        for part in parts[1:]:
            total = total + widened(number, part)
        return rounded(number, total)


class Rank:
    """One GPU. Boards lie at the same address in all processes, which are forked."""

    def __init__(self, number: str, rank: int, boards: Sequence[Array]) -> None:
        self.rank, self.boards, self.seed = rank, boards, 0
        self.variant = VARIANTS[number]
        self.calls = numpy.zeros(CTAS, numpy.uint32)
        self.late = numpy.zeros(1, numpy.uint32)

    def sum(self, x: Array, looks: int = 0) -> Array:
        out = numpy.empty_like(x)
        self.seed += 1
        source = SOURCES / self.variant.source
        machine = Emulation(source, self.variant.kernel, defines=self.variant.defines, seed=self.seed)
        addresses = [machine.map(array) for array in (x, out, self.calls, self.late)]
        boards = [machine.map(board) for board in self.boards]
        chunks = x.nbytes // CHUNK_BYTES
        parameters = Push.of(*addresses, boards, chunks, SLOTS, self.rank, looks)
        machine.launch((CTAS, 1, 1), (self.variant.threads, 1, 1), bytes(parameters))
        for cta in range(CTAS):
            machine.execute(cta)
        return out


def boards_of(ranks: int) -> list[Array]:
    size = layout_of(ranks, SLOTS * CHUNK_BYTES).bytes
    return [numpy.frombuffer(mmap.mmap(-1, size), numpy.uint8) for _ in range(ranks)]


def run_rank(number: str, rank: int, boards: Sequence[Array], lengths: Sequence[int], answers: Any) -> None:
    this = Rank(number, rank, boards)
    delays = random.Random(rank)
    results = []
    for call, length in enumerate(lengths):
        if delays.random() < 0.3:
            time.sleep(delays.random() * 0.01)
        results.append(this.sum(drawn(number, length, 100 * call + rank)))
    answers.put((rank, results))


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=pytest.mark.more), 4, pytest.param(8, marks=pytest.mark.more)]
)
@pytest.mark.parametrize("number", VARIANTS)
def test_all_ranks_get_the_sum_in_the_order_of_ranks(number: str, ranks: int) -> None:
    """In many calls of different lengths, which the ranks reach at different times."""
    Emulation(SOURCES / "push.cu", "fa_volta_push", defines=VARIANTS[number].defines)  # compiled once, before the fork
    per_chunk = CHUNK_BYTES // STORED[number]().itemsize
    lengths = [per_chunk * chunks for chunks in (1, 2, SLOTS, 385, 7, 1, 384, SLOTS, SLOTS, 3, 129, 500)]
    fork = multiprocessing.get_context("fork")
    boards, answers = boards_of(ranks), fork.Queue()
    processes = [
        fork.Process(target=run_rank, args=(number, rank, boards, lengths, answers), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(answers.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    for call, length in enumerate(lengths):
        wanted = expected(number, [drawn(number, length, 100 * call + rank) for rank in range(ranks)])
        for rank in range(ranks):
            assert numpy.array_equal(found[rank][call].view(numpy.uint8), wanted.view(numpy.uint8)), (call, rank)


@pytest.mark.parametrize("number", VARIANTS)
def test_special_numbers(number: str) -> None:
    """What rank 1 has sent is there already. Infinities, NaN, subnormal numbers, signed zeros, and ties."""
    largest = {"fp16": 65504.0, "bf16": 3.3895e38, "fp32": 3.4e38}[number]
    values = [numpy.inf, -numpy.inf, numpy.nan, 0.0, -0.0, 1e-7, 1e-40, largest, 1.0, 1 + 2**-7]
    pairs = numpy.array([(a, b) for a in values for b in values], numpy.float32)
    with numpy.errstate(over="ignore"):
        parts = [rounded(number, pairs[:, side].copy()) for side in (0, 1)]
    boards = boards_of(2)
    words = parts[1].view(numpy.uint32).reshape(-1, 2)
    half = boards[0].view(numpy.uint32).reshape(2, 2, SLOTS, 4)[1, 1, : len(words)]
    half[:, 0], half[:, 2], half[:, 1], half[:, 3] = words[:, 0], words[:, 1], 1, 1
    found, wanted = Rank(number, 0, boards).sum(parts[0], looks=1000), expected(number, parts)
    ours, theirs = widened(number, found), widened(number, wanted)
    nan = numpy.isnan(theirs)
    assert numpy.array_equal(numpy.isnan(ours), nan)
    assert numpy.array_equal(ours[~nan].view(numpy.uint32), theirs[~nan].view(numpy.uint32))
    sent = boards[1].view(numpy.uint32).reshape(2, 2, SLOTS, 4)[1, 0, : len(words)]
    assert numpy.array_equal(sent[:, [0, 2]], parts[0].view(numpy.uint32).reshape(-1, 2))
    assert (sent[:, [1, 3]] == 1).all()


def test_a_rank_that_is_told_to_gives_up() -> None:
    """A self-test on a machine whose GPUs do not reach each other must end."""
    rank = Rank("fp16", 1, boards_of(2))
    rank.sum(drawn("fp16", 400, 0), looks=5)
    assert rank.late[0] == 1
    assert rank.calls.tolist() == [1] * CTAS


def test_half_a_chunk_is_not_taken_for_a_whole_one() -> None:
    """The halves of a store may arrive one after the other, over what an earlier call left there."""
    boards = boards_of(2)
    half = boards[0].view(numpy.uint32).reshape(2, 2, SLOTS, 4)[1, 1]
    for left in (1, 3):
        half[0] = 0
        half[0, left] = 1
        rank = Rank("fp32", 0, boards)
        rank.sum(drawn("fp32", 2, 0), looks=5)
        assert rank.late[0] == 1


def test_the_parameters_are_those_of_the_header() -> None:
    assert ctypes.sizeof(Push) % 8 == 0
    assert sum(name.startswith("board") for name, *_ in Push._fields_) == MOST_RANKS
