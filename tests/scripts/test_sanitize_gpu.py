"""scripts/sanitize_gpu.py with a fake compute-sanitizer whose output the tests define, because there is no GPU here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastattention_vllm.attention.volta import images as volta
from fastattention_vllm.bench import gpu
from kernels.volta.variants import VARIANTS
from scripts import sanitize_gpu

FAKE = """#!{python}
import json, pathlib, subprocess, sys
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(arguments) + "\\n")
images = pathlib.Path(arguments[arguments.index("-c") + 2])
broken = not any("bar.sync" in path.read_text() for path in images.iterdir())
said = json.loads({said!r})["broken" if broken else arguments[arguments.index("--tool") + 1]]
if said is None:
    done = subprocess.run(arguments[arguments.index("kns=fa_volta") + 1 :])
    said = done.returncode, "========= ERROR SUMMARY: 0 errors"
print(said[1])
sys.exit(said[0])
"""
PASSED = "36 passed, 608 deselected in 50.1s"
CLEAN = {
    "memcheck": (0, f"{PASSED}\n========= ERROR SUMMARY: 0 errors"),
    "racecheck": (0, f"{PASSED}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"),
}
SEEN = """4 failed in 9.9s
========= Error: Race reported between Write access at fa_volta_prefill+0x1230
========= Error: Race reported between Read access at fa_volta_decode+0x40
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"""
ALL_SEEN = CLEAN | {"broken": (1, SEEN)}
PTX = ".version 8.8\n\tbar.warp.sync \t-1;\n\tbar.sync \t0;\n@%p1 bra LBB;\n"
Said = dict[str, "tuple[int, str] | None"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a GPU and with compiled kernels."""
    images = tmp_path / "images"
    images.mkdir()
    for variant in VARIANTS:
        (images / variant.image("ptx")).write_text(PTX if variant.head_size else ".version 8.8\n")
        (images / variant.image("cubin")).write_bytes(b"\x7fELF")
    monkeypatch.setattr(volta, "IMAGES", images)
    monkeypatch.setattr(gpu, "why_not", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    (tmp_path / "bin").mkdir()
    return tmp_path


def install(machine: Path, said: Said) -> Path:
    """Install a compute-sanitizer that prints ``said`` for each tool; returns the log of its calls."""
    log, program = machine / "log", machine / "bin" / "compute-sanitizer"
    program.write_text(FAKE.format(python=sys.executable, log=str(log), said=json.dumps(said)))
    program.chmod(0o755)
    return log


def test_both_tools_and_the_self_check(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = install(machine, ALL_SEEN)
    assert sanitize_gpu.main(["--self-check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "memcheck: 36 passed, 608 deselected",
        "racecheck: 36 passed, 608 deselected",
        "racecheck without barriers: hazards",
    ]
    assert all(line.endswith("ok") for line in lines)
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one[one.index("--tool") + 1] for one in asked] == ["memcheck", "racecheck", "racecheck"]
    for one in asked:
        assert one[one.index("--target-processes") + 1] == "all"
        assert "tests/gpu/test_volta.py" in one
    log.unlink()
    assert sanitize_gpu.main(["-k", "decode"]) == 0
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one[-2:] for one in asked] == [["-k", "decode"]] * 2


@pytest.mark.parametrize(
    ("tool", "status", "output", "problem"),
    [
        ("memcheck", 0, f"{PASSED}\n========= ERROR SUMMARY: 3 errors", "3 REPORTED, see above"),
        ("racecheck", 0, f"{PASSED}\n========= RACECHECK SUMMARY: 1 hazard displayed", "1 REPORTED, see above"),
        ("memcheck", 1, "1 failed, 35 passed in 9s\n========= ERROR SUMMARY: 0 errors", "TESTS FAILED, see above"),
        ("memcheck", 0, "36 skipped in 1s\n========= ERROR SUMMARY: 0 errors", "TESTS FAILED, see above"),
        ("racecheck", 1, "Error: unknown option", "NO SUMMARY OF racecheck, see above"),
        (
            "broken",
            0,
            f"{PASSED}\n========= RACECHECK SUMMARY: 0 hazards displayed",
            "NOT REPORTED in fa_volta_prefill",
        ),
        ("broken", 1, SEEN.replace("fa_volta_decode", "fa_volta_other"), "NOT REPORTED in fa_volta_decode"),
    ],
)
def test_problems_are_recognised(
    tool: str, status: int, output: str, problem: str, machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(machine, ALL_SEEN | {tool: (status, output)})
    assert sanitize_gpu.main(["--self-check"]) == 1
    printed = capsys.readouterr().out
    assert problem in printed
    assert output in printed
    assert sum(line.endswith(" ok") for line in printed.splitlines()) == 2


def test_tests_that_do_not_run_are_a_failure(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real command without stand-ins: without a GPU all tests are skipped."""
    install(machine, ALL_SEEN | {"memcheck": None})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert sanitize_gpu.main(["-k", "every_fp16_number_is_cast"]) == 1
    printed = capsys.readouterr().out
    assert "8 skipped" in printed
    assert "no test passed" in printed


def test_broken_kernels_lack_only_the_barriers_of_the_block(machine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    sanitize_gpu.without_barriers(folder)
    expected = PTX.replace("bar.sync \t0;", "")
    for name in ("prefill_d64.sm_75.ptx", "decode_d128_int8.sm_70.cubin"):
        assert (folder / name).read_text() == expected
    assert (folder / "write_kv.sm_70.ptx").read_text() == ".version 8.8\n"
    (volta.IMAGES / "decode_d64.sm_70.ptx").write_text(expected)
    with pytest.raises(sanitize_gpu.CannotRun, match="the PTX of decode_d64 has no barrier"):
        sanitize_gpu.without_barriers(folder)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("compute-sanitizer", "compute-sanitizer is not on PATH; install the CUDA toolkit, which includes it."),
        ("GPU", "there is no NVIDIA GPU that torch can use."),
        ("kernels", "the Volta kernels are not built: there is no "),
    ],
)
def test_missing_requirements_are_named_in_one_sentence(
    missing: str, said: str, machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing == "compute-sanitizer":
        monkeypatch.setenv("PATH", str(machine / "bin"))
    else:
        install(machine, ALL_SEEN)
    if missing == "GPU":
        monkeypatch.setattr(gpu, "why_not", lambda: "there is no NVIDIA GPU that torch can use.")
    if missing == "kernels":
        (volta.IMAGES / "decode_d64.sm_75.ptx").unlink()
    assert sanitize_gpu.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"fastattention sanitize-gpu: {said}")


@pytest.mark.parametrize(
    ("chosen", "count"), [*zip(sanitize_gpu.CHOSEN, (9, 2, 9, 4), strict=True), (sanitize_gpu.BROKEN, 2)]
)
def test_the_selected_tests_exist(chosen: str, count: int) -> None:
    """Each selected test runs with the kernels of both architectures."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", sanitize_gpu.TESTS, "-k", chosen]
    done = subprocess.run(command, cwd=sanitize_gpu.ROOT, capture_output=True, text=True, check=False)
    names = [line for line in done.stdout.splitlines() if "::" in line]
    assert sum("[auto" in name for name in names) == sum("[ptx-sm_75" in name for name in names) == count, done.stdout
