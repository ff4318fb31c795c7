"""Attention split into two calls gives the same bits as one call, whatever runs between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.problem import AttentionProblem
from tests.attention.cpu.test_threads import CASE, alive_in_child, assert_same_bits, run
from tests.attention.oracle import Case

pytestmark = pytest.mark.usefixtures("restore_threads")
SMALL = Case((1,), (5,), head_size=16)
EMPTY = Case((), ())


@contextmanager
def started(problem: AttentionProblem) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The result of the started call, to be read after the block."""
    out = torch.zeros_like(problem.query)
    lse = torch.zeros(out.shape[:2])
    running = cpu.start(problem, out, lse)
    try:
        yield out, lse
    finally:
        running.finish()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_same_bits_as_in_one_call(isa: str, threads: int) -> None:
    cpu.set_num_threads(threads)
    for case in (CASE, SMALL, EMPTY, CASE):
        problem = case.build()
        expected = run(problem)
        with started(problem) as result:
            pass
        assert_same_bits(result, expected)


def test_the_pool_computes_while_the_caller_does_something_else() -> None:
    cpu.set_num_threads(2)
    problem = CASE.build()
    expected = run(problem)
    with started(problem) as result:
        deadline = time.monotonic() + 60
        while not torch.equal(result[0], expected[0]) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert torch.equal(result[0], expected[0]), "nothing was computed before the caller came back"


def test_meanwhile_other_threads_wait_and_this_one_is_refused() -> None:
    cpu.set_num_threads(2)
    problem, other = CASE.build(), Case((1, 40), (3000, 400), seed=7).build()
    expected = run(problem), run(other)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    thread = threading.Thread(target=lambda: found.append(run(other)))
    with started(problem) as result:
        thread.start()
        for call in (
            lambda: run(other),
            lambda: cpu.start(other, torch.empty_like(other.query)),
            lambda: cpu.set_num_threads(3),
            cpu.measure_wake,
        ):
            with pytest.raises(ValueError, match="this thread has started attention and must finish it first"):
                call()
        assert not found
    thread.join()
    assert_same_bits(result, expected[0])
    assert_same_bits(found[0], expected[1])
    assert_same_bits(run(problem), expected[0])


def test_only_the_starting_thread_may_finish() -> None:
    problem = CASE.build()
    never = cpu.Running(problem, problem.query, None)
    with pytest.raises(ValueError, match="this thread has not started attention, so it cannot finish it"):
        never.finish()
    refused: list[str] = []

    def other() -> None:
        try:
            never.finish()
        except ValueError as error:
            refused.append(str(error))

    with started(problem):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert refused == ["this thread has not started attention, so it cannot finish it."]


def test_a_start_that_is_refused_needs_no_finish() -> None:
    problem = CASE.build()
    expected = run(problem)
    with pytest.raises(ValueError, match="out must be"):
        cpu.start(problem, problem.query[:1])
    bad = Case((1,), (5,)).build()
    assert bad.block_table is not None
    bad.block_table.fill_(10**6)
    with pytest.raises(ValueError, match="block_table"):  # raised by the library
        cpu.start(bad, torch.empty_like(bad.query))
    assert_same_bits(run(problem), expected)


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_child_forked_in_between_starts_anew() -> None:
    cpu.set_num_threads(3)
    problem = CASE.build()
    expected = run(problem)
    with started(problem) as result:
        assert alive_in_child(problem, expected)
    assert_same_bits(result, expected)
