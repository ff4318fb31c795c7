"""The doctor's findings on typical machines. They are pure functions of facts, so no such machine is needed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from fastattention_vllm.doctor import report
from fastattention_vllm.doctor.findings import Finding
from fastattention_vllm.doctor.kernels import Kernels
from fastattention_vllm.doctor.links import HostLink, Links, PeerLink
from fastattention_vllm.doctor.nvidia import Driver
from fastattention_vllm.doctor.report import Facts
from fastattention_vllm.doctor.software import has_code
from tests.doctor import machines
from tests.doctor.machines import (
    CODE_CU128,
    CODE_CU130,
    CPU,
    GIB,
    H100,
    RTX_4090,
    T4,
    V100,
    as_the_extra_volta,
    with_gpus,
)

OTHER_CODE = "The Volta kernels in lib/volta were compiled from other sources than src has now (a.cu); run `make volta`"
V100_COMMAND = "pip install torch==2.10.0 vllm==0.19.1"


def changed(facts: Facts, part: str, **changes: Any) -> Facts:
    return replace(facts, **{part: replace(getattr(facts, part), **changes)})


def bad(facts: Facts) -> list[tuple[str, Finding]]:
    """Each finding that is not OK, with its area."""
    found = report.findings(facts)
    return [(area, finding) for area, every in found.items() for finding in every if finding.level != "OK"]


def only(facts: Facts) -> Finding:
    """The one finding that is not OK."""
    found = bad(facts)
    assert len(found) == 1, found
    return found[0][1]


def text_of(facts: Facts) -> str:
    return " ".join(" ".join(report.as_text(report.findings(facts))).split())


HEALTHY = {
    "CPU server": (CPU, "this package's CPU kernels, instruction set avx2; usable here: avx2, scalar"),
    "V100": (
        as_the_extra_volta(with_gpus(V100, driver="535.183.01", cuda=(12, 2), rate=12e9)),
        "GPU 0: this package's kernels, machine code for sm_70; tested on a simulated V100, not yet run on hardware",
    ),
    "T4": (
        as_the_extra_volta(with_gpus(T4, rate=12e9)),
        "GPU 0: this package's kernels, machine code for sm_75; tested through their PTX on a newer GPU, not yet run",
    ),
    "T4 with a newer torch": (with_gpus(T4, rate=12e9), "with code for compute capability 7.5"),
    "RTX 4090": (
        with_gpus(RTX_4090),
        "GPU 0: vLLM's FlashAttention (compute capability 8.9 is 8.0 or newer); this package adds host layers",
    ),
    "H100": (with_gpus(H100), "NVIDIA H100 80GB HBM3, compute capability 9.0, 80 GiB"),
    "two H100": (with_gpus(H100, H100), "GPUs 0-1: 200.0 GB/s, directly (P2P)"),
    "Ascend": (
        machines.ascend("2.10.0.post4", "0.23.0"),
        "NPU: torch_npu's fused attention; not yet run on hardware",
    ),
}


@pytest.mark.parametrize("machine", HEALTHY)
def test_a_well_configured_machine_has_no_problem(machine: str) -> None:
    facts, sentence = HEALTHY[machine]
    assert not bad(facts)
    assert sentence in text_of(facts)
    assert text_of(facts).endswith("No problems.")


PROBLEMS = {
    "no vLLM": (
        changed(CPU, "software", vllm=None),
        "vLLM: not installed, so nothing can be served; fast_attn_func works without it",
        "VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.32.0 pip install --no-binary vllm vllm==0.32.0",
    ),
    "vLLM too new": (
        changed(CPU, "software", vllm="0.34.0"),
        r"vLLM: 0\.34\.0 is newer than what this plugin supports \(>=0\.19\.1, <0\.34\) -> Install a supported version",
        "vllm==0.32.0",
    ),
    "vLLM too old": (
        changed(with_gpus(H100), "software", vllm="0.18.0"),
        r"vLLM: 0\.18\.0 is older than what this plugin supports",
        "pip install vllm==0.23.0",
    ),
    "another torch than vLLM's": (
        changed(with_gpus(H100), "software", torch="2.10.0+cu130"),
        r"torch: vLLM 0\.23\.0 needs torch==2\.11\.0, but 2\.10\.0\+cu130 is installed",
        "pip install vllm==0.23.0",
    ),
    "torch without CUDA": (
        changed(with_gpus(H100), "software", torch="2.11.0+cpu", torch_cuda=None, torch_code=()),
        r"torch: 2\.11\.0\+cpu, built for CPUs, so it cannot use the GPU -> Install a torch for CUDA",
        "pip install vllm==0.23.0",
    ),
    "driver too old for torch": (
        with_gpus(H100, driver="550.90.07", cuda=(12, 4)),
        r"NVIDIA driver: it supports CUDA 12\.4, torch needs 13\.0 -> Install a newer driver, or a torch for CUDA 12",
        "",
    ),
    "driver that does not start": (
        changed(CPU, "hardware", driver=Driver("580.1", (13, 0), (), "the driver does not start: x"), pci_gpus=1),
        "NVIDIA GPU: 1 on the PCI bus, but the driver does not start: x -> Run `nvidia-smi`",
        "",
    ),
    "plugin not registered": (
        changed(CPU, "software", registered=()),
        "plugin: vLLM does not find it: no entry point in vllm.general_plugins and vllm.platform_plugins",
        "",
    ),
    "plugin excluded": (
        changed(CPU, "software", allowed_plugins="lora_filesystem_resolver"),
        "plugin: VLLM_PLUGINS=lora_filesystem_resolver excludes it -> Unset VLLM_PLUGINS, or add fastattention to it",
        "",
    ),
    "VLLM_TARGET_DEVICE left over": (
        changed(CPU, "software", target_device="cpu"),
        "plugin: VLLM_TARGET_DEVICE=cpu makes vLLM ignore it -> Unset VLLM_TARGET_DEVICE",
        "",
    ),
    "library not built": (
        replace(CPU, kernels=Kernels((), "The CPU kernel library is not built: looked at lib.")),
        "CPU: The CPU kernel library is not built: looked at lib -> Install fastattention-vllm again",
        "",
    ),
    "images of another version": (
        replace(as_the_extra_volta(with_gpus(V100)), kernels=Kernels(("avx2",), "", 78, {70: OTHER_CODE})),
        "GPU 0: The Volta kernels in lib/volta were compiled from other sources than src has now",
        "",
    ),
    "small container": (
        changed(CPU, "memory", cgroup_left=2 * GIB),
        r"amount: a control group allows 2\.0 GiB more, although 100\.0 GiB are free; vLLM takes about 3 GiB .*"
        "-> Start the container with a higher limit, as in `docker run --memory 32g`",
        "",
    ),
    "vllm-ascend of another version": (
        machines.ascend("2.7.1", "0.13.0"),
        r"vllm-ascend: 0\.13\.0; this plugin was checked against 0\.23\.0 -> Install 0\.23\.0",
        "pip install vllm==0.23.0 vllm-ascend==0.23.0",
    ),
    "NPUs without a driver": (
        changed(machines.ascend("2.10.0", "0.23.0"), "hardware", npus=0),
        "Ascend NPU: 8 on the PCI bus, but there is no /dev/davinci[*] -> Install Huawei's driver and firmware",
        "",
    ),
}


@pytest.mark.parametrize("machine", PROBLEMS)
def test_each_problem_is_named_with_its_fix(machine: str) -> None:
    facts, sentence, command = PROBLEMS[machine]
    found = only(facts)
    assert found.level == "problem"
    assert re.search(sentence, text_of(facts)), text_of(facts)
    assert found.fix or "run `make volta`" in found.text
    assert found.command.endswith(command) if command else not found.command
    assert text_of(facts).endswith("1 problem and 0 warnings.")


def test_a_v100_with_a_torch_that_has_no_code_for_it() -> None:
    found = [finding for _, finding in bad(with_gpus(V100, rate=12e9))]
    assert [finding.subject for finding in found] == ["torch", "vLLM"]
    torch, vllm = found
    assert "has no code for compute capability 7.0; it has code for sm_75" in torch.text
    assert (
        torch.fix == "Install torch 2.10.0 (CUDA 12.8) and vLLM 0.19.1, the last wheels on PyPI with code for the V100."
    )
    assert "wheels after 0.19.1 have no code for the V100" in vllm.text
    assert torch.command == vllm.command == V100_COMMAND
    assert {finding.level for finding in found} == {"problem"}


V100_ON_THE_BUS = ("Tesla V100 SXM2 32GB",)


@pytest.mark.parametrize(
    ("version", "error", "supported"),
    [
        ("580.82.07", "", True),
        ("535.183.01", "", True),
        ("590.44.01", "", False),
        ("595.71.05", "the driver does not start: unknown error (CUDA error 999)", False),
        ("", "", True),
    ],
)
def test_a_driver_that_dropped_the_v100_is_named(version: str, error: str, supported: bool) -> None:
    driver = Driver(version, (13, 2), (), error)
    facts = changed(
        as_the_extra_volta(CPU), "hardware", driver=driver, pci_gpus=1, pci_volta=V100_ON_THE_BUS, visible_gpus=None
    )
    text = f"a Tesla V100 SXM2 32GB is in this machine, but driver {version} does not support it"
    problems = [finding for _, finding in bad(facts) if "driver" in finding.subject]
    assert [finding.text for finding in problems] == ([] if supported else [text])
    if not supported:
        assert problems[0].fix == "Install a driver of branch 580, the last one for compute capability 7.0."
        assert "no GPU here needs them" not in text_of(facts)
        vllm = next(
            finding for _, finding in bad(changed(facts, "software", vllm="0.23.0")) if finding.subject == "vLLM"
        )
        assert vllm.command == V100_COMMAND


def test_a_newer_gpu_beside_a_v100_still_counts() -> None:
    """The newer driver runs it, and vLLM is judged for it alone."""
    facts = changed(with_gpus(H100, driver="595.71.05"), "hardware", pci_gpus=2, pci_volta=V100_ON_THE_BUS)
    assert only(facts).text == "a Tesla V100 SXM2 32GB is in this machine, but driver 595.71.05 does not support it"
    assert "NVIDIA H100 80GB HBM3, compute capability 9.0" in text_of(facts)


def test_a_v100_without_a_driver_is_named_with_the_branch_to_install() -> None:
    found = only(changed(CPU, "hardware", pci_gpus=1, pci_volta=V100_ON_THE_BUS))
    assert found.text == "1 on the PCI bus (Tesla V100 SXM2 32GB), but no NVIDIA driver is visible"
    assert found.fix.startswith("Install NVIDIA's driver of branch 580 or older; in a container")
    t4 = only(changed(CPU, "hardware", pci_gpus=1, pci_t4=("Tesla T4",)))
    assert (t4.text.partition(",")[0], t4.fix.partition(";")[0]) == (
        "1 on the PCI bus (Tesla T4)",
        "Install NVIDIA's driver",
    )


def test_a_v100_is_not_told_to_install_a_newer_driver_than_it_has() -> None:
    facts = with_gpus(V100, driver="535.183.01", cuda=(12, 2), rate=12e9)
    driver = next(finding for _, finding in bad(facts) if finding.subject == "NVIDIA driver")
    assert driver.fix == "Install a driver of branch 580, or a torch for CUDA 12."


def test_a_vllm_without_gpu_kernels() -> None:
    vllm, kernels = (finding for _, finding in bad(changed(with_gpus(RTX_4090), "software", vllm_flash=False)))
    assert (vllm.level, vllm.text) == ("problem", "0.23.0 contains no GPU kernels")
    assert vllm.fix == "Install the wheel with CUDA, or set CUDA_VISIBLE_DEVICES= (empty) to use the CPU alone."
    assert vllm.command == "pip install vllm==0.23.0"
    assert kernels.level == "warning"


def test_a_vllm_built_from_source_may_have_code_for_the_v100() -> None:
    facts = changed(as_the_extra_volta(with_gpus(V100, rate=12e9)), "software", vllm="0.23.0+cu126", vllm_torch="")
    assert only(facts).level == "warning"


def test_images_for_another_gpu_do_not_matter() -> None:
    kernels = Kernels(("avx2",), "", 78, {75: OTHER_CODE})
    assert not bad(replace(as_the_extra_volta(with_gpus(V100, rate=12e9)), kernels=kernels))
    assert only(replace(as_the_extra_volta(with_gpus(T4, rate=12e9)), kernels=kernels)).subject == "GPU 0"
    assert not bad(replace(with_gpus(H100), kernels=kernels))
    assert "the compiled kernels are missing or outdated; no GPU here needs them" in text_of(
        replace(with_gpus(H100), kernels=kernels)
    )


def test_an_ascend_host_without_torch_npu() -> None:
    found = [finding for _, finding in bad(machines.ascend())]
    assert [(finding.level, finding.subject) for finding in found] == [
        ("problem", "torch_npu"),
        ("problem", "vllm-ascend"),
        ("problem", "NPU"),
    ]
    assert found[0].command == "pip install vllm==0.23.0 vllm-ascend==0.23.0"


def test_no_vllm_on_a_newer_gpu_leaves_pytorchs_attention() -> None:
    vllm, kernels = (finding for _, finding in bad(changed(with_gpus(H100), "software", vllm=None, vllm_flash=False)))
    assert (vllm.level, vllm.command) == ("problem", "pip install vllm==0.23.0")
    assert kernels.level == "warning"
    assert kernels.text.startswith("PyTorch's FlashAttention in fast_attn_func")


WARNINGS = {
    "CPU without AVX2": (
        changed(CPU, "hardware", flags=frozenset(["sse4_2", "avx"])),
        "it has no AVX2, so attention runs on portable code, several times slower",
    ),
    "no fast kernels": (
        replace(CPU, kernels=Kernels(("scalar",), "", 78)),
        "instruction set scalar: portable code, several times slower",
    ),
    "GPU without a driver": (
        changed(CPU, "hardware", pci_gpus=2),
        "2 on the PCI bus, but no NVIDIA driver is visible",
    ),
    "Pascal": (
        changed(with_gpus(machines.GTX_1080), "hardware", pci_gpus=1),
        "no kernels: compute capability 6.1 is below 7.0 (V100)",
    ),
    "little memory": (changed(CPU, "memory", available=6 * GIB), "6.0 GiB free of 128.0 GiB, enough for models of"),
    "no huge pages": (changed(CPU, "memory", huge_pages="never"), "turned off, which makes long contexts"),
    "small /dev/shm": (changed(CPU, "memory", shared=64 << 20), "64 MiB, too little for tensor parallelism"),
    "no /dev/shm": (changed(CPU, "memory", shared=None), "missing, so tensor parallelism will not start"),
    "bandwidth not measured": (
        changed(CPU, "memory", bandwidth=None, not_measured="too little memory is free"),
        "not measured: too little memory is free",
    ),
    "a busy machine": (changed(CPU, "memory", load=20.0), "measured while other programs ran (load 20)"),
    "few lanes": (
        replace(with_gpus(RTX_4090), links=Links((HostLink(0, 6e9, 6e9, 4, 16),))),
        "6.0 GB/s from host memory, 6.0 GB/s to it; 4 of 16 PCIe lanes in use",
    ),
    "slow link": (replace(with_gpus(RTX_4090), links=Links((HostLink(0, 5e9, 12e9),))), "slow for host layers"),
    "link not measured": (
        replace(with_gpus(RTX_4090), links=Links(not_measured="torch cannot use the GPUs")),
        "not measured: torch cannot use the GPUs",
    ),
    "copy that failed": (
        replace(with_gpus(RTX_4090), links=Links(errors={0: "out of memory"})),
        "not measured: out of memory",
    ),
}


@pytest.mark.parametrize("machine", WARNINGS)
def test_slow_parts_are_warnings(machine: str) -> None:
    facts, sentence = WARNINGS[machine]
    found = only(facts)
    assert found.level == "warning"
    assert sentence in found.text


def test_quotas_and_hidden_gpus_are_reported() -> None:
    assert "16 cores, of which a control group allows the time of 3;" in text_of(changed(CPU, "hardware", quota=3))
    hidden = changed(CPU, "hardware", driver=Driver("580.1", (13, 0), ()), visible_gpus="", pci_gpus=1)
    assert not bad(hidden)
    assert "GPU: none: CUDA_VISIBLE_DEVICES= hides all" in text_of(hidden)
    assert not bad(changed(hidden, "hardware", visible_gpus=None))


def test_gpus_without_p2p_get_a_hint_about_tiling() -> None:
    facts = replace(with_gpus(RTX_4090, RTX_4090), links=Links(peers=(PeerLink((0, 1), False, 11e9),)))
    assert "GPUs 0-1: 11.0 GB/s through host memory: no P2P; with tensor parallelism, try" in text_of(facts)


@pytest.mark.parametrize(
    ("code", "capability", "runs"),
    [
        (CODE_CU128, (7, 0), True),
        (CODE_CU130, (7, 0), False),
        (CODE_CU130, (7, 5), True),
        (CODE_CU130, (8, 9), True),
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),
        (("compute_80",), (9, 0), True),
        (("compute_80",), (7, 5), False),
        (("sm_90a",), (10, 0), False),
        (CODE_CU130, (12, 1), True),
        ((), (9, 0), False),
    ],
)
def test_machine_code_runs_within_its_major_version_and_ptx_on_newer_gpus(
    code: tuple[str, ...], capability: tuple[int, int], runs: bool
) -> None:
    assert has_code(code, capability) is runs
