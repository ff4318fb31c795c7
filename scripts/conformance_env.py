"""The environment of one vLLM version: venv, vLLM as pure Python, upstream's tests, this package.

Used by: scripts/conformance.py and scripts/ascend_env.py.

Everything is under build/conformance/<version>/ and is made once; a step whose inputs changed is done again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from scripts import setup_env
from scripts.setup_env import SetupError, Step

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "build" / "conformance"

# Each version with the torch that it pins. 2.10 and 2.11 come from PyPI as CUDA builds: about 7 GB of disk each.
TORCH = {"0.19.1": "2.10.0", "0.23.0": "2.11.0", "0.28.0": "2.13.0", "0.32.0": "2.13.0"}
# Older sdists declare their license in a way that setuptools >= 77 reads; torch up to 2.10 needs less than 82.
SETUPTOOLS = "setuptools>=77.0.3,<81"
TOOLS = ["pytest>=8.3", "pytest-timeout>=2.3"]


@dataclass(frozen=True)
class Environment:
    version: str

    @property
    def torch(self) -> str:
        return TORCH[self.version]

    @property
    def folder(self) -> Path:
        return HOME / self.version

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def constraints(self) -> Path:
        """Exact versions of all packages; those of 0.32.0 are also what `make setup` installs."""
        own = ROOT / "constraints" / f"conformance-{self.version}.txt"
        return setup_env.CONSTRAINTS if self.version == setup_env.VLLM_VERSION else own

    @property
    def log(self) -> Path:
        return self.folder / "setup.log"

    @property
    def upstream(self) -> Path:
        """Holds only upstream's ``tests`` package."""
        return self.folder / "upstream"

    def prepare(self) -> None:
        """Run the steps that are missing.

        Raises:
            SetupError: pip failed, or this machine cannot build the kernels.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        setup_env.run_steps(
            [
                Step(f"vLLM {self.version}: create the environment", self._make_venv, lambda: [sys.version]),
                Step(
                    f"vLLM {self.version}: install torch {self.torch}",
                    self._install_torch,
                    lambda: [self.torch, self.constraints.read_text()],
                ),
                Step(f"vLLM {self.version}: install as pure Python", self._install_vllm, lambda: [self.version]),
                Step(f"vLLM {self.version}: install test tools", self._install_tools, lambda: TOOLS),
                Step(f"vLLM {self.version}: build the CPU kernels", self._install_package, self._package_inputs),
            ],
            self.folder / "done.json",
        )

    def _make_venv(self) -> None:
        setup_env.create_venv(self.folder / "venv")

    def _install_torch(self) -> None:
        requires = [SETUPTOOLS if name == "setuptools" else name for name in setup_env.VLLM_BUILD_REQUIRES]
        self._pip("install", f"torch=={self.torch}", *requires)

    def _install_vllm(self) -> None:
        # The sdist is passed by file name, to avoid pip's wheel cache, which ignores the build's environment variables.
        sdist = fetch_sdist(self.python, self.version, self.folder / "sdist", self.log)
        build = ["--no-build-isolation", str(sdist), f"torch=={self.torch}"]
        self._pip("install", *build, environment=build_environment(self.version))
        problem = setup_env.wrong_vllm(
            next((self.folder / "venv" / "lib").glob("python3.*/site-packages")), self.version
        )
        if problem:
            raise SetupError(f"{problem}; remove {self.folder.relative_to(ROOT)} and run this again.")
        unpack_tests(sdist, self.upstream)

    def _install_tools(self) -> None:
        self._pip("install", *TOOLS)

    def _install_package(self) -> None:
        self._pip("install", *setup_env.KERNEL_BUILD_REQUIRES, "packaging", "psutil", "pydantic")
        # A separate build folder, because CMake remembers the paths of the venv that ran it.
        where = f"--config-settings=build-dir={self.folder / 'kernels'}"
        self._pip("install", "--no-build-isolation", "--no-deps", where, "--editable", str(ROOT))

    def _package_inputs(self) -> Iterable[str]:
        yield from setup_env.package_inputs()

    def _pip(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        run_pip(self.python, self.log, *arguments, "--constraint", str(self.constraints), environment=environment)


def fetch_sdist(python: Path, version: str, folder: Path, log: Path) -> Path:
    """vLLM's source distribution. ``python`` must have torch and vLLM's build requirements: pip asks for metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted(folder.glob(f"vllm-{version}.tar.gz"))
    if not found:
        options = ["--no-deps", "--no-binary", "vllm", "--no-build-isolation", "--dest", str(folder)]
        run_pip(python, log, "download", *options, f"vllm=={version}", environment=build_environment(version))
        found = sorted(folder.glob(f"vllm-{version}.tar.gz"))
    return found[0]


def unpack_tests(sdist: Path, target: Path) -> None:
    """Unpack only ``tests/``: the package ``vllm`` at the archive's root would shadow the installed one."""
    part = target.with_suffix(".part")  # an interrupted copy must not look complete
    for folder in (part, target):
        shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            _, _, inside = member.name.partition("/")
            content = archive.extractfile(member) if member.isfile() and inside.startswith("tests/") else None
            if content is None or ".." in Path(inside).parts:
                continue
            (part / inside).parent.mkdir(parents=True, exist_ok=True)
            (part / inside).write_bytes(content.read())
    part.rename(target)


def build_environment(version: str) -> dict[str, str]:
    return {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}


def run_pip(python: Path, log: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
    command = [str(python), "-m", "pip", *arguments]
    with log.open("a") as output:
        output.write("$ " + " ".join(command) + "\n")
        output.flush()
        result = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )
    if result.returncode:
        print("\n" + "\n".join(log.read_text().strip().splitlines()[-25:]), file=sys.stderr)
        raise SetupError(f"pip failed with status {result.returncode}; see {log}.")
