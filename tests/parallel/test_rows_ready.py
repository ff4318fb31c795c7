"""A layer whose input arrives in blocks gives the same result as for the whole input, on two ranks of this CPU."""

from __future__ import annotations

import weakref

import pytest
import torch

from fastattention_vllm.parallel.rows_ready import RowsReady
from tests.parallel import tasks
from tests.parallel.ranks import Ranks
from tests.parallel.tasks import Case


@pytest.mark.parametrize("ends", [(64, 200, 517), (1, 516), (517,)])
def test_the_sum_equals_that_of_the_plain_layer(two_ranks: Ranks, ends: tuple[int, ...]) -> None:
    """Rows after the last mark belong to the last block: the padding of a padded step."""
    case = Case(517, 96, 80, torch.float16, (), exact=True)
    for blocked, plain, sums in two_ranks.run(tasks.after_attention, case, list(ends)):
        assert torch.equal(blocked, plain)
        assert sums == (len(ends) if len(ends) > 1 else 0), "the tiled layer must sum each block"


def test_marks_are_taken_once_and_only_by_their_tensor() -> None:
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


def test_rows_without_a_mark_are_not_taken() -> None:
    ready, x = RowsReady(8), torch.zeros(10, 4)
    ready.begin(x)
    assert ready.pop(x) is None


def test_a_marked_tensor_lives_until_it_is_taken() -> None:
    """Otherwise another tensor at the same address could be mistaken for it."""
    ready, x = RowsReady(8), torch.zeros(10, 4)
    ready.begin(x)
    ready.mark(x, 10)
    alive = weakref.ref(x)
    del x
    assert alive() is not None
    assert ready.pop(torch.zeros(10, 4)) is None
    assert alive() is None
