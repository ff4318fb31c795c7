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

from fastattention_vllm import cli
from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.doctor import command, hardware, kernels, links, memory, nvidia, pci, report, software
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


def pretend(facts: report.Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe these facts instead of this machine."""
    for area in (hardware, software, kernels, memory, links):
        found = getattr(facts, area.__name__.rpartition(".")[2])
        monkeypatch.setattr(area, "probe", lambda *arguments, found=found: found)


def test_findings_are_printed_before_the_next_area_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = with_gpus(V100)
    pretend(facts, monkeypatch)
    printed: list[str] = []

    def measure() -> memory.Memory:
        printed.append(capsys.readouterr().out)
        return facts.memory

    monkeypatch.setattr(memory, "probe", measure)
    command.main([])
    (before,) = printed
    assert [line for line in before.splitlines() if line and line[0] != " "] == ["Hardware", "Software", "Kernels"]
    whole = "\n".join(report.as_text(report.findings(facts)))
    assert (before + capsys.readouterr().out).rstrip() == whole


def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fastattention", "--version"])
    cli.main()
    assert capsys.readouterr().out == f"fastattention-vllm {importlib.metadata.version('fastattention-vllm')}\n"


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
    pretend(facts, monkeypatch)
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
    monkeypatch.setattr(pci, "DEVICES", tmp_path / "pci")
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / name).touch()
    monkeypatch.setattr(hardware, "DEVICES", tmp_path)
    found = hardware.probe()
    assert found.cpu == "Fast CPU"
    assert hardware.instruction_sets(found.flags) == ["AVX2"]
    assert (found.pci_gpus, found.pci_npus, found.npus) == (1, 1, 2)


def sysfs(folder: Path, *devices: tuple[str, str], bound_to: str = "nvidia") -> Path:
    """/sys/bus/pci/devices with display devices of these vendors and device IDs."""
    driver = folder / "drivers" / bound_to
    driver.mkdir(parents=True)
    for index, (vendor, device) in enumerate(devices):
        path = folder / "devices" / f"0000:0{index}:00.0"
        path.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("device", device), ("class", "0x030200")):
            (path / name).write_text(text + "\n")
        (path / "driver").symlink_to(driver)
    return folder / "devices"


@pytest.mark.parametrize(
    ("devices", "volta", "t4"),
    [
        ([("0x10de", "0x1db6")], ("Tesla V100 PCIe 32GB",), ()),
        ([("0x10de", "0x1db1"), ("0x10de", "0x1db1")], ("Tesla V100 SXM2 16GB", "Tesla V100 SXM2 16GB"), ()),
        ([("0x10de", "0x1eb8")], (), ("Tesla T4",)),
        ([("0x8086", "0x1db6"), ("0x10de", "0x2330")], (), ()),
        ([], (), ()),
    ],
    ids=["V100", "two V100", "T4", "others", "none"],
)
def test_gpus_are_recognised_on_the_pci_bus(
    devices: list[tuple[str, str]],
    volta: tuple[str, ...],
    t4: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pci, "DEVICES", sysfs(tmp_path, *devices))
    monkeypatch.setattr(nvidia, "probe", lambda: None)
    found = hardware.probe()
    assert (found.pci_volta, found.pci_t4) == (volta, t4)


def test_a_gpu_of_a_virtual_machine_is_not_this_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pci, "DEVICES", sysfs(tmp_path, ("0x10de", "0x1db6"), bound_to="vfio-pci"))
    assert pci.named(pci.VOLTA) == ()


def test_a_driver_that_is_too_new_is_found_although_it_lists_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the files to the sentence."""
    monkeypatch.setattr(pci, "DEVICES", sysfs(tmp_path, ("0x10de", "0x1db5")))
    monkeypatch.setattr(nvidia, "probe", lambda: nvidia.Driver("595.71.05", (13, 2), ()))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (problem,) = (finding for finding in hardware.findings(hardware.probe()) if finding.level == "problem")
    assert problem.text == "a Tesla V100 SXM2 32GB is in this machine, but driver 595.71.05 does not support it"
    assert problem.fix == "Install a driver of branch 580, the last one for compute capability 7.0."


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
