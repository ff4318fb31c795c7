from __future__ import annotations

from pathlib import Path

import pytest

from fastattention_vllm.integration import plugin
from fastattention_vllm.integration.refusal import Refusal


def test_the_entry_points_are_installed() -> None:
    from importlib.metadata import entry_points

    for group, function in (("vllm.general_plugins", plugin.register), ("vllm.platform_plugins", plugin.platform)):
        (entry,) = entry_points(group=group, name="fastattention")
        assert entry.load() is function


def test_the_platform_is_ours_without_an_accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plugin, "ACCELERATOR_DEVICES", (str(tmp_path / "nvidia[0-9]*"),))
    assert plugin.platform() == plugin.CPU_PLATFORM


def test_the_platform_steps_back_for_an_accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plugin, "ACCELERATOR_DEVICES", (str(tmp_path / "nvidia[0-9]*"),))
    (tmp_path / "nvidia0").touch()
    assert plugin.platform() is None


def test_vllm_resolves_its_platform_to_ours() -> None:
    from vllm.platforms import current_platform

    assert type(current_platform).__name__ == "FastAttentionCpuPlatform"
    assert current_platform.is_cpu()


def test_vllm_target_device_cpu_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    with pytest.raises(Refusal, match="unset VLLM_TARGET_DEVICE"):
        plugin.register()
