"""kernels/volta/build.py: what its compiler's reports must not say."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fastattention_vllm.attention.volta import launch as volta_kernels
from fastattention_vllm.attention.volta.images import MANIFEST
from fastattention_vllm.attention.volta.launch import COMBINE, Variant
from kernels.volta import build

PREFILL, DECODE = volta_kernels.prefill(64), volta_kernels.decode(256, architecture=75)
CROWDED = replace(volta_kernels.decode(64), ctas_per_sm=5)
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
def test_a_kernel_that_takes_too_much_fails_the_build(
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
        assert not (folder / MANIFEST).exists(), "images change under an earlier manifest"
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
    assert (tmp_path / MANIFEST).exists() == (said is None), "without one the launcher takes no image"


def test_kernels_are_compiled_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from kernels.volta import build; print(len(build.VARIANTS))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout == f"{len(volta_kernels.VARIANTS)}\n", done.stderr


def test_no_more_ctas_are_wanted_than_an_sm_has_threads() -> None:
    for variant in volta_kernels.VARIANTS:
        assert build.most_registers(variant) >= 32, variant.name
