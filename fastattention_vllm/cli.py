"""The `fastattention` command."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib import metadata

NEEDED = ("typer", "rich")
"""By all commands but doctor."""
USAGE = """\
Usage: fastattention COMMAND [OPTIONS]

FastAttention for vLLM.

Commands:
  doctor  Say what this machine can run, and what to do about problems.
  plan    Predict memory and speed of a model on a machine; needs fastattention-vllm[plan].
  bench   Measure attention kernels; needs fastattention-vllm[bench].

`fastattention COMMAND --help` lists the options, and `fastattention --version` the version."""


def main() -> None:
    command, *arguments = sys.argv[1:] or ["--help"]
    if command == "doctor":
        sys.exit(importlib.import_module("fastattention_vllm.doctor.command").main(arguments))
    if command in ("plan", "bench"):
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            sys.exit(
                f"fastattention {command} needs {' and '.join(missing)}: pip install 'fastattention-vllm[{command}]'"
            )
        if command == "plan":
            importlib.import_module("fastattention_vllm.plan.command").app(arguments, prog_name="fastattention plan")
        else:
            importlib.import_module("fastattention_vllm.bench.command").app()
        return
    if command in ("-h", "--help"):
        print(USAGE)
        return
    if command == "--version":
        print(f"fastattention-vllm {metadata.version('fastattention-vllm')}")
        return
    print(f"fastattention: there is no command {command!r}; choose doctor, plan or bench.", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
