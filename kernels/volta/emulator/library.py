"""Compiles kernels as ordinary C++ when they are first needed.

Reads:  CXX (C++ compiler).
Writes: build/volta-emulator/ in the checkout.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path

from kernels.volta.emulator.failure import EmulationError

SOURCE = Path(__file__).resolve().parent / "src"
KERNELS = SOURCE.parents[1] / "src"
HALF = SOURCE.parents[1] / "sim" / "src"
"""The folder of the simulator's fp16 arithmetic, which the emulator shares."""
BUILD = SOURCE.parents[3] / "build" / "volta-emulator"
RUNTIME = (SOURCE / "block.cpp", SOURCE / "fiber.cpp", SOURCE / "instructions.cpp", SOURCE / "memory.cpp",
           SOURCE / "warp.cpp", HALF / "half.cpp")  # fmt: skip
COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", f"-I{SOURCE}", f"-I{HALF}")
AS_KERNEL = (
    "-O1",
    # The compiler reports each memory access to src/memory.cpp. -fno-tree-sra keeps it from splitting 16-byte values.
    "-fsanitize=thread",
    "-fno-tree-sra",
    # Tiles are read with other types than they were written with.
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-Wno-unknown-pragmas",
    "-DFASTATTENTION_EMULATOR",
    f"-I{KERNELS}",
)


class Range(ctypes.Structure):
    """volta_emulator::Range."""

    _fields_ = (("begin", c_uint64), ("bytes", c_uint64))


def library(source: Path, kernels: Sequence[str], defines: Mapping[str, str | int], architecture: str) -> ctypes.CDLL:
    """A library with ``fa_emulator_run`` and, for each kernel, ``emulate_NAME``. ``architecture``: like ``sm_70``."""
    macros = {
        **defines,
        "KERNEL_SOURCE": f'"{source}"',
        "KERNELS": "".join(f"EMULATED({name}) " for name in kernels),
        "__CUDA_ARCH__": f"{architecture.removeprefix('sm_')}0",
    }
    return _loaded(tuple(f"-D{name}={value}" for name, value in sorted(macros.items())), source)


@functools.cache
def _loaded(macros: tuple[str, ...], source: Path) -> ctypes.CDLL:
    path = _built("kernel", [*COMMON, *AS_KERNEL, *macros, "-c", str(SOURCE / "kernel.cpp")], _digest(source.parent))
    runtime = [_built(file.stem, [*COMMON, "-O3", "-c", str(file)]) for file in RUNTIME]
    objects = [str(path), *map(str, runtime)]
    shared = _built("library", ["-shared", "-Wl,-Bsymbolic", *objects], suffix=".so")
    loaded = ctypes.CDLL(str(shared))
    loaded.fa_emulator_run.restype = c_char_p
    three = POINTER(c_uint32)
    loaded.fa_emulator_run.argtypes = [
        c_void_p, c_char_p, three, three, three, c_uint32, POINTER(Range), c_int, c_uint64
    ]  # fmt: skip
    return loaded


def _built(stem: str, arguments: Sequence[str], content: str = "", suffix: str = ".o") -> Path:
    """The compiler's output for ``arguments``. A hash of all inputs names it. Safe if several processes build it."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        raise EmulationError(f"the emulator needs a C++ compiler, but {compiler[0]!r} was not found; install g++.")
    key = repr((compiler, arguments, content, _digest(SOURCE), _digest(HALF)))
    path = BUILD / f"{stem}-{hashlib.sha256(key.encode()).hexdigest()[:24]}{suffix}"
    if not path.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            made = Path(folder) / path.name
            done = subprocess.run([*compiler, *arguments, "-o", str(made)], capture_output=True, text=True)
            if done.returncode:
                why = done.stderr or f"{compiler[0]} ended with status {done.returncode} and printed nothing."
                raise EmulationError(f"{stem} does not compile for the emulator:\n{why}")
            made.replace(path)
    return path


@functools.cache
def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
