"""Make .venv: official vLLM as pure Python, torch, and this package with its kernels built.

Run by: users and contributors through `make serve`, `make setup` and `make setup-dev`.
Needs: Python 3.11 or newer with venv, a C++ compiler, and a package index. Standard library only.
Reads: CXX (C++ compiler), PIP_* (pip's own settings).
Writes: .venv/ and .venv/setup.log.

Safe to run every time: a step whose inputs have not changed is skipped in milliseconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
DONE = VENV / "setup.json"
CONSTRAINTS = ROOT / "constraints" / "cpu.txt"

VLLM_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"
PYTHON_RANGE = ((3, 11), (3, 14))
# vLLM's sdist takes its build requirements from the environment, so that a second torch is not downloaded for it.
VLLM_BUILD_REQUIRES = [
    "cmake",
    "jinja2",
    "ninja",
    "packaging",
    "setuptools",
    "setuptools-rust",
    "setuptools-scm",
    "wheel",
]
KERNEL_BUILD_REQUIRES = ["scikit-build-core", "cmake", "ninja"]


class SetupError(Exception):
    """One sentence for the user: what is missing, and the command that fixes it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dev", action="store_true", help="also install the packages that tests and checks need")
    options = parser.parse_args()
    try:
        check_machine()
        steps = [
            Step("create .venv", make_venv, lambda: [sys.version]),
            Step(f"install torch {TORCH_VERSION}", install_torch, lambda: [TORCH_VERSION]),
            Step(f"install vLLM {VLLM_VERSION} as pure Python", install_vllm, lambda: [CONSTRAINTS.read_text()]),
            Step("build the CPU kernels", install_package, package_inputs),
        ]
        if options.dev:
            steps.append(Step("install test tools", install_dev, lambda: [(ROOT / "pyproject.toml").read_text()]))
        run_steps(steps)
    except SetupError as error:
        print(f"fastattention setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nfastattention setup: stopped; run it again to continue.", file=sys.stderr)
        return 130
    return 0


# --- steps ---------------------------------------------------------------------------------------------------------


class Step:
    """A named action and the texts that it depends on. It is done if it has succeeded with the same texts."""

    def __init__(self, name: str, action: Callable[[], None], inputs: Callable[[], Iterable[str]]) -> None:
        self.name, self.action, self.inputs = name, action, inputs

    def fingerprint(self, before: str) -> str:
        digest = hashlib.sha256(before.encode())
        for text in self.inputs():
            digest.update(text.encode())
        return digest.hexdigest()


def run_steps(steps: list[Step], record: Path | None = None) -> None:
    """Run those of ``steps`` that are not done. ``record``: the file that lists finished steps."""
    record = record or DONE
    done = read_done(record)
    before = ""
    for number, step in enumerate(steps, 1):
        # Each step depends on the previous ones: a new torch needs a new vLLM.
        before = step.fingerprint(before)
        if done.get(step.name) == before:
            continue
        with Progress(f"[{number}/{len(steps)}] {step.name}"):
            step.action()
        done[step.name] = before
        record.write_text(json.dumps(done, indent=1))


def read_done(record: Path) -> dict[str, str]:
    """Fingerprints of the finished steps. Empty if the file is missing or incomplete, so that all steps run again."""
    try:
        done: dict[str, str] = json.loads(record.read_text())
    except (OSError, ValueError):
        return {}
    return done


class Progress:
    """Shows a line with the step and its seconds so far."""

    def __init__(self, title: str) -> None:
        self.title, self.stop = title, threading.Event()

    def __enter__(self) -> None:
        self.started = time.monotonic()
        print(f"{self.title} ...", end="" if sys.stdout.isatty() else "\n", flush=True)
        self.thread = threading.Thread(target=self._tick, daemon=True)
        self.thread.start()

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        self.thread.join()
        word = "failed" if error[0] else "done"
        print(f"\r{self.title} ... {word} in {time.monotonic() - self.started:.0f} s", flush=True)

    def _tick(self) -> None:
        while sys.stdout.isatty() and not self.stop.wait(1):
            print(f"\r{self.title} ... {time.monotonic() - self.started:.0f} s", end="", flush=True)


def check_machine() -> None:
    low, high = PYTHON_RANGE
    if not low <= sys.version_info[:2] < high:
        raise SetupError(
            f"this is Python {sys.version.split()[0]}, but vLLM {VLLM_VERSION} needs Python "
            f"{low[0]}.{low[1]} to {high[0]}.{high[1] - 1}; run `make PYTHON=python3.11 ...`."
        )
    if not sys.platform.startswith("linux"):
        raise SetupError(f"this platform is {sys.platform}, but fastattention runs on Linux only.")
    if find_compiler() is None:
        wanted = os.environ.get("CXX")
        tried = f"CXX={wanted}" if wanted else "g++, clang++, c++"
        raise SetupError(
            f"the CPU kernels need a C++ compiler, but none was found (tried {tried}); run `apt-get install g++`, or "
            "set CXX."
        )


def find_compiler() -> str | None:
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((path for path in map(shutil.which, candidates) if path), None)


def make_venv() -> None:
    if not made_by_this_python():
        create_venv(VENV)


def create_venv(folder: Path) -> None:
    result = subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], capture_output=True, text=True)
    if result.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        raise SetupError(
            f"`python3 -m venv {folder.relative_to(ROOT)}` failed; on Debian, run `apt-get install python3-venv`. "
            f"Output: {' '.join((result.stdout + result.stderr).split())[-300:]}"
        )


def made_by_this_python() -> bool:
    settings = VENV / "pyvenv.cfg"
    return PYTHON.exists() and settings.exists() and f"version = {sys.version.split()[0]}\n" in settings.read_text()


def install_torch() -> None:
    pip("install", f"torch=={TORCH_VERSION}", *VLLM_BUILD_REQUIRES)


def install_vllm() -> None:
    # "empty" is vLLM's name for an install without compiled kernels. The version override drops the "+empty" suffix,
    # which pip rejects as inconsistent with the sdist's name.
    environment = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VLLM_VERSION}
    arguments = ["--no-binary", "vllm", "--no-build-isolation", f"vllm=={VLLM_VERSION}", f"torch=={TORCH_VERSION}"]
    pip("install", *arguments, environment=environment)
    problem = wrong_vllm(site_packages())
    if problem:
        # pip's wheel cache ignores environment variables, so it may return a vLLM that was built for another device.
        log(f"{problem}: pip's wheel cache held another build; installing again without it")
        pip("install", "--no-cache-dir", "--force-reinstall", "--no-deps", *arguments[:-1], environment=environment)
        problem = wrong_vllm(site_packages())
    if problem:
        raise SetupError(f"{problem}; run `{PYTHON} -m pip cache remove vllm`, then run this again.")


def wrong_vllm(packages: Path, wanted: str = VLLM_VERSION) -> str | None:
    """Why the vLLM installed in ``packages`` is not the pure-Python one of the wanted version, or None."""
    records = list(packages.glob("vllm-*.dist-info/RECORD"))
    if len(records) != 1:
        return f"{len(records)} vLLM installs found in .venv"
    version = records[0].parent.name.removeprefix("vllm-").removesuffix(".dist-info")
    if version != wanted:
        return f"vLLM {version} is installed instead of {wanted}"
    files = (line.split(",", 1)[0] for line in records[0].read_text().splitlines())
    compiled = [name for name in files if name.startswith("vllm/") and name.endswith(".so")]
    if compiled:
        return f"the installed vLLM is not the pure-Python build (it contains {compiled[0]})"
    return None


def install_package() -> None:
    pip("install", *KERNEL_BUILD_REQUIRES)
    pip("install", "--no-build-isolation", "--no-deps", "--editable", str(ROOT))
    pip("install", "numba", "packaging", "psutil", "pydantic")


def package_inputs() -> Iterable[str]:
    yield (ROOT / "pyproject.toml").read_text()
    yield str(find_compiler())
    # An editable install uses a list of paths made at installation, which is wrong after the folder has been moved.
    for path in sorted((ROOT / "fastattention_vllm").rglob("*.py")):
        yield str(path.relative_to(ROOT))
    for path in sorted((ROOT / "kernels" / "cpu").rglob("*")):
        if path.is_file():
            yield f"{path.relative_to(ROOT)}\n{path.read_text()}"


def install_dev() -> None:
    import tomllib  # since Python 3.11, and this file must print its message on older ones too

    # Only the packages of the extras: naming the project itself would build the kernels again.
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pip("install", *extras["bench"], *extras["dev"], *extras["ray"])


# --- pip -----------------------------------------------------------------------------------------------------------


def pip(*arguments: str, environment: dict[str, str] | None = None) -> None:
    command = [str(PYTHON), "-m", "pip", *arguments, "--constraint", str(CONSTRAINTS)]
    log("$ " + " ".join(command))
    with LOG.open("a") as output:
        result = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )
    if result.returncode:
        tail = LOG.read_text().strip().splitlines()[-25:]
        print("\n" + "\n".join(tail), file=sys.stderr)
        raise SetupError(f"pip failed with status {result.returncode}; see {LOG.relative_to(ROOT)}.")


def log(text: str) -> None:
    with LOG.open("a") as output:
        output.write(text + "\n")


def site_packages() -> Path:
    return next((VENV / "lib").glob("python3.*/site-packages"))


if __name__ == "__main__":
    sys.exit(main())
