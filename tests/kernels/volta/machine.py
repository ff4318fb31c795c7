"""Small kernels on the simulated V100: compiled by NVRTC to sm_70 machine code, run on numpy arrays."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing
import pytest

from kernels.volta.nvrtc import compile_cuda
from kernels.volta.sim import Cubin, Simulation, SimulationError, Trace, default_timing, pack_parameters
from kernels.volta.sim.library import SmTimeFields, library

Array = numpy.typing.NDArray[Any]


def more(*values: Any) -> Any:
    """A case only for `make test-more`: each kernel takes a quarter of a second, and `make test` has a similar case."""
    return pytest.param(*values, marks=pytest.mark.more)


def full(*values: Any) -> Any:
    """A case only for `make test-full`: its kernels take ten seconds each."""
    return pytest.param(*values, marks=pytest.mark.full)


@functools.lru_cache(maxsize=256)
def cubin(source: str) -> Cubin:
    return Cubin(compile_cuda(source).binary)


@dataclass(frozen=True)
class Run:
    simulation: Simulation
    traces: list[Trace]

    @property
    def opcodes(self) -> set[str]:
        """Opcodes of the executed instructions, with their modifiers."""
        return {
            next(word for word in facts.text.split() if word[0] != "@")
            for i, facts in enumerate(self.simulation.instructions)
            if any(trace.executions[i] for trace in self.traces)
        }

    def transactions(self, opcode: str) -> list[float]:
        """Mean wavefronts or sectors per execution, for each executed instruction with this opcode prefix."""
        trace = self.traces[0]
        return [
            float(trace.transactions[i] / trace.executions[i])
            for i, facts in enumerate(self.simulation.instructions)
            if opcode in facts.text and trace.executions[i]
        ]


def run(
    source: str,
    *arguments: Array | numpy.generic,
    grid: int = 1,
    block: tuple[int, int, int] | int = 32,
    shared: int = 0,
    kernel: str = "",
) -> Run:
    """Run all CTAs of a kernel. Arrays are passed by address and changed in place, numbers are passed by value."""
    simulation = Simulation(cubin(source), kernel)
    values = [numpy.uint64(simulation.map(a)) if isinstance(a, numpy.ndarray) else a for a in arguments]
    threads = (block, 1, 1) if isinstance(block, int) else block
    simulation.launch((grid, 1, 1), threads, pack_parameters(*values), shared)
    return Run(simulation, [simulation.trace(x) for x in range(grid)])


KINDS = {
    "float32": "float",
    "float16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned",
    "int64": "long long",
    "uint64": "unsigned long long",
    "uint16": "unsigned short",
}
Types = tuple[str, ...]


Case = tuple[str, Types]
"""An expression, and the types of its inputs and its output."""


def elementwise_source(cases: Sequence[Case]) -> str:
    """One kernel for all cases; it selects the case by number."""
    bodies = []
    for number, (expression, types) in enumerate(cases):
        *inputs, output = (KINDS[kind] for kind in types)
        loads = " ".join(f"{kind} {'abc'[k]} = ((const {kind}*)p{k})[i];" for k, kind in enumerate(inputs))
        statements = expression if ";" in expression else f"d = {expression};"
        bodies.append(f"if (which == {number}) {{ {loads} {output} d; {statements} (({output}*)out)[i] = d; }}")
    return f"""extern "C" __global__ void elementwise(
        const void* p0, const void* p1, const void* p2, void* out, int n, int which) {{
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i >= n) return;
      {" ".join(bodies)}
    }}"""


_compiled_together: dict[Case, tuple[str, int]] = {}
"""The source that contains a case, and the number of the case in it."""


def compile_together(cases: Iterable[Case]) -> None:
    """Announce cases for :func:`elementwise`, to compile them together: nvdisasm takes 0.2 s for each kernel."""
    together = list(dict.fromkeys(cases))
    source = elementwise_source(together)
    _compiled_together.update({case: (source, number) for number, case in enumerate(together)})


def types_of(inputs: Iterable[Array], output: Any) -> Types:
    return (*(str(array.dtype) for array in inputs), str(numpy.dtype(output)))


def elementwise(expression: str, *inputs: Array, output: Any) -> tuple[Array, Run]:
    """The value of ``expression`` in a, b and c (an element of each input), for all elements; one thread each.

    ``expression`` may also be statements that set ``d``. The kernel's types follow the numpy types; fp16 passes as
    bits.
    """
    case = expression, types_of(inputs, output)
    source, number = _compiled_together.get(case) or (elementwise_source([case]), 0)
    result = numpy.zeros(len(inputs[0]), output)
    pointers = [*inputs, *[numpy.uint64(0)] * (3 - len(inputs)), result]
    numbers = numpy.int32(len(result)), numpy.int32(number)
    return result, run(source, *pointers, *numbers, grid=-(-len(result) // 128), block=128)


class Listing:
    """A hand-written program. An instruction is its text, or its text and control bits."""

    def __init__(self, *instructions: str | tuple[str, int]) -> None:
        self.handle = library().fa_sim_create()
        written = [(item, control()) if isinstance(item, str) else item for item in instructions]
        lines = "\n".join(f"/*{16 * i:04x}*/ {text} ;" for i, (text, _) in enumerate(written))
        code = b"".join(bytes(8) + (bits << 41).to_bytes(8, "little") for _, bits in written)
        self.check(library().fa_sim_load(self.handle, lines.encode(), code, len(code)))

    def check(self, status: int) -> None:
        if status != 0:
            raise SimulationError(library().fa_sim_error(self.handle).decode())

    def run(self, threads: int = 32) -> int:
        """Run the program; returns the number of the trace."""
        three, trace = ctypes.c_uint32 * 3, ctypes.c_int32()
        self.check(library().fa_sim_set_launch(self.handle, three(1, 1, 1), three(threads, 1, 1), 1024, 64))
        self.check(library().fa_sim_run(self.handle, 0, 0, 0, trace))
        return trace.value

    def cycles(self, threads: int = 32, ctas: int = 1, **changes: float) -> int:
        """Cycles of ``ctas`` CTAs, one after the other."""
        traces, fields = (ctypes.c_int32 * ctas)(*[self.run(threads)] * ctas), SmTimeFields()
        timing = default_timing(**changes)
        self.check(library().fa_sim_time_sm(self.handle, traces, ctas, 1, timing, fields, None))
        return int(fields.cycles)


def control(stall: int = 1, writes: int = 7, reads: int = 7, waits: int = 0) -> int:
    """The control bits of an instruction. 7 means no scoreboard; ``waits`` has one bit per scoreboard."""
    return stall | 1 << 4 | writes << 5 | reads << 8 | waits << 11
