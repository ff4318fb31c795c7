"""Tasks for ranks (see ``Ranks.run``). They run in the ranks' processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fastattention_vllm.parallel import calibrate, push_sums, tiled_linear
from fastattention_vllm.parallel.choice import Choice
from fastattention_vllm.parallel.collective import Collective, CollectiveError
from fastattention_vllm.parallel.copy_collective import CopyCollective
from fastattention_vllm.parallel.plan import even
from fastattention_vllm.parallel.rows_ready import RowsReady
from fastattention_vllm.parallel.tiled_linear import Tiling

COLLECTIVE: Any = None  # a Collective, set when the process has joined the world

GROUP = "test"
GRANULE = 8


@dataclass(frozen=True)
class Case:
    """One layer and its input."""

    rows: int
    inputs: int
    """Number of inputs of each rank."""
    outputs: int
    dtype: torch.dtype
    blocks: tuple[int, ...]
    bias: bool = True
    exact: bool = False
    """Small integers, whose sums every dtype holds exactly in any order."""
    late: float = 0.0
    """Seconds by which the last rank is late."""

    def tensors(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Input, weight and bias. Input and weight differ by rank, the bias is shared."""
        own = torch.Generator().manual_seed(1000 + rank)
        common = torch.Generator().manual_seed(7)
        x = self._numbers((self.rows, self.inputs), own)
        weight = self._numbers((self.outputs, self.inputs), own)
        return x, weight, self._numbers((self.outputs,), common) if self.bias else None

    def _numbers(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if self.exact:
            return torch.randint(-1, 2, shape, generator=generator).to(self.dtype)
        return torch.randn(shape, generator=generator).to(self.dtype)


class TilingBy(Tiling):
    """A tiling from functions."""

    def __init__(
        self,
        collective: Collective,
        blocks: Callable[[int, torch.Tensor], Sequence[int]],
        plain: tiled_linear.Linear,
        **more: Any,
    ) -> None:
        super().__init__(collective, **more)
        self._blocks, self._plain = blocks, plain

    def blocks(self, rows: int, weight: torch.Tensor) -> Sequence[int]:
        return self._blocks(rows, weight)

    def plain(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._plain(x, weight, bias)


def plain_layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As vLLM's RowParallelLinear: one matmul, with the bias on one rank, then one all-reduce."""
    out = torch.nn.functional.linear(x, weight, bias)
    dist.all_reduce(out)
    return out


def tiled_and_plain(rank: int, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Both results of this rank."""
    x, weight, bias = case.tensors(rank)
    before = [tensor.clone() for tensor in (x, weight, bias) if tensor is not None]
    tiled_linear.register(GROUP, TilingBy(COLLECTIVE, lambda rows, weight: case.blocks, plain_layer))
    if rank == dist.get_world_size() - 1:
        time.sleep(case.late)
    tiled = tiled_linear.tiled_linear_all_reduce(x, weight, bias, GROUP)
    result = tiled.clone()  # the contents when the op returns, before anything later changes them
    for tensor, old in zip([t for t in (x, weight, bias) if t is not None], before, strict=True):
        assert torch.equal(tensor, old), "arguments must not be changed"
    return result, plain_layer(x, weight, bias if rank == 0 else None)


def several(rank: int, cases: list[Case]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [tiled_and_plain(rank, case) for case in cases]


def mlp(rank: int, case: Case, wide: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A tiled MLP with relu, the plain result, and the number of sums that the tiled one started."""
    x, second, _ = case.tensors(rank)
    generator = torch.Generator().manual_seed(50 + rank)
    x = torch.randint(-1, 2, (case.rows, wide), generator=torch.Generator().manual_seed(5)).to(case.dtype)
    first = torch.randint(-1, 2, (case.inputs, wide), generator=generator).to(case.dtype)
    counted = Counted(COLLECTIVE)
    tiling = TilingBy(counted, lambda rows, weight: case.blocks, plain_layer, activation=torch.relu)
    tiled_linear.register(GROUP, tiling)
    found = tiled_linear.tiled_mlp_all_reduce(x, first, second, GROUP).clone()
    return found, plain_layer(torch.relu(x @ first.t()), second, None), counted.started


def after_attention(rank: int, case: Case, ends: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The tiled layer after a producer that computes its input in blocks; the plain result; the number of sums."""
    x, weight, bias = case.tensors(rank)
    ready = RowsReady(case.outputs)
    counted = Counted(COLLECTIVE)
    tiled_linear.register(GROUP, TilingBy(counted, lambda rows, weight: (rows,), plain_layer, ready=ready))
    attended = torch.full_like(x, 99)
    ready.begin(attended.view(case.rows, 4, -1))
    begin = 0
    for end in ends:
        attended[begin:end] = x[begin:end]
        ready.mark(attended, end)
        begin = end
    attended[begin:] = x[begin:]
    result = tiled_linear.tiled_linear_all_reduce(attended, weight, bias, GROUP).clone()
    return result, plain_layer(x, weight, bias if rank == 0 else None), counted.started


class Counted(Collective):
    """A collective that counts the sums it starts."""

    def __init__(self, other: Collective) -> None:
        self.other, self.rank, self.size, self.started = other, other.rank, other.size, 0

    def start(self, block: torch.Tensor) -> Any:
        self.started += 1
        return self.other.start(block)

    def wait(self, started: Any) -> None:
        self.other.wait(started)


def all_in_flight(rank: int, case: Case, layers: int) -> torch.Tensor:
    """``layers`` calls in sequence, each on the previous result; returns the last one."""
    x, weight, _ = case.tensors(rank)
    tiled_linear.register(GROUP, TilingBy(COLLECTIVE, lambda rows, weight: even(rows, 4, GRANULE), plain_layer))
    for _ in range(layers):
        x = tiled_linear.tiled_linear_all_reduce(x, weight, None, GROUP).remainder(2)
    return x


def other_collective(rank: int, groups: list[list[int]]) -> tuple[int, int, float]:
    """Rank, size and a sum in the group of ``groups`` that contains this rank."""
    from fastattention_vllm.parallel.collective import open_collective

    collective: Collective = open_collective(groups, "cpu", 120)
    number = torch.tensor([10.0**rank])
    collective.wait(collective.start(number))
    return collective.rank, collective.size, number.item()


def compiled(rank: int, rows: list[int]) -> int:
    """Compile a layer once for any number of rows and compare it with the plain one. Returns the number of graphs."""
    case = Case(max(rows), 32, 24, torch.float32, (), exact=True)
    x, weight, bias = case.tensors(rank)
    tiled_linear.register(GROUP, TilingBy(COLLECTIVE, lambda rows, weight: even(rows, 4, GRANULE), plain_layer))
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def layer(x: torch.Tensor) -> torch.Tensor:
        return tiled_linear.tiled_linear_all_reduce(x * 1, weight, bias, GROUP) + 0

    for count in rows:
        expected = plain_layer(x[:count], weight, bias if rank == 0 else None)
        assert torch.equal(layer(x[:count]), expected)
    return len(graphs)


def die_in_the_second_layer(rank: int, case: Case) -> None:
    """The last rank exits without a message while the others wait for it."""
    tiled_and_plain(rank, case)
    if rank == dist.get_world_size() - 1:
        os._exit(1)
    x, weight, bias = case.tensors(rank)
    tiled_linear.tiled_linear_all_reduce(x, weight, bias, GROUP)


def fall_silent_in_the_second_layer(rank: int, case: Case, seconds: float) -> float:
    """The last rank stays away. The others return how long they waited before they raised."""
    tiled_and_plain(rank, case)
    if rank == dist.get_world_size() - 1:
        time.sleep(seconds)
        return 0.0
    x, weight, bias = case.tensors(rank)
    started = time.monotonic()
    try:
        tiled_linear.tiled_linear_all_reduce(x, weight, bias, GROUP)
    except CollectiveError:
        return time.monotonic() - started
    raise AssertionError("a sum without one of its ranks was returned")


def exchange(value: object) -> list[object]:
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def copied_sums(
    rank: int, sizes: list[int], dtype: torch.dtype, channels: int, board_bytes: int, seed: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Sums of blocks of these sizes by copies, all in flight together; the same by gloo; and the number of pieces."""
    from tests.parallel.shared_copies import SharedCopies

    copies = SharedCopies(rank, dist.get_world_size(), exchange, channels, board_bytes)
    collective = CopyCollective(copies)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    blocks = [torch.randint(-9, 10, (size,), generator=generator).to(dtype) for size in sizes]
    expected = [block.clone() for block in blocks]
    started = [collective.start(block) for block in blocks]
    for one, block in zip(started, expected, strict=True):
        collective.wait(one)
        dist.all_reduce(block)
    return blocks, expected, copies.pieces


KEPT_BACK = 0.02
"""Seconds."""


def measured(rank: int, outputs: int, inputs: int, min_rows: int, max_rows: int) -> Choice:
    """A calibration in which the last rank's matmuls take ``KEPT_BACK`` longer."""
    original = torch.mm

    def slow(*arguments: Any, **named: Any) -> torch.Tensor:
        time.sleep(KEPT_BACK)
        return original(*arguments, **named)

    if rank == dist.get_world_size() - 1:
        torch.mm = slow  # type: ignore[assignment]
    try:
        collectives = {"first": COLLECTIVE, "second": COLLECTIVE}
        return calibrate.measure(collectives, plain_layer, torch.zeros(outputs, inputs), min_rows, max_rows)
    finally:
        torch.mm = original  # type: ignore[assignment]


def measured_until(rank: int, stage: str, rows: list[int]) -> tuple[Choice, list[str], int]:
    """A calibration in which the last rank's clock jumps ahead after ``stage`` (the beginning of a log line).

    Returns the choice, the log lines, and the number of sums started after the jump.
    """
    from fastattention_vllm.parallel import layer_timer

    said: list[str] = []
    counted = Counted(COLLECTIVE)
    before = leap = 0.0

    def say(line: str) -> None:
        nonlocal before, leap
        said.append(line)
        if line.startswith(stage):
            before = counted.started
            leap = 1e6 if rank == dist.get_world_size() - 1 else 0.0

    original = layer_timer.monotonic
    layer_timer.monotonic = lambda: original() + leap
    try:
        least, most = rows
        found = calibrate.measure({"gloo": counted}, plain_layer, torch.zeros(48, 32), least, most, 1000.0, say)
    finally:
        layer_timer.monotonic = original
    return found, said, int(counted.started - before)


def pushed_sums(
    rank: int, lengths: list[int], dtype: torch.dtype, max_bytes: int, late: bool
) -> tuple[bool, list[torch.Tensor], list[torch.Tensor]]:
    """Whether a self-test passes; sums by push; and this rank's tensors. ``late``: a rank's numbers do not arrive.

    A look is much shorter than on a GPU, and a rank may be away for long. So otherwise it looks for ever.
    """
    from tests.parallel import shared_boards
    from tests.parallel.shared_boards import on_cpu

    sums = shared_boards.open_sums(rank, dist.get_world_size(), exchange, max_bytes)
    if late and rank == 0:
        elsewhere = torch.zeros(sums._layout.bytes, dtype=torch.uint8)
        sums._boards[1] = elsewhere.data_ptr()
    with on_cpu(), mock.patch.object(push_sums, "LOOKS", 20 if late else 1 << 30):
        works = sums.works(dtype, exchange)
        generator = torch.Generator().manual_seed(rank)
        given = [torch.randn(length, generator=generator).to(dtype) for length in ([] if late else lengths)]
        return works, [sums.sum(x) for x in given], given
