"""One drawn engine of tests/integration/test_differential.py, with host layers of three kinds.

It is in a file of its own, because files with longer tests begin first, and an engine's OpenMP threads would hang torch
in the forked children of tests/attention/cpu.
"""

from __future__ import annotations

from pathlib import Path

from tests.integration.drawn_problems import draw_problem
from tests.integration.test_differential import solve

WINDOWS_OF_TWO_LENGTHS = 92
"""Draws full layers, windowed layers of two lengths, and host layers of all three kinds."""


def test_a_drawn_engine_with_windows_of_two_lengths(tmp_path: Path) -> None:
    problem = draw_problem(WINDOWS_OF_TWO_LENGTHS)
    assert {problem.model.layers[layer] for layer in problem.host_layers} == {"F", "W", "N"}
    solve(problem, tmp_path)
