"""Which SM gets which CTA: properties for any list of works, and small hand-made cases."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kernels.volta.sim.dispatch import dispatch

WORKS = st.lists(st.floats(0.5, 100), min_size=1, max_size=60)


@given(WORKS, st.integers(1, 4), st.integers(1, 8))
def test_every_cta_runs_once_and_no_cta_waits_while_an_sm_is_free(works: list[float], resident: int, sms: int) -> None:
    found = dispatch(works, resident=resident, sms=sms)
    assert sorted(number for mine in found for number in mine) == list(range(len(works)))
    assert all(mine == sorted(mine) for mine in found)
    assert len(found) == min(sms, len(works))
    # As many CTAs as there are places begin at once, one after the other on the SMs.
    for number in range(min(len(works), resident * sms)):
        assert number in found_with(found, number % sms)


def found_with(found: list[list[int]], first: int) -> list[int]:
    return next(mine for mine in found if mine[0] == first)


@given(st.integers(1, 200), st.integers(1, 4), st.integers(1, 8))
def test_equal_ctas_are_dealt_evenly(count: int, resident: int, sms: int) -> None:
    found = dispatch([1.0] * count, resident=resident, sms=sms)
    assert len(found[0]) == -(-count // sms)
    assert max(map(len, found)) - min(map(len, found)) <= 1 or count < sms


def test_the_last_sm_to_finish_comes_first() -> None:
    # The long CTA keeps the first SM busy while the second takes the rest and ends first.
    assert dispatch([5, 1, 1, 1], resident=1, sms=2) == [[0], [1, 2, 3]]
    # The longest CTA at the end makes a tail.
    assert dispatch([1, 1, 1, 5], resident=1, sms=2) == [[1, 3], [0, 2]]
    # If two SMs end at the same time, the one with more work counts.
    assert dispatch([3, 2, 1, 3], resident=2, sms=2)[0] == [1, 3]
