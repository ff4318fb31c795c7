"""kernels/volta/build.py: compiler reports that must fail the build."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fastattention_vllm.attention.volta import images
from fastattention_vllm.attention.volta.images import MANIFEST
from kernels.volta import build, variants
from kernels.volta.variants import COMBINE, Variant

PREFILL, DECODE = variants.prefill(64), variants.decode(256, architecture=75)
CROWDED = replace(variants.decode(64), ctas_per_sm=5)
SMALL = replace(COMBINE, ctas_per_sm=32)


@pytest.mark.parametrize(
    ("variant", "registers", "spilled", "said"),
    [
        (PREFILL, 255, 0, None),
        (PREFILL, 255, 4, "4 bytes spilled, more than 0"),
        (DECODE, 255, 240, None),
        (DECODE, 255, 244, "244 bytes spilled, more than 240"),
        (CROWDED, 200, 0, None),
        (CROWDED, 201, 0, "201 registers, more than the 200 that 5 CTAs per SM leave"),
        (COMBINE, 255, 0, None),
        (SMALL, 64, 0, None),
        (SMALL, 65, 0, "65 registers, more than the 64 that 32 CTAs per SM leave"),
    ],
)
def test_a_kernel_that_needs_too_many_resources_fails_the_build(
    variant: Variant,
    registers: int,
    spilled: int,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = f"{spilled} bytes stack frame, {spilled} bytes spill stores\nptxas info: Used {registers} registers"
    monkeypatch.setattr(build, "VARIANTS", (COMBINE, variant))
    fine = "0 bytes spill stores\nUsed 32 registers"

    def compiled(one: Variant, folder: Path) -> str:
        assert not (folder / MANIFEST).exists(), "images must not change under an earlier manifest"
        for suffix in ("cubin", "ptx"):
            (folder / one.image(suffix)).write_text(one.image(suffix))
        return log if one is variant else fine

    monkeypatch.setattr(build, "build", compiled)
    (tmp_path / MANIFEST).write_text("{}")
    monkeypatch.setattr(sys, "argv", ["build", str(tmp_path)])
    assert build.main() == (said is not None)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert ("more than" in lines[1]) == (said is not None)
    assert (said or f"{registers} registers") in lines[1]
    assert (tmp_path / MANIFEST).exists() == (said is None), "without a manifest the launcher loads no image"


ALONE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "vllm", "triton", "pydantic", "fastattention_vllm"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
from kernels.volta import build
print(len(build.VARIANTS), flush=True)
build.VARIANTS = (build.VARIANTS[0],)
sys.argv = ["build", sys.argv[1]]
sys.exit(build.main())
"""


def test_kernels_are_compiled_with_nvrtc_alone(tmp_path: Path) -> None:
    """The build imports neither torch nor vLLM nor the package, and its output is what the launcher reads."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", ALONE, str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{len(build.VARIANTS)}\n")
    (variant,) = images.variants(tmp_path).values()
    assert variant.kernel == COMBINE.kernel
    assert images.read(tmp_path, variant, "cubin")[:4] == b"\x7fELF"


def test_the_wanted_ctas_fit_the_threads_of_an_sm() -> None:
    for variant in build.VARIANTS:
        assert build.max_registers(variant) >= 32, variant.name
