"""The programs that the kernels can ask the compiler for, and the compiler's options.

Read by ``kernels.py``, which launches them, and by ``tests/scripts/test_ascend_compile.py``, which compiles them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastattention_vllm.attention.ascend_triton.masks import PAGE

DTYPES = ("fp16", "bf16")
PREFILL_ROWS = {64: 128, 96: 128, 128: 128, 192: 64, 256: 64}
"""Head size -> query tokens of a tile. 128 rows of 192 numbers do not fit the vector cores' memory."""
DECODE_ROWS = (16, 32, 64)
"""The cube computes 16 rows at a time."""
FOUR_PAGES = {(64, 16), (64, 32), (64, 64), (96, 16), (96, 32), (96, 64), (128, 32), (128, 64), (192, 64)}
"""Head size and rows of decode programs that take four pages a step, because results leave the cube slowly. For the
others, one page a step starts to compute earlier. By predicted times, not yet by measured ones."""
COMBINE_ROWS = 16
"""Rows of a program that merges parts: the compiler does not share them between the two vector cores."""
NUMBERS = {
    "table": "*i32",
    "starts": "*i32",
    "lengths": "*i32",
    "tiles": "*i32",
    "lse": "*fp32",
    "part_acc": "*fp32",
    "part_top": "*fp32",
    "part_total": "*fp32",
    "mask": "*bf16",
    "scale": "fp32",
}
"""Types of arguments that do not depend on the specialization. Other numbers are int32."""


@dataclass(frozen=True)
class Specialization:
    program: str
    dtype: str
    head_size: int
    rows: int

    @property
    def name(self) -> str:
        return f"{self.program} {self.dtype} D{self.head_size} rows {self.rows}"

    @property
    def constants(self) -> dict[str, int]:
        found = {"HEAD": self.head_size, "ROWS": self.rows, "PAGE": PAGE}
        return found | ({"STEP": self.step} if self.program != "combine" else {})

    @property
    def step(self) -> int:
        """Pages of a first-level block."""
        return 4 if self.program == "prefill" or (self.head_size, self.rows) in FOUR_PAGES else 1

    @property
    def options(self) -> dict[str, Any]:
        """triton-ascend's options. Its default lets the cube run ahead by up to four blocks."""
        if self.program == "combine":
            return {}
        # unit_flag: scores leave the cube's accumulator part by part while it computes.
        row_tiles = 2 if self.program == "decode" and self.step == 4 and self.rows > 16 else 1
        return {"unit_flag": True, "tile_mix_vector_loop": row_tiles}

    def signature(self, names: list[str]) -> dict[str, str]:
        """The type of each argument in ``names``."""
        data = dict.fromkeys(("query", "key", "value", "out"), f"*{self.dtype}")
        types = NUMBERS | data
        return {name: types.get(name, "i32") for name in names if name not in self.constants}


def every() -> Iterator[Specialization]:
    for dtype in DTYPES:
        for size, rows in PREFILL_ROWS.items():
            yield Specialization("prefill", dtype, size, rows)
            for few in DECODE_ROWS:
                yield Specialization("decode", dtype, size, few)
            yield Specialization("combine", dtype, size, COMBINE_ROWS)
