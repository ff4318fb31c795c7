"""Unoptimised builds of the CPU kernels that recompile only what a mutation changes.

Used by: scripts/mutate.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

KERNELS = "kernels/cpu/"
LIBRARY = "libfastattention_cpu.so"
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

# Headers of a single instruction set; the other kernel headers are compiled for each of them.
ISA_OF_HEADER = {"unit_bf16.h": "avx512_bf16", "panel_amx.h": "amx", "panel_amx_direct.h": "amx"}


class DoesNotCompile(Exception):
    """The compiler's message."""


def emulate_amx() -> bool:
    """Whether this machine can run AMX code only through the emulation in AVX-512 (kernels/cpu/emulation)."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return "avx512_bf16" in flags and "amx_bf16" not in flags


def emulated() -> str | None:
    """CMake's option for what this machine lacks of AVX-512 and AMX; None if it lacks nothing, or cannot emulate it."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    if emulate_amx():
        return "FASTATTENTION_EMULATE_AMX"
    return "FASTATTENTION_EMULATE_AVX512" if "avx2" in flags and "avx512f" not in flags else None


class KernelBuild:
    def __init__(self, tree: Path, directory: Path) -> None:
        self.source, self.directory = tree / KERNELS, directory
        self.pristine = directory / "pristine"

    def everything(self) -> Path:
        """Builds everything that is out of date, and keeps the objects so that :meth:`changed` can restore them."""
        cmake = shutil.which("cmake", path=TOOLS)
        if cmake is None:
            raise DoesNotCompile("cmake was not found; run `make setup-dev`.")
        flags = ["-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0 -w", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
        flags += ["-DFASTATTENTION_EMULATE_AMX=ON"] if emulate_amx() else []
        _run([cmake, "-S", str(self.source), "-B", str(self.directory), "-G", "Unix Makefiles", *flags])
        _run([cmake, "--build", str(self.directory), "--parallel", str(os.cpu_count() or 1)])
        return self.directory / LIBRARY

    def keep(self) -> None:
        """Keep the current objects as those of the unchanged sources."""
        self.pristine.mkdir(exist_ok=True)
        for name, (_, built) in self._units().items():
            shutil.copy(built, self.pristine / name)

    def changed(self, file: str, isa: str, usable: list[str]) -> Path:
        """The library with the mutation in ``file`` compiled into one unit and the other units unchanged.

        ``isa``: the instruction set to compile a kernel header for, if the mutation names one. Otherwise it is the best
        usable one, which tests use unless they name another.
        """
        unit = self._unit_of(Path(file).name, isa, usable)
        if unit is None:
            return self.everything()
        command, built = self._units()[unit]
        try:
            _run(command, self.directory)
            _run(
                shlex.split((self.directory / "CMakeFiles/fastattention_cpu.dir/link.txt").read_text()), self.directory
            )
            return Path(shutil.copy(self.directory / LIBRARY, self.directory / "mutated.so"))
        finally:
            shutil.copy(self.pristine / unit, built)

    def _unit_of(self, name: str, isa: str, usable: list[str]) -> str | None:
        """The ``.cpp`` file in which the mutation is compiled, or ``None`` for all that include it."""
        if name.endswith(".cpp"):
            return name
        kernel = (self.source / "src" / "kernel_impl.h").read_text()
        own = re.fullmatch(r"vec_(?!math)(\w+)\.h", name)
        if own is None and f'#include "{name}"' not in kernel:
            return None
        chosen = isa or (own.group(1) if own else ISA_OF_HEADER.get(name))
        return f"kernel_{chosen or usable[0]}.cpp"

    def _units(self) -> dict[str, tuple[list[str], Path]]:
        """For each ``.cpp`` file, the command that compiles it, and the resulting object."""
        units = {}
        for entry in json.loads((self.directory / "compile_commands.json").read_text()):
            command = shlex.split(entry["command"])
            built = Path(entry["directory"]) / command[command.index("-o") + 1]
            units[Path(entry["file"]).name] = command, built
        return units


def _run(command: list[str], directory: Path | None = None) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    if done.returncode:
        raise DoesNotCompile(f"the kernels do not compile: {done.stdout}{done.stderr}")
