"""A layer whose input comes block by block gives what it gives of the whole, on two ranks of this CPU."""

from __future__ import annotations

import weakref

import pytest
import torch

from fastattention_vllm.parallel.rows_ready import RowsReady
from tests.parallel import tasks
from tests.parallel.ranks import Ranks
from tests.parallel.tasks import Case


@pytest.mark.parametrize("ends", [(64, 200, 517), (1, 516), (517,)])
def test_the_sum_is_that_of_the_plain_layer(two_ranks: Ranks, ends: tuple[int, ...]) -> None:
    """Rows behind the last mark belong to the last block: those of a step that is padded."""
    case = Case(517, 96, 80, torch.float16, (), exact=True)
    for blocked, plain, sums in two_ranks.run(tasks.after_attention, case, list(ends)):
        assert torch.equal(blocked, plain)
        assert sums == (len(ends) if len(ends) > 1 else 0), "one for each block, by the tiled layer"


def test_marks_are_taken_once_and_by_their_tensor_alone() -> None:
    ready, x, other = RowsReady(8), torch.zeros(10, 4), torch.zeros(10, 4)
    assert ready.pop(x) is None
    for asked in (other, x):
        ready.begin(x)
        ready.mark(x, 6)
        ready.mark(x, 9)
        pending = ready.pop(asked)
        assert (pending is not None) == (asked is x)
        assert ready.pop(x) is None
    assert pending is not None
    assert pending.blocks == (6, 4)
    assert pending.out.shape == (10, 8)


def test_what_was_begun_but_not_marked_is_not_taken() -> None:
    ready, x = RowsReady(8), torch.zeros(10, 4)
    ready.begin(x)
    assert ready.pop(x) is None


def test_a_marked_tensor_lives_until_it_is_taken() -> None:
    """Otherwise another tensor could lie at its address, and be taken for it."""
    ready, x = RowsReady(8), torch.zeros(10, 4)
    ready.begin(x)
    ready.mark(x, 10)
    alive = weakref.ref(x)
    del x
    assert alive() is not None
    assert ready.pop(torch.zeros(10, 4)) is None
    assert alive() is None
