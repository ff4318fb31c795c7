"""`vllm serve` of the installed version, over HTTP: a number hidden in a long prompt must come back.

Its name keeps pytest from collecting it: tests/server has these questions and more for the version that `make test`
installs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conformance_server import Served, check_needle, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.mark.parametrize("depth", [0.1, 0.5, 0.9])
def test_the_needle_is_found(served: Served, depth: float) -> None:
    check_needle(served, depth)
