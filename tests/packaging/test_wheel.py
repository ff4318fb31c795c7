"""The wheel that `make wheel` builds, installed into empty environments.

`make test-full` runs these tests. They download gigabytes.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fastattention_vllm import __version__
from fastattention_vllm.attention.cpu import kernels
from scripts import wheel as script
from tests.packaging import manifests

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
EPSILON = {"torch.float32": 1e-5, "torch.float16": 2e-3, "torch.bfloat16": 1.6e-2}

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]


def run(*command: str | Path, cwd: Path, status: int = 0, **environment: str) -> str:
    """What the command printed on stdout. A nonzero exit status fails the test and shows all output."""
    without = ("PYTHONPATH", "FASTATTENTION_CPU_LIBRARY", "FASTATTENTION_CPU_ISA")
    clean = {name: value for name, value in os.environ.items() if name not in without}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def interpreter(version: str) -> Path | None:
    """A Python of that version, on the PATH or under pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*sorted(pyenv.glob(f"{version}.*/bin/python")), *filter(None, [shutil.which(f"python{version}")])]
    for candidate in map(Path, candidates):
        told = subprocess.run([candidate, "-c", "import venv, sys; print(sys.version)"], capture_output=True, text=True)
        if told.returncode == 0 and told.stdout.startswith(f"{version}."):
            return candidate
    return None


@pytest.fixture(scope="module")
def wheel() -> Path:
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    print(run("make", "wheel", f"PYTHON={sys.executable}", cwd=ROOT))
    (built,) = (ROOT / "dist").glob("*.whl")
    return built


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is removed after the test, because each environment takes gigabytes."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def environment(python: Path, folder: Path, *requirements: str) -> Path:
    """The ``bin`` folder of a new environment with only these requirements and their dependencies."""
    run(python, "-m", "venv", folder / "env", cwd=folder)
    tools = folder / "env" / "bin"
    run(tools / "python", "-m", "pip", "install", "--quiet", *requirements, cwd=folder)
    return tools


def problems(tools: Path, folder: Path, status: int = 0) -> set[str]:
    """Problems of the environment that `fastattention doctor` reports."""
    report = json.loads(run(tools / "fastattention", "doctor", "--json", cwd=folder, status=status))
    findings = [finding for group in report["findings"].values() for finding in group]
    assert {"torch", "V100 and T4"} <= {finding["subject"] for finding in findings}
    return {finding["subject"] for finding in findings if finding["level"] == "problem"}


def test_auditwheel_confirms_the_name(wheel: Path) -> None:
    report = run(script.PYTHON, "-m", "auditwheel", "show", wheel, cwd=ROOT)
    found = re.search(r'platform tag: "(manylinux_(\d+)_(\d+)_\w+)"', " ".join(report.split()))
    assert found is not None, report
    assert found[1] in wheel.name
    assert (int(found[2]), int(found[3])) <= (2, 28)


def test_the_wheel_holds_the_kernels_and_no_sources(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        manifest = json.loads(archive.read("fastattention_vllm/lib/volta/manifest.json"))
    assert "fastattention_vllm/lib/libfastattention_cpu.so" in names
    page = ROOT / "fastattention_vllm" / "integration" / "serving" / "page"
    assert {path.relative_to(ROOT).as_posix() for path in page.iterdir()} <= set(names)
    assert {f"fastattention_vllm/lib/volta/{image}" for image in manifest["images"]} <= set(names)
    assert "fastattention_vllm/py.typed" in names
    assert not [name for name in names if name.startswith(("kernels/", "tests/", "scripts/", "benchmarks/"))]
    assert wheel.stat().st_size < 100e6  # limit of package indices


@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_works_in_an_empty_environment(wheel: Path, folder: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    # The V100's torch, which exists for each of these Python versions.
    (torch,) = (requirement for requirement in EXTRAS["volta"] if requirement.startswith("torch=="))
    tools = environment(python, folder, str(wheel), torch, "numpy")
    found = json.loads(run(tools / "python", "-I", HERE / "in_environment.py", ROOT, cwd=folder))
    assert found["version"] == __version__
    assert found["torch"].startswith(torch.removeprefix("torch=="))
    assert found["isas"] == kernels.usable_isas()  # the same as the checkout's library, which is linked differently
    assert found["errors"].keys() == EPSILON.keys()
    assert all(error < EPSILON[dtype] for dtype, error in found["errors"].items()), found["errors"]
    assert found["volta"] == [70, 75]
    assert found["npu_programs"] == ["combine", "decode", "prefill"]
    assert found["entry_points"] == {
        "console_scripts": [PROJECT["scripts"]["fastattention"]],
        "vllm.general_plugins": [PROJECT["entry-points"]["vllm.general_plugins"]["fastattention"]],
        "vllm.platform_plugins": [PROJECT["entry-points"]["vllm.platform_plugins"]["fastattention"]],
    }
    assert problems(tools, folder, status=1) == {"vLLM"}  # missing in this environment
    package = tools.parent / "lib" / f"python{version}" / "site-packages" / "fastattention_vllm"
    run(tools / "python", "-m", "compileall", "-f", "-q", package, cwd=folder)


def test_the_extra_for_the_v100_installs_and_registers(wheel: Path, folder: Path) -> None:
    """vLLM 0.19.1 from the index, with the other versions that pip chooses. Without a GPU, our CPU platform is used."""
    tools = environment(Path(sys.executable), folder, f"{wheel}[volta]")
    installed = json.loads(run(tools / "python", "-m", "pip", "list", "--format", "json", cwd=folder))
    versions = {package["name"]: package["version"] for package in installed}
    for requirement in EXTRAS["volta"]:
        name, version = requirement.split("==")
        assert versions[name] == version
    assert problems(tools, folder) == set()
    printed = run(tools / "python", "-I", HERE / "in_vllm.py", cwd=folder)
    assert printed.strip().splitlines()[-1] == (
        f"vLLM {versions['vllm']}: FastAttentionBackend on FastAttentionCpuPlatform"
    )


def test_the_source_distribution_builds_for_aarch64(folder: Path) -> None:
    """Ascend hosts use Arm. zig's clang cross-compiles the kernels from the archive alone; they are not run."""
    script.install_tools()
    code = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    archive = folder / run(sys.executable, "-c", code, folder, cwd=ROOT).split()[-1]
    settings = {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": "aarch64"}
    run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder / "built"),
        *(f"--config-settings=cmake.define.{name}={value}" for name, value in settings.items()),
        archive,
        cwd=folder,
        CXX=f"{script.PYTHON} -m ziglang c++ -target aarch64-linux-gnu.2.28",
        _PYTHON_HOST_PLATFORM="linux-aarch64",
    )
    (built,) = (folder / "built").glob("*.whl")
    assert built.name == f"fastattention_vllm-{__version__}-py3-none-linux_aarch64.whl"
    with zipfile.ZipFile(built) as unpacked:
        library = Path(unpacked.extract("fastattention_vllm/lib/libfastattention_cpu.so", folder))
    header = library.read_bytes()[:20]
    assert header[:5] == b"\x7fELF\x02"
    assert int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64
    exported = run("nm", "--dynamic", "--defined-only", library, cwd=folder)
    assert "fa_cpu_attention\n" in exported
    assert all(line.split()[-1].startswith("fa_cpu_") for line in exported.splitlines())


def test_workflows_and_citation_pass_their_checkers(folder: Path) -> None:
    """Uses jactionlint, a wheel that contains actionlint's checks and more."""
    tools = environment(Path(sys.executable), folder, *group("checkers"))
    run(tools / "jactionlint", cwd=ROOT)
    run(tools / "cffconvert", "--validate", cwd=ROOT)


def test_manifests_meet_kubernetes_schemas(folder: Path) -> None:
    """Strictly, so that a misspelt field fails. KubeRay's own fields are in no schema here; its pods are checked."""
    tools = environment(Path(sys.executable), folder, *group("schemas"))
    objects = [one for file in manifests.FILES for one in manifests.documents(file)]
    known = [manifests.as_deployment(one) if one["kind"] == "RayCluster" else one for one in objects]
    assert {one["kind"] for one in known} == {"Deployment", "NetworkPolicy", "PersistentVolumeClaim", "Service"}
    misspelt = copy.deepcopy(next(one for one in known if one["kind"] == "Deployment"))
    misspelt["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    good, bad = folder / "good.yaml", folder / "bad.yaml"
    good.write_text(yaml.safe_dump_all(known))
    bad.write_text(yaml.safe_dump(misspelt))
    for version in ("1.30", "1.37"):
        check = (tools / "kubernetes-validate", "--strict", "-k", version)
        run(*check, good, cwd=folder)
        run(*check, bad, cwd=folder, status=1)


def group(name: str) -> list[str]:
    groups: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    return groups[name]
