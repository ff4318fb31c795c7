"""A layer's repeated calls of the CPU kernels: what stays the same between steps is checked and converted only once.

:func:`cpu.run` and :func:`cpu.write_kv` check every tensor, which takes 10 and 15 microseconds in Python. A model of 32
layers makes 64 such calls per token. The classes here keep a call's arguments and replace only those that change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.cpu.library import WriteArguments, check, library
from fastattention_vllm.attention.problem import AttentionProblem


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of a step, checked once for all layers. The tensors are those of :class:`AttentionProblem`.

    Raises ``ValueError`` for a tensor that does not match.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    causal: bool

    def __post_init__(self) -> None:
        num_seqs = self.seq_lens.shape[0]
        cpu.check_index(self.query_start_loc, "query_start_loc", (num_seqs + 1,))
        cpu.check_index(self.seq_lens, "seq_lens", (num_seqs,))
        cpu.check_index(self.block_table, "block_table", (num_seqs, self.block_table.shape[-1]))


class LayerAttention:
    """Attention of one layer over its paged cache. One call at a time.

    ``problem`` and ``out`` are those of any step. The layer keeps the parts of ``problem`` that :meth:`run` does not
    take. ALiBi slopes must be ``[num_heads]``.
    """

    def __init__(self, problem: AttentionProblem, out: torch.Tensor) -> None:
        slopes = problem.alibi_slopes
        if not problem.is_paged or (slopes is not None and slopes.dim() != 1):
            raise ValueError(
                "the problem has no block_table, or different alibi_slopes per sequence; use cpu.run for it."
            )
        self._plan(problem, out)

    def _plan(self, problem: AttentionProblem, out: torch.Tensor) -> None:
        self._arguments, _, _ = cpu.attention_arguments(problem, out, None, return_lse=False)
        self._of_token, self._dtype = problem.query.shape[1:], problem.query.dtype
        self._problem = replace(problem, query=problem.query.new_empty(0))  # keeps cache and slopes alive, but no query

    def run(
        self,
        query: torch.Tensor,
        batch: Batch,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        """Like :func:`cpu.run`, with the same errors. ``query``, ``out``: ``[num_tokens, num_heads, head_size]``."""
        shape, strides, out_strides = query.shape, query.stride(), out.stride()
        if not (
            shape[1:] == self._of_token
            and out.shape == shape
            and query.dtype is out.dtype is self._dtype
            and query.is_cpu
            and out.is_cpu
            and strides[2] == out_strides[2] == 1
        ):
            self._plan(replace(self._problem, query=query), out)  # says what is wrong, or takes it
        if sinks is not None:
            cpu.check_sinks(sinks, shape[1])
        arguments = self._arguments
        arguments.num_seqs = batch.seq_lens.shape[0]
        arguments.causal = batch.causal
        arguments.query_start_loc = batch.query_start_loc.data_ptr()
        arguments.seq_lens = batch.seq_lens.data_ptr()
        # Not null, as in kernels.py.
        arguments.block_table = batch.block_table.data_ptr() or self._problem.key.data_ptr()
        arguments.block_table_width = batch.block_table.shape[1]
        arguments.block_table_stride = batch.block_table.stride(0)
        arguments.sinks = None if sinks is None else sinks.data_ptr()
        arguments.key_scale, arguments.value_scale = key_scale, value_scale
        arguments.num_tokens = shape[0]
        arguments.query, arguments.out = query.data_ptr(), out.data_ptr()
        arguments.query_token_stride, arguments.query_head_stride, _ = strides
        arguments.out_token_stride, arguments.out_head_stride, _ = out_strides
        check(library().fa_cpu_attention(arguments))


class LayerWriter:
    """Writes of new K and V rows into one layer's paged cache. One call at a time.

    ``key_cache``, ``value_cache``: as in :func:`cpu.write_kv`.
    """

    def __init__(self, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
        self._caches = key_cache, value_cache
        self._arguments = WriteArguments()
        self._of_token: torch.Size | None = None
        self._dtype = torch.float32

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        """Like :func:`cpu.write_kv`, with the same errors."""
        shape, strides, value_strides = key.shape, key.stride(), value.stride()
        if not (
            shape[1:] == self._of_token
            and value.shape == shape
            and key.dtype is value.dtype is self._dtype
            and key.is_cpu
            and value.is_cpu
            and strides[2] == value_strides[2] == 1
            and slot_mapping.dtype is torch.int64
            and slot_mapping.is_cpu
            and slot_mapping.dim() == 1
            and slot_mapping.is_contiguous()
            and slot_mapping.shape[0] <= shape[0]
        ):
            self._arguments = cpu.write_arguments(key, value, *self._caches, slot_mapping, key_scale, value_scale)
            self._of_token, self._dtype = shape[1:], key.dtype
        arguments = self._arguments
        arguments.num_tokens = slot_mapping.shape[0]
        arguments.key_scale, arguments.value_scale = key_scale, value_scale
        arguments.slot_mapping, arguments.key, arguments.value = (
            slot_mapping.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
        )
        arguments.key_token_stride, arguments.key_head_stride, _ = strides
        arguments.value_token_stride, arguments.value_head_stride, _ = value_strides
        check(library().fa_cpu_write_kv(arguments))
