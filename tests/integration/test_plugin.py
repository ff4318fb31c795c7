from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastattention_vllm.integration import plugin
from fastattention_vllm.integration.refusal import Refusal


def test_the_entry_points_are_installed() -> None:
    for group, function in (("vllm.general_plugins", plugin.register), ("vllm.platform_plugins", plugin.platform)):
        (entry,) = entry_points(group=group, name="fastattention")
        assert entry.load() is function


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose NPU device nodes are files of a folder, and on which vLLM finds what the test specifies."""
    monkeypatch.setattr(plugin, "NPU_DEVICES", (str(tmp_path / "davinci[0-9]*"),))
    return tmp_path


def found_by_vllm(monkeypatch: pytest.MonkeyPatch, **found: str | None) -> None:
    import vllm.platforms

    probes = {"cpu": lambda: "the CPU platform"} | {name: lambda path=path: path for name, path in found.items()}
    monkeypatch.setattr(vllm.platforms, "builtin_platform_plugins", probes)


def test_the_platform_is_ours_without_an_accelerator(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found_by_vllm(monkeypatch, cuda=None, rocm=None)
    assert plugin.platform() == plugin.CPU_PLATFORM


def test_the_platform_steps_back_for_an_npu(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found_by_vllm(monkeypatch, cuda=None)
    (devices / "davinci0").touch()
    assert plugin.platform() is None


def test_the_platform_steps_back_for_a_gpu_that_vllm_finds(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found_by_vllm(monkeypatch, cuda="the CUDA platform")
    assert plugin.platform() is None


def test_a_failing_probe_finds_nothing(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.platforms

    def fail() -> str:
        raise OSError("no driver")

    monkeypatch.setattr(vllm.platforms, "builtin_platform_plugins", {"cuda": fail})
    assert plugin.platform() == plugin.CPU_PLATFORM


@pytest.mark.parametrize(
    ("answer", "allowed", "stepped_back"),
    [
        (lambda: "theirs.Platform", None, True),
        (lambda: "theirs.Platform", "theirs", True),
        (lambda: "theirs.Platform", "fastattention", False),
        (lambda: None, None, False),
        (lambda: 1 / 0, None, False),
    ],
    ids=["finds its device", "is allowed", "is not allowed", "finds none", "fails"],
)
def test_the_platform_steps_back_for_another_platform_plugin(
    answer: Any, allowed: str | None, stepped_back: bool, devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM refuses to start if two platform plugins are active."""
    found_by_vllm(monkeypatch, cuda=None)
    if allowed is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    (own,) = entry_points(group=plugin.PLATFORM_GROUP, name="fastattention")
    theirs = SimpleNamespace(name="theirs", value="theirs:platform", load=lambda: answer)
    monkeypatch.setattr(plugin, "entry_points", lambda group: [own, theirs])
    assert (plugin.platform() is None) == stepped_back


def test_vllm_resolves_its_platform_to_ours() -> None:
    from vllm.platforms import current_platform

    assert type(current_platform).__name__ == "FastAttentionCpuPlatform"
    assert current_platform.is_cpu()


def test_vllm_target_device_cpu_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    with pytest.raises(Refusal, match="unset VLLM_TARGET_DEVICE"):
        plugin.register()
