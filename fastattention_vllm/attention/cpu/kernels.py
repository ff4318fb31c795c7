"""Attention on CPUs, through the C ABI library of ``kernels/cpu``.

The library (``library.py``) has its own thread pool, chooses the instruction set, and computes in fp32 for all dtypes,
with one exception: if queries, keys and values are bf16, ``amx`` and ``avx512_bf16`` round the softmax weights to bf16.
A call runs once per layer and decode step, so it takes at most tens of microseconds in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastattention_vllm.attention.cpu.library import AttentionArguments, WriteArguments, check, library
from fastattention_vllm.attention.problem import AttentionProblem

ANY_PAGE_SIZE = True
MAX_HEAD_SIZE = 256
HEAD_SIZE_MULTIPLE = 8

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_KV_DTYPES = _DTYPES | {torch.float8_e4m3fn: 3, torch.float8_e5m2: 4, torch.int8: 5}
_CPU = torch.device("cpu")


def isa() -> str:
    """The instruction set in use."""
    name: bytes = library().fa_cpu_isa()
    return name.decode()


def usable_isas() -> list[str]:
    """The compiled instruction sets that this machine supports, best first."""
    names: bytes = library().fa_cpu_usable_isas()
    return names.decode().split(",")


def num_threads() -> int:
    """Number of computing threads, including the caller. Initially one per CPU of the affinity mask."""
    count: int = library().fa_cpu_num_threads()
    return count


def set_num_threads(count: int, cpus: Sequence[int] | None = None) -> None:
    """Resize the thread pool to ``count`` threads, including the caller.

    The caller is the first thread, and its affinity is not changed. Thread ``i`` of the pool is pinned to
    ``cpus[i % len(cpus)]``, so the first CPU is left to the caller. Without ``cpus``, the threads inherit the affinity
    of the thread that first needs them; a caller that is bound to one CPU should pass ``cpus``. Results are
    bit-identical for any number of threads.

    Raises ``ValueError`` for a CPU that is offline or outside this process's cpuset. The pool is then not changed.
    """
    named = (c_int32 * len(cpus))(*cpus) if cpus else None
    if cpus and count == 1:
        # CPUs are checked when threads are pinned, and a pool of one thread has only the caller.
        check(library().fa_cpu_set_num_threads(2, named, len(cpus)))
    check(library().fa_cpu_set_num_threads(count, named, len(cpus) if cpus else 0))


def set_spin(seconds: float) -> None:
    """Set how long an idle thread of the pool spins before it sleeps. Initially 50 microseconds.

    A longer time helps if no other program uses the CPUs and calls arrive every millisecond, because waking a thread
    takes tens of microseconds, or hundreds on virtual machines. ``ValueError`` below 0 or above 1.
    """
    check(library().fa_cpu_set_spin(round(seconds * 1e6)))


def measure_wake() -> float | None:
    """Seconds until every thread of the pool runs; None if that takes more than one second."""
    nanoseconds = c_int64()
    check(library().fa_cpu_measure_wake(ctypes.byref(nanoseconds)))
    return None if nanoseconds.value < 0 else nanoseconds.value * 1e-9


def can_run(problem: AttentionProblem) -> str | None:
    """Why this kernel family cannot compute ``problem``, in one sentence; ``None`` if it can."""
    query, key = problem.query, problem.key
    for name in ("query", "key", "value"):
        tensor: torch.Tensor = getattr(problem, name)
        if not tensor.is_cpu:
            return f"{name} is on {tensor.device}, but the CPU kernels need it on cpu."
        if tensor.dtype not in (_DTYPES if name == "query" else _KV_DTYPES):
            or_narrow = "" if name == "query" else ", float8_e4m3fn, float8_e5m2 or int8"
            return f"{name} has dtype {tensor.dtype}, but the CPU kernels need float32, float16 or bfloat16{or_narrow}."
    if query.dim() != 3 or key.dim() != (4 if problem.is_paged else 3):
        return None  # run() reports wrong shapes
    if query.shape[2] % HEAD_SIZE_MULTIPLE != 0 or not 0 < query.shape[2] <= MAX_HEAD_SIZE:
        sizes = f"multiples of {HEAD_SIZE_MULTIPLE} up to {MAX_HEAD_SIZE}"
        return f"head_size is {query.shape[2]}, but the CPU kernels support {sizes}."
    try:
        library()
    except RuntimeError as error:
        return str(error)
    return None


def run(
    problem: AttentionProblem,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    *,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute ``problem``.

    ``out``: ``[num_tokens, num_heads, head_size]`` in the query's dtype, last dimension contiguous; allocated if
    absent.
    ``lse``: ``[num_tokens, num_heads]`` fp32 with any strides, natural-log softmax denominators; allocated if absent
    and ``return_lse``. Rows of padding tokens are not changed (zero if the tensor is allocated here).

    Raises ``ValueError`` for tensors that do not match, with one sentence that names the value.
    """
    arguments, out, lse = attention_arguments(problem, out, lse, return_lse)
    check(library().fa_cpu_attention(arguments))
    return out, lse


@dataclass(frozen=True)
class Running:
    """A running attention call of the thread pool. It keeps the tensors alive."""

    problem: AttentionProblem
    out: torch.Tensor
    lse: torch.Tensor | None

    def finish(self) -> None:
        """Compute the rest together with the pool, and return when everything is done."""
        check(library().fa_cpu_attention_finish())


def start(problem: AttentionProblem, out: torch.Tensor, lse: torch.Tensor | None = None) -> Running:
    """Start :func:`run` on the pool's threads and return at once, so that the caller can do other work.

    The same thread must call :meth:`Running.finish`. Until then, its other calls of these kernels raise ``ValueError``,
    and calls of other threads wait.
    """
    arguments, out, lse = attention_arguments(problem, out, lse, False)
    check(library().fa_cpu_attention_start(arguments))
    return Running(problem, out, lse)


def attention_arguments(
    problem: AttentionProblem, out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool
) -> tuple[AttentionArguments, torch.Tensor, torch.Tensor | None]:
    """The checked and converted arguments, with ``out`` and ``lse``, which are allocated as in :func:`run`."""
    query, key, value = problem.query, problem.key, problem.value
    query_start_loc, seq_lens = problem.query_start_loc, problem.seq_lens
    block_table, kv_start_loc = problem.block_table, problem.kv_start_loc
    slopes, sinks = problem.alibi_slopes, problem.sinks

    reason = can_run(problem)
    if reason is not None:
        raise ValueError(reason)
    if query.dim() != 3:
        raise ValueError(f"query must be [num_tokens, num_heads, head_size], not {_shape(query)}.")
    num_tokens, num_heads, head_size = query_shape = query.shape
    key_shape = key.shape
    num_seqs = seq_lens.shape[0]
    query_strides = row_strides(query, "query")
    key_strides = row_strides(key, "key")
    value_strides = row_strides(value, "value")
    if key_shape != value.shape or key.dtype != value.dtype:
        raise ValueError(
            f"key and value must match, but are {_shape(key)} {key.dtype} and {_shape(value)} {value.dtype}."
        )
    if key_shape[-1] != head_size:
        raise ValueError(f"key has head_size {key_shape[-1]}, but query has {head_size}; they must match.")

    check_index(query_start_loc, "query_start_loc", (num_seqs + 1,))
    check_index(seq_lens, "seq_lens", (num_seqs,))
    page_size, table_width, table_stride = 0, 0, 0
    if block_table is not None:
        if len(key_shape) != 4:
            raise ValueError(
                f"with a block_table, key must be [num_blocks, page_size, num_kv_heads, head_size], not {_shape(key)}."
            )
        page_size, table_width = max(1, key_shape[1]), block_table.shape[-1]
        check_index(block_table, "block_table", (num_seqs, table_width))
        table_stride = block_table.stride(0)
    else:
        if len(key_shape) != 3:
            raise ValueError(
                f"without a block_table, key must be [num_kv_tokens, num_kv_heads, head_size], not {_shape(key)}."
            )
        if kv_start_loc is None:
            raise ValueError("kv_start_loc is missing; pass it, or a block_table.")
        check_index(kv_start_loc, "kv_start_loc", (num_seqs,))
        key_strides, value_strides = (0, *key_strides), (0, *value_strides)
    factors = _row_factors((("key_factors", problem.key_factors, key), ("value_factors", problem.value_factors, value)))
    slope_stride = 0
    if slopes is not None:
        if slopes.dtype != torch.float32 or slopes.device != _CPU:
            raise ValueError(f"alibi_slopes must be float32 on cpu, not {slopes.dtype} on {slopes.device}.")
        if slopes.shape not in ((num_heads,), (num_seqs, num_heads)):
            raise ValueError(f"alibi_slopes must be [{num_heads}] or [{num_seqs}, {num_heads}], not {_shape(slopes)}.")
        if num_heads > 1 and slopes.stride(-1) != 1:
            raise ValueError("alibi_slopes must be contiguous in its last dimension.")
        slope_stride = slopes.stride(0) if slopes.dim() == 2 else 0
    if sinks is not None:
        check_sinks(sinks, num_heads)

    if out is None or (lse is None and return_lse):
        padded = num_seqs == 0 or int(query_start_loc[-1]) < num_tokens
        allocate = query.new_zeros if padded else query.new_empty
        if out is None:
            out = allocate((num_tokens, num_heads, head_size))
        if lse is None and return_lse:
            lse = allocate((num_tokens, num_heads), dtype=torch.float32)
    if out.shape != query_shape or out.dtype != query.dtype or not out.is_cpu:
        raise ValueError(
            f"out must be {_shape(query)} {query.dtype} on cpu, not {_shape(out)} {out.dtype} on {out.device}."
        )
    out_strides = row_strides(out, "out")
    lse_strides: tuple[int, ...] = (0, 0)
    if lse is not None:
        if lse.shape != (num_tokens, num_heads) or lse.dtype != torch.float32 or lse.device != _CPU:
            raise ValueError(
                f"lse must be [{num_tokens}, {num_heads}] float32 on cpu, "
                f"not {_shape(lse)} {lse.dtype} on {lse.device}."
            )
        lse_strides = lse.stride()

    # In the order of AttentionArguments: by name they take ctypes twice as long, once per layer and step.
    arguments = AttentionArguments(
        num_seqs,
        num_heads,
        key_shape[-2],
        head_size,
        page_size,
        _DTYPES[query.dtype],
        _KV_DTYPES[key.dtype],
        problem.causal,
        *problem.window,
        problem.scale,
        problem.softcap,
        problem.key_scale,
        problem.value_scale,
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        # An empty table has a null pointer, which would mean "contiguous". It is never read, so any address works.
        None if block_table is None else block_table.data_ptr() or key.data_ptr(),
        None if kv_start_loc is None else kv_start_loc.data_ptr(),
        None if slopes is None else slopes.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        num_tokens,
        key_shape[0],
        table_width,
        table_stride,
        slope_stride,
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        *factors.addresses,
        out.data_ptr(),
        None if lse is None else lse.data_ptr(),
        *query_strides,
        *key_strides,
        *value_strides,
        *factors.strides,
        *out_strides,
        *lse_strides,
    )
    return arguments, out, lse


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    factors: tuple[torch.Tensor, torch.Tensor] | None = None,
    saturated: torch.Tensor | None = None,
) -> None:
    """Write new K and V rows into the paged cache, casting where the dtypes differ.

    ``key``, ``value``: ``[>= num_tokens, num_kv_heads, head_size]``, fp32, fp16 or bf16; the caches: ``[num_blocks,
    page_size, num_kv_heads, head_size]``, one of these, fp8 or int8; ``slot_mapping``: ``[num_tokens]`` int64 with
    ``block * page_size + row`` for each token, negative to skip it. Last dimensions must be contiguous, other strides
    are free.

    fp8 caches (float8_e4m3fn, float8_e5m2) store the row divided by ``key_scale`` or ``value_scale``, which must be 1
    for other dtypes. Values beyond the largest finite fp8 number, including infinity, become that number; NaN stays
    NaN. Their number is added to ``saturated``, one int64.

    int8 caches store the row divided by its factor, which is its largest magnitude / 127, and the factor in ``factors``
    (of keys and of values, fp32 ``[num_blocks, page_size, num_kv_heads]``). A row with infinity or NaN becomes NaN.

    Raises ``ValueError`` for tensors or scales that do not match, with one sentence that names the value.
    """
    arguments = write_arguments(
        key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale, factors, saturated
    )
    check(library().fa_cpu_write_kv(arguments))


def write_arguments(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float,
    value_scale: float,
    factors: tuple[torch.Tensor, torch.Tensor] | None = None,
    saturated: torch.Tensor | None = None,
) -> WriteArguments:
    """The checked and converted arguments of :func:`write_kv`."""
    for name, tensor, like in (("value", value, key), ("value_cache", value_cache, key_cache)):
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ValueError(f"{name} must be {_shape(like)} {like.dtype}, not {_shape(tensor)} {tensor.dtype}.")
    tensors = (key, value, key_cache, value_cache, slot_mapping)
    if any(tensor.device != _CPU for tensor in tensors):
        raise ValueError(f"all tensors must be on cpu, but are on {[str(t.device) for t in tensors]}.")
    if key.dtype not in _DTYPES or key_cache.dtype not in _KV_DTYPES:
        raise ValueError(
            "key must be float32, float16 or bfloat16, and the cache must be one of these, float8_e4m3fn, "
            f"float8_e5m2 or int8; they are {key.dtype} and {key_cache.dtype}."
        )
    if key.dim() != 3 or key_cache.dim() != 4 or key_cache.shape[2:] != key.shape[1:]:
        raise ValueError(
            "key must be [num_tokens, num_kv_heads, head_size] and the cache [num_blocks, page_size, "
            f"num_kv_heads, head_size], not {_shape(key)} and {_shape(key_cache)}."
        )
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1 or not slot_mapping.is_contiguous():
        raise ValueError(
            f"slot_mapping must be a contiguous int64 vector, not {_shape(slot_mapping)} {slot_mapping.dtype}."
        )
    num_tokens = slot_mapping.shape[0]
    if num_tokens > key.shape[0]:
        raise ValueError(f"slot_mapping has {num_tokens} tokens, but key has only {key.shape[0]}.")
    if saturated is not None and (saturated.dtype != torch.int64 or saturated.numel() != 1 or not saturated.is_cpu):
        raise ValueError(f"saturated must be one int64 on cpu, not {_shape(saturated)} {saturated.dtype}.")
    key_factors, value_factors = factors or (None, None)
    rows = _row_factors((("key_factors", key_factors, key_cache), ("value_factors", value_factors, value_cache)))
    return WriteArguments(
        num_tokens,
        key_cache.shape[0],
        key.shape[1],
        key.shape[2],
        key_cache.shape[1],
        _DTYPES[key.dtype],
        _KV_DTYPES[key_cache.dtype],
        key_scale,
        value_scale,
        slot_mapping.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        *rows.addresses,
        None if saturated is None else saturated.data_ptr(),
        *row_strides(key, "key"),
        *row_strides(value, "value"),
        *row_strides(key_cache, "key_cache"),
        *row_strides(value_cache, "value_cache"),
        *rows.strides,
    )


class _RowFactors(NamedTuple):
    """The factors of keys and values, as the library takes them."""

    addresses: tuple[int | None, int | None] = (None, None)
    strides: tuple[int, ...] = (0,) * 6


def _row_factors(of_caches: Sequence[tuple[str, torch.Tensor | None, torch.Tensor]]) -> _RowFactors:
    addresses: list[int] = []
    strides: list[int] = []
    for name, factors, cache in of_caches:
        if (factors is not None) != (cache.dtype is torch.int8):
            are = "are missing" if factors is None else "must be None"
            raise ValueError(f"{name} {are}: int8 caches have a factor for each row, and others ({cache.dtype}) none.")
        if factors is None:
            continue
        if factors.shape != cache.shape[:-1] or factors.dtype != torch.float32 or not factors.is_cpu:
            raise ValueError(
                f"{name} must be {list(cache.shape[:-1])} float32 on cpu, not {_shape(factors)} {factors.dtype} on "
                f"{factors.device}."
            )
        addresses.append(factors.data_ptr())
        strides += (0,) * (3 - factors.dim()) + factors.stride()
    return _RowFactors((addresses[0], addresses[1]), tuple(strides)) if len(addresses) == 2 else _RowFactors()


def row_strides(tensor: torch.Tensor, name: str) -> tuple[int, ...]:
    """Strides of all dimensions but the last, which must be contiguous."""
    strides = tensor.stride()
    if strides[-1] != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, but its stride is {strides[-1]}.")
    return strides[:-1]


def check_sinks(sinks: torch.Tensor, num_heads: int) -> None:
    if sinks.shape != (num_heads,) or sinks.dtype != torch.float32 or sinks.device != _CPU:
        raise ValueError(
            f"sinks must be [{num_heads}] float32 on cpu, not {_shape(sinks)} {sinks.dtype} on {sinks.device}."
        )
    if num_heads > 1 and sinks.stride(0) != 1:
        raise ValueError(f"sinks must be contiguous, but its stride is {sinks.stride(0)}.")


def check_index(tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or tensor.dtype != torch.int32 or not tensor.is_cpu:
        raise ValueError(
            f"{name} must be {list(shape)} int32 on cpu, not {_shape(tensor)} {tensor.dtype} on {tensor.device}."
        )
    if shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension.")


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)
