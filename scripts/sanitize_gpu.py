"""Tests of the V100's and Turing's kernels on this machine's GPU, under compute-sanitizer's memcheck and racecheck.

    python -m scripts.sanitize_gpu --self-check

Run by: contributors as `make sanitize-gpu`.
Needs: an NVIDIA GPU, compute-sanitizer (of the CUDA toolkit), what tests/gpu needs, and what `make volta` builds. It
takes minutes more where the driver has not compiled the kernels' PTX before.

The exit status is 1 if a test fails or a tool reports anything. With --self-check the barriers of the block are then
taken out of the kernels' PTX, and racecheck must report hazards in prefill and in decode. Each tensor has its own
allocation, so that memcheck sees accesses outside of it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fastattention_vllm.attention.volta import images as volta
from fastattention_vllm.bench import gpu
from kernels.volta import manifest
from kernels.volta.variants import VARIANTS

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests/gpu/test_volta.py"
CHOSEN = (
    "every_feature and (causal-64 or it-128)",
    "chunk_after and (window-64 or it-256)",  # in parts, with a combine kernel
    "8_bits and (e5m2-causal-64 or int8-causal-128 or (e4m3fn and it-80))",
    "every_fp16_number_is_cast",  # write_kv, for every kind of cache
)
"""Tests of prefill and decode, with the V100 kernels and, if the GPU supports them, with the Turing kernels."""
BROKEN = "every_feature and (prefill-causal-64 or decode-causal-64)"
KERNELS = ("fa_volta_prefill", "fa_volta_decode")
"""Kernels that have barriers."""
BARRIER = re.compile(r"\bbar(rier)?(\.cta)?\.sync\b[^;]*;")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) ")
# One process, because a sanitizer takes seconds for the first kernel of each process.
PYTEST = """
import sys, pathlib, pytest
from fastattention_vllm.attention.volta import images as volta
volta.IMAGES = pathlib.Path(sys.argv[1])
sys.exit(pytest.main(sys.argv[2:]))
"""


class CannotRun(Exception):
    """One sentence: what is missing."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-check", action="store_true", help="also prove that missing barriers are reported")
    parser.add_argument("-k", default=" or ".join(f"({one})" for one in CHOSEN), help=f"which tests of {TESTS}")
    options = parser.parse_args(arguments)
    try:
        sanitizer = found()
        problems = [examine(sanitizer, tool, options.k) for tool in ("memcheck", "racecheck")]
        if options.self_check:
            problems.append(check_itself(sanitizer))
    except CannotRun as error:
        print(f"fastattention sanitize-gpu: {error}", file=sys.stderr)
        return 2
    return int(any(problems))


def found() -> str:
    """The path of compute-sanitizer, after checking that everything else is available."""
    path = shutil.which("compute-sanitizer")
    if path is None:
        raise CannotRun("compute-sanitizer is not on PATH; install the CUDA toolkit, which includes it.")
    if reason := gpu.why_not():
        raise CannotRun(reason)
    for variant in VARIANTS:
        image = volta.IMAGES / variant.image("ptx")
        if not image.exists():
            raise CannotRun(f"the Volta kernels are not built: there is no {image}; run `make volta`.")
    return path


def examine(sanitizer: str, tool: str, tests: str) -> bool:
    """Whether there is a problem in the unchanged kernels."""
    began = time.monotonic()
    status, output = run(sanitizer, tool, volta.IMAGES, tests)
    counts = [int(count) for count in SUMMARY.findall(output)]
    passed = re.findall(r"\d+ passed.*", output)
    problem = None
    if not counts:
        problem = f"NO SUMMARY OF {tool}, see above"
    elif any(counts):
        problem = f"{sum(counts)} REPORTED, see above"
    elif status or not passed:
        problem = "TESTS FAILED, see above"
    if problem is not None:
        print(output[-20000:])
    said = re.sub(r" in .*", "", passed[-1]) if passed else "no test passed"
    return print_row(f"{tool}: {said}", began, problem)


def check_itself(sanitizer: str) -> bool:
    """Whether the tools miss the hazards. Tests may fail here, and most do."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fastattention-sanitize-gpu-") as directory:
        without_barriers(Path(directory))
        _, output = run(sanitizer, "racecheck", Path(directory), BROKEN)
    unseen = [kernel for kernel in KERNELS if not re.search(rf"=========.*\b{kernel}\b", output)]
    if not sum(map(int, SUMMARY.findall(output))):
        unseen = [*KERNELS]
    problem = f"NOT REPORTED in {' and '.join(unseen)}, see above" if unseen else None
    if problem is not None:
        print(output[-20000:])
    return print_row("racecheck without barriers: hazards", began, problem)


def without_barriers(folder: Path) -> None:
    """All kernels from PTX under both names, because the driver also accepts PTX instead of machine code."""
    for variant in VARIANTS:
        text, count = BARRIER.subn("", (volta.IMAGES / variant.image("ptx")).read_text())
        if not count and variant.kernel in KERNELS:
            raise CannotRun(f"the PTX of {variant.name} has no barrier to remove.")
        for suffix in ("ptx", "cubin"):
            (folder / variant.image(suffix)).write_text(text)
    manifest.write(folder, VARIANTS, compiler="none: barriers taken out of PTX")


def run(sanitizer: str, tool: str, images: Path, tests: str) -> tuple[int, str]:
    """Exit status and all output."""
    # Only our kernels are checked: others are slow under a sanitizer, and their errors are not ours.
    command = [sanitizer, "--tool", tool, "--target-processes", "all", "--kernel-regex", "kns=fa_volta"]
    command += [sys.executable, "-c", PYTEST, str(images), TESTS, "-q", "-p", "no:cacheprovider", "-k", tests]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def print_row(what: str, began: float, problem: str | None) -> bool:
    print(f"{what:<50} {time.monotonic() - began:>4.0f} s  {problem or 'ok'}", flush=True)
    return problem is not None


if __name__ == "__main__":
    sys.exit(main())
