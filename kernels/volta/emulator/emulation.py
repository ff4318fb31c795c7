"""One kernel on the emulator: memory and launches, with the interface of the simulated V100."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy
import numpy.typing

from kernels.volta.emulator.failure import EmulationError
from kernels.volta.emulator.library import Range, library

Array = numpy.typing.NDArray[Any]
Size = tuple[int, int, int]


class Emulation:
    """``kernel``: its name, one of ``kernels``. ``source`` defines them in the namespace fastattention."""

    def __init__(
        self,
        source: Path,
        kernel: str,
        *,
        kernels: Sequence[str] = (),
        defines: Mapping[str, str | int] | None = None,
        architecture: str = "sm_70",
        seed: int = 0,
    ) -> None:
        self._library = library(source, tuple(kernels) or (kernel,), defines or {}, architecture)
        self._entry = ctypes.cast(getattr(self._library, f"emulate_{kernel}"), c_void_p)
        self._arrays: list[Array] = []
        self._seed = seed
        self._launch: tuple[Any, ...] | None = None

    def map(self, array: Array, address: int | None = None) -> int:
        """Let the kernel access ``array``; returns its address, which is the array's address in this process."""
        if not array.flags.c_contiguous:
            raise ValueError("an array must be contiguous to be mapped.")
        if address not in (None, array.ctypes.data):
            raise ValueError(f"the array at {array.ctypes.data:#x} cannot be mapped to {address:#x}.")
        self._arrays.append(array)
        return array.ctypes.data

    def launch(self, grid: Size, block: Size, parameters: bytes = b"", dynamic_shared_bytes: int = 0) -> None:
        """Set up a launch, of which :meth:`execute` runs one thread block at a time."""
        ranges = (Range * len(self._arrays))(*(Range(array.ctypes.data, array.nbytes) for array in self._arrays))
        three = c_uint32 * 3
        self._launch = (parameters, three(*grid), three(*block), dynamic_shared_bytes, ranges)

    def execute(self, x: int, y: int = 0, z: int = 0) -> None:
        """Run one thread block. The seed determines the order of its warps. Raises :class:`EmulationError`."""
        if self._launch is None:
            raise EmulationError("nothing has been launched; call launch() first.")
        parameters, grid, block, shared_bytes, ranges = self._launch
        index = (c_uint32 * 3)(x, y, z)
        seed = hash((self._seed, x, y, z)) & 0xFFFFFFFF
        failure: bytes | None = self._library.fa_emulator_run(
            self._entry, parameters, grid, block, index, shared_bytes, ranges, len(ranges), seed
        )
        if failure is not None:
            raise EmulationError(failure.decode())
