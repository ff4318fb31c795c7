"""Attention on NVIDIA V100 (sm_70) by kernels of our own, in fp16 with fp32 sums.

Few packed rows (query tokens times query heads per KV head, up to 8 of each sequence) go to the decode kernel, more to
the prefill kernel. On a newer GPU the same kernels run from their PTX, for tests: there they are correct, not fast.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from fastattention_vllm.attention import volta_driver, volta_kernels
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.attention.volta_kernels import CHUNK, DECODE_ROWS, HEAD_SIZES, Decode, Divisor, Prefill, Variant

IMAGES = Path(__file__).resolve().parents[1] / "lib" / "volta"
"""``NAME.cubin`` for sm_70 and ``NAME.ptx`` for newer GPUs, of each variant."""
LOG2E = math.log2(math.e)
MOST_OFFSET = 1 << 32
"""Chunks of 16 bytes that the kernels can count in a cache."""
NUMBERS = {
    "query_start_loc": torch.int32,
    "seq_lens": torch.int32,
    "block_table": torch.int32,
    "kv_start_loc": torch.int32,
    "alibi_slopes": torch.float32,
    "sinks": torch.float32,
}
TENSORS = ("query", "key", "value", *NUMBERS)
"""What the kernels read; those that a problem lacks have the address 0."""


def can_run(problem: AttentionProblem) -> str | None:
    """Why these kernels cannot compute ``problem``, in one sentence; ``None`` if they can."""
    query, key, value = problem.query, problem.key, problem.value
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.device.type != "cuda":
            return f"{name} is on {tensor.device}, the Volta kernels need it on a GPU."
        if tensor.dtype != torch.float16:
            return f"{name} has dtype {tensor.dtype}, the Volta kernels take float16; pass --dtype float16."
        if tensor.stride(-1) != 1 or any(stride % CHUNK for stride in tensor.stride()[:-1]):
            return f"{name} has strides {tensor.stride()}, all but the last must be multiples of {CHUNK}, the last 1."
        if tensor.data_ptr() % 16:
            return f"{name} begins at an address that is no multiple of 16 bytes, which the Volta kernels need."
    if query.shape[-1] not in HEAD_SIZES:
        return f"head_size is {query.shape[-1]}, the Volta kernels take {', '.join(map(str, HEAD_SIZES))}."
    if key.stride() != value.stride():
        return f"key has strides {key.stride()} and value {value.stride()}, they must be alike."
    if key.shape[0] * key.stride(0) // CHUNK >= MOST_OFFSET:
        return f"key has {key.shape[0]} blocks of {key.stride(0)} numbers, more than the Volta kernels can count."
    if problem.scale <= 0:
        return f"scale is {problem.scale}, the Volta kernels need it above 0."
    if problem.alibi_slopes is not None and problem.alibi_slopes.dim() != 1:
        return "alibi_slopes differ from sequence to sequence, the Volta kernels take one per head."
    return None


def run(problem: AttentionProblem, *, return_lse: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute ``problem`` on its query's GPU, on torch's current stream.

    ``out``: ``[num_tokens, num_heads, head_size]`` fp16; ``lse``: ``[num_tokens, num_heads]`` fp32, natural logarithm.
    ``query_start_loc`` and ``seq_lens`` on the host say how large the grids are; on the GPU, where a CUDA graph reads
    them, their copies say what is computed.

    Raises ``ValueError`` for what :func:`can_run` names, :class:`~.volta_driver.DriverError` where the GPU refuses.
    """
    reason = can_run(problem)
    if reason is not None:
        raise ValueError(reason)
    query = problem.query
    tokens, heads, head_size = query.shape
    out = torch.zeros(tokens, heads, head_size, dtype=query.dtype, device=query.device)
    lse = torch.zeros(tokens, heads, dtype=torch.float32, device=query.device)
    kv_heads, seqs = problem.key.shape[-2], len(problem.seq_lens)
    if seqs == 0:
        return out, lse if return_lse else None
    most_rows = heads // kv_heads * int(torch.diff(problem.query_start_loc).max())
    moved = _on(query.device, problem)
    argument = parameters(moved, out, lse)
    stream = torch.cuda.current_stream(query.device).cuda_stream
    if most_rows <= DECODE_ROWS:
        variant = volta_kernels.decode(head_size)
        parts = volta_kernels.most_parts(int(problem.seq_lens.max()))
        partial_out = torch.empty(seqs, kv_heads, parts, DECODE_ROWS, head_size, device=query.device)
        partial_lse = torch.empty(seqs, kv_heads, parts, DECODE_ROWS, device=query.device)
        whole = Decode(argument, partial_out.data_ptr(), partial_lse.data_ptr(), parts)
        attend, combine = (_kernel(variant, name) for name in variant.kernels)
        attend.launch((parts, kv_heads, seqs), (variant.threads, 1, 1), variant.shared_bytes, whole, stream)
        combine.launch((most_rows, kv_heads, seqs), (head_size, 1, 1), 0, whole, stream)
    else:
        adjusted = problem.softcap > 0 or problem.alibi_slopes is not None
        variant = volta_kernels.prefill(head_size, adjusted=adjusted)
        grid = volta_kernels.prefill_grid(variant, most_rows, kv_heads, seqs)
        kernel = _kernel(variant, variant.kernels[0])
        kernel.launch(grid, (variant.threads, 1, 1), variant.shared_bytes, argument, stream)
    del moved  # torch's allocator keeps them until the stream has passed
    return out, lse if return_lse else None


def parameters(
    problem: AttentionProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    address_of: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr,
) -> Prefill:
    """The kernels' argument. ``address_of``: where they see a tensor; the simulated V100 has addresses of its own."""
    query, key, table = problem.query, problem.key, problem.block_table
    return Prefill(
        out=address_of(out),
        lse=address_of(lse),
        **{name: 0 if (tensor := getattr(problem, name)) is None else address_of(tensor) for name in TENSORS},
        query_token_stride=query.stride(0),
        query_head_stride=query.stride(1),
        kv_block_stride=0 if table is None else key.stride(0),
        kv_token_stride=key.stride(-3),
        kv_head_stride=key.stride(-2),
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        lse_token_stride=lse.stride(0),
        lse_head_stride=lse.stride(1),
        page=Divisor.by(1 if table is None else key.shape[1]),
        group=Divisor.by(query.shape[1] // key.shape[-2]),
        block_table_stride=0 if table is None else table.stride(0),
        window_left=problem.window[0],
        window_right=0 if problem.causal else problem.window[1],
        scale=problem.scale * LOG2E,
        softcap=problem.softcap * LOG2E,
    )


def _on(device: torch.device, problem: AttentionProblem) -> AttentionProblem:
    """``problem`` with all that the kernels read on ``device``, in the dtypes that they read."""
    moved = {
        name: tensor.to(device=device, dtype=dtype).contiguous()
        for name, dtype in NUMBERS.items()
        if (tensor := getattr(problem, name)) is not None
    }
    return replace(problem, **moved)


@functools.cache
def _kernel(variant: Variant, name: str) -> volta_driver.Kernel:
    architecture = torch.cuda.get_device_capability()
    path = IMAGES / f"{variant.name}.{'cubin' if architecture == (7, 0) else 'ptx'}"
    try:
        image = path.read_bytes()
    except OSError as error:
        raise RuntimeError(f"The Volta kernels are not built: there is no {path}; run `make volta`.") from error
    shared = variant.shared_bytes if name == variant.kernels[0] else 0
    return volta_driver.load(image + b"\0", name, shared)
