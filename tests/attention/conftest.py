from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from tests.attention.isa import set_isa


@pytest.fixture(params=cpu.usable_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this machine in turn."""
    before = cpu.isa()
    set_isa(request.param)
    yield request.param
    set_isa(before)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = cpu.num_threads()
    yield
    cpu.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def single_threaded_oracle() -> Iterator[None]:
    """Torch's idle threads spin between the oracle's small products and would take cores from the kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
