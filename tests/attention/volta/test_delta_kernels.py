"""The launcher of the gated delta rule's kernels: any batch, on the emulator, against the definition in float64."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

from fastattention_vllm.attention.volta import delta_kernels, images
from fastattention_vllm.attention.volta.delta_kernels import (
    SCRATCH_BYTES,
    SIZE,
    GatedDelta,
    Plan,
    Variant,
    chunks_at_once,
    gated_delta_rule,
)
from fastattention_vllm.attention.volta.gated_delta import WORKSPACE_BYTES
from kernels.volta import gated_delta_problems, manifest
from kernels.volta.gated_delta_variants import ALL, describe
from tests.attention.volta.delta_rule import CPU, Problem, definition
from tests.attention.volta.simulated_gpu import addresses, mapping_of

COMPILED = {str(describe(one)["name"]): one for one in ALL}
Launches = list[tuple[str, tuple[int, int, int]]]


@dataclass
class EmulatedKernel:
    """Replaces ``cuda_driver.Kernel``. Works on this process's memory."""

    variant: Variant
    launches: Launches

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        parameters: GatedDelta,
        stream: int,
    ) -> None:
        self.launches.append((self.variant.kind, grid))
        machine = gated_delta_problems.emulated(COMPILED[self.variant.name])
        for begin, end in sorted({mapping_of(address) for address in addresses(parameters)}):
            machine.map(numpy.frombuffer((ctypes.c_uint8 * (end - begin)).from_address(begin), dtype=numpy.uint8))
        machine.launch(grid, block, bytes(parameters), shared_bytes)
        for y in range(grid[1]):
            for x in range(grid[0]):
                machine.execute(x, y)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Emulates all launches. The kernel and grid of each is appended to this list."""
    found: Launches = []
    known = tuple(Variant(**describe(one)) for one in ALL)  # type: ignore[arg-type]
    monkeypatch.setattr(delta_kernels, "variants", lambda folder: known)
    monkeypatch.setattr(delta_kernels, "_kernel", lambda variant: EmulatedKernel(variant, found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
    return found


def problem(lengths: list[int], key_heads: int = 1, value_heads: int = 1) -> Problem:
    return Problem(lengths, (key_heads, value_heads, SIZE, SIZE), dtype=torch.float16)


def run(of: Problem, at_once: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    plan = Plan(of.starts, at_once, CPU)
    return gated_delta_rule(of.q, of.k, of.v, of.g, of.beta, of.states, plan, normalise=True)


def check(of: Problem, at_once: int = 100) -> None:
    """The kernels' own tests have narrower limits. A wrong token, head or request is farther off."""
    before = of.states.clone()
    out, states = run(of, at_once)
    expected, after = definition(of)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(states.double(), after, rtol=1e-5, atol=1e-5)
    assert torch.equal(of.states, before)


@pytest.mark.parametrize("at_once", [2, 100])
def test_a_batch_in_segments(at_once: int, launches: Launches) -> None:
    """Requests that are cut, one without tokens, and a last one of one token."""
    one = problem([70, 0, 130, 1], 1, 2)
    check(one, at_once)
    assert sum(grid[1] for kind, grid in launches if kind == "chunk") == 2 + 3 + 1
    assert max(grid[1] for kind, grid in launches if kind == "chunk") == min(at_once, 6)


def test_parts_of_wider_tensors(launches: Launches) -> None:
    """As vLLM's layers may pass them: rows further apart, rows that are not aligned, and beta in fp16."""
    one = problem([20], 1, 2)
    both = torch.zeros(20, 2, SIZE, dtype=torch.float16)
    both[:, :1], both[:, 1:] = one.q, one.k
    one.q, one.k = both[:, :1], both[:, 1:]
    odd = torch.zeros(20, 2 * SIZE + 4, dtype=torch.float16)
    odd[:, 4:] = one.v.flatten(1)
    one.v, one.beta = odd[:, 4:].unflatten(1, (2, SIZE)), one.beta.half()
    assert (one.q.stride(0), one.v.stride(0) % 8) == (2 * SIZE, 4)
    check(one)


def test_no_tokens(launches: Launches) -> None:
    one = problem([0])
    out, states = run(one)
    assert out.shape == one.v.shape
    assert torch.equal(states, one.states)
    assert not launches


def test_few_heads_are_shared_by_two_ctas(launches: Launches) -> None:
    assert [delta_kernels.scan_for(heads).values for heads in (1, 40, 41, 80)] == [64, 64, 128, 128]


def test_a_request_keeps_its_place_in_all_segments() -> None:
    plan = Plan([0, 70, 270], 3, CPU)
    assert [segment.pieces.tolist() for segment in plan.segments] == [
        [[70, 262, 0, 1]],
        [[262, 270, 0, 1], [0, 70, 1, 0]],
    ]
    assert [segment.chunks.tolist() for segment in plan.segments] == [
        [[70, 134], [134, 198], [198, 262]],
        [[262, 270], [0, 64], [64, 70]],
    ]


@pytest.mark.parametrize("heads", [12, 24, 48])
def test_scratch_memory_is_bounded(heads: int) -> None:
    used = chunks_at_once(heads) * heads * SCRATCH_BYTES
    assert WORKSPACE_BYTES - heads * SCRATCH_BYTES < used <= WORKSPACE_BYTES


def test_the_manifest_describes_the_kernels(tmp_path: Path) -> None:
    for one in ALL:
        for suffix in ("cubin", "ptx"):
            (tmp_path / one.image(suffix)).write_text(one.name)
    manifest.write(tmp_path, ALL, "NVRTC 12.9")
    found = delta_kernels.variants(tmp_path)
    assert [(one.kind, one.values, one.threads) for one in found] == [
        ("chunk", 0, 128),
        ("scan", 64, 128),
        ("scan", 128, 256),
    ]
    assert [images.read(tmp_path, one, "ptx").decode() for one in found] == [one.name for one in ALL]


def test_what_does_not_fit_is_refused() -> None:
    one = problem([5])
    one.q = one.q.float()
    with pytest.raises(ValueError, match=r"^Heads of 128 and 128 in torch\.float32 do not fit the kernels"):
        run(one)
    one = Problem([5], (1, 1, 64, SIZE), dtype=torch.float16)
    with pytest.raises(ValueError, match=r"^Heads of 64 and 128 in torch\.float16 do not fit"):
        run(one)
    one = problem([5])
    one.beta = one.beta[:4]
    with pytest.raises(ValueError, match=r"^beta has shape \[4, 1\], but must have \[5, 1\].$"):
        run(one)
