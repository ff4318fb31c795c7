"""Builds of the CPU kernels without a feature, for comparison: parts of the sources are replaced in copies.

Used by: ablation_cpu.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "kernels" / "cpu"
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


@dataclass(frozen=True)
class Edit:
    file: str
    old: str
    """A regular expression that matches exactly one place in the file."""
    new: str


EVERY_KEY = (
    Edit("plan.cpp", r"item\.kv_begin = problem\.window_left < 0 \? [^;]*;", "item.kv_begin = 0;"),
    Edit("plan.cpp", r"item\.kv_end = right < 0 \? [^;]*;", "item.kv_end = right < last_position ? kv_len : kv_len;"),
    Edit("attention_kernel.h", r"const int begin = column\([^;]*;", "const int begin = 0;"),
    Edit("attention_kernel.h", r"const int end = column\([^;]*;", "const int end = rows->count;"),
    Edit("attention_kernel.h", r"const bool boundary =[^;]*;", "const bool boundary = last_token >= 0;"),
)
"""No mask skipping: every query row is multiplied with every key, and each score is compared with the mask."""


def rows_of_one_panel(isa: str) -> tuple[Edit, ...]:
    """Blocks of rows are as small as the panels of the second level; each reads K and V itself."""
    rows = 32 if isa == "amx" else 12
    return (Edit("plan.cpp", r"int rows = kRowBlock;", f"int rows = {rows}; if (rows > 0) return rows;"),)


def one_tile(isa: str, tokens: int) -> tuple[Edit, ...]:
    """All keys are one tile: the working set of a panel is as long as the context."""
    table = "kTuning" + "".join(word.capitalize() for word in isa.split("_"))
    return (Edit("tuning.h", rf"({table} = \{{[^}}]*\.kv_tile = )\d+", rf"\g<1>{tokens}"),)


class Variants:
    """Builds variants: compiles only the units that differ, and shares the rest."""

    def __init__(self, folder: Path, isa: str) -> None:
        """``isa``: the only instruction set for which headers are compiled anew."""
        self.folder, self.isa = folder, isa
        cmake = shutil.which("cmake", path=TOOLS)
        if cmake is None:
            sys.exit("ablation: there is no cmake; run `make setup-dev`.")
        flags = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
        _run([cmake, "-S", str(KERNELS), "-B", str(folder / "base"), "-G", "Unix Makefiles", *flags])
        _run([cmake, "--build", str(folder / "base"), "--parallel", "2"])

    def build(self, name: str, edits: Sequence[Edit]) -> Path:
        """Build the library; without edits it is the shipped one."""
        base = self.folder / "base"
        if not edits:
            return base / "libfastattention_cpu.so"
        sources = self.folder / name / "src"
        shutil.copytree(KERNELS / "src", sources, dirs_exist_ok=True)
        apply(edits, sources)
        link = (base / "CMakeFiles/fastattention_cpu.dir/link.txt").read_text()
        library = self.folder / name / "libfastattention_cpu.so"
        for entry in json.loads((base / "compile_commands.json").read_text()):
            unit = Path(entry["file"]).name
            if unit not in ("plan.cpp", f"kernel_{self.isa}.cpp"):
                continue
            built = next(word for word in shlex.split(entry["command"]) if word.endswith(f"{unit}.o"))
            command = entry["command"].replace(entry["file"], str(sources / unit))
            _run(shlex.split(command.replace(built, str(sources / f"{unit}.o"))), base)
            link = link.replace(built, str(sources / f"{unit}.o"))
        _run(shlex.split(re.sub(r"-o \S+", f"-o {library}", link)), base)
        return library


def apply(edits: Sequence[Edit], sources: Path) -> None:
    for edit in edits:
        path = sources / edit.file
        text, count = re.subn(edit.old, edit.new, path.read_text())
        if count != 1:
            raise RuntimeError(f"{edit.file} has {count} places like {edit.old!r}; cpu_variants.py must learn which.")
        path.write_text(text)


def _run(command: Sequence[str], folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"ablation: {' '.join(command[:1])} failed:\n{(done.stdout + done.stderr)[-3000:]}")
