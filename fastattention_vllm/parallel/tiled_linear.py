"""A row-parallel linear layer and its all-reduce as one op: a block is summed while the next one is multiplied.

To torch.compile it is one opaque op, ``torch.ops.fastattention.tiled_linear_all_reduce``. How many blocks a number of
rows becomes is decided inside, where that number is known. The weight is an argument, and the group goes by its name,
so that all layers of a model have the same graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from fastattention_vllm.parallel.collective import Collective
from fastattention_vllm.parallel.multiprocessors import leave_free
from fastattention_vllm.parallel.rows_ready import RowsReady

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


Activation = Callable[[torch.Tensor], torch.Tensor]


class Tiling(ABC):
    """What the op does on one group of ranks.

    Args:
        collective: of the group; its first rank adds the bias.
        activation: between the two matmuls of an MLP, where there are any: [rows, n] to [rows, inputs of the second].
        ready: where attention says which rows of its output are there before the rest; then its blocks are taken.
    """

    def __init__(
        self, collective: Collective, *, activation: Activation | None = None, ready: RowsReady | None = None
    ) -> None:
        self.collective = collective
        self.activation = activation
        self.ready = ready

    @abstractmethod
    def blocks(self, rows: int, weight: torch.Tensor) -> Sequence[int]:
        """Rows of each block of a layer; fewer than two blocks mean :meth:`plain`.

        The same on every rank, or they wait for each other forever.
        """

    @abstractmethod
    def plain(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Input, weight and this rank's bias to the summed output, without tiling: what the caller would do else."""

    def collective_for(self, rows: int, weight: torch.Tensor) -> Collective:
        """Sums the blocks of a layer that has several."""
        return self.collective


_tilings: dict[str, Tiling] = {}


def register(group: str, tiling: Tiling) -> None:
    """Let the op know ``group``; replaces what it knew."""
    _tilings[group] = tiling


def tiled_linear_all_reduce(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: str
) -> torch.Tensor:
    """The sum over the ranks of ``x @ weight.T``, plus ``bias`` once.

    Args:
        x: [rows, inputs of this rank].
        weight: [outputs, inputs of this rank], of x's dtype.
        bias: [outputs], the same on every rank; one of them adds it.
        group: a name given to :func:`register`.

    Returns:
        [rows, outputs], of x's dtype, the same on every rank.

    Raises:
        CollectiveError: a rank is gone, or has not answered in time.
    """
    result: torch.Tensor = torch.ops.fastattention.tiled_linear_all_reduce(x, weight, bias, group)
    return result


def _run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: str) -> torch.Tensor:
    tiling = _tilings[group]
    collective = tiling.collective
    if collective.rank != 0:
        # Before the sum on one rank, as vLLM has it: free inside the matmul, where after the sum it would be one more
        # pass over the output on every rank.
        bias = None
    pending = tiling.ready.pop(x) if tiling.ready is not None else None
    blocks = pending.blocks if pending is not None else tiling.blocks(x.shape[0], weight)
    if len(blocks) < 2:
        return tiling.plain(x, weight, bias)
    collective = tiling.collective_for(x.shape[0], weight)
    if pending is not None:
        assert pending.out.shape[1] == weight.shape[0], f"{pending.out.shape} for {weight.shape[0]} outputs"
        with pending.beside():
            compute_and_sum(pending.waiting(_multiply(x, weight, bias)), pending.out, blocks, collective)
        return pending.out
    out = x.new_empty(x.shape[0], weight.shape[0])
    multiply_and_sum(x, weight, bias, out, blocks, collective)
    return out


def tiled_mlp_all_reduce(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over the ranks of ``activate(x @ first.T) @ second.T``: a block of rows goes through all of it before the
    next, so that both matmuls and the activation are there to hide a sum behind.

    Args:
        x: [rows, inputs].
        first: [n of this rank, inputs].
        second: [outputs, inputs of this rank]; decides about the blocks, as if it were alone.
        group: a name given to :func:`register`, with an activation.

    Returns:
        [rows, outputs], the same on every rank.

    Raises:
        CollectiveError: a rank is gone, or has not answered in time.
    """
    result: torch.Tensor = torch.ops.fastattention.tiled_mlp_all_reduce(x, first, second, group)
    return result


def _run_mlp(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, group: str) -> torch.Tensor:
    tiling = _tilings[group]
    activate = tiling.activation
    assert activate is not None, f"no activation is registered for {group}"
    blocks = tiling.blocks(x.shape[0], second)
    if len(blocks) < 2:
        return tiling.plain(activate(torch.nn.functional.linear(x, first)), second, None)
    collective = tiling.collective_for(x.shape[0], second)

    def compute(rows: slice, block: torch.Tensor) -> None:
        torch.mm(activate(torch.mm(x[rows], first.t())), second.t(), out=block)

    out = x.new_empty(x.shape[0], second.shape[0])
    compute_and_sum(compute, out, blocks, collective)
    return out


def multiply_and_sum(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    blocks: Sequence[int],
    collective: Collective,
) -> None:
    """Into ``out`` the sum over the ranks of ``x @ weight.T + bias``, in blocks of so many rows."""

    compute_and_sum(_multiply(x, weight, bias), out, blocks, collective)


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[slice, torch.Tensor], None]:
    def multiply(rows: slice, block: torch.Tensor) -> None:
        if bias is None:
            torch.mm(x[rows], weight.t(), out=block)
        else:
            torch.addmm(bias, x[rows], weight.t(), out=block)

    return multiply


def compute_and_sum(
    compute: Callable[[slice, torch.Tensor], object], out: torch.Tensor, blocks: Sequence[int], collective: Collective
) -> None:
    """Into ``out`` ([rows, outputs]) the sum over the ranks of what ``compute`` puts there, in blocks of so many rows.

    Args:
        compute: told which rows, and where they go. Anything that ends in a row-parallel layer: its matmul alone, or
            attention and o_proj, or a whole MLP, which have more to hide a sum behind.
    """
    started = []
    begin = 0
    for rows in blocks:
        block = out[begin : begin + rows]
        compute(slice(begin, begin + rows), block)
        started.append(collective.start(block))
        if begin == 0 and collective.multiprocessors:
            leave_free(collective.multiprocessors, out.device)
        begin += rows
    if collective.multiprocessors:
        leave_free(0, out.device)
    assert begin == out.shape[0], f"blocks of {blocks} rows for {out.shape[0]}"
    for one in started:
        collective.wait(one)


def _shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: str) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _mlp_shape(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty(x.shape[0], second.shape[0])


_library = torch.library.Library("fastattention", "FRAGMENT")
_library.define("tiled_linear_all_reduce(Tensor x, Tensor weight, Tensor? bias, str group) -> Tensor")
_library.define("tiled_mlp_all_reduce(Tensor x, Tensor first, Tensor second, str group) -> Tensor")
for _key in ("CPU", "CUDA", "PrivateUse1"):  # the last is an NPU's
    _library.impl("tiled_linear_all_reduce", _run, _key)
    _library.impl("tiled_mlp_all_reduce", _run_mlp, _key)
_library.impl("tiled_mlp_all_reduce", _mlp_shape, "Meta")
_library.impl("tiled_linear_all_reduce", _shape, "Meta")
