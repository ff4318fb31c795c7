"""Runs the GPU kernels as ordinary C++ on this machine, in milliseconds per problem. See README.md in this folder."""

from kernels.volta.emulator.emulation import Emulation
from kernels.volta.emulator.failure import EmulationError

__all__ = ["Emulation", "EmulationError"]
