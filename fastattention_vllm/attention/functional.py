"""``fast_attn_func`` and ``fast_attn_varlen_func``: attention with the interface of flash_attn 2.x.

Names, shapes and meaning of the arguments are those of ``flash_attn_func`` and ``flash_attn_varlen_func``
(github.com/Dao-AILab/flash-attention, ``flash_attn_interface.py``), the function name that of the FastAttention paper
(arXiv 2410.16663). Both work under ``torch.compile(fullgraph=True)``: each is one opaque operator,
``torch.ops.fastattention.attention`` and ``.varlen_attention``.

They run on the device of ``q``: a CPU, an NVIDIA GPU below compute capability 8.0 (the Volta kernels), a newer one
(vLLM's FlashAttention, or PyTorch's where vLLM is absent), or an NPU (torch_npu). ``kernels.py`` chooses. Arguments
that a device's kernels do not support are refused with a ``ValueError`` that names them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fastattention_vllm.attention.kernels import kernels_for
from fastattention_vllm.attention.problem import AttentionProblem


def fast_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """Attention over a batch of equally long sequences.

    Fewer heads in ``k`` and ``v`` than in ``q`` mean grouped-query attention: query head ``h`` reads KV head
    ``h // (num_heads / num_kv_heads)``. If the sequence lengths differ, the mask is aligned to the bottom right: the
    last query sees the last key. A query that sees no key yields zeros.

    Args:
        q: ``[batch, seqlen_q, num_heads, head_size]``, float32, float16 or bfloat16.
        k: ``[batch, seqlen_k, num_kv_heads, head_size]``, one of these dtypes, float8_e4m3fn or float8_e5m2.
        v: as ``k``.
        dropout_p: must be 0; these kernels are for inference.
        softmax_scale: factor on ``q k^T``; ``head_size ** -0.5`` if absent.
        causal: query ``i`` sees keys up to ``i + seqlen_k - seqlen_q``.
        window_size: ``(left, right)`` keys visible around that position; -1 is unlimited.
        softcap: if positive, scores become ``softcap * tanh(score / softcap)``.
        alibi_slopes: ``[num_heads]`` or ``[batch, num_heads]`` float32: adds ``-slope`` times the distance
            ``|i + seqlen_k - seqlen_q - j|`` to the score.
        deterministic: accepted for compatibility; results are always bit-reproducible.
        return_attn_probs: also return the log-sum-exp of the scores.
        sinks: ``[num_heads]`` float32, not part of flash_attn's interface: the learned attention sinks of GPT-OSS
            (arXiv 2508.10925), with the same name as in vLLM. Each head's softmax gets one more key with this score and
            value zero: ``out = sum_j(exp(s_j) v_j) / (sum_j(exp(s_j)) + exp(sinks[h]))``. Scale, softcap, mask and
            slope do not apply to this score, and ``softmax_lse`` includes it.

    Returns:
        ``[batch, seqlen_q, num_heads, head_size]`` in the dtype of ``q``; with ``return_attn_probs`` the tuple
        ``(out, softmax_lse, None)``, where ``softmax_lse`` is ``[batch, num_heads, seqlen_q]`` float32, natural log,
        and -inf, or the head's sink, for a query that sees no key.

    Raises:
        ValueError: for dropout, for tensors that require gradients, for a device without kernels, and for tensors that
            do not fit together.
    """
    _refuse_training(dropout_p, q, k, v)
    _refuse_device(q.device)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = torch.ops.fastattention.attention(
        q, k, v, alibi_slopes, sinks, scale, causal, window_size[0], window_size[1], softcap
    )
    return (out, lse, None) if return_attn_probs else out


def fast_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """Attention over sequences of different lengths, concatenated or in pages.

    Args:
        q: ``[total_q, num_heads, head_size]``, float32, float16 or bfloat16.
        k: ``[total_k, num_kv_heads, head_size]``, or with ``block_table`` ``[num_blocks, page_size, num_kv_heads,
            head_size]``; any page size.
        v: as ``k``.
        cu_seqlens_q: ``[batch + 1]`` int32: the first query of each sequence, and the end. Launching kernels needs the
            lengths on the host, so tensors on a device are waited for.
        cu_seqlens_k: ``[batch + 1]`` int32, the same for keys; with ``block_table`` only the differences count.
        max_seqlen_q: accepted for compatibility; nothing depends on it.
        max_seqlen_k: accepted for compatibility; nothing depends on it.
        block_table: ``[batch, max_blocks]`` int32: the page numbers of each sequence.

    The other arguments, the errors and the result are those of :func:`fast_attn_func`; ``out`` is ``[total_q,
    num_heads, head_size]`` and ``softmax_lse`` is ``[num_heads, total_q]``.
    """
    _refuse_training(dropout_p, q, k, v)
    _refuse_device(q.device)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = torch.ops.fastattention.varlen_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        block_table,
        alibi_slopes,
        sinks,
        scale,
        causal,
        window_size[0],
        window_size[1],
        softcap,
    )
    return (out, lse, None) if return_attn_probs else out


def _refuse_training(dropout_p: float, *tensors: torch.Tensor) -> None:
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p must be 0 (these kernels are for inference), not {dropout_p}.")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "q, k or v requires gradients, but these kernels have no backward pass; "
            "call this under torch.no_grad(), or detach the tensors."
        )


def _refuse_device(device: torch.device) -> None:
    # Compiled code leaves it to the operators: the choice of kernels looks for files, which torch.compile cannot trace.
    if not torch.compiler.is_compiling():
        kernels_for(device)


@torch.library.custom_op(
    "fastattention::attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, Tensor? sinks, float scale, bool causal, "
    "SymInt window_left, SymInt window_right, float softcap) -> (Tensor, Tensor)",
)
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != k.shape[0]:
        raise ValueError(
            "q, k and v must be [batch, seqlen, num_heads, head_size] with the same batch size, "
            f"not {list(q.shape)}, {list(k.shape)} and {list(v.shape)}."
        )
    batch, seqlen_q, num_heads, head_size = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, num_heads, seqlen_q, dtype=torch.float32, device=q.device)
    token_lse = torch.empty(batch * seqlen_q, num_heads, dtype=torch.float32, device=q.device)
    problem = AttentionProblem(
        query=_rows_contiguous(q).reshape(batch * seqlen_q, num_heads, head_size),
        key=_rows_contiguous(k),
        value=_rows_contiguous(v),
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32) * seqlen_q,
        seq_lens=torch.full((batch,), k.shape[1], dtype=torch.int32),
        scale=scale,
        causal=causal,
        window=(window_left, window_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    kernels = kernels_for(q.device)
    if kernels.ANY_PAGE_SIZE:
        # Treat each batch row as one page of the sequence's length, so that any strides work without a copy.
        problem = replace(problem, block_table=torch.arange(batch, dtype=torch.int32).unsqueeze(1))
    else:
        first_rows = torch.arange(batch, dtype=torch.int32) * k.shape[1]
        key, value = problem.key.flatten(0, 1), problem.value.flatten(0, 1)
        problem = replace(problem, key=key, value=value, kv_start_loc=first_rows)
    kernels.run(problem, out=out.view(-1, num_heads, head_size), lse=token_lse)
    lse.copy_(token_lse.view(batch, seqlen_q, num_heads).transpose(1, 2))
    return out, lse


@_attention.register_fake
def _attention_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seqlen_q, num_heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, num_heads, seqlen_q), dtype=torch.float32)


@torch.library.custom_op(
    "fastattention::varlen_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? block_table, "
    "Tensor? alibi_slopes, Tensor? sinks, float scale, bool causal, SymInt window_left, SymInt window_right, "
    "float softcap) -> (Tensor, Tensor)",
)
def _varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.zeros(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    problem = AttentionProblem(
        query=_rows_contiguous(q),
        key=_rows_contiguous(k),
        value=_rows_contiguous(v),
        query_start_loc=cu_seqlens_q.cpu(),
        seq_lens=cu_seqlens_k.diff().cpu(),
        scale=scale,
        causal=causal,
        block_table=block_table,
        kv_start_loc=cu_seqlens_k[:-1].cpu() if block_table is None else None,
        window=(window_left, window_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    _refuse_outside(problem)
    kernels_for(q.device).run(problem, out=out, lse=lse.transpose(0, 1))
    return out, lse


@_varlen_attention.register_fake
def _varlen_attention_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _refuse_outside(problem: AttentionProblem) -> None:
    """Kernels of GPUs and NPUs would read what lies beyond the tensors."""
    starts, seqs, table = len(problem.query_start_loc), problem.num_seqs, problem.block_table
    if starts != seqs + 1:
        raise ValueError(f"cu_seqlens_q has {starts} entries and cu_seqlens_k {seqs + 1}; both need the same number.")
    if table is not None and (table.dim() != 2 or len(table) < seqs):
        raise ValueError(f"block_table is {list(table.shape)}, but needs a row for each of the {seqs} sequences.")
    queries, last = len(problem.query), int(problem.query_start_loc[-1])
    if last > queries:
        raise ValueError(f"cu_seqlens_q ends with {last}, but q has {queries} tokens.")
    if not seqs:
        return
    if table is None:
        assert problem.kv_start_loc is not None
        keys, last = len(problem.key), int((problem.kv_start_loc + problem.seq_lens).max())
        if last > keys:
            raise ValueError(f"cu_seqlens_k ends with {last}, but k has {keys} tokens.")
        return
    longest, room = int(problem.seq_lens.max()), table.shape[1] * problem.key.shape[1]
    if longest > room:
        raise ValueError(f"cu_seqlens_k has a sequence of {longest} tokens, but block_table has pages for {room}.")


def _rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
