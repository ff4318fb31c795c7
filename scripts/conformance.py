"""Runs upstream vLLM's attention tests, its server and host layers on this backend, for several vLLM versions.

Run by: contributors as `make conformance`, before a release and when a vLLM version is added.
Needs: Python and a package index. It installs 20 GB under build/conformance/ for all versions, most of it CUDA builds
of torch, and keeps them.

The exit status is 1 if a test failed or a suite ran no test. `tests/conformance/README.md` says what is run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.conformance_env import TORCH, Environment  # noqa: E402
from scripts.setup_env import SetupError, check_machine  # noqa: E402

PLUGINS = ROOT / "tests" / "conformance"
SUITE_TIMEOUT_S = 3600


@dataclass(frozen=True)
class Suite:
    name: str
    file: str
    """Relative to upstream's root, or absolute."""
    select: str = ""
    """pytest -k: the tests of the file that use a backend for CPUs."""
    versions: tuple[str, ...] = tuple(TORCH)
    adapts_upstream: bool = True
    """Whether conformance_upstream.py puts this backend into the file's tests."""


SUITES = (
    Suite(
        "upstream: attention backends",
        "tests/v1/attention/test_attention_backends.py",
        "backend_correctness",
        # The file of 0.19.1 uses CUDA as its device.
        tuple(version for version in TORCH if version != "0.19.1"),
    ),
    Suite("upstream: backend registry", "tests/test_attention_backend_registry.py"),
    Suite("options and claims: as recorded", str(PLUGINS / "options_and_claims.py"), adapts_upstream=False),
    Suite("block tables: hybrids beside host layers", str(PLUGINS / "hybrid_block_tables.py"), adapts_upstream=False),
    Suite(
        "quantised weights: layers of the V100",
        str(ROOT / "tests" / "integration" / "cuda" / "quantised" / "test_layers.py"),
        adapts_upstream=False,
    ),
    Suite(
        "quantised weights: scales of the KV cache",
        str(ROOT / "tests" / "integration" / "cuda" / "quantised" / "test_kv_scales.py"),
        adapts_upstream=False,
    ),
    Suite(
        "quantised weights: refusals of the planner",
        str(ROOT / "tests" / "integration" / "cuda" / "quantised" / "test_planner.py"),
        versions=("0.19.1", "0.32.0"),
        adapts_upstream=False,
    ),
    Suite("vllm serve: needle over HTTP", str(PLUGINS / "served_needle.py"), adapts_upstream=False),
    Suite("host layers: offline and over HTTP", str(PLUGINS / "host_kv_layers.py"), adapts_upstream=False),
)


@dataclass
class Result:
    """The result of one suite in one version."""

    version: str
    torch: str
    suite: str
    passed: int = 0
    failed: int = 0
    not_run: int = 0
    """Skipped by the suite itself: neither passed nor failed."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    skips: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.failed == 0 and self.passed > 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", choices=tuple(TORCH), default=list(TORCH), help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    options = parser.parse_args(arguments)
    results: list[Result] = []
    try:
        check_machine()
        for version in options.versions:
            environment = Environment(version)
            environment.prepare()
            results += [
                run_suite(suite, environment.python, environment.folder, environment.upstream, version)
                for suite in SUITES
                if version in suite.versions
            ]
    except (SetupError, subprocess.CalledProcessError) as error:
        print(f"fastattention conformance: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nfastattention conformance: stopped.", file=sys.stderr)
        return 130
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return exit_status(results)


def run_suite(suite: Suite, python: Path, folder: Path, upstream: Path, version: str) -> Result:
    """Run one suite with ``python``; ``folder`` takes model configurations, log and result."""
    print(f"vLLM {version}: {suite.name} ...", flush=True)
    models, entries = folder / "models", folder / "result.json"
    entries.unlink(missing_ok=True)
    subprocess.run([str(python), str(PLUGINS / "conformance_models.py"), str(models)], check=True)
    file = suite.file if Path(suite.file).is_absolute() else str(upstream / suite.file)
    plugins = ["conformance_recorder", *(["conformance_upstream"] if suite.adapts_upstream else [])]
    command = [str(python), "-m", "pytest", file, "-q", "--noconftest", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(folder), *(f"-p{name}" for name in plugins)]
    command += ["-k", suite.select] if suite.select else []
    environment = os.environ | {
        # Upstream's package of tests is called `tests`, like ours; ours must not be found.
        "PYTHONPATH": os.pathsep.join([str(PLUGINS), str(upstream)]),
        "CONFORMANCE_RESULT": str(entries),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    log = folder / (suite.name.split(":")[-1].strip().replace(" ", "-") + ".log")
    started = time.monotonic()
    with log.open("wb") as output:
        # Run in the folder where the models' names are paths.
        process = subprocess.Popen(command, cwd=models, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            status = process.wait(SUITE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = end(process)
        except KeyboardInterrupt:
            end(process)
            raise
    result = read_result(entries, Result(version, installed_torch(python), suite.name), log)
    # Otherwise the run was interrupted, and the recorder has only its first part.
    if not (status == 0 or (status in (1, 2) and result.failed)):
        result.failed += 1
        result.problems.append(f"pytest ended with status {status}; see {log}")
    result.seconds = round(time.monotonic() - started, 1)
    return result


def end(process: subprocess.Popen[bytes]) -> int:
    """Wait up to a minute for pytest to stop a server that it may have started, then kill it."""
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def read_result(entries: Path, result: Result, log: Path) -> Result:
    """Count the recorder's entries. If there is no file, the run was interrupted."""
    if not entries.exists():
        result.failed, result.problems = 1, [f"the run broke off; see {log}"]
        return result
    for name, entry in json.loads(entries.read_text()).items():
        case = f"{name.rsplit('::', 1)[-1]}: {entry['why']}"
        if entry["outcome"] == "passed":
            result.passed += 1
        elif entry["outcome"] == "skipped":
            result.not_run += 1
            result.skips.append(case)
        else:
            result.failed += 1
            result.problems.append(case)
    return result


def installed_torch(python: Path) -> str:
    code = "from importlib.metadata import version; print(version('torch'))"
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def table(results: Sequence[Result]) -> str:
    """The table, followed by all failures and the reasons why cases were not run."""
    head = ("vLLM", "torch", "suite", "cases", "passed", "failed", "not run", "seconds")
    rows = [
        (
            result.version,
            result.torch,
            result.suite,
            str(result.passed + result.failed + result.not_run),
            str(result.passed),
            str(result.failed),
            str(result.not_run),
            f"{result.seconds:.0f}",
        )
        for result in results
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    lines.insert(1, "  ".join("-" * width for width in widths))
    for result in results:
        where = f"{result.version} {result.suite}"
        lines += [f"FAILED {where}: {problem}" for problem in result.problems]
        reasons = sorted({skip.partition(": ")[2] for skip in result.skips})
        lines += [f"not run {where}: {reason}" for reason in reasons]
        if not result.ok and not result.problems:
            lines.append(f"FAILED {where}: no test passed")
    return "\n".join(line.rstrip() for line in lines)


def exit_status(results: Sequence[Result]) -> int:
    return 0 if results and all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
