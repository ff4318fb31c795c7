"""Build the demo model: `python -m fastattention_vllm.demo OUT_DIR`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DTYPES, DemoModelSpec


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the model described by the command line and return the exit status."""
    default = DemoModelSpec()
    parser = argparse.ArgumentParser(
        prog="python -m fastattention_vllm.demo",
        description="Build a small Llama-architecture model that retrieves numbers by name.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("path", type=Path, help="directory to create")
    parser.add_argument("--layers", type=int, default=default.num_layers)
    parser.add_argument("--heads", type=int, default=default.num_heads, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=default.num_kv_heads)
    parser.add_argument("--head-size", type=int, default=default.head_size)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default=default.dtype)
    parser.add_argument("--max-positions", type=int, default=default.max_position_embeddings, help="context length")
    options = parser.parse_args(arguments)
    try:
        spec = DemoModelSpec(
            num_layers=options.layers,
            num_heads=options.heads,
            num_kv_heads=options.kv_heads,
            head_size=options.head_size,
            dtype=options.dtype,
            max_position_embeddings=options.max_positions,
        )
        path = build_demo_model(options.path, spec)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    size = sum(file.stat().st_size for file in path.iterdir())
    print(
        f"{path}: {spec.num_layers} layers, {spec.num_heads} query heads and "
        f"{spec.num_kv_heads} KV heads of size {spec.head_size}, {spec.dtype}, "
        f"{spec.max_position_embeddings} positions, {size / 1e6:.1f} MB"
    )
    print('Try it on "... alpha=7319. ... What is the value of alpha?"')
    return 0


if __name__ == "__main__":
    sys.exit(main())
