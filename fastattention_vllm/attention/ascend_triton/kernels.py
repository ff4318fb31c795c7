"""This package's Triton kernels for the Ascend 910B. Not yet run on hardware.

They compute what torch_npu's fused operator computes (``attention/ascend.py``), with the paper's two-level tiling and
tiling-mask. docs/ascend.md says what was checked without an NPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from typing import Any

import torch

from fastattention_vllm.attention.ascend_triton.masks import PAGE, UNLIMITED, Mask, tiling_mask
from fastattention_vllm.attention.ascend_triton.specializations import COMBINE_ROWS, OPTIONS, PREFILL_ROWS
from fastattention_vllm.attention.ascend_triton.work import Decoding, Work, divide
from fastattention_vllm.attention.pages import write_kv as write_kv
from fastattention_vllm.attention.problem import AttentionProblem

ANY_PAGE_SIZE = False
DTYPES = (torch.float16, torch.bfloat16)
MAX_QUERIES_PER_KV_HEAD = 64
MAX_NUMBERS = 2**31 - 1
"""Of a tensor other than the cache: the programs' addresses are int32."""
MAX_PROGRAMS = 65535
"""Of one launch: CANN's limit."""


def can_run(problem: AttentionProblem) -> str | None:
    """Why these kernels cannot compute ``problem``, in one sentence; ``None`` if they can."""
    query, key, value = problem.query, problem.key, problem.value
    if importlib.util.find_spec("triton") is None:
        return "the package triton-ascend is not installed; install the version that vllm-ascend requires."
    if query.dtype not in DTYPES:
        return f"query is {query.dtype}, but the kernels need float16 or bfloat16; pass --dtype bfloat16."
    if key.dtype != query.dtype or value.dtype != query.dtype:
        return f"keys are {key.dtype} and values {value.dtype}, but both must be {query.dtype}."
    if problem.head_size not in PREFILL_ROWS:
        sizes = ", ".join(map(str, PREFILL_ROWS))
        return f"the head size is {problem.head_size}, but the kernels support {sizes}."
    for name, asked in (
        ("a soft cap", problem.softcap > 0),
        ("ALiBi", problem.alibi_slopes is not None),
        ("attention sinks", problem.sinks is not None),
        ("a window without a causal mask", max(problem.window) >= 0 and not problem.causal),
        ("a scaled cache", (problem.key_scale, problem.value_scale) != (1.0, 1.0)),
    ):
        if asked:
            return f"the kernels do not support {name}."
    heads, kv_heads = problem.num_heads, problem.num_kv_heads
    if heads % kv_heads or heads // kv_heads > MAX_QUERIES_PER_KV_HEAD:
        return (
            f"there are {heads} query heads and {kv_heads} KV heads, but every KV head must have the same number of "
            f"query heads, at most {MAX_QUERIES_PER_KV_HEAD}."
        )
    if not problem.is_paged:
        return "keys and values are contiguous, but the kernels read pages only."
    if key.shape[1] != PAGE:
        return f"the page size is {key.shape[1]} tokens, but the kernels need {PAGE}; pass --block-size {PAGE}."
    if key.stride() != value.stride() or (query.stride(-1), key.stride(-1)) != (1, 1):
        return "keys and values must have the same strides, and adjacent numbers in the last dimension."
    if query.numel() > MAX_NUMBERS:
        return (
            f"the step has {len(query)} tokens of {heads} heads, more than {MAX_NUMBERS} numbers; lower "
            "--max-num-batched-tokens."
        )
    return None


def run(
    problem: AttentionProblem,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute ``problem`` on its query's NPU, on torch's current stream.

    ``out``: ``[num_tokens, num_heads, head_size]`` in the query's dtype; ``lse``: ``[num_tokens, num_heads]`` fp32.

    Raises ``ValueError`` for what :func:`can_run` names.
    """
    reason = can_run(problem)
    if reason is not None:
        raise ValueError(reason)
    if out is None:
        out = torch.empty_like(problem.query, memory_format=torch.contiguous_format)
    new = torch.diff(problem.query_start_loc).tolist()
    work = divide(
        new,
        problem.seq_lens.tolist(),
        heads=problem.num_heads,
        kv_heads=problem.num_kv_heads,
        tile_rows=PREFILL_ROWS[problem.head_size],
        causal=problem.causal,
    )
    # Head by head, so that a tile's sums are adjacent.
    sums = problem.query.new_empty(problem.num_heads, len(problem.query), dtype=torch.float32)
    if work.tiles:
        _prefill(problem, work, out, sums)
    for decoding in work.decodings:
        programs = problem.num_kv_heads * max(decoding.splits, decoding.rows // COMBINE_ROWS)  # of one sequence
        count = max(1, MAX_PROGRAMS // programs)
        for first in range(0, len(decoding.sequences), count):
            some = decoding.sequences[first : first + count]
            _decode(problem, replace(decoding, sequences=some), out, sums)
    tokens = int(problem.query_start_loc[-1])
    if lse is not None:
        lse[:tokens].copy_(sums.T[:tokens])
    elif return_lse:
        lse = sums.T
    return out, lse if return_lse else None


def _prefill(problem: AttentionProblem, work: Work, out: torch.Tensor, sums: torch.Tensor) -> None:
    query, device = problem.query, problem.query.device
    rows = PREFILL_ROWS[problem.head_size]
    mask = tiling_mask(rows, 1 if problem.causal else rows, _window(problem), device)
    starts, lengths = (numbers.to(device, torch.int32) for numbers in (problem.query_start_loc, problem.seq_lens))
    tiles = torch.tensor(work.tiles, dtype=torch.int32, device=device)
    for some in tiles.split(MAX_PROGRAMS // problem.num_heads):
        _launch(
            "prefill",
            (len(some), problem.num_heads),
            query=query,
            **_cache(problem, problem.block_table),
            out=out,
            lse=sums,
            starts=starts,
            lengths=lengths,
            tiles=some.contiguous(),
            query_token=query.stride(0),
            query_head=query.stride(1),
            out_token=out.stride(0),
            out_head=out.stride(1),
            lse_head=sums.stride(0),
            group=problem.num_heads // problem.num_kv_heads,
            causal=int(problem.causal),
            **_masked(problem, mask),
            HEAD=problem.head_size,
            ROWS=rows,
            PAGE=PAGE,
        )


def _decode(problem: AttentionProblem, decoding: Decoding, out: torch.Tensor, sums: torch.Tensor) -> None:
    query, device = problem.query, problem.query.device
    count, heads, size = len(decoding.sequences), problem.num_kv_heads, problem.head_size
    group = problem.num_heads // heads
    used = decoding.tokens * group
    chosen = torch.tensor(decoding.sequences)
    first = problem.query_start_loc[chosen].long()
    tokens = (first[:, None] + torch.arange(decoding.tokens)).flatten().to(device)
    # [sequences, KV heads, tokens, group, size]: the rows of a program are adjacent.
    asked = query[tokens].view(count, decoding.tokens, heads, group, size).transpose(1, 2).contiguous()
    parts = (count, heads, decoding.splits, decoding.rows)
    part_acc = query.new_empty(*parts, size, dtype=torch.float32)
    part_top, part_total = (query.new_empty(parts, dtype=torch.float32) for _ in range(2))
    mask = tiling_mask(decoding.rows, group, _window(problem), device)
    assert problem.block_table is not None
    table = problem.block_table[chosen.to(device)]
    lengths = problem.seq_lens[chosen].to(device, torch.int32)
    constants = {"HEAD": size, "ROWS": decoding.rows, "PAGE": PAGE}
    _launch(
        "decode",
        (count, heads, decoding.splits),
        query=asked,
        **_cache(problem, table),
        part_acc=part_acc,
        part_top=part_top,
        part_total=part_total,
        lengths=lengths,
        query_sequence=asked.stride(0),
        query_head=asked.stride(1),
        query_row=size,
        **_masked(problem, mask),
        tokens=decoding.tokens,
        pages=decoding.pages,
        splits=decoding.splits,
        used=used,
        **constants,
    )
    found = torch.empty_like(asked)
    found_sums = query.new_empty(found.shape[:-1], dtype=torch.float32)
    _launch(
        "combine",
        (count, heads, decoding.rows // COMBINE_ROWS),
        part_acc=part_acc,
        part_top=part_top,
        part_total=part_total,
        out=found,
        lse=found_sums,
        lengths=lengths,
        out_sequence=found.stride(0),
        out_head=found.stride(1),
        out_row=size,
        lse_sequence=found_sums.stride(0),
        lse_head=found_sums.stride(1),
        pages=decoding.pages,
        splits=decoding.splits,
        part_rows=decoding.rows,
        used=used,
        **(constants | {"ROWS": COMBINE_ROWS}),
    )
    out[tokens] = found.transpose(1, 2).reshape(len(tokens), problem.num_heads, size)
    sums[:, tokens] = found_sums.transpose(1, 2).reshape(len(tokens), problem.num_heads).T


def _window(problem: AttentionProblem) -> int:
    longest = int(problem.seq_lens.max())
    return problem.window[0] if 0 <= problem.window[0] < longest else UNLIMITED


def _cache(problem: AttentionProblem, table: torch.Tensor | None) -> dict[str, Any]:
    assert table is not None
    page_stride, token_stride, kv_head_stride = problem.key.stride()[:3]
    return {
        "key": problem.key,
        "value": problem.value,
        "table": table,
        "page_stride": page_stride,
        "token_stride": token_stride,
        "kv_head_stride": kv_head_stride,
        "table_stride": table.stride(0),
    }


def _masked(problem: AttentionProblem, mask: Mask) -> dict[str, Any]:
    return {
        "mask": mask.matrix,
        "mask_stride": mask.matrix.stride(0),
        "zero": mask.zero,
        "cap": mask.cap,
        "left_zero": mask.left_zero,
        "window": _window(problem),
        "scale": problem.scale,
    }


def _launch(name: str, grid: tuple[int, ...], **arguments: Any) -> None:
    if not all(grid):
        return
    triton: Any = importlib.import_module("triton")
    program = program_of(name)
    # Triton's interpreter does not accept the compiler's options.
    options = OPTIONS[name] if isinstance(program, triton.runtime.JITFunction) else {}
    program[grid](**arguments, **options)


def program_of(name: str) -> Any:
    """The Triton function of this name."""
    module = "prefill" if name == "prefill" else "decode"
    return getattr(importlib.import_module(f"fastattention_vllm.attention.ascend_triton.{module}"), name)
