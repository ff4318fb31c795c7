"""Run ruff, mypy --strict and clang-format over the tree. The exit status is not 0 if any of them complains.

Run by: contributors as `make lint`, and CI through `make test`.
Needs: `make setup-dev`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sources = sorted(
        str(p) for p in (ROOT / "kernels").rglob("*") if p.suffix in {".h", ".hpp", ".inc", ".cpp", ".cu", ".cuh"}
    )
    commands = [
        [str(BIN / "ruff"), "check", "."],
        [str(BIN / "ruff"), "format", "--check", "."],
        [str(BIN / "mypy")],
        [str(BIN / "clang-format"), "--dry-run", "--Werror", *sources],
    ]
    return max(subprocess.run(command, cwd=ROOT).returncode for command in commands)


if __name__ == "__main__":
    sys.exit(main())
