"""`fastattention doctor` on this machine, and its printed report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.doctor import command, hardware, kernels, links, memory, report, software
from fastattention_vllm.doctor.findings import Finding
from fastattention_vllm.placement import host_memory
from tests.doctor import machines
from tests.doctor.machines import CPU, H100, V100, with_gpus

WITHOUT_EXTRAS = """
import sys
for name in ("typer", "rich", "matplotlib", "numba", "vllm", "fastapi"):
    sys.modules[name] = None
from fastattention_vllm import cli
sys.argv = ["fastattention", *sys.argv[1:]]
cli.main()
"""


@pytest.fixture(scope="module")
def here() -> report.Facts:
    return report.probe()


def test_the_report_describes_this_machine(here: report.Facts) -> None:
    assert here.hardware.cores <= len(os.sched_getaffinity(0))
    assert here.hardware.flags
    assert here.software.torch == torch.__version__
    assert here.software.vllm == importlib.metadata.version("vllm")
    assert here.software.registered == software.PLUGIN_GROUPS
    assert here.kernels.isas[0] == cpu.isa()
    assert set(here.kernels.isas) == set(cpu.usable_isas())
    assert here.memory.total == psutil.virtual_memory().total
    if here.memory.bandwidth is None:
        assert here.memory.not_measured
    else:
        assert 1e8 < here.memory.bandwidth < 1e13


def test_the_doctor_runs_without_extras_and_without_vllm() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert set(found) == {"findings", "counts", "facts"}
    assert list(found["findings"]) == ["Hardware", "Software", "Kernels", "Host memory", "Links"]
    assert done.returncode == (1 if found["counts"]["problem"] else 0)
    assert found["facts"]["software"]["torch"] == torch.__version__
    every = [finding for area in found["findings"].values() for finding in area]
    assert {level: sum(one["level"] == level for one in every) for level in report.LEVELS} == found["counts"]


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        (CPU, 0),
        (with_gpus(V100), 1),
        (replace(CPU, memory=replace(CPU.memory, huge_pages="never")), 0),
    ],
    ids=["no finding", "problems", "a warning"],
)
def test_only_problems_make_the_exit_code_one(
    facts: report.Facts, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "probe", lambda: facts)
    assert command.main([]) == status
    text = capsys.readouterr().out
    assert command.main(["--json"]) == status
    as_json = json.loads(capsys.readouterr().out)
    first = as_json["findings"]["Hardware"][0]
    assert f"{first['subject']}: {first['text']}"[:60] in text


@pytest.mark.parametrize("facts", [CPU, with_gpus(V100), with_gpus(H100, H100), machines.ascend()], ids=range(4))
def test_lines_fit_a_terminal_of_80_columns(facts: report.Facts) -> None:
    found = report.findings(facts)
    commands = {finding.command for area in found.values() for finding in area if finding.command}
    for line in report.as_text(found):
        assert len(line) <= report.WIDTH or line.strip() in commands


def test_a_whole_report() -> None:
    found = {
        "Software": [
            Finding("OK", "torch", "2.13.0"),
            Finding(
                "problem",
                "vLLM",
                "not installed, " + "and that is a long story " * 4,
                "Install it.",
                "pip install vllm",
            ),
        ],
        "Links": [],
    }
    assert "\n".join(report.as_text(found)) == (
        "Software\n"
        "  OK       torch: 2.13.0\n"
        "  problem  vLLM: not installed, and that is a long story and that is a long\n"
        "           story and that is a long story and that is a long story\n"
        "           -> Install it.\n"
        "              pip install vllm\n"
        "\n"
        "1 problem and 0 warnings."
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tp", "1"], "--tp is 1; it must be at least 2"),
        (["--tp", "2", "--tokens", "8"], "--tokens is 8; it must be at least 256"),
        (["--tp", "2", "--limit", "0"], "--limit is 0; it must be at least 1"),
        (["--tp", "2", "--json"], "--json cannot be combined with --tp"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_processor_is_read_from_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor : 0\nmodel name : Fast CPU\nflags : avx2 fma f16c\n\nprocessor : 1\nmodel name : Fast CPU\n"
    )
    monkeypatch.setattr(hardware, "CPUINFO", cpuinfo)
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x10de", "0x040300"), ("c", "0x19e5", "0x120000")):
        (tmp_path / "pci" / name).mkdir(parents=True)
        (tmp_path / "pci" / name / "vendor").write_text(vendor + "\n")
        (tmp_path / "pci" / name / "class").write_text(kind + "\n")
    monkeypatch.setattr(hardware, "PCI", tmp_path / "pci")
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / name).touch()
    monkeypatch.setattr(hardware, "DEVICES", tmp_path)
    found = hardware.probe()
    assert found.cpu == "Fast CPU"
    assert hardware.instruction_sets(found.flags) == ["AVX2"]
    assert (found.pci_gpus, found.pci_npus, found.npus) == (1, 1, 2)


def test_too_little_memory_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1 << 30)
    assert memory.measure() == (None, 0, "too little memory is free")


def test_images_are_checked_one_architecture_at_a_time(tmp_path: Path) -> None:
    found = kernels.probe(tmp_path)
    assert set(found.image_errors) == {70, 75}
    assert all("The Volta kernels are not built" in text for text in found.image_errors.values())


def test_links_need_gpus_that_torch_can_use() -> None:
    assert links.probe(CPU.hardware) == links.Links()
    assert links.probe(with_gpus(H100).hardware) == links.Links(not_measured="torch cannot use the GPUs")
