"""The measuring process of one thread count: `python -m fastattention_vllm.bench.child`, started by command.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from fastattention_vllm.bench.cases import Case
from fastattention_vllm.bench.command import measure_here


def main() -> None:
    order = json.loads(sys.argv[1])
    cases = [Case(**fields) for fields in order["cases"]]
    console = Console(width=None if sys.stdout.isatty() else 180)
    found = measure_here(cases, order["threads"], order["contenders"], order["rounds"], console)
    Path(order["out"]).write_text(found.model_dump_json())


if __name__ == "__main__":
    main()
