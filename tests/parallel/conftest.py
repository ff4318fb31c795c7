from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.ranks import Ranks


@pytest.fixture(scope="package")
def two_ranks() -> Iterator[Ranks]:
    """Spawned once, and shared by all tests here that do not end the ranks."""
    with Ranks(2) as ranks:
        yield ranks
