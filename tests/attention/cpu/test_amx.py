"""AMX and AVX-512 on processors without them: built over kernels/cpu/emulation. Not run on hardware."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.kernel_build import LIBRARY, TOOLS, emulate_amx, emulated

ROOT = Path(__file__).resolve().parents[3]
CMAKE = shutil.which("cmake", path=TOOLS)

pytestmark = [
    # Without AVX-512, it takes five minutes to compile and eight to run on two cores; otherwise a minute and a half.
    pytest.mark.more if emulate_amx() else pytest.mark.full,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        emulated() is None or CMAKE is None,
        reason="needs cmake, and a processor whose lack of AMX or AVX-512 is emulated",
    ),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    assert CMAKE is not None
    build = tmp_path_factory.mktemp("amx")
    configure = [CMAKE, "-S", str(ROOT / "kernels" / "cpu"), "-B", str(build), f"-D{emulated()}=ON"]
    subprocess.run(configure, check=True)
    subprocess.run([CMAKE, "--build", str(build), "--parallel", str(os.cpu_count() or 1)], check=True)
    return os.environ | {"FASTATTENTION_CPU_LIBRARY": str(build / LIBRARY)}


@pytest.mark.parametrize("file", ["test_attention.py", "test_bytes.py", "test_threads.py"])
def test_kernels_are_right_over_emulated_operations(environment: dict[str, str], file: str) -> None:
    """Run all tests of a file that select what is emulated by name, or use the best instruction set."""
    code = "from fastattention_vllm.attention.cpu import kernels as cpu; print(cpu.isa())"
    chosen = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert chosen.stdout.strip() == "amx", chosen.stderr
    others = "not avx and not scalar" if emulate_amx() else "not avx2 and not scalar"
    tests = [f"tests/attention/cpu/{file}", "-k", others, "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *tests], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
