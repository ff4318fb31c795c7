"""x times quantised weights on NVIDIA V100 (sm_70), in fp16 with fp32 sums. Equal inputs give equal bits.

Up to 16 rows are one launch that reads the weights once, from 17 on in turns of 16. Many rows are multiplied by cuBLAS,
with weights that are converted to fp16 a slice at a time. On a newer GPU, the same kernels run from their PTX for
tests: they are correct there, but slow.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fastattention_vllm import cuda_driver
from fastattention_vllm.attention.volta import images
from fastattention_vllm.attention.volta.kernels import target
from fastattention_vllm.linear.volta import launch, packing, reference
from fastattention_vllm.linear.volta.launch import TILE, Linear, Unpack, Variant, Weights
from fastattention_vllm.linear.volta.packing import PackedWeights
from fastattention_vllm.linear.weights import BLOCK, Kind, Scales, WeightFormat

NAMES = {"int4": "int4", "int8": "int8", "fp8_e4m3": "e4m3"}
"""The formats' names in the kernels."""
ALIGNED = 16
"""Bytes. The kernels read x in chunks of so many."""
ROWS_WITH_BIAS = 2048
"""At most so many rows of a slice of columns exist in fp32."""
NO_GROUPS = 31
"""A shift that leaves 0 of any number of quarters or tiles."""


def supports(form: WeightFormat, k: int, n: int) -> str | None:
    """Why the kernels cannot multiply by a matrix ``[k, n]`` of this format, in one sentence; ``None`` if they can.

    They need k and n in multiples of 8 and groups of a power of two times 32 (int4) or 16 (int8) of k. k need not be
    a multiple of the group size, n not of the blocks' size. ``k`` and ``n`` are those of one rank's share.
    """
    return packing.unsupported(form, k, n)


def load(form: WeightFormat) -> None:
    """Load the kernels for this format, which is impossible during the capture of a CUDA graph. Call it for each format
    when a model is loaded on its GPU; further calls do nothing. Whether machine code or PTX runs is decided by
    ``fastattention_vllm.attention.volta.kernels.choose``.

    Raises:
        ImageError: the kernels are not built, or do not match this code.
        DriverError: the driver cannot load them.
    """
    for variant in _variants(NAMES[form.kind]):
        _kernel(variant)


def apply(x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weights + bias``, by one operator that torch.compile and CUDA graphs can contain.

    On the CPU this is :func:`~.reference.product`, for tests only.

    Args:
        x: fp16 ``[..., k]``. It is copied if its last dimension is not contiguous or rows are not 16 bytes aligned.
        weights: on the same device.
        bias: fp16 ``[n]`` on the same device.

    Returns:
        fp16 ``[..., n]``, contiguous.

    Raises:
        ValueError: a dtype, shape or device is wrong. One sentence.
    """
    rows = x.reshape(-1, x.shape[-1])
    out: torch.Tensor = torch.ops.fastattention.volta_linear(rows, bias, *_arguments(weights))
    return out.view(*x.shape[:-1], weights.n)


def _arguments(weights: PackedWeights) -> tuple[Any, ...]:
    """The weights as arguments of an operator, which takes no structures."""
    form = weights.format
    return (
        weights.packed,
        weights.scales,
        weights.factor,
        form.kind,
        form.scales,
        form.group_size,
        form.zero_points,
        weights.k,
        weights.n,
    )


def _given(
    packed: torch.Tensor,
    scales: torch.Tensor,
    factor: torch.Tensor | None,
    kind: Kind,
    scales_per: Scales,
    group_size: int,
    zero_points: bool,
    k: int,
    n: int,
) -> PackedWeights:
    """The inverse of :func:`_arguments`."""
    return PackedWeights(WeightFormat(kind, scales_per, group_size, zero_points), k, n, packed, scales, factor)


def _refuse(x: torch.Tensor, bias: torch.Tensor | None, weights: PackedWeights) -> None:
    """The kernels take all sizes from the weights, so with other tensors they would read elsewhere."""
    if x.dtype != torch.float16:
        raise ValueError(
            f"x has dtype {x.dtype}, but products with quantised weights need float16; pass --dtype float16."
        )
    if x.shape[1] != weights.k:
        raise ValueError(f"x has {x.shape[1]} columns, but the weights have k = {weights.k}.")
    if bias is not None and (bias.dtype != torch.float16 or bias.shape != (weights.n,)):
        raise ValueError(
            f"bias has shape {list(bias.shape)} and dtype {bias.dtype}, but must have [{weights.n}] and float16."
        )
    of_scales = torch.float32 if weights.format.kind == "fp8_e4m3" else torch.int32
    for name, tensor, dtype in (("scales", weights.scales, of_scales), ("factor", weights.factor, torch.float32)):
        if tensor is not None and tensor.dtype != dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, but packed {weights.format} has {dtype}; use pack().")
    for name, tensor in (("x", x), ("bias", bias), ("scales", weights.scales), ("factor", weights.factor)):
        if tensor is not None and tensor.device != weights.packed.device:
            raise ValueError(f"{name} is on {tensor.device}, but the weights are on {weights.packed.device}.")


def _on_cpu(x: torch.Tensor, bias: torch.Tensor | None, *of: Any) -> torch.Tensor:
    weights = _given(*of)
    _refuse(x, bias, weights)
    return reference.product(x, weights, bias)


def _on_gpu(x: torch.Tensor, bias: torch.Tensor | None, *of: Any) -> torch.Tensor:
    """On torch's current stream, without synchronisation. All memory comes from torch's allocator, so a captured graph
    keeps its own."""
    weights = _given(*of)
    _refuse(x, bias, weights)
    if x.stride(1) != 1 or x.stride(0) % TILE or x.data_ptr() % ALIGNED:
        x = x.clone(memory_format=torch.contiguous_format)
    if bias is not None:
        bias = bias.contiguous()
    out = x.new_empty(len(x), weights.n)
    multiply = _by_packed if launch.reads_packed(weights.format.kind, len(x)) else _by_unpacked
    multiply(x, weights, bias, out)
    return out


def _by_packed(x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    fitting, description = _variants(NAMES[weights.format.kind]), _described(weights)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    for first, rows in launch.turns(len(x)):
        variant = launch.variant_for(fitting, rows, weights.n)
        ctas, warps = launch.shape(weights.n, description.units, variant)
        tiles, more = divmod(weights.n // TILE, ctas)
        argument = Linear(
            weights=description,
            x=x[first:].data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            out=out[first:].data_ptr(),
            rows=rows,
            x_stride=x.stride(0),
            tiles=tiles,
            more=more,
        )
        shared = warps * variant.shared_bytes_per_warp
        _kernel(variant).launch((ctas, 1, 1), (32 * warps, 1, 1), shared, argument, stream)


def _by_unpacked(x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """A slice of columns after the other, so that unpacked weights never exist as a whole."""
    tiles, at_once = weights.n // TILE, launch.slice_tiles(weights.n, weights.k)
    scratch = x.new_empty(at_once * TILE, weights.k)
    for first in range(0, tiles, at_once):
        count = min(at_once, tiles - first)
        columns = slice(first * TILE, (first + count) * TILE)
        transposed = scratch[: count * TILE]
        unpack_tiles(weights, first, transposed)
        if bias is None:
            with _sums_in_fp32():
                torch.mm(x, transposed.t(), out=out[:, columns])
            continue
        # cuBLAS may round the product before it adds to what is there. In fp32 there is only one rounding, of the sum.
        for begin in range(0, len(x), ROWS_WITH_BIAS):
            rows = slice(begin, begin + ROWS_WITH_BIAS)
            torch.add(product_in_fp32(x[rows], transposed), bias[columns], out=out[rows, columns])


@contextmanager
def _sums_in_fp32() -> Iterator[None]:
    """Where cuBLAS divides k, torch otherwise lets it add the parts in fp16."""
    matmul = torch.backends.cuda.matmul
    if not matmul.allow_fp16_reduced_precision_reduction:
        yield
        return
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction = True


def product_in_fp32(x: torch.Tensor, transposed: torch.Tensor) -> torch.Tensor:
    """``x @ transposed.t()`` of fp16 matrices in fp32, which torch can only do on GPUs."""
    return torch.mm(x, transposed.t(), out_dtype=torch.float32)


def unpack_tiles(weights: PackedWeights, first: int, out: torch.Tensor) -> None:
    """Convert tiles of eight columns from ``first`` on into ``out``, fp16 ``[columns, k]``, contiguous."""
    variant = launch.variant_for(_variants(NAMES[weights.format.kind]), 0, weights.n)
    argument = Unpack(weights=_described(weights), out=out.data_ptr(), first_tile=first)
    grid = (len(out) // TILE, -(-argument.weights.units // variant.warps), 1)
    stream = torch.cuda.current_stream(out.device).cuda_stream
    _kernel(variant).launch(grid, (32 * variant.warps, 1, 1), 0, argument, stream)


def _described(weights: PackedWeights) -> Weights:
    form = weights.format
    quarter = packing.UNIT[form.kind] // packing.QUARTERS
    group = {"group": form.group_size, "block": BLOCK}.get(form.scales, weights.k)
    blocks = weights.scales.shape[1] > 1 and form.scales == "block"
    return Weights(
        packed=weights.packed.data_ptr(),
        scales=weights.scales.data_ptr(),
        factor=0 if weights.factor is None else weights.factor.data_ptr(),
        columns=weights.n,
        units=weights.packed.shape[1],
        chunks=weights.k // TILE,
        groups=len(weights.scales),
        group_shift=NO_GROUPS if group >= weights.k else (group // quarter).bit_length() - 1,
        scale_stride=weights.scales.shape[1],
        scale_shift=(BLOCK // TILE).bit_length() - 1 if blocks else NO_GROUPS,
    )


def _variants(weight: str) -> list[Variant]:
    """``weight``: the format's name in the kernels."""
    return _of(images.IMAGES, weight)


@functools.cache
def _of(folder: Path, weight: str) -> list[Variant]:
    return [one for one in variants(folder) if one.weight == weight]


def variants(folder: Path) -> list[Variant]:
    """The compiled kernels in ``folder``.

    Raises:
        ImageError: the manifest is missing, or the kernels do not match this launcher.
    """
    return images.described(folder, "linear", Variant, launch.STRUCTURES, launch.CONSTANTS)


def _kernel(variant: Variant) -> cuda_driver.Kernel:
    return _loaded(variant, target().suffix)


@functools.cache
def _loaded(variant: Variant, suffix: str) -> cuda_driver.Kernel:
    # Turing runs the V100's machine code, and newer GPUs its PTX.
    return images.load(images.IMAGES, variant, suffix)


def _shape(x: torch.Tensor, bias: torch.Tensor | None, *of: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], of[-1])


_library = torch.library.Library("fastattention", "FRAGMENT")
_library.define(
    "volta_linear(Tensor x, Tensor? bias, Tensor packed, Tensor scales, Tensor? factor, str kind, str scales_per, "
    "int group_size, bool zero_points, int k, int n) -> Tensor"
)
_library.impl("volta_linear", _on_cpu, "CPU")
_library.impl("volta_linear", _on_gpu, "CUDA")
_library.impl("volta_linear", _shape, "Meta")
