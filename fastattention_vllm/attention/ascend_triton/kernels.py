"""This package's Triton kernels for the Ascend 910B. Not yet run on hardware.

They compute what torch_npu's fused operator computes (``attention/ascend.py``), with the paper's two-level tiling and
tiling-mask. docs/ascend.md says what was checked without an NPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from fastattention_vllm.attention.ascend_triton.device_work import DecodePart, DeviceWork, on_device
from fastattention_vllm.attention.ascend_triton.masks import PAGE, UNLIMITED, Mask, tiling_mask
from fastattention_vllm.attention.ascend_triton.specializations import COMBINE_ROWS, PREFILL_ROWS, Specialization
from fastattention_vllm.attention.pages import write_kv as write_kv
from fastattention_vllm.attention.problem import AttentionProblem

ANY_PAGE_SIZE = False
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
MAX_QUERIES_PER_KV_HEAD = 64
MAX_NUMBERS = 2**31 - 1
"""Of a tensor other than the cache: the programs' addresses are int32."""


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
    device = problem.query.device
    work = on_device(
        tuple(problem.query_start_loc.tolist()),
        tuple(problem.seq_lens.tolist()),
        heads=problem.num_heads,
        kv_heads=problem.num_kv_heads,
        tile_rows=PREFILL_ROWS[problem.head_size],
        causal=problem.causal,
        device=device,
    )
    # Head by head, so that a tile's sums are adjacent.
    sums = problem.query.new_empty(problem.num_heads, len(problem.query), dtype=torch.float32)
    for tiles in work.tiles:
        _prefill(problem, work, tiles, out, sums)
    for part in work.decodings:
        _decode(problem, part, out, sums)
    tokens = int(problem.query_start_loc[-1])
    if lse is not None:
        lse[:tokens].copy_(sums.T[:tokens])
    elif return_lse:
        lse = sums.T
    return out, lse if return_lse else None


def _prefill(
    problem: AttentionProblem, work: DeviceWork, tiles: torch.Tensor, out: torch.Tensor, sums: torch.Tensor
) -> None:
    query = problem.query
    one = _specialization("prefill", problem, PREFILL_ROWS[problem.head_size])
    mask = tiling_mask(one.rows, 1 if problem.causal else one.rows, _window(problem), query.device)
    _launch(
        one,
        (len(tiles), problem.num_heads),
        query=query,
        **_cache(problem, problem.block_table),
        out=out,
        lse=sums,
        starts=work.starts,
        lengths=work.lengths,
        tiles=tiles,
        query_token=query.stride(0),
        query_head=query.stride(1),
        out_token=out.stride(0),
        out_head=out.stride(1),
        lse_head=sums.stride(0),
        group=problem.num_heads // problem.num_kv_heads,
        causal=int(problem.causal),
        **_masked(problem, mask),
    )


def _decode(problem: AttentionProblem, part: DecodePart, out: torch.Tensor, sums: torch.Tensor) -> None:
    query, device, decoding = problem.query, problem.query.device, part.decoding
    count, heads, size = len(decoding.sequences), problem.num_kv_heads, problem.head_size
    group = problem.num_heads // heads
    used = decoding.tokens * group
    # [sequences, KV heads, tokens, group, size]: the rows of a program are adjacent.
    asked = query[part.tokens].view(count, decoding.tokens, heads, group, size).transpose(1, 2).contiguous()
    parts = (count, heads, decoding.splits, decoding.rows)
    part_acc = query.new_empty(*parts, size, dtype=torch.float32)
    part_top, part_total = (query.new_empty(parts, dtype=torch.float32) for _ in range(2))
    mask = tiling_mask(decoding.rows, group, _window(problem), device)
    assert problem.block_table is not None
    _launch(
        _specialization("decode", problem, decoding.rows),
        (count, heads, decoding.splits),
        query=asked,
        **_cache(problem, problem.block_table[part.sequences]),
        part_acc=part_acc,
        part_top=part_top,
        part_total=part_total,
        lengths=part.lengths,
        query_sequence=asked.stride(0),
        query_head=asked.stride(1),
        query_row=size,
        **_masked(problem, mask),
        tokens=decoding.tokens,
        pages=decoding.pages,
        splits=decoding.splits,
        used=used,
    )
    found = torch.empty_like(asked)
    found_sums = query.new_empty(found.shape[:-1], dtype=torch.float32)
    _launch(
        _specialization("combine", problem, COMBINE_ROWS),
        (count, heads, decoding.rows // COMBINE_ROWS),
        part_acc=part_acc,
        part_top=part_top,
        part_total=part_total,
        out=found,
        lse=found_sums,
        lengths=part.lengths,
        out_sequence=found.stride(0),
        out_head=found.stride(1),
        out_row=size,
        lse_sequence=found_sums.stride(0),
        lse_head=found_sums.stride(1),
        pages=decoding.pages,
        splits=decoding.splits,
        part_rows=decoding.rows,
        used=used,
    )
    out[part.tokens] = found.transpose(1, 2).reshape(len(part.tokens), problem.num_heads, size)
    sums[:, part.tokens] = found_sums.transpose(1, 2).reshape(len(part.tokens), problem.num_heads).T


def _specialization(program: str, problem: AttentionProblem, rows: int) -> Specialization:
    return Specialization(program, DTYPES[problem.query.dtype], problem.head_size, rows)


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


def _launch(one: Specialization, grid: tuple[int, ...], **arguments: Any) -> None:
    triton: Any = importlib.import_module("triton")
    program = program_of(one.program)
    # Triton's interpreter does not accept the compiler's options.
    options = one.options if isinstance(program, triton.runtime.JITFunction) else {}
    program[grid](**arguments, **one.constants, **options)


def program_of(name: str) -> Any:
    """The Triton function of this name."""
    module = "prefill" if name == "prefill" else "decode"
    return getattr(importlib.import_module(f"fastattention_vllm.attention.ascend_triton.{module}"), name)
