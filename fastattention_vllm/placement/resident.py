"""The blocks of host layers that also lie on the device, where a request that fits needs no CPU.

A pool of rows on the device holds copies of blocks. One row stands for the same block in every host layer. vLLM's
blocks are filled from their first token on, and the device writes every token twice: to the host pool, and to the row
of its block if there is one. So a block that gets a row when its first token is written has a true copy for as long as
it keeps the row, and a row can be taken away at any time without a copy, because the host pool holds everything.

Only the first blocks of a context are of use: the device attends to these, and the CPU to the rest. A block gets a row
if all blocks before it have one. Free rows come first, then the rows that no request of the batch uses, the longest
unused first and of these the last blocks of a context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastattention_vllm.placement.step import Batch

NONE = -1


@dataclass(frozen=True)
class Residents:
    """What one batch has on the device. All tensors are on the host."""

    counts: tuple[int, ...]
    """For each request, how many blocks at the beginning of its context have a row."""
    rows: torch.Tensor
    """``[num_seqs, max_blocks]`` int32: the rows of these blocks, 0 elsewhere."""
    slots: torch.Tensor
    """``[num_tokens]`` int64: where the copy of each new token belongs, counted in tokens of the rows; -1: nowhere."""


class ResidentBlocks:
    """Which blocks have a row.

    All batches of one block table pass through :meth:`admit`, in the order in which they are computed, and every token
    is written to where it says.
    """

    def __init__(self, num_blocks: int, num_rows: int) -> None:
        self.row_of = torch.full((num_blocks,), NONE, dtype=torch.int32)
        """By block."""
        self.block_of = torch.full((num_rows,), NONE, dtype=torch.int64)
        """By row."""
        self._used = torch.zeros(num_rows, dtype=torch.int64)
        """By row: the number of the last batch that used it; 0 if it is free."""
        self._place = torch.zeros(num_rows, dtype=torch.int64)
        """By row: which block of its context it holds."""
        self._now = 0

    def admit(self, batch: Batch, block_size: int) -> Residents:
        """Give rows to blocks that this batch begins, and say what the batch has on the device."""
        self._now += 1
        begun = ((batch.slot_mapping >= 0) & (batch.slot_mapping % block_size == 0)).nonzero().flatten()
        self._release(batch.slot_mapping[begun] // block_size)  # they belong to somebody else now
        width = -(-batch.seq_lens // block_size)
        table = batch.block_table[:, : int(width.max()) if len(width) else 0].long()
        inside = torch.arange(table.shape[1]) < width[:, None]
        kept = self._first(table, inside)
        self._used[self.row_of[table[kept]].long()] = self._now
        if len(begun):
            starts = batch.query_start_loc.long()
            contexts = batch.seq_lens - torch.diff(starts)
            for index in torch.searchsorted(starts, begun, right=True).sub(1).unique().tolist():
                own = begun[(begun >= starts[index]) & (begun < starts[index + 1])]
                places = (contexts[index] + own - starts[index]) // block_size
                first = int(self._first(table[index, None], inside[index, None]).sum())
                extending = places - first == torch.arange(len(places))
                self._place_blocks(table[index, places[extending]], first)
            kept = self._first(table, inside)
        rows = torch.where(kept, self.row_of[table], 0)
        return Residents(tuple(kept.sum(1).tolist()), rows, self._slots(batch.slot_mapping, block_size))

    def _first(self, table: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        """Which blocks, at the beginning of each row of ``table``, have a row here."""
        return ((self.row_of[table] != NONE) & inside).cumprod(1).bool()

    def _place_blocks(self, blocks: torch.Tensor, first: int) -> None:
        """Give rows to ``blocks``, which continue a context from its block ``first`` on, as far as there are rows."""
        # The key of a row is the greater, the later it is to be taken.
        keys = self._used * (len(self.row_of) + 1) - self._place
        order = keys.argsort(stable=True)
        rows = order[self._used[order] < self._now][: len(blocks)]
        blocks = blocks[: len(rows)]
        self._release(self.block_of[rows])
        self.row_of[blocks] = rows.int()
        self.block_of[rows] = blocks
        self._used[rows] = self._now
        self._place[rows] = first + torch.arange(len(rows))

    def _release(self, blocks: torch.Tensor) -> None:
        blocks = blocks[blocks >= 0]
        rows = self.row_of[blocks].long()
        rows = rows[rows >= 0]
        self.row_of[blocks] = NONE
        self.block_of[rows] = NONE
        self._used[rows] = 0
        self._place[rows] = 0

    def _slots(self, slots: torch.Tensor, block_size: int) -> torch.Tensor:
        rows = self.row_of[slots.clamp(min=0) // block_size].long()
        return torch.where((slots >= 0) & (rows != NONE), rows * block_size + slots % block_size, NONE)
