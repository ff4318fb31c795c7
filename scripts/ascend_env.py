"""An environment with genuine torch_npu, vLLM and vllm-ascend, for machines without an NPU.

Used by: scripts/ascend.py.

Empty libraries stand in for CANN, and for the CUDA parts of torch (torch_npu does not load beside the genuine ones).
What is left computes on the CPU. Everything is under build/ascend/<torch_npu version>/ and is made once; a step whose
inputs changed is done again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts import conformance_env, setup_env, stub_libraries
from scripts.setup_env import SetupError, Step

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "build" / "ascend"
CONSTRAINTS = ROOT / "constraints" / "ascend.txt"

TORCH = {"2.10.0.post4": "2.10.0", "2.13.0": "2.13.0"}
"""torch_npu -> torch. The first is what vllm-ascend 0.23.0 pins."""
VLLM = {"2.10.0.post4": "0.23.0"}
"""torch_npu -> vLLM and vllm-ascend, which have the same version."""
CUDA_PARTS = ("libtorch_cuda*.so", "libc10_cuda.so", "libtorch_nvshmem.so", "libcaffe2_nvrtc.so")
WITHOUT_VLLM = """
    annotated-types attrs execnet filelock fsspec hypothesis iniconfig Jinja2 MarkupSafe mpmath networkx numpy
    packaging pluggy psutil pydantic pydantic_core pytest pytest-timeout pytest-xdist PyYAML Pygments setuptools
    sortedcontainers sympy typing-inspection typing_extensions
""".split()
TRITON = HOME / "triton"
"""Folder of triton-ascend and what its programs are compiled with. It is on the path of only the tests that need it,
because vllm-ascend's own Triton kernels ask for an NPU when they are imported."""
TRITON_PACKAGES = [
    "triton-ascend==3.2.0",  # vllm-ascend 0.23 requires 3.2.2, which is not on PyPI
    "ascendnpu-ir==1.2.0",
    "msopmodeling==1.0.9",  # only its tables are read
    "numpy==1.26.4",  # triton-ascend's interpreter fails with numpy 2.4
    "pybind11==2.13.6",
]
BUILD_VLLM = ["cmake", "ninja", "wheel"]
CPU_LIBRARY = "FASTATTENTION_CPU_LIBRARY"
"""Prefix of a name that already exists."""


@dataclass(frozen=True)
class AscendEnvironment:
    torch_npu: str

    @property
    def folder(self) -> Path:
        return HOME / self.torch_npu

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def stubs(self) -> Path:
        return self.folder / "stubs"

    @property
    def log(self) -> Path:
        return self.folder / "setup.log"

    @property
    def kernels(self) -> Path:
        """The build folder of the CPU kernels, which host layers use."""
        return self.folder / "kernels"

    @property
    def site_packages(self) -> Path:
        return next((self.folder / "venv" / "lib").glob("python3.*/site-packages"))

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables for a process of this environment."""
        return {
            "LD_LIBRARY_PATH": str(self.stubs),
            "PYTHONPATH": str(ROOT),
            "FASTATTENTION_CPU_LIBRARY": os.environ.get(CPU_LIBRARY, str(self.kernels / "libfastattention_cpu.so")),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # vllm-ascend asks at import which NPU it was built for.
            "SOC_VERSION": "ascend910b1",
            # Tensors are small, and on a busy machine threads would mostly wait for each other.
            "OMP_NUM_THREADS": "1",
        }

    def prepare(self) -> None:
        """Run the steps that are missing.

        Raises:
            SetupError: pip failed, or a tool is missing.
        """
        for tool in ("nm", "readelf"):
            if shutil.which(tool) is None:
                raise SetupError(f"{tool} was not found; run `apt-get install binutils`.")
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"torch_npu {self.torch_npu}"
        steps = [
            Step(f"{name}: create the environment", self._make_venv, lambda: [sys.version]),
            Step(f"{name}: install it and torch {TORCH[self.torch_npu]}", self._install_torch, self._pins),
            Step(f"{name}: build stub libraries for CANN and CUDA", self._build_stubs, self._stub_inputs),
        ]
        if self.torch_npu in VLLM:
            version = VLLM[self.torch_npu]
            steps += [
                Step(f"{name}: install what vLLM {version} imports", self._install_imports, self._pins),
                Step(f"{name}: install vLLM and vllm-ascend {version}", self._install_vllm, lambda: [version]),
            ]
            steps.append(Step("install triton-ascend and its compiler", self._install_triton, lambda: TRITON_PACKAGES))
        if CPU_LIBRARY not in os.environ:
            steps.append(Step(f"{name}: build the CPU kernels", self._build_kernels, setup_env.package_inputs))
        setup_env.run_steps(steps, self.folder / "done.json")

    def _make_venv(self) -> None:
        setup_env.create_venv(self.folder / "venv")

    def _install_torch(self) -> None:
        # Forced, because pip would consider a torch whose CUDA parts were removed to be complete.
        pins = [f"torch=={TORCH[self.torch_npu]}", f"torch-npu=={self.torch_npu}"]
        self._pip("--force-reinstall", *pins)
        self._pip(*WITHOUT_VLLM, "--constraint", str(CONSTRAINTS))

    def _build_stubs(self) -> None:
        if (self.stubs / "libtorch_cuda.so").exists():  # the stub is generated from this library, which is then removed
            self._install_torch()
        shutil.rmtree(self.stubs, ignore_errors=True)
        libraries = self.site_packages / "torch" / "lib"
        parts = [path for pattern in CUDA_PARTS for path in libraries.glob(pattern)]
        packages = [self.site_packages / "torch", self.site_packages / "torch_npu"]
        try:
            stub_libraries.build(packages, self.stubs, [path.name for path in parts])
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            raise SetupError(f"the stub libraries for CANN could not be built: {error}") from error
        for path in parts:
            path.unlink()

    def _build_kernels(self) -> None:
        self._pip("cmake", "ninja", "--constraint", str(CONSTRAINTS))
        tools = self.python.parent
        cmake, source = str(tools / "cmake"), str(ROOT / "kernels" / "cpu")
        make = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", "-DCMAKE_BUILD_TYPE=Release"]
        with self.log.open("a") as output:
            for command in (
                [cmake, "-S", source, "-B", str(self.kernels), *make],
                [cmake, "--build", str(self.kernels)],
            ):
                if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode:
                    raise SetupError(f"the CPU kernels could not be built; see {self.log}.")

    def _install_imports(self) -> None:
        self._pip("--requirement", str(CONSTRAINTS))

    def _install_vllm(self) -> None:
        version = VLLM[self.torch_npu]
        self._pip(*BUILD_VLLM, "--constraint", str(CONSTRAINTS))
        build = conformance_env.build_environment(version)
        # Not from pip's wheel cache, which ignores the environment variables of the build.
        source = ["--no-cache-dir", "--no-binary", "vllm", "--no-build-isolation"]
        self._pip(*source, f"vllm=={version}", environment=build | self.variables)
        problem = setup_env.wrong_vllm(self.site_packages, version)
        if problem:
            raise SetupError(f"{problem}; remove {self.folder.relative_to(ROOT)} and run this again.")
        self._pip("--only-binary", ":all:", f"vllm-ascend=={version}")

    def _install_triton(self) -> None:
        shutil.rmtree(TRITON, ignore_errors=True)
        self._pip("--target", str(TRITON), *TRITON_PACKAGES)

    def _pins(self) -> list[str]:
        return [self.torch_npu, TORCH[self.torch_npu], CONSTRAINTS.read_text(), *WITHOUT_VLLM]

    def _stub_inputs(self) -> list[str]:
        return [Path(stub_libraries.__file__).read_text()]

    def _pip(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        """Without dependencies: those of torch are for CUDA, those of vllm-ascend for CANN."""
        options = ["install", "--no-deps", *arguments]
        conformance_env.run_pip(self.python, self.log, *options, environment=environment)
