"""The extra for the V100, resolved by pip against the package index without installing anything.

`make test-full` installs it for real (test_wheel.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
METADATA = (
    "import sys; from scikit_build_core.build import prepare_metadata_for_build_wheel as p; print(p(sys.argv[1]))"
)


def wheel_of_metadata(folder: Path) -> Path:
    """A wheel with the project's metadata, as its build backend writes them, and nothing else: pip reads no more."""
    command = [sys.executable, "-c", METADATA, str(folder)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    info = folder / printed.split()[-1]
    wheel = folder / f"{info.name.removesuffix('.dist-info')}-py3-none-any.whl"
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    (info / "RECORD").touch()
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted(info.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder))
    return wheel


@pytest.mark.full
@pytest.mark.timeout(900)
def test_pip_resolves_the_extra_to_code_for_the_v100(tmp_path: Path) -> None:
    wheel, report = wheel_of_metadata(tmp_path), tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    done = subprocess.run(
        [*command, "--only-binary=:all:", "--report", str(report), f"{wheel}[volta]"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    chosen = {
        one["metadata"]["name"].lower(): one["metadata"]["version"] for one in json.loads(report.read_text())["install"]
    }
    assert "fastattention-vllm" in chosen
    for requirement in EXTRAS["volta"]:
        name, version = requirement.split("==")
        assert chosen[name] == version
    cuda = Version(chosen["nvidia-cuda-runtime-cu12"])
    assert (cuda.major, cuda.minor) == (12, 8)
    # A library of CUDA 13 has no code for compute capability 7.0.
    assert [name for name in chosen if name.startswith("nvidia-") and name.endswith("-cu13")] == []
    print({name: chosen[name] for name in ("torch", "vllm", "triton", "transformers")})
