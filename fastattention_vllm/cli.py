"""The `fastattention` command."""

from __future__ import annotations

import importlib
import importlib.util
import sys

NEEDED = ("typer", "rich")


def main() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"fastattention needs {' and '.join(missing)}: pip install 'fastattention-vllm[bench]'")
    app = importlib.import_module("fastattention_vllm.bench.command").app
    app.command()(importlib.import_module("fastattention_vllm.doctor.command").doctor)
    app()


if __name__ == "__main__":
    main()
