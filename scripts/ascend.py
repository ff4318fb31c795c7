"""Runs the tests of the Ascend path with genuine torch_npu and vllm-ascend, on a machine without an NPU.

Run by: contributors as `make test-ascend`, by `make test-full`, and in part by `make test-more`.
Needs: Python, gcc and binutils, and a package index. It installs about 5 GB under build/ascend/ and keeps them.

The exit status is 1 if a test failed. docs/ascend.md says what is tested how.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.ascend_env import TORCH, TRITON, VLLM, AscendEnvironment  # noqa: E402
from scripts.setup_env import SetupError, check_machine  # noqa: E402

TESTS = ["tests/ascend", "tests/benchmarks/test_ascend_910b.py"]
INTERPRETED = "Triton kernels, interpreted"
TRITON_TESTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "Triton kernels, compiled for four chips and timed by a model": (
        [
            "tests/scripts/test_ascend_compile.py",
            "tests/scripts/test_ascend_predict.py",
            "tests/kernels/ascend",
            "tests/benchmarks/test_ascend_predicted.py",
            "tests/attention/ascend_triton/test_compilation.py",
        ],
        {"PYTHONPATH": f"{ROOT}:{TRITON}"},
    ),
    INTERPRETED: (
        ["tests/attention/ascend_triton"],
        {"PYTHONPATH": f"{ROOT}:{TRITON}", "TRITON_INTERPRET": "1"},
    ),
    "Triton kernels in vllm-ascend, interpreted": (
        ["tests/ascend/test_vllm_ascend_triton.py"],
        {"FASTATTENTION_TRITON": str(TRITON), "TRITON_INTERPRET": "1"},
    ),
}
"""Tests of the Triton kernels, and the environment variables of each run."""
TWO_AT_A_TIME = ["--numprocesses", "2", "--dist", "worksteal"]
"""Each test keeps one core busy."""
ONE_IN_EIGHT = ["--every", "8"]
MUTATIONS = ROOT / "tests" / "mutations" / "genuine"
TIMEOUT_S = 3600


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-npu", nargs="+", choices=tuple(TORCH), default=list(TORCH), help="default: all")
    parser.add_argument("--set-up-only", action="store_true", help="install the environments, but run no test")
    parser.add_argument(
        "--some", action="store_true", help="of the Triton kernels' tests, only one in eight interpreted cases"
    )
    parser.add_argument("--mutate", action="store_true", help="run scripts/mutate.py there instead of the tests")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest; write them after --")
    options = parser.parse_args(arguments)
    statuses = {}
    try:
        check_machine()
        for version in options.torch_npu:
            environment = AscendEnvironment(version)
            environment.prepare()
            if not options.set_up_only:
                command = mutate() if options.mutate else pytest(options.pytest)
                statuses[described(version)] = run(environment, command)
            if version in VLLM and not (options.set_up_only or options.mutate or options.pytest):
                for name, (tests, variables) in TRITON_TESTS.items():
                    if not options.some:
                        statuses[name] = run(environment, pytest(tests), variables, name)
                    elif name == INTERPRETED:
                        statuses[name] = run(environment, pytest([*tests, *ONE_IN_EIGHT]), variables, name)
    except (SetupError, subprocess.SubprocessError) as error:
        print(f"fastattention test-ascend: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nfastattention test-ascend: stopped.", file=sys.stderr)
        return 130
    for name, (status, seconds) in statuses.items():
        print(f"{name}: {'passed' if status == 0 else f'FAILED (status {status})'} in {seconds:.0f} s")
    return int(any(status for status, _ in statuses.values()))


def described(version: str) -> str:
    with_vllm = f", vLLM and vllm-ascend {VLLM[version]}" if version in VLLM else ""
    return f"torch_npu {version}, torch {TORCH[version]}{with_vllm}"


def pytest(arguments: Sequence[str]) -> list[str]:
    """Run pytest. Exits with 5 if there was no test."""
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", *TWO_AT_A_TIME, *(arguments or TESTS)]


def mutate() -> list[str]:
    """Run the mutations of code that only genuine vllm-ascend tests."""
    return ["scripts/mutate.py", *map(str, sorted(MUTATIONS.glob("*.toml")))]


def run(
    environment: AscendEnvironment, arguments: Sequence[str], more: Mapping[str, str] | None = None, name: str = ""
) -> tuple[int, float]:
    """The exit status of the environment's Python with these arguments, and the seconds that it took.

    ``more``: further environment variables.
    """
    print(f"{name or described(environment.torch_npu)} ...", flush=True)
    started = time.monotonic()
    command = [str(environment.python), *arguments]
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment.variables, **(more or {})}, timeout=TIMEOUT_S
    )
    return result.returncode, time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
