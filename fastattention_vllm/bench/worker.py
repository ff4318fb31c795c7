"""The measuring process of one thread count.

Used by: command.py. It starts this file as `python -m fastattention_vllm.bench.worker ORDER`, once per thread count.
"""

from __future__ import annotations

import sys

from fastattention_vllm.bench.command import Order, measure_here, new_console


def main() -> None:
    measure_here(Order.model_validate_json(sys.argv[1]), new_console())


if __name__ == "__main__":
    main()
