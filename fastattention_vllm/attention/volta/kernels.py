"""Attention on NVIDIA V100 (sm_70) and Turing (sm_75) with this package's kernels, in fp16 with fp32 sums.

Up to 8 packed rows per sequence (query tokens times query heads per KV head) go to the decode kernel, up to 32 to the
wide decode kernel, more to the prefill kernel. On a newer GPU, the same kernels run from their PTX for tests: they are
correct there, but slow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fastattention_vllm import cuda_driver
from fastattention_vllm.attention.problem import AttentionProblem, deliver, no_keys
from fastattention_vllm.attention.volta import images as volta_images
from fastattention_vllm.attention.volta import launch as volta_kernels
from fastattention_vllm.attention.volta.launch import (
    CHUNK,
    HEAD_SIZES,
    TURING,
    VOLTA,
    AttentionParams,
    Divisor,
    Split,
    Variant,
    WriteKv,
)

ANY_PAGE_SIZE = False
DEVICE = "cuda"
LOG2E = math.log2(math.e)
MAX_OFFSET = 1 << 32
"""Maximum number of 16-byte chunks in a cache that the kernels can address."""
MAX_BLOCKS = 65535
"""The driver's limit for the second and third dimension of a grid."""
NUMBERS = {
    "query_start_loc": torch.int32,
    "seq_lens": torch.int32,
    "block_table": torch.int32,
    "kv_start_loc": torch.int32,
    "alibi_slopes": torch.float32,
    "sinks": torch.float32,
}
CACHES = {torch.float16: "", torch.float8_e5m2: "e5m2", torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}
"""The dtypes of keys and values, and their names in the kernels."""
UNITS = {torch.float8_e4m3fn: 256.0}
"""Factors that the kernels leave out when they convert stored numbers to fp16."""
TENSORS = ("query", "key", "value", *NUMBERS)
"""The tensors that the kernels read. A tensor that a problem lacks has the address 0."""


@dataclass(frozen=True, slots=True)
class Target:
    """The architecture of the kernels that run, and the kind of image."""

    architecture: int
    """``VOLTA`` or ``TURING``."""
    suffix: str
    """``cubin``, or ``ptx``, which the driver compiles."""

    def __str__(self) -> str:
        form = "machine code" if self.suffix == "cubin" else "compiled from PTX by the driver"
        return f"sm_{self.architecture}, {form}"


CHOICES = {"ptx": Target(VOLTA, "ptx"), "ptx-sm_75": Target(TURING, "ptx")}
"""Alternatives to a GPU's own kernels. Newer GPUs have Turing's matrix instructions, but only emulate the V100's."""


def target_of(capability: tuple[int, int], kernels: str = "auto") -> Target:
    """``kernels``: ``auto`` or one of ``CHOICES``. Raises ``ValueError`` for Turing's kernels on an older GPU."""
    if kernels == "auto":
        own = {(7, 0): Target(VOLTA, "cubin"), (7, 2): Target(VOLTA, "cubin"), (7, 5): Target(TURING, "cubin")}
        return own.get(capability, CHOICES["ptx"])
    target = CHOICES[kernels]
    if 10 * capability[0] + capability[1] < target.architecture:
        raise ValueError(
            f"volta_kernels is {kernels}, but this GPU has compute capability {capability[0]}.{capability[1]}; "
            "set it to auto."
        )
    return target


_asked = "auto"


def choose(kernels: str) -> Target:
    """Set the kernels that this process launches on its GPU from now on, as in :func:`target_of`."""
    global _asked
    _asked = kernels
    target.cache_clear()
    return target()


@functools.cache
def target() -> Target:
    """The target for this process's GPU."""
    return target_of(torch.cuda.get_device_capability(), _asked)


def can_run(problem: AttentionProblem) -> str | None:
    """Why these kernels cannot compute ``problem``, in one sentence; ``None`` if they can."""
    query, key, value = problem.query, problem.key, problem.value
    if query.shape[-1] not in HEAD_SIZES:
        return f"head_size is {query.shape[-1]}, but the Volta kernels support {', '.join(map(str, HEAD_SIZES))}."
    if problem.key_factors is not None or problem.value_factors is not None:
        return "keys or values have a factor for each row, but the Volta kernels have one for the whole cache."
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.device.type != DEVICE:
            return f"{name} is on {tensor.device}, but the Volta kernels need it on a GPU."
        if name == "query" and tensor.dtype != torch.float16:
            return f"query has dtype {tensor.dtype}, but the Volta kernels need float16; pass --dtype float16."
        if tensor.dtype not in CACHES:
            return (
                f"{name} has dtype {tensor.dtype}, but the Volta kernels need float16, float8_e5m2, float8_e4m3fn or "
                "int8."
            )
        if tensor.stride(-1) != 1 or any(stride % CHUNK for stride in tensor.stride()[:-1]):
            return (
                f"{name} has strides {tensor.stride()}, but the last one must be 1 and the others multiples of {CHUNK}."
            )
        aligned = CHUNK * tensor.element_size()
        if tensor.data_ptr() % aligned:
            return f"{name} begins at an address that is not a multiple of {aligned} bytes, as the Volta kernels need."
    if key.dtype != value.dtype:
        return f"key has dtype {key.dtype} and value {value.dtype}, but they must have the same dtype."
    if key.stride() != value.stride():
        return f"key has strides {key.stride()} and value {value.stride()}, but they must have the same strides."
    if key.shape[0] * key.stride(0) // CHUNK >= MAX_OFFSET:
        return f"key has {key.shape[0]} blocks of {key.stride(0)} numbers, more than the Volta kernels can address."
    if problem.scale <= 0:
        return f"scale is {problem.scale}, but the Volta kernels need a positive one."
    if problem.alibi_slopes is not None and problem.alibi_slopes.dim() != 1:
        return "alibi_slopes differ between sequences, but the Volta kernels need one slope per head."
    return _wrong_shapes(problem)


def _wrong_shapes(problem: AttentionProblem) -> str | None:
    """The kernels take all sizes from the query and the key, so other shapes would make them read elsewhere."""
    heads, kv_heads, size = problem.num_heads, problem.num_kv_heads, problem.head_size
    key, value = list(problem.key.shape), list(problem.value.shape)
    if key != value or key[-1] != size:
        return f"key is {key} and value {value}, but both must have the same shape and the query's head_size {size}."
    if kv_heads == 0 or heads % kv_heads:
        return f"there are {heads} query heads, but they must be a multiple of the {kv_heads} KV heads."
    for name, numbers in (("alibi_slopes", problem.alibi_slopes), ("sinks", problem.sinks)):
        if numbers is not None and numbers.shape != (heads,):
            return f"{name} must be [{heads}], one for each query head, not {list(numbers.shape)}."
    return None


def run(
    problem: AttentionProblem,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute ``problem`` on its query's GPU, on torch's current stream.

    ``out``: ``[num_tokens, num_heads, head_size]`` fp16; ``lse``: ``[num_tokens, num_heads]`` fp32, natural logarithm.
    The grids are computed from ``query_start_loc`` and ``seq_lens`` on the host. The kernels read copies of them on the
    GPU, which a CUDA graph can also read.

    Raises ``ValueError`` for problems that :func:`can_run` refuses, and ``cuda_driver.DriverError`` for GPU errors.
    """
    if problem.block_table is None:
        key, value = alike(problem.key, problem.value)
        problem = replace(problem, key=key, value=value)
    reason = can_run(problem)
    if reason is not None:
        raise ValueError(reason)
    if problem.is_empty:
        out, lse = deliver(problem, *no_keys(problem), out, lse)
        return out, lse if return_lse else None
    query = problem.query
    tokens, heads, _ = query.shape
    # The kernels write answers in chunks, at addresses that fresh memory has.
    found = torch.zeros_like(query, memory_format=torch.contiguous_format)
    sums = torch.zeros(tokens, heads, dtype=torch.float32, device=query.device)
    maximum = int(torch.diff(problem.query_start_loc).max())
    attend(_on(query.device, problem), Extent(maximum, int(problem.seq_lens.max())), found, sums)
    out, lse = deliver(problem, found, sums, out, lse)
    return out, lse if return_lse else None


def alike(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give both tensors the same strides, which the kernels need. After a rotation, new keys may be contiguous while
    values are still part of the projection's output."""
    return (key, value) if key.stride() == value.stride() else (key.contiguous(), value.contiguous())


@dataclass(frozen=True, slots=True)
class Extent:
    """The bounds that determine the grids. Only the GPU has the exact values. A CUDA graph is captured with bounds that
    hold for all of its replays."""

    max_tokens: int
    """Maximum number of query tokens of a sequence."""
    longest: int
    """Maximum number of KV tokens of a sequence."""


def attend(
    problem: AttentionProblem,
    extent: Extent,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Compute ``problem``, whose tensors are all on the GPU, on torch's current stream, without synchronisation.

    ``query_start_loc`` need not begin with 0, so that a part of a batch can use the whole batch's query and ``out``.

    Args:
        problem: a problem that :func:`can_run` accepts. Integers are int32, slopes and sinks fp32; all tensors are
            contiguous, except for the rows of the block table.
        out: ``[num_tokens, num_heads, head_size]`` fp16, the last dimension contiguous.
        lse: ``[num_tokens, num_heads]`` fp32.
        workspace: :func:`partial_floats` fp32 elements for parts of sequences until they are merged; allocated if
            absent. A captured graph keeps using it.
    """
    kv_heads, seqs = problem.num_kv_heads, problem.num_seqs
    if seqs > MAX_BLOCKS:
        raise ValueError(
            f"the batch has {seqs} sequences, but the Volta kernels process at most {MAX_BLOCKS} at a time; "
            f"split the batch, or pass --max-num-seqs {MAX_BLOCKS} or less to vLLM."
        )
    head_size, device = problem.head_size, problem.query.device
    max_rows = problem.num_heads // kv_heads * extent.max_tokens
    argument = parameters(problem, out, lse)
    stream = torch.cuda.current_stream(device).cuda_stream
    cache, architecture = CACHES[problem.key.dtype], target().architecture

    def rows_of(parts: int) -> int:
        return seqs * kv_heads * parts * max_rows

    kind, minimum = volta_kernels.kind_of(max_rows), volta_kernels.min_parts(kv_heads)
    parts = volta_kernels.decode_parts(extent.longest, minimum)
    needed = volta_kernels.floats_of_parts(head_size, rows_of(parts))
    if kind == "decode_wide" and workspace is not None and workspace.numel() < needed:
        kind = "prefill"  # the workspace holds all decoding sequences, but perhaps not as many short prompts
    if kind == "prefill":
        minimum = 0
        adjusted = _is_adjusted(problem)
        variant = _variant("prefill", head_size, adjusted=adjusted, cache=cache, architecture=architecture)
        blocks = volta_kernels.prefill_grid(variant, max_rows, kv_heads, seqs)
        if blocks[1] > MAX_BLOCKS:
            raise ValueError(
                f"a sequence has {extent.max_tokens} new tokens, but with {problem.num_heads // kv_heads} query heads "
                "per KV head the Volta kernels process at most "
                f"{MAX_BLOCKS * variant.rows * kv_heads // problem.num_heads} at a time; split them into chunks."
            )
        parts = volta_kernels.prefill_parts(variant, blocks, extent.longest)
        grid = (kv_heads * parts, blocks[1], seqs)
    else:
        variant = _variant(kind, head_size, cache=cache, architecture=architecture)
        grid = (kv_heads, seqs, parts)
    split = Split(argument, parts=Divisor.by(parts), rows=max_rows, min_parts=minimum)
    if kind != "prefill" or parts > 1:
        needed = volta_kernels.floats_of_parts(head_size, rows_of(parts))
        partial = torch.empty(needed, dtype=torch.float32, device=device) if workspace is None else workspace
        if partial.numel() < needed:
            raise ValueError(f"the workspace has room for {partial.numel()} numbers, but {parts} parts need {needed}.")
        split.partial_out = partial.data_ptr()
        split.partial_lse = partial.data_ptr() + volta_kernels.bytes_of_means(head_size, rows_of(parts))
    _kernel(variant).launch(grid, (variant.threads, 1, 1), variant.shared_bytes, split, stream)
    if split.partial_out:
        _kernel(_variant("combine")).launch((max_rows, kv_heads, seqs), (head_size // CHUNK, 1, 1), 0, split, stream)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Scatter ``key`` and ``value`` ``[>= num_tokens, num_kv_heads, head_size]`` into pages that the GPU can address.

    ``key_cache``, ``value_cache``: ``[num_blocks, page_size, num_kv_heads, head_size]``, fp16, fp8 or int8; strides of
    the caches alike. ``slot_mapping``: ``[num_tokens]`` int64, a negative slot leaves its token out.

    Caches of 8 bits get fp16 rows divided by ``key_scale`` or ``value_scale``, rounded to the nearest, ties to even.
    What lies beyond the largest finite number, infinity included, becomes that number; NaN stays NaN, in int8 it
    becomes 0.
    """
    if key_cache.dtype not in CACHES or key.dtype != torch.float16:
        raise ValueError(
            "the Volta kernels write float16 keys into a float16, float8_e5m2, float8_e4m3fn or int8 cache, not "
            f"{key.dtype} keys into a {key_cache.dtype} cache."
        )
    assert key_scale == value_scale == 1.0 or key_cache.dtype != torch.float16
    assert key_cache.stride() == value_cache.stride()
    if not len(slot_mapping):
        return
    variant = _variant("write_kv", cache=CACHES[key_cache.dtype])
    stream = torch.cuda.current_stream(key.device).cuda_stream
    argument = write_parameters(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    _kernel(variant).launch((len(slot_mapping), 1, 1), (variant.threads, 1, 1), 0, argument, stream)


def load(head_size: int, *, adjusted: bool, cache: torch.dtype = torch.float16) -> None:
    """Load the kernels for layers of ``head_size``, which is impossible during the capture of a CUDA graph.
    ``adjusted``: with soft cap or ALiBi; ``cache``: dtype of keys and values.

    Raises:
        ImageError: the kernels are not built, or do not match this code.
        DriverError: the driver cannot load them.
    """
    name, architecture = CACHES[cache], target().architecture
    variants = (
        _variant("write_kv", cache=name),
        _variant("combine"),
        _variant("decode", head_size, cache=name, architecture=architecture),
        _variant("decode_wide", head_size, cache=name, architecture=architecture),
        _variant("prefill", head_size, adjusted=adjusted, cache=name, architecture=architecture),
    )
    for variant in variants:
        _kernel(variant)


def partial_floats(
    head_size: int, group: int, num_kv_heads: int, max_seqs: int, longest: int, speculated: int = 0
) -> int:
    """Number of fp32 elements of a workspace for any launch, as in :func:`~.launch.partial_floats`.

    Raises:
        ImageError: the kernels are not built, or do not match this code.
    """
    variant = _variant("prefill", head_size)
    return volta_kernels.partial_floats(variant, group, num_kv_heads, max_seqs, longest, speculated)


def _is_adjusted(problem: AttentionProblem) -> bool:
    return problem.softcap > 0 or problem.alibi_slopes is not None


def write_parameters(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float,
    value_scale: float,
    address_of: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr,
) -> WriteKv:
    """The argument of :func:`write_kv`'s kernel. ``address_of``: see :func:`parameters`."""
    return WriteKv(
        key=address_of(key),
        value=address_of(value),
        key_cache=address_of(key_cache),
        value_cache=address_of(value_cache),
        slot_mapping=address_of(slot_mapping),
        key_token_stride=key.stride(0),
        key_head_stride=key.stride(1),
        value_token_stride=value.stride(0),
        value_head_stride=value.stride(1),
        block_stride=key_cache.stride(0),
        page_token_stride=key_cache.stride(1),
        page_head_stride=key_cache.stride(2),
        page_size=key_cache.shape[1],
        num_kv_heads=key.shape[1],
        head_size=key.shape[2],
        key_scale=key_scale,
        value_scale=value_scale,
    )


def parameters(
    problem: AttentionProblem,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    address_of: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr,
) -> AttentionParams:
    """The kernels' argument. ``address_of``: returns a tensor's device address. The simulated V100 has its own ones."""
    query, key, table = problem.query, problem.key, problem.block_table
    assert key.stride() == problem.value.stride()
    unit = UNITS.get(key.dtype, 1.0)
    scale = problem.scale * problem.key_scale * unit
    return AttentionParams(
        out=address_of(out),
        lse=0 if lse is None else address_of(lse),
        **{name: 0 if (tensor := getattr(problem, name)) is None else address_of(tensor) for name in TENSORS},
        query_token_stride=query.stride(0),
        query_head_stride=query.stride(1),
        kv_block_stride=0 if table is None else key.stride(0),
        kv_token_stride=key.stride(-3),
        kv_head_stride=key.stride(-2),
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        lse_token_stride=0 if lse is None else lse.stride(0),
        lse_head_stride=0 if lse is None else lse.stride(1),
        page=Divisor.by(1 if table is None else key.shape[1]),
        group=Divisor.by(query.shape[1] // key.shape[-2]),
        block_table_stride=0 if table is None else table.stride(0),
        window_left=problem.window[0],
        window_right=0 if problem.causal else problem.window[1],
        scale=scale * LOG2E,
        softcap=problem.softcap * LOG2E,
        value_scale=problem.value_scale * unit,
        scale_over_softcap=scale / problem.softcap if problem.softcap > 0 else 0.0,
    )


def _on(device: torch.device, problem: AttentionProblem) -> AttentionProblem:
    """Move all tensors of ``problem`` that the kernels read to ``device``, in the dtypes that they read."""
    moved = {
        name: tensor.to(device=device, dtype=dtype).contiguous()
        for name, dtype in NUMBERS.items()
        if (tensor := getattr(problem, name)) is not None
    }
    return replace(problem, **moved)


def _variant(
    kind: str, head_size: int = 0, *, adjusted: bool = False, cache: str = "", architecture: int = VOLTA
) -> Variant:
    return _described(volta_images.IMAGES)[kind, head_size, adjusted, cache, architecture]


@functools.cache
def _described(folder: Path) -> dict[tuple[str, int, bool, str, int], Variant]:
    return volta_images.variants(folder)


def _kernel(variant: Variant) -> cuda_driver.Kernel:
    return _loaded(variant, target().suffix)


@functools.cache
def _loaded(variant: Variant, suffix: str) -> cuda_driver.Kernel:
    # Turing also runs the V100's machine code, so kernels without matrix products exist only for the V100.
    return volta_images.load(volta_images.IMAGES, variant, suffix)
