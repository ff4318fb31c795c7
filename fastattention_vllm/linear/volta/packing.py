"""The kernels' layout of quantised weights, packed once when a model is loaded, and its inverse.

``kernels/volta/src/linear.h`` and ``weights.cuh`` define the layout. Columns come in tiles of eight, k in units of 512
bytes of a tile. A lane of a warp reads 16 bytes of one column and a quarter of the unit's k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastattention_vllm.linear.weights import MIDDLE, PER_WORD, QuantisedMatrix, WeightFormat

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
LANES = tuple(slot & 3 | quarter << 2 | slot >> 2 << 4 for quarter in range(QUARTERS) for slot in range(TILE))
"""The lane of each quarter and column of a tile."""
CHUNK_BYTES = 64 << 20
"""Approximate maximum of temporary memory of :func:`pack`."""
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
        ValueError: the kernels do not support the format or shape, a scale is not finite in fp16 (integers), a weight
            is NaN, or a zero point lies outside of its range. One sentence, without the layer's name.
    """
    raise NotImplementedError


def unpack(weights: PackedWeights) -> QuantisedMatrix:
    """The inverse of :func:`pack`, for tests. Scales are fp16 for integers, fp32 for FP8."""
    raise NotImplementedError
