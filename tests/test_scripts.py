"""Each file of benchmarks/, scripts/ and fastattention_vllm/bench names who runs it; every command has a help text."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = [
    path
    for folder in ("benchmarks", "scripts", "fastattention_vllm/bench")
    for path in sorted((ROOT / folder).glob("*.py"))
    if path.stat().st_size
]


def text_of(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def says(path: Path, what: str) -> bool:
    return any(line.startswith(f"{what}: ") for line in text_of(path).splitlines())


COMMANDS = [path for path in FILES if says(path, "Run by") and "__main__" in path.read_text()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_names_who_runs_or_uses_it(path: Path) -> None:
    assert says(path, "Run by") or says(path, "Used by"), "its docstring needs a line `Run by: ...` or `Used by: ...`"
    if says(path, "Run by"):
        assert says(path, "Needs"), "its docstring needs a line `Needs: ...`"
    elif "__main__" in path.read_text():
        assert "It starts this file" in text_of(path), "only files that others start have no `Run by: ...`"


HELP = """
import contextlib, io, runpy, sys
for path in sys.argv[1:]:
    said = io.StringIO()
    sys.argv = [path, "--help"]
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(path, run_name="__main__")
        status = "goes on"
    except SystemExit as end:
        status = end.code
    print(path, status, "usage" in said.getvalue().lower(), sep="|")
"""


def test_every_command_has_a_help_text_without_a_gpu() -> None:
    """All in one process, which imports torch only once."""
    names = [str(path.relative_to(ROOT)) for path in COMMANDS]
    assert {"benchmarks/first_token.py", "scripts/soak.py"} <= set(names)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    command = [sys.executable, "-c", HELP, *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"{name}|0|True" for name in names], done.stderr
