"""Models with images need no torchvision."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastattention_vllm.integration.cpu.stand_ins import vision
from fastattention_vllm.integration.cpu.stand_ins.video_settings import VideoSettings
from fastattention_vllm.integration.refusal import Refusal

TEXT = """
import sys, importlib.util
from fastattention_vllm.integration.cpu.stand_ins import vision
vision.spare_torchvision()
vision.spare_torchvision()
for name in vision.IMPORTERS:
    assert name not in sys.modules, "imported only when it is needed"
    assert sum(getattr(finder, "name", "") == name for finder in sys.meta_path) == 1
import transformers.models.gemma3.image_processing_gemma3
import transformers.models.qwen2_vl.image_processing_qwen2_vl as processing
assert processing.smart_resize
assert not any(name.startswith("torchvision") for name in sys.modules)
assert importlib.util.find_spec("torchvision") is None
"""


@pytest.mark.more
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_the_image_processors_are_imported_without_torchvision() -> None:
    subprocess.run([sys.executable, "-c", TEXT], check=True)


def test_an_installed_torchvision_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    before = list(sys.meta_path)
    vision.spare_torchvision()
    assert sys.meta_path == before


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_processor_holds_the_settings_of_videos_and_reads_none(tmp_path: Path) -> None:
    settings = {"size": {"shortest_edge": 784, "longest_edge": 1568}, "temporal_patch_size": 4, "fps": 3}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    vision.spare_torchvision()
    found = VideoSettings.from_pretrained(tmp_path)
    assert {name: getattr(found, name) for name in settings} == settings
    with pytest.raises(Refusal, match="videos are not supported on CPUs"):
        found(videos=[])


def test_another_transformers_is_left_alone() -> None:
    vision._load_settings_of_videos(SimpleNamespace())
