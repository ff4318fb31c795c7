"""Attention on NVIDIA GPUs of compute capability 8.0 and newer without vLLM: the FlashAttention 2 that torch contains.

``torch.nn.functional.scaled_dot_product_attention`` reaches the same kernels, but aligns causal masks to the top left,
takes no window and returns no log-sum-exp. torch's own ``torch.nn.attention.varlen`` calls the operator used here.
"""

from __future__ import annotations

import itertools

import torch

from fastattention_vllm.attention import pages
from fastattention_vllm.attention.pages import write_kv as write_kv
from fastattention_vllm.attention.problem import AttentionProblem, deliver, flash_sums, no_keys

ANY_PAGE_SIZE = False
DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_SIZE = 256
HEAD_SIZE_MULTIPLE = 8
DEVICE = "cuda"
NAME = "PyTorch's FlashAttention"


def can_run(problem: AttentionProblem) -> str | None:
    """Why these kernels cannot compute ``problem``, in one sentence; ``None`` if they can."""
    query, key, value = problem.query, problem.key, problem.value
    if query.device.type != DEVICE:
        return f"query is on {query.device}, {NAME} needs it on a GPU."
    if query.dtype not in DTYPES or {key.dtype, value.dtype} != {query.dtype}:
        return (
            f"query is {query.dtype}, key {key.dtype} and value {value.dtype}; {NAME} needs all three in float16 or "
            "all three in bfloat16."
        )
    for name, asked in (
        ("softcap", problem.softcap > 0),
        ("sinks", problem.sinks is not None),
        ("alibi_slopes", problem.alibi_slopes is not None),
    ):
        if asked:
            return f"{NAME} does not support {name}; {'install vLLM' if name != 'alibi_slopes' else 'use the CPU'}."
    if query.shape[-1] % HEAD_SIZE_MULTIPLE or not 0 < query.shape[-1] <= MAX_HEAD_SIZE:
        return f"head_size is {query.shape[-1]}, {NAME} takes multiples of {HEAD_SIZE_MULTIPLE} up to {MAX_HEAD_SIZE}."
    if key.shape[-2] == 0 or problem.num_heads % key.shape[-2]:
        return f"{problem.num_heads} query heads are not a multiple of {key.shape[-2]} KV heads."
    return None


def run(
    problem: AttentionProblem,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute ``problem`` on its query's GPU, on torch's current stream. Keys and values in pages are copied first."""
    reason = can_run(problem)
    if reason is not None:
        raise ValueError(reason)
    starts, lengths = problem.query_start_loc.tolist(), problem.seq_lens.tolist()
    query = problem.query[: starts[-1]]
    if problem.is_empty:
        found, sums = no_keys(problem)
    else:
        key, value = _rows(problem, lengths)
        found, by_head, *_ = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            _ends(query.device, starts),
            _ends(query.device, (0, *itertools.accumulate(lengths))),
            max(end - begin for begin, end in itertools.pairwise(starts)),
            max(lengths),
            0.0,
            problem.causal,
            False,
            scale=problem.scale,
            window_size_left=problem.window[0],
            window_size_right=problem.window[1],
        )
        if by_head.shape != query.shape[1::-1]:
            raise ValueError(
                f"torch {torch.__version__} pads the log-sum-exp of ragged sequences; "
                "install torch 2.10 or newer for CUDA."
            )
        sums = flash_sums(found, by_head.transpose(0, 1))
    if len(query) < len(problem.query):  # the operator has no rows of padding
        out = torch.zeros_like(problem.query, memory_format=torch.contiguous_format) if out is None else out
        lse = sums.new_zeros(problem.query.shape[:2]) if lse is None else lse
    out, lse = deliver(problem, found, sums, out, lse)
    return out, lse if return_lse else None


def _rows(problem: AttentionProblem, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[tokens, num_kv_heads, head_size]``, sequence by sequence without gaps."""
    key, value = problem.key, problem.value
    if problem.block_table is not None:
        where = pages.places(problem.block_table.to(key.device), lengths, key.shape[1])
        return key[where], value[where]
    assert problem.kv_start_loc is not None
    key, value = pages.rows(key, value, problem.kv_start_loc.tolist(), lengths)
    return key, value


def _ends(device: torch.device, numbers: tuple[int, ...] | list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)
