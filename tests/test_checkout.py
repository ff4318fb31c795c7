"""Imports from the source checkout find the built library, and packages below integration/ never import vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


# makes Ray listen on 127.0.0.1
ENVIRONMENT = os.environ | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def run(code: str, *flags: str, cwd: Path = ROOT) -> str:
    command = [sys.executable, *flags, "-c", code]
    result = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


LIBRARY = "from fastattention_vllm.attention.cpu import kernels, library; print(library.library_path(), kernels.isa())"


def test_the_library_is_found_from_the_checkout_and_from_anywhere(tmp_path: Path) -> None:
    """The package folder is at the top of the checkout, so there it shadows the installed one."""
    here, elsewhere = run(LIBRARY), run(LIBRARY, cwd=tmp_path)
    assert here == elsewhere
    assert Path(here.split()[0]).is_file()


def test_the_library_is_found_when_only_the_path_leads_to_the_checkout() -> None:
    """The conditions of a Ray worker: the checkout is first on sys.path, without the editable install's import hook."""
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]; "
        f"sys.path.insert(0, {str(ROOT)!r}); " + LIBRARY
    )
    assert Path(run(code, cwd=Path("/")).split()[0]).is_file()


def test_a_ray_worker_finds_the_library() -> None:
    code = (
        "import ray; ray.init(address='local', num_cpus=1, include_dashboard=False, log_to_driver=False)\n"
        "@ray.remote\n"
        "def isa():\n"
        "    from fastattention_vllm.attention.cpu import kernels as cpu\n"
        "    return cpu.isa()\n"
        "print(ray.get(isa.remote()))"
    )
    assert run(code) == run("from fastattention_vllm.attention.cpu import kernels as cpu; print(cpu.isa())")


@pytest.mark.parametrize("module", ["attention.cpu", "attention.functional", "attention.problem", "demo"])
def test_packages_below_integration_do_not_import_vllm(module: str) -> None:
    code = f"import sys, fastattention_vllm.{module}; print([m for m in sys.modules if m.split('.')[0] == 'vllm'])"
    assert run(code) == "[]"
