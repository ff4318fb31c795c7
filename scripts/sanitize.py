"""The kernel tests under AddressSanitizer + UndefinedBehaviorSanitizer and under ThreadSanitizer.

Run by: contributors as `make sanitize`; tests/scripts/test_sanitize.py runs a part of it in `make test-full`.
Needs: `make setup-dev`, and g++ with its sanitizer runtimes.
Reads: CXX (C++ compiler).

Builds both from a copy of kernels/cpu and runs the tests named below. The exit status is 1 if any of them fails or any
process they start writes a report. Kernels for instruction sets that this machine lacks are compiled without sanitizer,
because no test runs them. With --self-check it then plants one bug per sanitizer and demands that it is
reported. With --every N, one in N cases of every parametrised test runs.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fastattention_vllm.attention.cpu.kernels import usable_isas

ROOT = Path(__file__).resolve().parent.parent
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


class CannotRun(Exception):
    """One sentence: what is missing."""


@dataclass(frozen=True)
class Bug:
    """A change of a kernel source, the test that runs into it, and what the sanitizer must call it."""

    file: str
    text: str
    replacement: str
    test: str
    report: str


@dataclass(frozen=True)
class Sanitizer:
    name: str
    flag: str
    runtimes: tuple[str, ...]  # the interpreter is not instrumented, so they are preloaded
    options: dict[str, str]
    tests: tuple[str, ...]
    bugs: tuple[Bug, ...]


SANITIZERS = (
    Sanitizer(
        name="ASan + UBSan",
        flag="address,undefined",
        # The C++ library is preloaded as well: the runtime looks up __cxa_throw at start, before Python loads it.
        runtimes=("libasan.so", "libubsan.so", "libstdc++.so"),
        options={
            # No leak check: Python and torch keep thousands of objects until the end, as do our engine and its threads.
            "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",  # the structs that ctypes passes get red zones too
        },
        # All kernel tests except those that call the same kernels through torch operators, and those of finding a
        # library.
        tests=(
            "tests/attention/cpu/test_attention.py",
            "tests/attention/cpu/test_errors.py",
            "tests/attention/cpu/test_start.py",
            "tests/attention/cpu/test_threads.py",
            "tests/attention/cpu/test_write_kv.py",
            "tests/attention/cpu/test_memory.py",
            "tests/attention/cpu/test_roofline.py",
            # Only a part of the largest grids: the cases of `make test`, and of these two tests the most rows, and
            # features with a partial and a whole vector.
            "-m",
            "not more",
            "-k",
            "not TestLibrary and not importing and not (any_number_of_rows and not 270)"
            " and not (every_feature_at_every_head_size and not (80 or 256))",
        ),
        bugs=(
            Bug(
                file="src/api.cpp",
                text="for (int s = 0; s < p.num_seqs; ++s) {",
                replacement="for (int s = 0; s <= p.num_seqs; ++s) {",
                test="tests/attention/cpu/test_attention.py::test_lse_may_have_any_strides",
                report="heap-buffer-overflow",
            ),
            Bug(
                file="src/plan.cpp",
                text="const int rows = item.num_tokens * group;",
                replacement="const int rows = item.num_tokens * group * (INT32_MAX / 2);",
                test="tests/attention/cpu/test_threads.py::test_calls_after_the_workers_went_to_sleep",
                report="signed integer overflow",
            ),
        ),
    ),
    Sanitizer(
        name="TSan",
        flag="thread",
        runtimes=("libtsan.so",),
        # No suppressions: torch and Python synchronise through pthread functions, which the runtime sees.
        options={"TSAN_OPTIONS": "halt_on_error=1"},
        # Tests that use several threads, except those that fork: the runtime does not support threads in the child of a
        # process that had threads.
        tests=(
            "tests/attention/cpu/test_start.py",
            "tests/attention/cpu/test_threads.py",
            "tests/attention/cpu/test_attention.py",
            "tests/attention/cpu/test_write_kv.py",
            "tests/attention/cpu/test_memory.py",
            "tests/attention/cpu/test_roofline.py",
            "-k",
            "((test_threads or test_start) and not fork) or discarded or split_and_merged or (slots and 700)"
            " or test_roofline",
        ),
        bugs=(
            Bug(
                file="src/engine.cpp",
                text=".fetch_sub(1, std::memory_order_acq_rel) == 1)",
                replacement=".fetch_sub(1, std::memory_order_relaxed) == 1)",
                test="tests/attention/cpu/test_threads.py::test_calls_after_the_workers_went_to_sleep",
                report="data race",
            ),
        ),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--self-check", action="store_true", help="also prove that each sanitizer reports a planted bug"
    )
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="run only one in N cases of every parametrised test"
    )
    options = parser.parse_args()
    table = Table()
    try:
        for sanitizer in SANITIZERS:
            with tempfile.TemporaryDirectory(prefix="fastattention-sanitize-") as directory:
                examine(sanitizer, Path(directory), options.every, options.self_check, table)
    except CannotRun as error:
        print(f"fastattention sanitize: {error}", file=sys.stderr)
        return 2
    return 1 if table.problems else 0


class Table:
    """Prints a row for each action, with the time since the previous one."""

    def __init__(self) -> None:
        self.problems, self.before = 0, time.monotonic()

    def row(self, sanitizer: Sanitizer, what: str, problem: str | None = None) -> None:
        self.problems += problem is not None
        now = time.monotonic()
        print(f"{sanitizer.name:<13} {what:<50} {now - self.before:>4.0f} s  {problem or 'ok'}", flush=True)
        self.before = now


def examine(sanitizer: Sanitizer, directory: Path, every: int, self_check: bool, table: Table) -> None:
    """Run the kernel tests, then plant each bug."""
    sources = directory / "kernels"
    shutil.copytree(ROOT / "kernels" / "cpu", sources)
    library = build(sanitizer, sources, directory / "build")
    table.row(sanitizer, "build")

    run = Run(sanitizer, library, directory / "reports")
    passed, summary = run.pytest(*sanitizer.tests, f"--every={every}")
    report = run.report()
    if report:
        print(report)
    problem = "REPORT, see above" if report else None if passed else "TESTS FAILED, see above"
    table.row(sanitizer, f"kernel tests: {summary}", problem)

    for bug in sanitizer.bugs if self_check else ():
        source = sources / bug.file
        original = source.read_text()
        if original.count(bug.text) != 1:
            raise CannotRun(
                f"{bug.text!r} occurs {original.count(bug.text)} times in {bug.file}, but must occur exactly once."
            )
        source.write_text(original.replace(bug.text, bug.replacement))
        library = build(sanitizer, sources, directory / "build")
        source.write_text(original)
        run = Run(sanitizer, library, directory / "planted")
        run.pytest(bug.test, quiet=True)
        found = bug.report in run.report()
        table.row(sanitizer, f"planted bug: {bug.report}", None if found else "NOT REPORTED")


def build(sanitizer: Sanitizer, sources: Path, directory: Path) -> Path:
    cmake = shutil.which("cmake", path=TOOLS)
    if cmake is None:
        raise CannotRun("cmake was not found; run `make setup-dev`.")
    named = {path.stem.removeprefix("kernel_") for path in sources.glob("src/kernel_*.cpp")}
    not_run = ";".join(sorted(named - set(usable_isas())))
    options = [f"-DFASTATTENTION_SANITIZE={sanitizer.flag}", f"-DFASTATTENTION_NOT_RUN={not_run}"]
    configure = [cmake, "-S", str(sources), "-B", str(directory), *options]
    for command in (configure, [cmake, "--build", str(directory), "--parallel", str(os.cpu_count() or 1)]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout + done.stderr, file=sys.stderr)
            raise CannotRun(f"the kernels do not build with {sanitizer.name}.")
    return directory / "libfastattention_cpu.so"


class Run:
    """Test runs with one instrumented library, and the reports of all their processes."""

    def __init__(self, sanitizer: Sanitizer, library: Path, reports: Path) -> None:
        reports.mkdir(exist_ok=True)
        for old in reports.iterdir():
            old.unlink()
        self.reports, self.output = reports, ""
        # Tests start processes whose output is not shown, so reports go to files.
        log = f"log_path={reports / 'report'}"
        options = {
            name: f"{value}:{log}" if name.endswith("SAN_OPTIONS") else value
            for name, value in sanitizer.options.items()
        }
        preload = " ".join(runtime(name) for name in sanitizer.runtimes)
        chosen = {"FASTATTENTION_CPU_LIBRARY": str(library), "LD_PRELOAD": preload, **options}
        self.environment = {**os.environ, **chosen}
        self.prefix = self.start()

    def start(self) -> list[str]:
        """The command that starts a process: g++ 12's TSan cannot handle the address space layout of newer kernels."""
        for prefix in ([], ["setarch", platform.machine(), "--addr-no-randomize"]):
            command = [*prefix, sys.executable, "-c", ""]
            if shutil.which(command[0]) and subprocess.run(command, env=self.environment).returncode == 0:
                return prefix
        text = " ".join(self.report().split())[-200:]
        raise CannotRun(f"Python does not start with {self.environment['LD_PRELOAD']} preloaded: {text}")

    def pytest(self, *arguments: str, quiet: bool = False) -> tuple[bool, str]:
        """Whether all tests passed, and pytest's last line."""
        # -s: pytest's captured output is lost when a report ends it, and UBSan together with ASan ignores log_path.
        command = [*self.prefix, sys.executable, "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True)
        self.output += done.stdout + done.stderr
        if done.returncode and not quiet:
            print(done.stdout[-5000:] + done.stderr[-5000:])
        lines = done.stdout.strip().splitlines()
        return done.returncode == 0, lines[-1].split(" in ")[0] if lines else "no output"

    def report(self) -> str:
        printed = [line for line in self.output.splitlines() if "runtime error: " in line]
        return "\n".join([*printed, *(path.read_text() for path in sorted(self.reports.iterdir()))])


def runtime(name: str) -> str:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise CannotRun("g++ was not found; install it, or set CXX to another compiler.")
    path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    if not Path(path).is_absolute():  # without the library, g++ prints only its name
        raise CannotRun(f"{compiler} has no {name}; install g++, which includes it.")
    return path


if __name__ == "__main__":
    sys.exit(main())
