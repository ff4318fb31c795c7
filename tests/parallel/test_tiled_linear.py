"""The tiled layer equals the plain one over gloo: bit for bit where sums are exact, otherwise up to rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastattention_vllm.parallel import tiled_linear
from fastattention_vllm.parallel.collective import Collective, open_collective
from fastattention_vllm.parallel.plan import even
from tests.parallel import tasks
from tests.parallel.ranks import SECONDS, Raised, Ranks
from tests.parallel.tasks import GROUP, Case, TilingBy

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ODD = 517
BLOCKS = {
    "even": lambda rows: even(rows, 4, 64),
    "small first": lambda rows: (64, rows - 64),
    "small last": lambda rows: (rows - 1, 1),
    "many": lambda rows: even(rows, 16, 1),
}


def cases(dtype: torch.dtype, numbers: tuple[int, ...] = (130, ODD), **changes: Any) -> list[Case]:
    """Every split of these ``numbers`` of rows, with and without bias."""
    found = []
    for rows in numbers:
        for cut in BLOCKS.values():
            for bias in (True, False):
                blocks = tuple(block for block in cut(rows) if block)
                found.append(Case(rows, 96, 80, dtype, blocks, bias, **changes))
    return found


def exact_sum(case: Case, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In float64: the sum over the ranks, the sum of the ranks' magnitudes, and the sum of all terms' magnitudes."""
    total = terms = partials = torch.zeros(case.rows, case.outputs, dtype=torch.float64)
    for rank in range(size):
        x, weight, bias = (None if t is None else t.double() for t in case.tensors(rank))
        assert x is not None
        assert weight is not None
        part, magnitude = x @ weight.T, x.abs() @ weight.abs().T
        if bias is not None and rank == 0:
            part, magnitude = part + bias, magnitude + bias.abs()
        total, terms, partials = total + part, terms + magnitude, partials + part.abs()
    return total, partials, terms


def rounding(case: Case, size: int, partials: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """The allowed distance of a result from the exact sum.

    A rank's matmul sums K products (exact in fp32 from 16-bit numbers) and the bias in fp32 in any order: the error is
    at most (K + 1) u32 of the sum of magnitudes. It rounds the result to the dtype, and possibly also before it adds
    the bias: 2 u of the result. Then follow size - 1 sums in the dtype, in any order, each with an error of u of the
    partial sum, which the ranks' magnitudes bound. 1 % covers the products of these errors.
    """
    u, u32 = torch.finfo(case.dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    tiny = torch.finfo(case.dtype).tiny
    with_bias = terms if case.bias else partials  # the rounded value before the bias may be larger than after it
    return 1.01 * ((case.inputs + 2) * u32 * terms + u * with_bias + (1 + size - 1) * u * partials) + tiny


def compare(ranks: Ranks, several: list[Case], size: int) -> None:
    answers = ranks.run(tasks.several, several)
    for index, case in enumerate(several):
        results = [answer[index] for answer in answers]
        total, partials, terms = exact_sum(case, size)
        limit = rounding(case, size, partials, terms)
        for tiled, plain in results:
            assert tiled.shape == (case.rows, case.outputs)
            assert tiled.dtype == case.dtype
            if case.exact:
                assert torch.equal(tiled, plain), case
                assert torch.equal(tiled.double(), total), case
            else:
                assert ((tiled.double() - total).abs() <= limit).all(), case
                assert ((tiled.double() - plain.double()).abs() <= 2 * limit).all(), case
        assert all(torch.equal(tiled, results[0][0]) for tiled, _ in results), "ranks must agree"


@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_are_summed_exactly(two_ranks: Ranks, dtype: torch.dtype) -> None:
    compare(two_ranks, cases(dtype, exact=True), 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_numbers_are_summed_up_to_rounding(two_ranks: Ranks, dtype: torch.dtype) -> None:
    compare(two_ranks, cases(dtype), 2)


@pytest.mark.more
@pytest.mark.parametrize("size", [4, 8])
def test_more_ranks(size: int) -> None:
    with Ranks(size) as ranks:
        for dtype in DTYPES:
            compare(ranks, cases(dtype, (130,), exact=True), size)
            compare(ranks, cases(dtype, (ODD,)), size)


def test_no_rows(two_ranks: Ranks) -> None:
    for bias in (True, False):
        case = Case(0, 96, 80, torch.float32, even(0, 4, 64), bias)
        for tiled, plain in two_ranks.run(tasks.tiled_and_plain, case):
            assert tiled.shape == plain.shape == (0, 80)


def test_one_block_is_the_plain_layer_bit_by_bit(two_ranks: Ranks) -> None:
    several = [Case(rows, 96, 80, dtype, (rows,)) for rows in (1, 7, ODD) for dtype in DTYPES]
    for answer in two_ranks.run(tasks.several, several):
        for tiled, plain in answer:
            assert torch.equal(tiled, plain)


def test_a_late_rank_is_waited_for(two_ranks: Ranks) -> None:
    case = Case(256, 96, 80, torch.float32, (64, 128, 64), exact=True, late=0.3)
    compare(two_ranks, [case], 2)


def test_layers_follow_each_other_without_mixing(two_ranks: Ranks) -> None:
    case = Case(128, 64, 64, torch.float32, (), exact=True)
    x, total = case.tensors(0)[0].double(), [case.tensors(rank)[1].double() for rank in range(2)]
    own = [case.tensors(rank)[0].double() for rank in range(2)]
    for _ in range(5):
        x = sum(part @ weight.T for part, weight in zip(own, total, strict=True)).remainder(2)
        own = [x, x]
    for answer in two_ranks.run(tasks.all_in_flight, case, 5):
        assert torch.equal(answer.double(), x)


def test_one_graph_serves_all_numbers_of_rows(two_ranks: Ranks) -> None:
    assert two_ranks.run(tasks.compiled, [64, 37, 100, 128]) == [1, 1]


@pytest.mark.parametrize("groups", [[[0], [1]], [[1, 0]]])
def test_a_rank_sums_with_the_ranks_of_its_group(two_ranks: Ranks, groups: list[list[int]]) -> None:
    for rank, answer in enumerate(two_ranks.run(tasks.other_collective, groups)):
        group = next(group for group in groups if rank in group)
        assert answer == (sorted(group).index(rank), len(group), sum(10.0**member for member in group))


def test_other_devices_have_no_collective() -> None:
    with pytest.raises(ValueError, match="'npu'; available: cpu, cuda"):
        open_collective([[0]], "npu", 1)


CASE = Case(256, 32, 32, torch.float32, (64, 128, 64), exact=True)


def test_a_rank_that_dies_raises_on_the_others() -> None:
    with Ranks(2) as ranks:
        ranks.start(tasks.die_in_the_second_layer, CASE)
        failed = ranks.result(0)
        assert isinstance(failed, Raised)
        assert failed.kind == "CollectiveError"
        assert "rank 0 of 2: another rank has ended or has not answered in time" in failed.message
        with pytest.raises(EOFError):
            ranks.result(1)


def test_a_rank_that_falls_silent_raises_on_the_others_within_the_timeout() -> None:
    timeout = 5.0  # even a busy machine must finish the first layer in this time
    with Ranks(2, timeout=timeout) as ranks:
        ranks.start(tasks.fall_silent_in_the_second_layer, CASE, 2 * SECONDS)
        waited = ranks.result(0)
        assert not isinstance(waited, Raised), waited.traceback
        assert waited > timeout / 2


class Doubling(Collective):
    """Two ranks with the same numbers. A sum is available only once it was waited for."""

    size = 2

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.started: list[torch.Tensor] = []
        self.seen: list[torch.Tensor] = []
        self.waited = 0

    def start(self, block: torch.Tensor) -> int:
        assert block.is_contiguous()
        self.started.append(block)
        self.seen.append(block.clone())
        return len(self.started) - 1

    def wait(self, started: int) -> None:
        assert torch.equal(self.started[started], self.seen[started]), "must not be read before its sum is complete"
        self.started[started].mul_(2)
        self.waited += 1


@pytest.fixture
def doubling() -> Iterator[Doubling]:
    yield Doubling()
    tiled_linear._tilings.clear()


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return 2 * torch.nn.functional.linear(x, weight, bias)


def test_all_blocks_are_on_their_way_before_the_first_is_waited_for(doubling: Doubling) -> None:
    begun = []

    class Ordered(Doubling):
        def wait(self, started: int) -> None:
            begun.append(len(self.started))
            super().wait(started)

    collective = Ordered()
    x, weight, _ = CASE.tensors(0)
    tiled_linear.register(GROUP, TilingBy(collective, lambda rows, weight: CASE.blocks, plain))
    out = tiled_linear.tiled_linear_all_reduce(x, weight, None, GROUP)
    assert torch.equal(out, plain(x, weight, None))
    assert begun == [3, 3, 3]
    assert [len(block) for block in collective.started] == list(CASE.blocks)
    assert all(block.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() for block in collective.started)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("blocks", [(64, 128, 64), (256,)])
def test_one_rank_adds_the_bias(doubling: Doubling, rank: int, blocks: tuple[int, ...]) -> None:
    doubling.rank = rank
    x, weight, bias = CASE.tensors(0)
    tiled_linear.register(GROUP, TilingBy(doubling, lambda rows, weight: blocks, plain))
    expected = plain(x, weight, None if rank else bias)
    assert torch.equal(tiled_linear.tiled_linear_all_reduce(x, weight, bias, GROUP), expected)


def test_blocks_depend_on_the_rows_and_the_weight(doubling: Doubling) -> None:
    asked = []

    def blocks(rows: int, weight: torch.Tensor) -> tuple[int, ...]:
        asked.append((rows, tuple(weight.shape)))
        return (rows,)

    tiled_linear.register(GROUP, TilingBy(doubling, blocks, plain))
    x, weight, bias = dataclasses.replace(CASE, rows=5, outputs=48).tensors(0)
    tiled_linear.tiled_linear_all_reduce(x, weight, bias, GROUP)
    assert asked == [(5, (48, 32))]


def test_blocks_that_leave_rows_out_are_an_error(doubling: Doubling) -> None:
    x, weight, bias = CASE.tensors(0)
    tiled_linear.register(GROUP, TilingBy(doubling, lambda rows, weight: (64, 64), plain))
    with pytest.raises(AssertionError, match="for 256"):
        tiled_linear.tiled_linear_all_reduce(x, weight, bias, GROUP)


def test_inputs_with_gaps_between_their_rows(doubling: Doubling) -> None:
    x, weight, bias = CASE.tensors(0)
    wide = torch.cat([x, x], dim=1)[:, :32]
    tiled_linear.register(GROUP, TilingBy(doubling, lambda rows, weight: CASE.blocks, plain))
    assert torch.equal(tiled_linear.tiled_linear_all_reduce(wide, weight, bias, GROUP), plain(x, weight, bias))


def test_the_op_passes_torchs_checks(doubling: Doubling) -> None:
    """Its schema is valid, and its fake has the shape, dtype and strides of the real op."""
    tiled_linear.register(GROUP, TilingBy(doubling, lambda rows, weight: CASE.blocks, plain))
    op = torch.ops.fastattention.tiled_linear_all_reduce.default
    x, weight, bias = CASE.tensors(0)
    for given in (bias, None):
        doubling.started.clear()
        doubling.seen.clear()
        torch.library.opcheck(op, (x, weight, given, GROUP), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("blocks", [(64, 300, 153), (517,)])
def test_a_tiled_mlp_equals_plain_steps(two_ranks: Ranks, blocks: tuple[int, ...]) -> None:
    """The inputs are integers, so fp32 holds all sums exactly."""
    case = Case(ODD, 40, 24, torch.float32, blocks, exact=True)
    for tiled, plain, sums in two_ranks.run(tasks.mlp, case, 16):
        assert torch.equal(tiled, plain)
        assert sums == (len(blocks) if len(blocks) > 1 else 0)
