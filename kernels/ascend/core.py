"""Runs one core's program: scalar code for real, every other instruction as a time on its pipe."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kernels.ascend import vector
from kernels.ascend.pipes import Pipes
from kernels.ascend.tables import Chip, Tables
from kernels.ascend.text import (
    BYTES,
    NAME,
    Branch,
    Loop,
    Memory,
    Operation,
    Statement,
    memory,
    operands,
    result_type,
    split,
)
from kernels.ascend.values import WORKSPACE, Values, View

L0_BYTES = 32 * 1024
"""Half of L0A and L0B: while the cube reads one half, the other is filled."""
IGNORED = ("set_ffts_base_addr", "set_mask_norm", "set_mask_count", "convert_layout")


@dataclass(frozen=True)
class Operand:
    name: str
    type: Memory | str
    """Of a memory view, or of a number."""


@dataclass(frozen=True)
class Instruction:
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    buffers: tuple[Operand, ...]


@functools.cache
def instruction(rest: str) -> Instruction:
    def given(key: str) -> tuple[Operand, ...]:
        found = re.search(rf"(?<!\w){key}\((.*?) : (.*?)\)(?= outs| temp| |$)", rest)
        if not found:
            return ()
        types = [memory(one) if one.startswith("memref") else one for one in split(found.group(2))]
        return tuple(map(Operand, split(found.group(1)), types))

    return Instruction(given("ins"), given("outs"), given("temp_buffer"))


class Core:
    """Of kind "AIC" (the cube's) or "AIV" (a vector core, number 0 or 1)."""

    def __init__(
        self,
        kind: str,
        number: int,
        chip: Chip,
        tables: Tables,
        values: Values,
        *,
        block: int,
        cached: bool,
        send: Callable[[int, float], None],
        take: Callable[[int], float | None],
    ) -> None:
        """``send`` and ``take`` set a flag of the other cores at a time, and take one that they set, if they have.

        Args:
            block: number of the program in its grid.
            cached: keys and values come from the L2 cache instead of global memory.
        """
        self.kind, self.number, self.chip, self.tables, self.values = kind, number, chip, tables, values
        self.block, self.cached, self.send, self.take = block, cached, send, take
        self.pipes = Pipes()
        self.assumed = tables.assumed
        self.steps = 0
        self.counts: Counter[str] = Counter()
        self.moved: defaultdict[str, float] = defaultdict(float)
        """Bytes by path, as in "L1 to L0"."""
        self.by_instruction: defaultdict[str, float] = defaultdict(float)
        """Cycles of the vector and cube pipes by instruction."""
        self._yielded: list[object] = []
        self._l0 = [0.0, 0.0]  # when each half is free
        self._product = self._leaving = (0.0, 0.0)  # begin and end of the last product, and of its way out of L0C

    def run(self, body: Sequence[Statement]) -> Iterator[None]:
        """Run statements. Yields while another core's flag is missing."""
        for one in body:
            if isinstance(one, Loop):
                yield from self._loop(one)
            elif isinstance(one, Branch):
                self._yielded = []
                yield from self.run(one.body if self.values.number(one.condition) else one.otherwise)
                self.values.bind(one.result, self._yielded)
            else:
                yield from self._operation(one)

    def _loop(self, loop: Loop) -> Iterator[None]:
        names = self.values.names
        state: list[object] = [names.get(first, 0) for _, first in loop.carried]
        begin, end, step = map(self.values.number, loop.bounds)
        for index in range(begin, end, step):
            names[loop.index] = index
            names.update(zip((name for name, _ in loop.carried), state, strict=True))
            yield from self.run(loop.body)
            if loop.carried:
                state = self._yielded
        self.values.bind(loop.result, state)

    def _operation(self, one: Operation) -> Iterator[None]:
        self.steps += 1
        if one.name.startswith("hivm.hir."):
            yield from self._instruction(one.result, one.name.removeprefix("hivm.hir."), one.rest)
        elif one.name == "scf.yield":
            self._yielded = [self.values.names.get(name, 0) for name in operands(one.rest)]
        elif one.name != "annotation.mark":
            self.pipes.scalar += self.assumed.scalar_load if one.name == "memref.load" else self.assumed.scalar
            self.values.compute(one)

    def _instruction(self, result: str, name: str, rest: str) -> Iterator[None]:
        if name == "get_block_idx":
            self.values.names[result] = self.block
        elif name == "get_sub_block_idx":
            self.values.names[result] = self.number
        elif name == "pointer_cast":
            of = result_type(rest)
            self.values.names[result] = View(of.dims, of.dtype, result)
        elif name not in IGNORED:
            self.counts[name] += 1
            self.pipes.scalar += self.assumed.issue
            if name in ("sync_block_set", "sync_block_wait"):
                yield from self._other_cores(name, rest)
            elif name in ("set_flag", "wait_flag"):
                setter, waiter, event = _flag(rest)
                flag = setter, waiter, int(self.values.number(event))
                self.pipes.set(flag) if name == "set_flag" else self.pipes.wait(flag)
            elif name == "pipe_barrier":
                self.pipes.barrier(_flag(rest)[0])
            else:
                self._on_a_pipe(name, rest)

    def _other_cores(self, name: str, rest: str) -> Iterator[None]:
        pipe, *_, event = _flag(rest)
        flag = int(self.values.number(event))
        if name == "sync_block_set":
            self.send(flag, max(self.pipes.reached(pipe), self.pipes.scalar) + self.assumed.hand_over)
            return
        while (time := self.take(flag)) is None:
            yield
        self.pipes.not_before("S", time)

    def _on_a_pipe(self, name: str, rest: str) -> None:
        given = instruction(rest)
        if name == "mmadL1":
            self._multiply(given, rest)
        elif name == "nd2nz" or (name == "load" and self.kind == "AIC"):
            view = self._view(given.inputs[0])
            self._copy("MTE2", view.bytes, self._into_l1(view), "to L1")
        elif name == "load":
            self._copy("MTE2", self._view(given.outputs[0]).bytes, self._rate("L2", "UB"), "to UB")
        elif name == "store":
            self._copy("MTE3", self._view(given.inputs[0]).bytes, self._rate("UB", "L2"), "from UB")
        elif name == "fixpipe":
            self._out_of_l0(given, rest)
        elif self.kind == "AIC":  # zeros for the rows that a tile lacks
            view = self._view(given.outputs[0])
            self.pipes.run("MTE2", max(1, math.ceil(view.bytes / vector.REPEAT)), self.assumed.cube_latency)
        else:
            self._vector(name, given, rest)

    def _view(self, operand: Operand) -> View:
        of = operand.type
        if isinstance(of, str):
            raise ValueError(f"the model expected a memory view, not {of}.")
        if -1 in of.dims:
            return self.values.view(operand.name)
        return View(of.dims, of.dtype, self.values.view(operand.name).root)

    def _rate(self, source: str, destination: str) -> float:
        return self.tables.bandwidth[source, destination]

    def _into_l1(self, view: View) -> float:
        if self.cached or view.root == WORKSPACE:
            return self._rate("L2", "L1")
        return min(self._rate("GM", "L1"), self._rate("GM", "L2") / self.chip.cores)

    def _copy(self, pipe: str, size: float, rate: float, path: str) -> None:
        self.pipes.run(pipe, size / rate, self.assumed.copy_latency)
        self.moved[path] += size

    def _multiply(self, given: Instruction, rest: str) -> None:
        """A product of ``rows`` x ``inner`` and ``inner`` x ``columns`` numbers, in parts that fit in half of L0."""
        rows, inner, columns = (int(self.values.number(one.name)) for one in given.inputs if one.type == "index")
        dtype = self._view(given.inputs[0]).dtype
        size = BYTES[dtype]
        found = re.search(r"sync_related_args\((.*?) :", rest)
        events = [int(self.values.number(one)) for one in found.group(1).split(",")] if found else [-1] * 4
        for event in events[:2]:
            if event >= 0:
                self.pipes.wait(("MTE2", "MTE1", event))
        part_by_part = "unit_flag_mode" in rest
        if part_by_part:  # a part of L0C may be overwritten as soon as it has left
            self.pipes.not_before("M", self._leaving[0])
        begin = None
        part = max(16, min(inner, int(L0_BYTES / size / max(rows, columns, 16))))
        for start in range(0, inner, part):
            depth = min(part, inner - start)
            copied = rows * depth * size / self._rate("L1", "L0A") + columns * depth * size / self._rate("L1", "L0B")
            self.pipes.not_before("MTE1", self._l0.pop(0))
            self.pipes.not_before(
                "M", self.pipes.run("MTE1", copied, self.assumed.cube_latency) + self.assumed.cube_latency
            )
            begin = max(self.pipes.scalar, self.pipes.free["M"]) if begin is None else begin
            tiles = math.ceil(rows / 16) * math.ceil(depth * size / 32) * math.ceil(columns / 16)
            cycles = tiles * (2 if dtype == "f32" else 1)
            self._l0.append(self.pipes.run("M", cycles, self.assumed.cube_latency))
            self.moved["L1 to L0"] += (rows + columns) * depth * size
        if part_by_part:
            self.pipes.not_before("M", self._leaving[1])
        self._product = begin or 0.0, self.pipes.free["M"]
        for event in events[2:4]:
            if event >= 0:
                self.pipes.set(("MTE1", "MTE2", event))

    def _out_of_l0(self, given: Instruction, rest: str) -> None:
        size = self._view(given.outputs[0]).bytes
        cycles = size / self._rate("L0C", "L2") + self.assumed.fixpipe_start
        self.moved["from L0C"] += size
        if "unit_flag_mode" not in rest:
            self.pipes.run("FIX", cycles, self.assumed.copy_latency)
            return
        # It follows the cube part by part, and ends a part after it.
        self.pipes.not_before("FIX", self._product[0] + 64)
        begin = max(self.pipes.scalar, self.pipes.free["FIX"])
        self.pipes.run("FIX", cycles, self.assumed.copy_latency)
        self.pipes.not_before("FIX", self._product[1] + 64)
        self.pipes.done["FIX"] = max(self.pipes.done["FIX"], self.pipes.free["FIX"] + self.assumed.copy_latency)
        self._leaving = begin, self.pipes.free["FIX"]

    def _vector(self, name: str, given: Instruction, rest: str) -> None:
        shapes = [self._shape(one) for one in given.inputs if isinstance(one.type, Memory)]
        output = self._shape(given.outputs[0])
        if name == "vreduce":
            along = "reduce_dims = [1]" in rest or len(shapes[0].dims) == 1
            cycles, gap = vector.reduction(self.tables, shapes[0], largest="<max>" in rest, along_rows=along)
        else:
            spread = 0
            if "broadcast" in rest and name not in ("vbrc", "copy"):
                spread = self._shape(given.buffers[0]).numbers if given.buffers else 64
            number = any(isinstance(one.type, str) for one in given.inputs)
            cycles, gap = vector.cycles(self.tables, name, shapes, output, number=number, spread=spread)
        self.pipes.run("V", cycles, gap)
        self.by_instruction[name] += cycles

    def _shape(self, operand: Operand) -> vector.Shape:
        view = self._view(operand)
        return vector.Shape(view.dims, view.dtype)


@functools.cache
def _flag(rest: str) -> tuple[str, ...]:
    """The pipes of a flag or a barrier, and the number or name of the flag's event."""
    return tuple(re.findall(rf"(?<=PIPE_)\w+|(?<=EVENT_ID)\d+|{NAME}|(?<=flag = )\d+", rest))
