"""Disassembles machine code with NVIDIA's nvdisasm from PyPI.

The package nvidia-cuda-nvdisasm begins with release 13.2, which no longer reads files for sm_70. But Turing (sm_75)
kept Volta's instruction encoding, so the bare code is read as sm_75. Each instruction gets the same text that release
12.8 gives for sm_70 (README.md says how many instructions were compared).

Reads:  NVDISASM (path of the program, instead of the package's).
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import subprocess
import tempfile
from pathlib import Path

from kernels.volta.sim.failure import SimulationError

PACKAGE = "nvidia-cuda-nvdisasm"


@functools.lru_cache(maxsize=64)
def disassemble(code: bytes) -> str:
    """Lines like ``/*0010*/ IADD3 R0, R1, R2, RZ ;``. Branch addresses count from the beginning of the code."""
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(code)
        file.flush()
        done = subprocess.run([str(_program()), "--binary", "SM75", file.name], capture_output=True, text=True)
    if done.returncode:
        raise SimulationError(f"nvdisasm failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


@functools.cache
def _program() -> Path:
    if os.environ.get("NVDISASM"):
        return Path(os.environ["NVDISASM"])
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        raise SimulationError(f"{PACKAGE} is not installed; run `make setup-dev`, or set NVDISASM.") from None
    for file in files:
        if file.name == "nvdisasm":
            return Path(str(file.locate()))
    raise SimulationError(f"the package {PACKAGE} has no nvdisasm; reinstall it.")
