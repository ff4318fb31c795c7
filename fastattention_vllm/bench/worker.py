"""The measuring process of one thread count: `python -m fastattention_vllm.bench.worker`, started by command.py."""

from __future__ import annotations

import sys

from fastattention_vllm.bench.command import Order, measure_here, new_console


def main() -> None:
    measure_here(Order.model_validate_json(sys.argv[1]), new_console())


if __name__ == "__main__":
    main()
