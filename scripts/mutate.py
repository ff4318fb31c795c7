"""Break the code on purpose, one place at a time, and check that the tests notice.

    python scripts/mutate.py [LIST.toml ...] [--only WORD] [--every N] [--jobs N]

Run by: contributors as `make mutate`; tests/scripts/test_mutate.py checks the lists and runs samples of them.
Needs: `make setup-dev`, and a C++ compiler for the lists of kernels.
Reads: CXX (C++ compiler), and what the tests read.

A list (tests/mutations/*.toml; all of them by default) gives for each mutation a file, a text that occurs in it exactly
once, the replacement, and the tests that must then fail. Where breaking one place changes nothing, `also` names others
that are broken with it. Everything happens in a copy of the tree, on which the same tests must pass before it is
changed. Exits with 1 if a mutation survives, and with 2 if a list does not match the code.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script too

from scripts.kernel_build import KERNELS, DoesNotCompile, KernelBuild  # noqa: E402

LISTS = ROOT / "tests" / "mutations"
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "dist", "models", "__pycache__", ".*_cache", ".hypothesis")
# A mutant may wait forever, also inside C++, where only killing the process helps.
PYTEST = ["-q", "-x", "-p", "no:cacheprovider", "--timeout=120", "-o", "timeout_method=thread"]
TRIAL_S = 600
"""Time for the tests of one mutation. Then they are killed: pytest's own time limit needs Python's lock, which a thread
that waits in C++ may hold."""
FAILED = 1  # pytest's status when tests ran and one failed; others mean that there was nothing to run
# Compile errors of kernels that the tests themselves compile.
DOES_NOT_COMPILE = re.compile(r"^E +kernels\.volta\.[\w.]+Error: (.* does not compile .*)", re.MULTILINE)

# An editable install finds the package by an import hook, which precedes PYTHONPATH and would leave the copy.
WITHOUT_EDITABLE_INSTALL = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "fastattention_vllm" not in getattr(f, "known_source_files", {})]
"""


class DoesNotFit(Exception):
    """One sentence: which entry, and why."""


@dataclass(frozen=True)
class Edit:
    file: str
    text: str
    replacement: str


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]
    isa: str = ""
    """The instruction set, if the code belongs to a single one. Skipped on machines that lack it."""
    also: tuple[Edit, ...] = ()
    """Edits of Python files."""

    @property
    def edits(self) -> tuple[Edit, ...]:
        return (Edit(self.file, self.text, self.replacement), *self.also)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", nargs="*", type=Path, default=sorted(LISTS.glob("*.toml")), metavar="LIST.toml")
    parser.add_argument("--only", default="", metavar="WORD", help="run only mutations whose name contains WORD")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="run only every Nth mutation, to save time")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="number of mutations to test at the same time")
    options = parser.parse_args()
    try:
        mutations = [m for path in options.lists for m in read(path) if options.only in m.name][:: options.every]
        if not mutations:
            raise DoesNotFit("no mutation matches; check LIST.toml and --only.")
        with tempfile.TemporaryDirectory(prefix="fastattention-mutate-") as directory:
            return survivors([Copy(Path(directory) / str(job)) for job in range(options.jobs)], mutations)
    except (DoesNotFit, DoesNotCompile) as error:
        print(f"fastattention mutate: {error}", file=sys.stderr)
        return 2


def read(path: Path) -> list[Mutation]:
    content = tomllib.loads(path.read_text())
    entries = content.pop("mutation", [])
    if content:
        raise DoesNotFit(f"{path.name} has an unknown table {next(iter(content))!r}; use [[mutation]] tables only.")
    mutations, misfits = [], []
    for number, entry in enumerate(entries, 1):
        try:
            also = tuple(Edit(**edit) for edit in entry.get("also", ()))
            mutation = Mutation(**{**entry, "tests": tuple(entry["tests"]), "also": also})
        except (KeyError, TypeError) as error:
            raise DoesNotFit(f"{path.name}, entry {number} ({entry.get('name')}): {error}.") from None
        try:
            check(mutation)
        except DoesNotFit as error:
            misfits.append(str(error))
        mutations.append(mutation)
    if misfits:
        raise DoesNotFit("\n".join(misfits))
    return mutations


def check(mutation: Mutation) -> None:
    for edit in mutation.edits:
        source = ROOT / edit.file
        if not source.is_file():
            raise DoesNotFit(f"{mutation.name!r}: {edit.file} does not exist.")
        found = source.read_text().count(edit.text)
        if found != 1:
            raise DoesNotFit(
                f"{mutation.name!r}: its text occurs {found} times in {edit.file}, but must occur exactly once."
            )
        if not mutation.tests or edit.text == edit.replacement:
            raise DoesNotFit(f"{mutation.name!r}: it names no test, or its replacement equals its text.")


def survivors(copies: list[Copy], mutations: list[Mutation]) -> int:
    """1 if any mutation survives, 2 if one does not compile, else 0."""
    started = time.monotonic()
    if any(m.file.startswith(KERNELS) for m in mutations):
        for copy in copies:
            library = copy.kernels.everything()
            copy.kernels.keep()
            unmutated = shutil.copy(library, library.with_name("unmutated.so"))
            copy.environment["FASTATTENTION_CPU_LIBRARY"] = str(unmutated)
    isas = copies[0].isas()
    usable = [m for m in mutations if not m.isa or m.isa in isas]  # the others' tests may not exist on this machine
    status, output = copies[0].pytest(sorted({test for m in usable for test in m.tests}))
    if status != 0:
        print(output)
        raise DoesNotFit("some of the named tests fail even without a mutation; see above.")
    width = max(len(name) for name in ["unmutated", *(m.name for m in mutations)])
    print(f"{'unmutated':<{width}}  passes    {time.monotonic() - started:>4.0f} s", flush=True)

    free: queue.Queue[Copy] = queue.Queue()
    for copy in copies:
        free.put(copy)

    def attempt(mutation: Mutation) -> tuple[str, str, float]:
        if mutation.isa and mutation.isa not in isas:
            return "skipped", f"needs {mutation.isa}", 0.0
        copy, begun = free.get(), time.monotonic()
        try:
            verdict, detail = trial(copy, mutation, isas)
        finally:
            free.put(copy)
        return verdict, detail, time.monotonic() - begun

    verdicts = []
    with ThreadPoolExecutor(len(copies)) as pool:
        for mutation, (verdict, detail, seconds) in zip(mutations, pool.map(attempt, mutations), strict=True):
            print(f"{mutation.name:<{width}}  {verdict:<8}  {seconds:>4.0f} s  {detail}", flush=True)
            verdicts.append(verdict)
    counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("caught", "SURVIVED", "UNFIT", "skipped"))
    print(f"{counts}, {time.monotonic() - started:.0f} s")
    if "UNFIT" in verdicts:
        return 2
    return 1 if "SURVIVED" in verdicts or "caught" not in verdicts else 0


def trial(copy: Copy, mutation: Mutation, isas: list[str]) -> tuple[str, str]:
    """The verdict on one mutation, and the first failure."""
    originals = {edit.file: (copy.tree / edit.file).read_text() for edit in mutation.edits}
    for edit in mutation.edits:
        source = copy.tree / edit.file
        source.write_text(source.read_text().replace(edit.text, edit.replacement))
    try:
        is_kernel = mutation.file.startswith(KERNELS)
        library = copy.kernels.changed(mutation.file, mutation.isa, isas) if is_kernel else None
        status, output = copy.pytest(list(mutation.tests), library, TRIAL_S)
    except DoesNotCompile as error:
        return "UNFIT", str(error).splitlines()[0]
    finally:
        for file, original in originals.items():
            (copy.tree / file).write_text(original)
    if status == 0:
        return "SURVIVED", mutation.file
    if status == -signal.SIGKILL:
        raise DoesNotFit(f"{mutation.name!r}: another process killed its tests; free some memory or lower --jobs.")
    if status < 0:
        return "caught", f"crash, signal {-status}"
    if status != FAILED:
        print(output)
        raise DoesNotFit(f"{mutation.name!r}: pytest ended with status {status}; see above.")
    compiler = DOES_NOT_COMPILE.search(output)
    if compiler:
        return "UNFIT", compiler.group(1)
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return "caught", failed[0].split(" - ")[0].split("::", 1)[-1] if failed else "timeout"


class Copy:
    """A copy of the tree for mutations, and its builds of the kernels."""

    def __init__(self, directory: Path) -> None:
        self.tree = directory / "tree"
        shutil.copytree(ROOT, self.tree, ignore=LEFT_OUT)
        self.kernels = KernelBuild(self.tree, directory / "build")
        (self.tree / "sitecustomize.py").write_text(WITHOUT_EDITABLE_INSTALL)
        paths = [str(self.tree), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # Python caches compiled modules by size and second, and a mutation may change neither.
        self.environment["PYTHONDONTWRITEBYTECODE"] = "1"
        said = self.python("-c", "import fastattention_vllm; print(fastattention_vllm.__file__)").stdout.strip()
        package = said.rpartition("\n")[2]  # after what torch's extensions say when they are loaded
        if not package.startswith(str(self.tree)):
            raise DoesNotFit(
                f"tests in the copy of the tree import the package from {package or 'nowhere'} instead of the copy."
            )

    def python(
        self, *arguments: str, environment: dict[str, str] | None = None, timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        command, chosen = [sys.executable, *arguments], self.environment | (environment or {})
        return subprocess.run(command, cwd=self.tree, env=chosen, capture_output=True, text=True, timeout=timeout)

    def isas(self) -> list[str]:
        code = "from fastattention_vllm.attention.cpu import kernels as cpu; print(*cpu.usable_isas())"
        return self.python("-c", code).stdout.split()

    def pytest(self, tests: list[str], library: Path | None = None, timeout: float | None = None) -> tuple[int, str]:
        """pytest's status and output. Tests that take longer than ``timeout`` seconds have failed."""
        chosen = {"FASTATTENTION_CPU_LIBRARY": str(library)} if library else {}
        try:
            done = self.python("-m", "pytest", *PYTEST, *tests, environment=chosen, timeout=timeout)
        except subprocess.TimeoutExpired:
            return FAILED, ""
        return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
