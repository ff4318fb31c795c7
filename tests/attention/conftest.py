from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastattention_vllm.attention import cpu


@pytest.fixture(params=cpu.usable_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of this machine, one after the other."""
    before = cpu.isa()
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(before)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = cpu.num_threads()
    yield
    cpu.set_num_threads(before)
