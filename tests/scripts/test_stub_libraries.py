"""Libraries that can be loaded although the libraries they are linked against are missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import stub_libraries

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None or shutil.which("readelf") is None, reason="needs gcc and binutils"
)

GONE = "int gone_number(void) { return 41; }"
PART = """
int variable = 7;
struct Thing { virtual int number() { return 5; } };
Thing& thing() { static Thing one; return one; }
"""
USER = """
#include <typeinfo>
extern "C" int gone_number(void);
extern int variable;
struct Thing { virtual int number(); };
Thing& thing();
extern "C" int ask(void) { return gone_number() + 1; }
extern "C" int ask_variable(void) { return variable + 2; }
extern "C" int refers(void) { return &thing() != nullptr; }
"""


def compile_shared(source: str, target: Path, *more: str) -> None:
    file = target.with_suffix(".cpp")
    file.write_text(source if "extern" in source or "struct" in source else f'extern "C" {{ {source} }}')
    command = ["g++", "-shared", "-fPIC", str(file), "-o", str(target), f"-Wl,-soname,{target.name}", *more]
    subprocess.run(command, check=True)


def load(library: Path, stubs: Path, expression: str) -> subprocess.CompletedProcess[str]:
    code = f"import ctypes; library = ctypes.CDLL({str(library)!r}); print({expression})"
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{stubs}:{library.parent}"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_missing_libraries_are_replaced_by_stubs(tmp_path: Path) -> None:
    package, elsewhere, stubs = tmp_path / "package", tmp_path / "elsewhere", tmp_path / "stubs"
    package.mkdir()
    elsewhere.mkdir()
    versions = tmp_path / "versions.map"
    versions.write_text("GONE_1 { gone_number; };\n")
    compile_shared(GONE, elsewhere / "libgone.so", f"-Wl,--version-script={versions}")
    compile_shared(PART, package / "libpart.so")
    links = [f"-L{elsewhere}", "-lgone", f"-L{package}", "-lpart"]
    compile_shared(USER, package / "libuser.so", *links)
    library = package / "libuser.so"
    assert load(library, elsewhere, "library.ask()").stdout == "42\n"
    assert load(library, stubs, "library.ask()").returncode != 0

    assert stub_libraries.build([package], stubs, ["libpart.so"]) == ["libgone.so", "libpart.so"]
    (package / "libpart.so").unlink()
    result = load(library, stubs, "library.ask(), library.ask_variable(), library.refers()")
    # Functions return zero, variables hold zero, and references into an omitted library resolve to something.
    assert result.stdout == "1 2 1\n", result.stderr
    assert "version" not in result.stderr


def test_no_stub_is_built_if_nothing_is_missing(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    compile_shared("int whole(void) { return 1; }", package / "libwhole.so")
    assert stub_libraries.build([package], tmp_path / "stubs") == []
