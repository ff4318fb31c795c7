"""Pipelines to plan for: random ones, and those of measured machines."""

from __future__ import annotations

from hypothesis import strategies as st

from fastattention_vllm.parallel.pipeline import Pipeline, Times

SECONDS = st.floats(1e-6, 1e-1)
SLOWDOWNS = st.sampled_from([1.0, 1.1, 1.5, 2.0, 3.0])
BLOCKS = st.lists(st.integers(1, 5000), min_size=1, max_size=8)


def affine(start: float, per_row: float, granule: int = 1, rows: int = 1 << 20) -> Times:
    """``start + per_row * rows`` seconds, for at least ``granule`` rows."""
    return Times(((granule, start + per_row * granule), (granule + rows, start + per_row * (granule + rows))))


@st.composite
def times(draw: st.DrawFn) -> Times:
    """Affine times, and any other non-decreasing ones."""
    if draw(st.booleans()):
        return affine(draw(st.floats(0, 1e-3)), draw(st.floats(1e-8, 1e-5)), granule=draw(st.integers(1, 300)))
    rows = draw(st.lists(st.integers(1, 20000), min_size=1, max_size=6, unique=True))
    return Times.measured([(count, draw(SECONDS)) for count in rows])


TIMES = times()
PIPELINES = st.builds(Pipeline, TIMES, TIMES)
SLOWED_PIPELINES = st.builds(Pipeline, TIMES, TIMES, SLOWDOWNS, SLOWDOWNS)

STARTS = st.sampled_from([0.0, 5e-6, 3e-5, 2e-4])
PER_ROW = st.floats(1e-8, 1e-6)


@st.composite
def noisy(draw: st.DrawFn) -> Times:
    """Times as a calibration measures them: at doubled numbers of rows, each up to 10 % off."""
    start, per_row = draw(STARTS), draw(PER_ROW)
    return Times.measured(
        [(64 << i, (start + per_row * (64 << i)) * draw(st.floats(0.9, 1.1))) for i in range(draw(st.integers(2, 5)))]
    )


AFFINE_TIMES = st.builds(affine, STARTS, PER_ROW, granule=st.sampled_from([1, 64, 128]))
AFFINE = st.builds(Pipeline, AFFINE_TIMES, AFFINE_TIMES)
MEASURED = st.builds(Pipeline, noisy(), noisy(), SLOWDOWNS, SLOWDOWNS)
