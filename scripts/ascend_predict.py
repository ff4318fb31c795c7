"""Predicts, without an NPU, how long the Triton kernels take on a 910B, with the model in kernels/ascend.

Run by: contributors, with the environment of `make test-ascend`; benchmarks/ascend_predicted.py has the paper's tables.
Needs: what `scripts/ascend.py --set-up-only` installs.

    PYTHONPATH=.:build/ascend/triton build/ascend/2.10.0.post4/venv/bin/python -m scripts.ascend_predict [--chip 910B4]

Prints one line per program that the plugin can ask for: how long one call takes, how long each pipe is busy, and the
memory that it uses. `--flags` then takes out each flag of each program once, and fails if the model does not notice.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import sys
from collections.abc import Iterable, Iterator

from fastattention_vllm.attention.ascend_triton import kernels, specializations
from fastattention_vllm.attention.ascend_triton.masks import PAGE
from fastattention_vllm.attention.ascend_triton.specializations import Specialization
from kernels.ascend.removal import noticed, without_each
from kernels.ascend.simulation import Bodies, Predicted, bodies, simulate
from kernels.ascend.tables import CHIPS, Chip, Tables, read
from scripts import ascend_calls, ascend_compile
from scripts.ascend_calls import Call, Heads

FIRST = "910B1"
TOKENS = 8192
"""Of a prefill tile's sequence; the last tile is timed."""
PAGES = 64
"""Of a decode program."""


@functools.cache
def linalg(one: Specialization) -> str:
    function = kernels.program_of(one.program)
    return ascend_compile.linalg_of(function, one.signature(function.arg_names), one.constants)


@functools.cache
def compiled(one: Specialization, chip: str = FIRST) -> ascend_compile.Compiled:
    return ascend_compile.compile_for(f"Ascend{chip}", linalg(one), one.options)


@functools.cache
def tables() -> Tables:
    return read()


def names(one: Specialization) -> list[str]:
    return [name for name in kernels.program_of(one.program).arg_names if name not in one.constants]


def programs(one: Specialization, chip: str = FIRST) -> Bodies:
    """Raises ``ValueError`` if the compiler refuses the program."""
    found = compiled(one, chip)
    if found.refusal:
        raise ValueError(f"{one.name} is refused: {found.refusal}")
    return bodies({kind: core.text for kind, core in found.cores.items()})


def predict(one: Specialization, call: Call, chip: str = FIRST) -> Predicted:
    return simulate(programs(one, chip), call.launch(names(one)), CHIPS[chip], tables())


def usual_call(one: Specialization) -> Call:
    """A long call: the last tile of a prompt, or a part of a long sequence with all rows in use."""
    if one.program == "prefill":
        heads = Heads(32, 8, one.head_size)
        return ascend_calls.prefill(heads, TOKENS, TOKENS // one.rows - 1, one.rows, causal=True)
    heads = Heads(8 * one.rows, 8, one.head_size)
    if one.program == "decode":
        return ascend_calls.decode(heads, PAGES * PAGE, PAGES, one.rows)
    return ascend_calls.combine(heads, 8 * PAGES * PAGE, PAGES, one.rows)


def call_of_every_flag(one: Specialization) -> Call:
    """A short call that takes every branch: whole pages, both edges of a window, a page with an end."""
    window = 12 * PAGE
    kept = 18 * PAGE - 28
    if one.program == "prefill":
        tile = kept // one.rows
        return ascend_calls.prefill(Heads(4, 1, one.head_size), kept, tile, one.rows, causal=True, window=window)
    heads = Heads(one.rows - 3, 1, one.head_size)
    if one.program == "decode":
        return ascend_calls.decode(heads, kept, 18, one.rows, window=window)
    return ascend_calls.combine(heads, kept, 4, one.rows)


def unnoticed_flags(one: Specialization, chip: str = FIRST) -> Iterator[str]:
    """Flags without which the program still seems right to the model."""
    launch = call_of_every_flag(one).launch(names(one))
    for flag, fewer in without_each(programs(one, chip)):
        if not noticed(fewer, launch, CHIPS[chip], tables()):
            yield flag


def makespan(durations: Iterable[float], cores: int) -> float:
    """When the last of these programs ends, if each starts on the first free core, in this order."""
    free = [0.0] * cores
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=tuple(CHIPS), default=FIRST)
    parser.add_argument("--flags", action="store_true", help="take out each flag once, too (minutes)")
    options = parser.parse_args()
    print(f"Predicted times of one call on one core of a {options.chip}. Not yet run on hardware.")
    lost = 0
    for one in specializations.every():
        print(described(one, options.chip), flush=True)
        if options.flags:
            for flag in unnoticed_flags(one, options.chip):
                print(f"    NOT NOTICED without {flag}")
                lost += 1
    return int(lost > 0)


def described(one: Specialization, chip: str) -> str:
    found = predict(one, usual_call(one), chip)
    cores = compiled(one, chip).cores
    memory = {space: size for core in cores.values() for space, size in core.memory.items()}
    busy = ", ".join(f"{pipe} {cycles / found.cycles:.0%}" for pipe, cycles in sorted(found.busy.items()))
    used = ", ".join(f"{space} {size / 1024:.0f} KiB" for space, size in memory.items())
    ahead = max(core.run_ahead for core in cores.values())
    time = microseconds(found, CHIPS[chip])
    return f"{one.name}: predicted {time:.1f} us; busy {busy}; {used}; {ahead} marks of loops that run ahead"


def microseconds(found: Predicted, chip: Chip) -> float:
    return found.cycles / chip.mhz


if __name__ == "__main__":
    sys.exit(main())
