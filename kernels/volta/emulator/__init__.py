"""The GPU kernels as ordinary C++ on this machine, milliseconds per problem. See README.md beside this file."""

from kernels.volta.emulator.emulation import Emulation
from kernels.volta.emulator.failure import EmulationError

__all__ = ["Emulation", "EmulationError"]
