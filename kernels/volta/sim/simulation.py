"""One kernel on the simulated V100: memory, launches, traces and times."""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Sequence
from ctypes import c_int32, c_uint32
from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing

from kernels.volta.sim.cubin import PARAMETERS_AT, STACK_TOP_AT, Cubin
from kernels.volta.sim.disassembly import disassemble
from kernels.volta.sim.failure import SimulationError
from kernels.volta.sim.gpu import V100, Gpu, Occupancy
from kernels.volta.sim.library import InstructionInfo, SmTimeFields, Timing, library
from kernels.volta.sim.timing import HotSpot, SmTime, default_timing, pipe_names

Array = numpy.typing.NDArray[Any]
Counts = numpy.typing.NDArray[numpy.uint64]
Size = tuple[int, int, int]

FIRST_ADDRESS = 0x7_0000_0000
"""Address of the first array that :meth:`Simulation.map` maps."""
ADDRESS_UNIT = 0x1000_0000
"""Arrays begin at multiples of this (256 MiB), so that an index far out of range hits unmapped memory."""
LOCAL_BYTES = 8192
"""Local memory of each thread, for spilled registers and arrays."""
MAX_STATIC_AND_DYNAMIC_SHARED = 96 * 1024


@dataclass(frozen=True, slots=True)
class Trace:
    """What one CTA executed, kept by the simulation until :meth:`Simulation.drop_traces`."""

    number: int
    executions: Counts
    """Per instruction: how often warps executed it."""
    transactions: Counts
    """Per instruction: wavefronts of shared memory (1 per access and warp without bank conflicts, 2 and 4 for accesses
    of 8 and 16 bytes), or 32-byte sectors of global memory."""


@dataclass(frozen=True, slots=True)
class InstructionFacts:
    text: str
    pipe: str
    occupancy: int
    """Cycles that one instruction occupies the pipe."""
    access: str
    """``shared load``, ``shared store``, ``shuffle``, ``global load``, ``global store`` or nothing."""
    width: int
    """Bytes per lane of an access."""


ACCESSES = ("", "shared load", "shared store", "shuffle", "global load", "global store")


class Simulation:
    """``kernel``: its name in the cubin, or a part of it that occurs in no other kernel's name."""

    def __init__(self, cubin: Cubin, kernel: str, gpu: Gpu = V100) -> None:
        self.image = cubin.kernel(kernel)
        self.gpu = gpu
        self._library = library()
        self._handle = self._library.fa_sim_create()
        if not self._handle:
            raise MemoryError
        weakref.finalize(self, self._library.fa_sim_destroy, self._handle)
        code = self.image.code
        self._call("load", disassemble(code).encode(), code, len(code))
        for bank, content in self.image.constants.items():
            self._call("set_constants", bank, content, len(content))
        self.instructions = [self._instruction(i) for i in range(self._library.fa_sim_num_instructions(self._handle))]
        self._arrays: list[Array] = []
        self._next_address = FIRST_ADDRESS
        self._shared_bytes = 0
        self._threads = 0

    # --- memory ----------------------------------------------------------------------------------------------------

    def map(self, array: Array, address: int | None = None) -> int:
        """Make ``array`` visible to the kernel, which reads and writes it in place; returns its address.

        An array that numpy holds read-only is read-only for the kernel too.
        """
        if not array.flags.c_contiguous:
            raise ValueError("an array must be contiguous to be mapped.")
        if address is None:
            address = self._next_address
            self._next_address += -(-max(array.nbytes, 1) // ADDRESS_UNIT) * ADDRESS_UNIT + ADDRESS_UNIT
        self._call("map", address, array.nbytes, array.ctypes.data, int(array.flags.writeable))
        self._arrays.append(array)  # keeps it alive as long as the kernel can access it
        return address

    def unmap_all(self) -> None:
        self._call("unmap_all")
        self._arrays.clear()

    # --- execution -------------------------------------------------------------------------------------------------

    def launch(self, grid: Size, block: Size, parameters: bytes = b"", dynamic_shared_bytes: int = 0) -> None:
        """Set up a launch, of which :meth:`execute` and :meth:`trace` run one CTA at a time.

        ``parameters``: the bytes of the kernel's parameter block, from :func:`pack_parameters` or a ctypes structure.
        """
        if len(parameters) != self.image.parameter_bytes:
            raise SimulationError(
                f"{self.image.name} takes {self.image.parameter_bytes} bytes of parameters, not {len(parameters)}."
            )
        shared = self.image.shared_bytes + dynamic_shared_bytes
        if shared > MAX_STATIC_AND_DYNAMIC_SHARED:
            raise SimulationError(f"a CTA can have at most 98304 bytes of shared memory, not {shared}.")
        constants = bytearray(PARAMETERS_AT) + parameters
        struct.pack_into("<6I", constants, 0, *block, *grid)
        struct.pack_into("<I", constants, STACK_TOP_AT, LOCAL_BYTES)
        self._call("set_launch", (c_uint32 * 3)(*grid), (c_uint32 * 3)(*block), shared, LOCAL_BYTES)
        self._call("set_constants", 0, bytes(constants), len(constants))
        self._shared_bytes, self._threads = shared, block[0] * block[1] * block[2]

    def execute(self, x: int, y: int = 0, z: int = 0) -> None:
        """Run one CTA without a trace."""
        self._call("run", x, y, z, None)

    def trace(self, x: int, y: int = 0, z: int = 0) -> Trace:
        """Run one CTA and record what it executes."""
        number = c_int32()
        self._call("run", x, y, z, number)
        return Trace(number.value, self._counts("executions", number.value), self._counts("transactions", number.value))

    def drop_traces(self) -> None:
        self._call("drop_traces")

    def set_instruction_limit(self, limit: int) -> None:
        """Set the number of instructions after which a warp is considered endless."""
        self._call("set_instruction_limit", limit)

    # --- time ------------------------------------------------------------------------------------------------------

    @property
    def occupancy(self) -> Occupancy:
        """Occupancy of the latest launch."""
        return Occupancy.of(
            self.gpu, threads=self._threads, registers=self.image.registers, shared_bytes=self._shared_bytes
        )

    def time(self, traces: Sequence[Trace], *, resident: int | None = None, timing: Timing | None = None) -> SmTime:
        """Simulated time of one SM that works through CTAs like ``traces``, ``resident`` of them at a time.

        ``resident``: by default as many as fit. ``timing``: by default the validated parameters, with the L1 size that
        the resident CTAs' shared memory leaves.
        """
        if not traces:
            raise ValueError("no trace was recorded; run a launch with a trace first.")
        resident = min(resident or self.occupancy.ctas, len(traces))
        if resident < 1:
            raise SimulationError(f"a CTA of {self.image.name} does not fit on an SM: {self.occupancy}.")
        if timing is None:
            timing = default_timing(l1_kib=self.l1_kib(resident))
        numbers = (c_int32 * len(traces))(*(trace.number for trace in traces))
        fields, waits = SmTimeFields(), numpy.zeros(len(self.instructions), numpy.uint64)
        self._call("time_sm", numbers, len(traces), resident, timing, fields, waits.ctypes.data)
        executions = sum((trace.executions for trace in traces), numpy.zeros_like(waits))
        spots = [
            HotSpot(16 * i, self.instructions[i].text, int(executions[i]), int(waits[i]))
            for i in numpy.argsort(-waits.astype(numpy.int64), kind="stable")
            if executions[i]
        ]
        return SmTime.of(fields, tuple(spots))

    def l1_kib(self, resident: int) -> int:
        """Size of L1 in KiB if ``resident`` CTAs of the latest launch are on an SM."""
        return self.gpu.l1_kib(resident * self._shared_bytes)

    # ---------------------------------------------------------------------------------------------------------------

    def _call(self, function: str, *arguments: object) -> None:
        if getattr(self._library, f"fa_sim_{function}")(self._handle, *arguments) != 0:
            text: bytes = self._library.fa_sim_error(self._handle)
            raise SimulationError(text.decode())

    def _counts(self, function: str, trace: int) -> Counts:
        counts = numpy.zeros(len(self.instructions), numpy.uint64)
        self._call(function, trace, counts.ctypes.data)
        return counts

    def _instruction(self, index: int) -> InstructionFacts:
        info = InstructionInfo()
        self._call("instruction", index, info)
        text: bytes = self._library.fa_sim_instruction_text(self._handle, index)
        return InstructionFacts(
            text.decode(), pipe_names()[info.pipe], info.occupancy, ACCESSES[info.access], info.width
        )


def pack_parameters(*values: numpy.generic | ctypes.Structure) -> bytes:
    """A kernel's parameter block: each value at the next multiple of its size (a structure's alignment)."""
    block = bytearray()
    for value in values:
        if isinstance(value, ctypes.Structure):
            content, unit = bytes(value), ctypes.alignment(value)
        else:
            content, unit = value.tobytes(), value.dtype.itemsize
        block += bytes(-len(block) % unit) + content
    return bytes(block)
