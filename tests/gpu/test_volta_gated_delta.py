"""The gated delta rule's kernels on a real GPU: machine code on a V100, elsewhere PTX that the driver compiles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastattention_vllm.attention.volta import delta_kernels
from fastattention_vllm.attention.volta import kernels as attention
from fastattention_vllm.attention.volta.delta_kernels import SIZE, Plan, gated_delta_rule
from tests.attention.volta.delta_rule import Problem, definition


@pytest.fixture(scope="module", autouse=True)
def gpu() -> Iterator[None]:
    """Replaces the fixture of other GPU tests, because these run from the V100 on."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (7, 0):
        pytest.skip("needs an NVIDIA GPU of compute capability 7.0 or newer")
    torch.zeros(1, device="cuda")  # images are loaded into torch's context
    attention.choose("ptx")
    delta_kernels.load()
    yield
    attention.choose("auto")


def run(of: Problem, at_once: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    plan = Plan(of.starts, at_once, torch.device("cuda"))
    tensors = (getattr(of, name).cuda() for name in ("q", "k", "v", "g", "beta", "states"))
    out, states = gated_delta_rule(*tensors, plan, normalise=True)
    return out.cpu(), states.cpu()


@pytest.mark.parametrize("decay", [0.0, 0.1, 3.0, 80.0])
@pytest.mark.parametrize(("lengths", "at_once"), [([70, 0, 130, 1], 2), ([1000, 16, 17], 100), ([300] * 12, 100)])
def test_batches(lengths: list[int], at_once: int, decay: float) -> None:
    """Few and many heads, so both scans run. Tensor cores truncate sums that the definition rounds."""
    one = Problem(lengths, (2, 6, SIZE, SIZE), decay, torch.float16)
    out, states = run(one, at_once)
    expected, after = definition(one)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(states.double(), after, rtol=1e-4, atol=1e-4)


def test_equal_inputs_give_equal_bits() -> None:
    one = Problem([500, 7], (2, 6, SIZE, SIZE), 0.1, torch.float16)
    first, second = run(one), run(one)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
