"""Stand-ins for the Triton kernels that copy states of linear-attention layers from block to block.

Why: Triton has no CPU target here. vLLM has no CPU version of them.
Remove when: vLLM publishes CPU wheels with such copies. Reference: ``vllm/v1/worker/mamba_utils.py``.

With prefix caching, a request keeps one state per block, so that another request can continue at the end of a block. A
request that goes on in the next block takes its state with it. With speculation, the state after the last accepted
token is one of several: ``offset`` blocks, or in the convolution's inputs ``offset`` tokens, behind the first.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def copy_states(src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor, BLOCK_SIZE: int = 0) -> None:
    """Copy ``sizes`` bytes between addresses. Parameter names are the Triton kernel's."""
    for source, target, size in zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


class _States:
    """All states of a worker, by their addresses. The arguments are the last ones of both kernels below."""

    def __init__(
        self,
        tables: torch.Tensor,
        table_stride: int,
        addresses: torch.Tensor,
        block_bytes: torch.Tensor,
        element_bytes: torch.Tensor,
        inner_elements: torch.Tensor,
        conv_tokens: torch.Tensor,
        groups: torch.Tensor,
        row_counts: torch.Tensor,
        row_bytes: torch.Tensor,
        channels_first: bool,
    ) -> None:
        self.tables, self.table_stride, self.channels_first = tables.tolist(), table_stride, channels_first
        self.states = list(
            zip(
                *(
                    numbers.tolist()
                    for numbers in (
                        addresses,
                        block_bytes,
                        element_bytes,
                        inner_elements,
                        conv_tokens,
                        groups,
                        row_counts,
                        row_bytes,
                    )
                ),
                strict=True,
            )
        )

    def copy(self, request: int, source: int, target: int, offset: int) -> None:
        """Copy all states of a request from the block in column ``source`` of its tables to that in ``target``."""
        for address, block, element, inner, tokens, group, rows, row in self.states:
            to = address + self._block(group, request, target) * block
            if not tokens:
                ctypes.memmove(to, address + self._block(group, request, source + offset) * block, inner * element)
                continue
            begin, count = address + self._block(group, request, source) * block, tokens - offset
            if self.channels_first:
                for number in range(rows):
                    ctypes.memmove(to + number * row, begin + number * row + offset * element, count * element)
            else:
                ctypes.memmove(to, begin + offset * inner * element, count * inner * element)

    def _block(self, group: int, request: int, column: int) -> int:
        entry = self.tables[group] + 4 * (request * self.table_stride + column)
        return ctypes.c_int32.from_address(entry).value


def move_on(
    target_columns: torch.Tensor,
    source_columns: torch.Tensor,
    offsets: torch.Tensor,
    tables: torch.Tensor,
    table_stride: int,
    addresses: torch.Tensor,
    block_bytes: torch.Tensor,
    element_bytes: torch.Tensor,
    inner_elements: torch.Tensor,
    conv_tokens: torch.Tensor,
    groups: torch.Tensor,
    row_counts: torch.Tensor,
    row_bytes: torch.Tensor,
    requests: torch.Tensor | None,
    num_requests: int,
    CONV_STATE_DIM_FIRST: bool = False,
    **_: Any,
) -> None:
    """Before a step: copy the state of each request that goes on in another block. Source -1: it has none yet."""
    assert requests is None, "the V2 model runner is refused at start"
    states = _States(
        tables,
        table_stride,
        addresses,
        block_bytes,
        element_bytes,
        inner_elements,
        conv_tokens,
        groups,
        row_counts,
        row_bytes,
        CONV_STATE_DIM_FIRST,
    )
    columns = (numbers[:num_requests].tolist() for numbers in (source_columns, target_columns, offsets))
    for request, (source, target, offset) in enumerate(zip(*columns, strict=True)):
        if source >= 0 and source != target:
            states.copy(request, source, target, offset)


def keep_at_borders(
    num_accepted: torch.Tensor,
    state_columns: torch.Tensor,
    num_scheduled: torch.Tensor,
    num_computed: torch.Tensor,
    num_drafted: torch.Tensor,
    tables: torch.Tensor,
    table_stride: int,
    addresses: torch.Tensor,
    block_bytes: torch.Tensor,
    element_bytes: torch.Tensor,
    inner_elements: torch.Tensor,
    conv_tokens: torch.Tensor,
    groups: torch.Tensor,
    row_counts: torch.Tensor,
    row_bytes: torch.Tensor,
    num_accepted_after: torch.Tensor,
    requests: torch.Tensor | None,
    num_requests: int,
    block_size: int,
    CONV_STATE_DIM_FIRST: bool = False,
    **_: Any,
) -> None:
    """After a step: where the accepted tokens reach the end of a block, keep the state of exactly that token there.

    ``num_accepted`` includes the verified token. A state that stays in its block becomes the first one there.
    """
    assert requests is None, "the V2 model runner is refused at start"
    states = _States(
        tables,
        table_stride,
        addresses,
        block_bytes,
        element_bytes,
        inner_elements,
        conv_tokens,
        groups,
        row_counts,
        row_bytes,
        CONV_STATE_DIM_FIRST,
    )
    numbers = (num_accepted, state_columns, num_scheduled, num_computed, num_drafted)
    for request, (accepted, column, scheduled, computed, drafted) in enumerate(
        zip(*(one[:num_requests].tolist() for one in numbers), strict=True)
    ):
        first = computed + scheduled - drafted  # tokens up to the first state of this step
        border = (first + accepted - 1) // block_size * block_size
        if border < first:
            continue
        target, offset = border // block_size - 1, border - first
        if target == column:
            num_accepted_after[request] = 1
        if target != column or offset:
            states.copy(request, column, target, offset)


_UTILS = "vllm.v1.worker.mamba_utils"
KERNELS = {
    f"{_UTILS}.batch_memcpy_kernel": copy_states,
    f"{_UTILS}.precopy_mamba_align_fused_kernel": move_on,
    f"{_UTILS}.postprocess_mamba_fused_kernel": keep_at_borders,
}
