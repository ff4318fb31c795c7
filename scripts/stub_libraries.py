"""Creates stub libraries for shared libraries that an installed package needs and this machine does not have.

Used by: scripts/ascend_env.py. They need ``nm``, ``readelf``, ``ldconfig`` and a C compiler (binutils, gcc), on x86-64
or aarch64.

torch_npu is linked against CANN, and most of PyPI's torch against CUDA. Neither is needed to read operator schemas, to
run Meta kernels and to compute on the CPU, but the dynamic linker looks up every library and every symbol by name. The
stubs have these names, which are read from the installed files; their functions return zero.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

RETURN_ZERO = {
    "x86_64": ["xorl %eax, %eax", "xorps %xmm0, %xmm0", "ret"],
    "aarch64": ["mov x0, #0", "fmov d0, xzr", "ret"],
}
RETURN_ROOM = {
    "x86_64": ["leaq .Lroom(%rip), %rax", "ret"],
    "aarch64": ["adrp x0, .Lroom", "add x0, x0, :lo12:.Lroom", "ret"],
}
SYSTEM = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1", "libstdc++.so.6")
ROOM_BYTES = 4096
VARIABLE_BYTES = 512
VTABLE_ENTRIES = 64


@dataclass
class Wanted:
    """The libraries and symbols that a file needs."""

    libraries: set[str] = field(default_factory=set)
    symbols: set[tuple[str, str]] = field(default_factory=set)
    """Name and version ("" if it has none)."""
    home: dict[str, str] = field(default_factory=dict)
    """Symbol version -> the library that has it."""


def build(packages: Iterable[Path], target: Path, without: Iterable[str] = ()) -> list[str]:
    """Write stubs for everything that the shared objects under ``packages`` miss; returns the names of the libraries.

    ``without``: existing libraries that get a stub nevertheless. ``target`` must be in LD_LIBRARY_PATH before Python
    starts.

    Raises:
        RuntimeError: This machine's architecture is unknown.
        subprocess.CalledProcessError: A tool of binutils or the compiler failed.
    """
    if platform.machine() not in RETURN_ZERO:
        raise RuntimeError(
            f"stub libraries are not supported on {platform.machine()}; supported: {', '.join(RETURN_ZERO)}."
        )
    found = [path for package in packages for path in sorted(package.rglob("*.so*")) if path.is_file()]
    files = [path for path in found if path.name not in without]
    replaced = {name: kind for path in found if path.name in without for name, kind in defined_symbols(path).items()}
    system = system_libraries()
    there = {path.name for path in files} | set(system)
    defined: set[str] = set()
    for path in [*files, *(system[name] for name in SYSTEM if name in system), Path(sys.executable).resolve()]:
        defined |= defined_symbols(path).keys()
    wanted = [wanted_by(path) for path in files]
    missing = sorted(set().union(*(one.libraries for one in wanted)) - there)
    versioned: dict[str, dict[str, set[str]]] = {library: defaultdict(set) for library in missing}
    plain: set[str] = set()
    for one in wanted:
        for name, version in one.symbols:
            library = one.home.get(version, "")
            if library in versioned:
                versioned[library][version].add(name)
            elif name not in defined:
                plain.add(name)
    target.mkdir(parents=True, exist_ok=True)
    for library in missing:
        compile_library(library, plain, versioned[library], replaced, target)
    return missing


def compile_library(
    library: str, plain: set[str], versions: dict[str, set[str]], replaced: dict[str, str], target: Path
) -> None:
    """Compile one stub. Unversioned symbols are not assigned to a library, so every stub has all of ``plain``.

    Functions of the omitted libraries may return a reference, which must not be null. They return an address whose
    lowest byte is zero, for functions that return a bool.
    """
    names = plain.union(*versions.values())
    data = {name for name in names if replaced.get(name, "T") in "BDR" or name.startswith(("_ZTI", "_ZTV"))}
    functions = sorted(names - data)
    lines = [".text"]
    for own, code in ((set(replaced), RETURN_ROOM), (names - set(replaced), RETURN_ZERO)):
        lines += [".Lzero:"] if code is RETURN_ZERO else []
        for name in functions:
            lines += [f'.globl "{name}"', f'.type "{name}", %function', f'"{name}":'] if name in own else []
        lines += code[platform.machine()]
    lines += ['.section .data.rel, "aw"', ".balign 256", f".Lroom: .zero {ROOM_BYTES}"]
    for name in sorted(data):
        lines += [f'.globl "{name}"', f'.type "{name}", %object', f'"{name}":', *content(name)]
        lines += [f'.size "{name}", .-"{name}"']
    source, script = target / f"{library}.s", target / f"{library}.map"
    source.write_text("\n".join([*lines, '.section .note.GNU-stack, "", %progbits', ""]))
    nodes = [f"{version} {{ {' '.join(f'{name};' for name in sorted(own))} }};" for version, own in versions.items()]
    script.write_text("\n".join([*nodes, ""]))
    command = [
        os.environ.get("CC", "gcc"),
        "-shared",
        "-nostdlib",
        str(source),
        f"-Wl,-soname,{library}",
        "-Wl,--as-needed",
    ]
    command += [f"-Wl,--version-script={script}"] if versions else []
    command += [str(system_libraries()["libstdc++.so.6"])] if data else []  # typeinfos are made of its symbols
    subprocess.run([*command, "-o", str(target / library)], check=True)
    source.unlink()
    script.unlink()


def content(name: str) -> list[str]:
    """Content of a variable. C++ reads the names of typeinfos when libraries register their classes with Python."""
    if name.startswith("_ZTI"):
        return [".quad _ZTVN10__cxxabiv117__class_type_infoE + 16", ".quad 1f", f'1: .asciz "{name[4:]}"', ".balign 16"]
    if name.startswith("_ZTV"):
        return [f".rept {VTABLE_ENTRIES}", ".quad .Lzero", ".endr"]
    return [f".zero {VARIABLE_BYTES}"]


def wanted_by(path: Path) -> Wanted:
    found = Wanted()
    for line in run("readelf", "-d", path):
        if "(NEEDED)" in line:
            found.libraries.add(line.split("[")[1].split("]")[0])
    for line in run("nm", "-D", "--undefined-only", path):
        kind, symbol = line.split()[-2:]
        if kind == "U":  # the others are weak and may be missing
            name, _, version = symbol.partition("@")
            found.symbols.add((name, version))
    library = ""
    for line in run("readelf", "-V", path):
        file, version_name = re.search(r"File: (\S+)", line), re.search(r"Name: (\S+)", line)
        if file:
            library = file[1]
        elif version_name and library:
            found.home[version_name[1]] = library
    return found


def defined_symbols(path: Path) -> dict[str, str]:
    """Names that others may link to, with nm's letter for their kind."""
    lines = (line.split() for line in run("nm", "-D", "--defined-only", path))
    return {words[-1].partition("@")[0]: words[-2] for words in lines}


def system_libraries() -> dict[str, Path]:
    """The libraries that the dynamic linker finds by itself, and the linker."""
    found: dict[str, Path] = {}
    for line in run("ldconfig", "-p"):
        name, _, path = line.partition(" => ")
        if path:
            found.setdefault(name.split()[0], Path(path.strip()))
    for line in run("readelf", "-l", Path(sys.executable).resolve()):
        asked = re.search(r"interpreter: (\S+)\]", line)
        if asked:
            found.setdefault(Path(asked[1]).name, Path(asked[1]))
    return found


def run(*command: str | Path) -> list[str]:
    environment = {**os.environ, "LC_ALL": "C", "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    words = [str(word) for word in command]
    result = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    return [line for line in result.stdout.splitlines() if line.strip()]
