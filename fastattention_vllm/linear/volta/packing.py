"""The kernels' layout of quantised weights, packed once when a model is loaded, and its inverse.

``kernels/volta/src/linear.h`` and ``weights.cuh`` define the layout. Columns come in tiles of eight, k in units of 512
bytes of a tile. A lane of a warp reads 16 bytes of one column and a quarter of the unit's k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastattention_vllm.linear.weights import MIDDLE, QuantisedMatrix, WeightFormat

TILE = 8
"""Columns."""
QUARTERS = 4
"""A unit's k is shared out to four groups of lanes."""
WORDS = 4
"""32-bit words of a lane and unit."""
UNIT = {"int4": 128, "int8": 64, "fp8_e4m3": 64}
"""k of a unit."""
ORDER = {"int4": (0, 2, 4, 6, 1, 3, 5, 7), "int8": (0, 1, 2, 3), "fp8_e4m3": (0, 2, 1, 3)}
"""Of k within a word, from its lowest bits."""
SLICE_BYTES = 16 << 20
"""Maximum bytes of weights that :func:`pack` converts at a time. It needs about four times as many temporarily."""
MINUS_1024 = 0xE400 - 0x10000
"""-1024 in fp16, as a signed number of 16 bits. Zero points are added to it: -(1024 + zero point)."""
LEAST_SCALE = 2.0**-20
"""Of integers. fp16 holds smaller numbers with at most four bits."""
LEAST_OF_LARGEST = 2.0**-14
"""Beside a scale of this size, what fp16 takes from smaller ones is at most 2^-11 of it, as in fp16 weights."""
LEFT_OUT_OF_E4M3 = 256.0
"""A factor that the kernels leave out when they convert e4m3 to fp16, so that the scales contain it."""


@dataclass(frozen=True)
class PackedWeights:
    """A matrix in the kernels' layout. To keep its tensors as parameters of a module, build it anew from them: it does
    nothing at that time."""

    format: WeightFormat
    k: int
    n: int
    packed: torch.Tensor
    """int32 ``[n / 8, units, 32, 4]``."""
    scales: torch.Tensor
    """Integers: int32 ``[groups, n]``, scale in fp16 in the lower half and -(1024 + zero point) in fp16 above it. FP8:
    fp32 ``[groups, column blocks]``."""
    factor: torch.Tensor | None = None
    """fp32 ``[n]``: scales per channel of FP8."""


def pack(matrix: QuantisedMatrix) -> PackedWeights:
    """Convert a matrix that :func:`~.kernels.supports` accepts, on the device where it is.

    Works through the columns in slices, so that the temporary memory is some 64 MiB whatever the matrix's size. The
    packed form has as many bytes as the given one. Free the given tensors before the next matrix.

    Raises:
        ValueError: the kernels do not support the format or shape, fp16 cannot hold a scale of integers, a scale is not
            finite, a weight is NaN, or a zero point lies outside of its range. One sentence, without the layer's name.
    """
    reason = unsupported(matrix.format, matrix.k, matrix.n)
    if reason is not None:
        raise ValueError(reason)
    words = _packed(matrix)
    scales, factor = _packed_scales(matrix)
    return PackedWeights(matrix.format, matrix.k, matrix.n, words, scales, factor)


def unpack(weights: PackedWeights) -> QuantisedMatrix:
    """The inverse of :func:`pack`, for tests. Scales are fp16 for integers, fp32 for FP8."""
    form, k, n = weights.format, weights.k, weights.n
    tiles, units = weights.packed.shape[:2]
    by_lane = weights.packed.view(tiles, units, 2, QUARTERS, 4, WORDS)
    words = _reordered(by_lane.permute(1, 3, 5, 0, 2, 4).reshape(-1, n), ORDER[form.kind], inverse=True)
    if form.kind == "fp8_e4m3":
        columns = words.t().contiguous().view(torch.float8_e4m3fn)
        scales = weights.scales / LEFT_OUT_OF_E4M3 if weights.factor is None else weights.factor[None]
        return QuantisedMatrix(form, k, n, columns.t()[:k], scales)
    rows, _ = form.number_shape(k, n)
    scales = weights.scales.to(torch.int16).view(torch.float16)
    zeros = (weights.scales >> 16) - MINUS_1024
    return QuantisedMatrix(form, k, n, words[:rows], scales, zeros if form.zero_points else None)


def unsupported(form: WeightFormat, k: int, n: int) -> str | None:
    """Why the layout cannot hold a matrix ``[k, n]`` of this format, in one sentence; ``None`` if it can."""
    for name, size in (("k", k), ("n", n)):
        if size <= 0 or size % TILE:
            return f"{name} is {size}, but the Volta kernels need a positive multiple of {TILE}."
    quarter = UNIT[form.kind] // QUARTERS
    quarters, rest = divmod(form.group_size, quarter)
    if form.group_size < k and (rest or quarters & (quarters - 1)):
        sizes = ", ".join(str(quarter << shift) for shift in range(4))
        return (
            f"group_size is {form.group_size}, but the Volta kernels support {sizes} and further powers of two "
            f"for {form.kind} weights, or a scale per channel."
        )
    return None


def _packed(matrix: QuantisedMatrix) -> torch.Tensor:
    """int32 ``[n / 8, units, 32, 4]``."""
    kind, n = matrix.format.kind, matrix.n
    units = -(-matrix.k // UNIT[kind])
    rows = units * QUARTERS * WORDS
    packed = torch.empty(n // TILE, units, 32, WORDS, dtype=torch.int32, device=matrix.numbers.device)
    at_once = max(1, SLICE_BYTES // (4 * rows * TILE))  # tiles
    for first in range(0, n // TILE, at_once):
        out = packed[first : first + at_once]
        tiles = len(out)
        given = matrix.numbers[:, first * TILE : (first + tiles) * TILE]
        if kind == "fp8_e4m3":
            given = _words_of(given)
        if len(given) < rows:  # x has zeros for the rest of the last unit
            given = torch.nn.functional.pad(given, (0, 0, 0, rows - len(given)))
        by_lane = _reordered(given, ORDER[kind]).view(units, QUARTERS, WORDS, tiles, 2, 4)
        out.view(tiles, units, 2, QUARTERS, 4, WORDS).copy_(by_lane.permute(3, 0, 4, 1, 5, 2))
    return packed


def _words_of(numbers: torch.Tensor) -> torch.Tensor:
    """FP8 ``[k, columns]`` as int32 ``[k / 4, columns]``. ``ValueError`` for NaN, which the kernels would take for a
    number."""
    columns = numbers.t().contiguous()
    if bool((columns.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise ValueError("a weight is NaN, so the checkpoint is damaged; download it again.")
    return columns.view(torch.int32).t()


def _reordered(words: torch.Tensor, order: tuple[int, ...], inverse: bool = False) -> torch.Tensor:
    """Contiguous. The number at place ``order[i]`` of a word moves to place ``i``, or with ``inverse`` back."""
    if order == tuple(range(len(order))):
        return words.contiguous()
    bits = 32 // len(order)
    out = torch.zeros(words.shape, dtype=torch.int32, device=words.device)
    for place, of in enumerate(order):
        source, to = (place, of) if inverse else (of, place)
        number = words >> bits * source
        number &= (1 << bits) - 1
        number <<= bits * to
        out |= number
    return out


def _packed_scales(matrix: QuantisedMatrix) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``PackedWeights.scales`` and ``PackedWeights.factor``."""
    form = matrix.format
    if form.kind == "fp8_e4m3":
        scales = matrix.scales.to(torch.float32)
        _check_finite(matrix.scales, scales)
        if form.scales == "channel":
            return torch.full_like(scales[:1, :1], LEFT_OUT_OF_E4M3), scales[0].contiguous()
        return (scales * LEFT_OUT_OF_E4M3).contiguous(), None
    scales, middle = scales_in_fp16(matrix.scales), MIDDLE[form.kind]
    most = 2 * middle - 1
    zeros = torch.full_like(scales, middle, dtype=torch.int32) if matrix.zeros is None else matrix.zeros.int()
    if zeros.numel() and (int(zeros.min()) < 0 or int(zeros.max()) > most):
        raise ValueError(
            f"zero points range from {int(zeros.min())} to {int(zeros.max())}, but those of {form.kind} weights must "
            f"lie between 0 and {most}; use another checkpoint."
        )
    return (scales.contiguous().view(torch.int16).int() & 0xFFFF | (zeros + MINUS_1024) << 16).contiguous(), None


def scales_in_fp16(given: torch.Tensor) -> torch.Tensor:
    """Scales of integers as the kernels read them.

    Raises:
        ValueError: fp16 cannot hold one of them. One sentence. Small scales among large ones are accepted: groups of
            inputs that a model does not use have weights of nearly 0.
    """
    scales = given.to(torch.float16)
    _check_finite(given, scales)
    lost = (scales != given) & (given.abs() < LEAST_SCALE)
    if bool(lost.any()) and float(scales.abs().max()) < LEAST_OF_LARGEST:
        raise ValueError(
            f"a scale is {given[lost][0].item():g}, of which fp16 keeps at most four bits; use a checkpoint with FP8 "
            "or 16-bit weights."
        )
    return scales


def _check_finite(given: torch.Tensor, scales: torch.Tensor) -> None:
    finite = scales.isfinite()
    if not bool(finite.all()):
        raise ValueError(
            f"a scale is {given[~finite][0].item():g}, which {scales.dtype} cannot hold, so the checkpoint is "
            "damaged or not meant for fp16; use another one."
        )
