from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastattention_vllm.attention.cpu import kernels as cpu
from tests.attention import oracle
from tests.attention.conftest import restore_threads, single_threaded_oracle  # noqa: F401
from tests.attention.isa import set_isa


@pytest.fixture
def exact_weights() -> Iterator[None]:
    """Other tests cover kernels that round the weights to bf16; here the rounding would hide a missing token."""
    before = cpu.isa()
    set_isa(next(isa for isa in cpu.usable_isas() if isa not in oracle.BF16_ISAS))
    yield
    set_isa(before)
