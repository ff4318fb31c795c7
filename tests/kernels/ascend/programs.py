"""A small pair of programs in the compiler's text: the cube multiplies, then both vector cores take its result on."""

from __future__ import annotations

from pathlib import Path

from kernels.ascend.tables import Tables

HERE = Path(__file__).parent
CUBE, VECTOR = ((HERE / name).read_text() for name in ("cube.mlir", "vector.mlir"))
BANDWIDTH = {
    ("L2", "L1"): 64.0,
    ("GM", "L1"): 16.0,
    ("GM", "L2"): 48.0,
    ("L1", "L0A"): 256.0,
    ("L1", "L0B"): 128.0,
    ("L0C", "L2"): 32.0,
    ("L2", "UB"): 64.0,
    ("UB", "L2"): 64.0,
}
TABLES = Tables(BANDWIDTH, {("VEXP", "FP32"): (2.0, 24.0)})
