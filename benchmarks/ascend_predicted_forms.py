"""Forms of the NPU's prefill and decode programs, and the predicted time of whole steps. Not yet run on hardware.

Used by: ascend_predicted.py.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastattention_vllm.attention.ascend_triton import kernels
from fastattention_vllm.attention.ascend_triton.masks import PAGE, UNLIMITED
from fastattention_vllm.attention.ascend_triton.specializations import COMBINE_ROWS, DECODE_ROWS, Specialization
from fastattention_vllm.attention.ascend_triton.work import pages_per_program
from kernels.ascend.simulation import Bodies, Predicted, bodies, simulate
from kernels.ascend.tables import CHIPS, Tables
from scripts import ascend_calls, ascend_compile, ascend_predict
from scripts.ascend_calls import Heads
from scripts.ascend_predict import FIRST, makespan

EXACT = 48
"""Prefill tiles up to this page are timed."""
PERIOD = 16
"""Every further 16 pages, four steps of four pages, take equally long: the compiler unrolls four steps."""


@dataclass(frozen=True)
class Form:
    """The package's program, or one of ascend_masks_triton.py, with constants and compiler options changed."""

    name: str
    one: Specialization
    masks: bool = False
    constants: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def _function(self) -> Any:
        if self.masks:
            return importlib.import_module("ascend_masks_triton").prefill
        return kernels.program_of(self.one.program)

    @functools.cached_property
    def _constants(self) -> dict[str, int]:
        return self.one.constants | dict(self.constants)

    @functools.cached_property
    def names(self) -> list[str]:
        return [name for name in self._function.arg_names if name not in self._constants]

    @functools.cached_property
    def compiled(self) -> ascend_compile.Compiled:
        linalg = ascend_compile.linalg_of(self._function, self.one.signature(self.names), self._constants)
        return ascend_compile.compile_for(f"Ascend{FIRST}", linalg, self.one.options | dict(self.options))

    @property
    def refusal(self) -> str:
        """The compiler's first sentence, or empty."""
        return self.compiled.refusal.partition("!")[0]

    @functools.cached_property
    def bodies(self) -> Bodies:
        return bodies({kind: core.text for kind, core in self.compiled.cores.items()})

    @property
    def memory(self) -> dict[str, int]:
        return {space: size for core in self.compiled.cores.values() for space, size in core.memory.items()}

    def __hash__(self) -> int:
        return hash(self.name)


def run(form: Form, call: ascend_calls.Call, chip: str = FIRST, tables: Tables | None = None) -> Predicted:
    return simulate(form.bodies, call.launch(form.names), CHIPS[chip], tables or ascend_predict.tables())


@functools.cache
def tile(form: Form, heads: Heads, number: int, chip: str = FIRST, window: int = UNLIMITED) -> Predicted:
    """A tile of a causal prompt. What follows the tile does not matter."""
    rows = form.one.rows
    return run(form, ascend_calls.prefill(heads, (number + 1) * rows, number, rows, causal=True, window=window), chip)


@functools.cache
def whole_tile(form: Form, heads: Heads, pages: int, chip: str = FIRST) -> Predicted:
    """A tile of which every row sees all ``pages``."""
    return run(form, ascend_calls.prefill(heads, pages * PAGE, 0, form.one.rows, causal=False), chip)


def prefill_seconds(
    form: Form, heads: Heads, tokens: int, *, causal: bool, chip: str = FIRST, window: int = UNLIMITED
) -> float:
    """Of one prompt, with one program per tile and head, the longest ones first, on all cores."""
    count = -(-tokens // form.one.rows)
    if causal:
        cycles = [tile_cycles(form, heads, number, chip, window) for number in range(count)]
    else:
        cycles = [full_cycles(form, heads, tokens // PAGE, chip)] * count
    each = [one for one in sorted(cycles, reverse=True) for _ in range(heads.query)]
    return makespan(each, CHIPS[chip].cores) / CHIPS[chip].mhz / 1e6


def tile_cycles(form: Form, heads: Heads, number: int, chip: str, window: int) -> float:
    pages = -(-form.one.rows * (number + 1) // PAGE)
    periods = max(0, -(-(pages - EXACT) // PERIOD))
    tiles = PERIOD * PAGE // form.one.rows
    known = tile(form, heads, number - periods * tiles, chip, window).cycles
    if not periods or window < UNLIMITED:  # a window shows as many pages to every later tile
        return known
    return known + periods * (known - tile(form, heads, number - (periods + 1) * tiles, chip).cycles)


def full_cycles(form: Form, heads: Heads, pages: int, chip: str) -> float:
    if pages <= 64:
        return whole_tile(form, heads, pages, chip).cycles
    at_64 = whole_tile(form, heads, 64, chip).cycles
    return at_64 + (at_64 - whole_tile(form, heads, 32, chip).cycles) * (pages - 64) / 32


def prefill_flops(heads: Heads, tokens: int, *, causal: bool, window: int = UNLIMITED) -> float:
    seen = min(window + 1, tokens)
    pairs = seen * (seen + 1) / 2 + (tokens - seen) * seen if causal else tokens**2
    return 4 * heads.query * heads.size * pairs


def decode_form(dtype: str, size: int, rows: int) -> Form:
    one = Specialization("decode", dtype, size, rows)
    return Form(one.name, one)


def decode_seconds(heads: Heads, kept: int, sequences: int, *, tokens: int = 1, chip: str = FIRST) -> tuple[float, int]:
    """Of one step with equally long sequences, with the merging of parts; and the pages of a program."""
    rows = next(rows for rows in DECODE_ROWS if rows >= tokens * heads.group)
    pages = -(-kept // PAGE)
    each = pages_per_program([pages] * sequences, heads.kv)
    parts = [min(each, pages - first) for first in range(0, pages, each)]
    form = decode_form("fp16", heads.size, rows)
    cycles = {count: decode_cycles(form, heads, count, tokens, chip) for count in set(parts)}
    programs = [cycles[count] for count in sorted(parts * heads.kv * sequences, reverse=True)]
    merge = Specialization("combine", "fp16", heads.size, COMBINE_ROWS)
    merged = run(Form(merge.name, merge), ascend_calls.combine(heads, kept, each, rows, tokens=tokens), chip).cycles
    merges = [merged] * (heads.kv * sequences * (rows // COMBINE_ROWS))
    whole = makespan(programs, CHIPS[chip].cores) + makespan(merges, 2 * CHIPS[chip].cores)
    return whole / CHIPS[chip].mhz / 1e6, each


@functools.cache
def decode_cycles(form: Form, heads: Heads, pages: int, tokens: int, chip: str) -> float:
    return run(form, ascend_calls.decode(heads, pages * PAGE, pages, form.one.rows, tokens=tokens), chip).cycles


def decode_bytes(heads: Heads, kept: int, sequences: int) -> float:
    """Keys and values of fp16, read once."""
    return 2 * sequences * kept * heads.kv * heads.size * 2
