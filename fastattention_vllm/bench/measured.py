"""What measurements on a GPU have in common: a row for each contender, its samples, and the reason if there are none.

Used by: volta.py and volta_linear.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from pydantic import ConfigDict

from fastattention_vllm.bench import gpu as gpus
from fastattention_vllm.bench.contender import Call
from fastattention_vllm.bench.gpu import Gpu, Timed
from fastattention_vllm.bench.report import Row


class Measured(Row):
    """One case and one contender, the peer. Rows that lose, fail or run out of memory stay.

    ``ratio``, of right answers only: its time over ours.
    """

    model_config = ConfigDict(extra="forbid")

    contender: str
    value: float | None = None
    """In ``unit``."""
    milliseconds: float | None = None
    iqr: float | None = None
    samples: int | None = None
    error: float | None = None
    """Largest difference to float64 on a sample of the answer."""
    captured: bool = False
    """As a CUDA graph, without the CPU's part."""
    note: str = ""
    """Why there is no value, or what is wrong with it."""


@contextmanager
def noted(row: Measured, tolerance: float, gpu: Gpu) -> Iterator[None]:
    """What goes wrong, and an error that is too large, become the row's note. Memory is given back."""
    try:
        yield
    except torch.OutOfMemoryError:
        row.note = "out of memory."
    except (RuntimeError, ValueError, ImportError, OSError) as error:  # a kernel or a library that is not for it
        row.note = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    gpu.free()
    if row.error is not None and not row.error <= tolerance:
        row.note = f"wrong by {row.error:.1e}."


def together(calls: Sequence[Call], gpu: Gpu, *, graph: bool) -> tuple[Callable[[], object], bool]:
    """One call for all of them, and whether it is a graph, if ``graph`` and that is possible."""

    def one_by_one() -> None:
        for call in calls:
            call()

    if not graph:
        return one_by_one, False
    try:
        return gpu.captured(calls), True
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return one_by_one, False


def sample(
    rows: Mapping[str, Measured], timed: Sequence[Timed], gpu: Gpu, rounds: int, work: Callable[[str], float], ours: str
) -> None:
    """Measure, and fill in each row's times, its value, and what it says against ours.

    ``rows``: by contender; ``work``: of a contender's call, in ``unit`` times seconds.
    """
    gpus.interleave(gpu, timed, rounds)
    for sampled in timed:
        row, samples = rows[sampled.name], sampled.samples
        row.milliseconds, row.iqr, row.samples = 1e3 * samples.median, samples.iqr, len(samples.used)
        row.value = work(sampled.name) / samples.median
    own = rows[ours]
    for row in rows.values():
        row.ours = None if own.note else own.value
        if row is own:
            continue
        row.peer_name, row.peer = row.contender, None if row.note else row.value
        if row.milliseconds and own.milliseconds and not row.note and not own.note:
            row.ratio = row.milliseconds / own.milliseconds
