"""The `fastattention` command."""

from __future__ import annotations

import importlib
import importlib.util
import sys

NEEDED_BY_BENCH = ("typer", "rich")
USAGE = """\
Usage: fastattention COMMAND [OPTIONS]

FastAttention for vLLM.

Commands:
  doctor  Say what this machine can run, and what to do about problems.
  bench   Measure attention kernels; needs fastattention-vllm[bench].

`fastattention COMMAND --help` lists the options."""


def main() -> None:
    command, *arguments = sys.argv[1:] or ["--help"]
    if command == "doctor":
        sys.exit(importlib.import_module("fastattention_vllm.doctor.command").main(arguments))
    if command == "bench":
        missing = [name for name in NEEDED_BY_BENCH if importlib.util.find_spec(name) is None]
        if missing:
            sys.exit(f"fastattention bench needs {' and '.join(missing)}: pip install 'fastattention-vllm[bench]'")
        importlib.import_module("fastattention_vllm.bench.command").app()
        return
    if command in ("-h", "--help"):
        print(USAGE)
        return
    print(f"fastattention: there is no command {command!r}; choose doctor or bench.", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
