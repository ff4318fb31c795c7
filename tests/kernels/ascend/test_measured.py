"""The model beside measurements, as kernels/ascend/README.md states it. Needs msopmodeling: `make test-ascend`."""

from __future__ import annotations

import importlib.util

import pytest

from kernels.ascend import measured, tables

if importlib.util.find_spec("tilesim") is None:
    pytest.skip("needs msopmodeling: `make test-ascend` installs it", allow_module_level=True)


def errors(name: str) -> list[float]:
    read = tables.read()
    found = [*measured.vector_additions(read), *measured.matrix_products(read)]
    return [one.error for one in found if one.what.startswith(name)]


@pytest.mark.parametrize(
    ("name", "count", "low", "high"),
    [("vector addition", 6, -0.19, -0.05), ("cube", 4, -0.02, -0.01), ("fixpipe", 4, -0.41, -0.40)],
)
def test_the_errors_are_those_of_the_readme(name: str, count: int, low: float, high: float) -> None:
    found = [round(error, 2) for error in errors(name)]
    assert (len(found), min(found), max(found)) == (count, low, high)
