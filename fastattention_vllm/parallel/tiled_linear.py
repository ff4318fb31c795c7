"""A row-parallel linear layer and its all-reduce as one op: a block is summed while the next one is multiplied.

For torch.compile it is one opaque op, ``torch.ops.fastattention.tiled_linear_all_reduce``. The number of blocks is
chosen inside the op, where the number of rows is known. The weight is an argument and the group is passed by name, so
all layers of a model have the same graph.
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
    """How the op works on one group of ranks.

    Args:
        collective: the group's collective. The group's first rank adds the bias.
        activation: between the two matmuls of tiled MLPs: [rows, n] to [rows, inputs of the second].
        ready: where attention marks rows of its output that are ready; the op then uses the blocks of attention.
    """

    def __init__(
        self, collective: Collective, *, activation: Activation | None = None, ready: RowsReady | None = None
    ) -> None:
        self.collective = collective
        self.activation = activation
        self.ready = ready

    @abstractmethod
    def blocks(self, rows: int, weight: torch.Tensor) -> Sequence[int]:
        """Rows of each block of a layer. With fewer than two blocks, :meth:`plain` is used.

        Every rank must return the same blocks; otherwise the ranks wait for each other forever.
        """

    @abstractmethod
    def plain(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The layer without tiling: from input, weight and this rank's bias to the summed output."""

    def collective_for(self, rows: int, weight: torch.Tensor) -> Collective:
        """The collective for a layer with several blocks."""
        return self.collective


_tilings: dict[str, Tiling] = {}


def register(group: str, tiling: Tiling) -> None:
    """Register the tiling for ``group``, which replaces an earlier one."""
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
        CollectiveError: a rank has ended, or has not answered in time.
    """
    result: torch.Tensor = torch.ops.fastattention.tiled_linear_all_reduce(x, weight, bias, group)
    return result


def _run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: str) -> torch.Tensor:
    tiling = _tilings[group]
    collective = tiling.collective
    if collective.rank != 0:
        # As in vLLM, one rank adds the bias before the sum. Inside the matmul this costs nothing; after the sum it
        # would be another pass over the output on every rank.
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
    """The sum over the ranks of ``activate(x @ first.T) @ second.T``, in blocks of rows.

    A block passes through both matmuls and the activation before the next one begins, so that all of this can overlap
    with a sum.

    Args:
        x: [rows, inputs].
        first: [n of this rank, inputs].
        second: [outputs, inputs of this rank]. It determines the blocks, as for a single layer.
        group: a name given to :func:`register`, with an activation.

    Returns:
        [rows, outputs], the same on every rank.

    Raises:
        CollectiveError: a rank has ended, or has not answered in time.
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
    """Write the sum over the ranks of ``x @ weight.T + bias`` to ``out``, in the given blocks of rows."""

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
    """Write the sum over the ranks of ``compute``'s results to ``out`` ([rows, outputs]), in the given blocks of rows.

    Args:
        compute: computes the given rows into the given block. It may be any computation that ends in a row-parallel
            layer: only its matmul, attention and o_proj, or a whole MLP. More computation overlaps with more of a sum.
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
