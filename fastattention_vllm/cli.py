"""The `fastattention` command."""

from __future__ import annotations

import importlib.util
import sys

NEEDED = ("typer", "rich", "matplotlib")


def main() -> None:
    app = load_app()
    app()


def load_app():  # type: ignore[no-untyped-def]
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"fastattention needs {' and '.join(missing)}: pip install 'fastattention-vllm[bench]'")
    from fastattention_vllm.bench.command import app

    return app


if __name__ == "__main__":
    main()
