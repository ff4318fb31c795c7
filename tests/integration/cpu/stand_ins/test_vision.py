"""The module of Qwen3.5 is imported without torchvision."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from fastattention_vllm.integration.cpu.stand_ins import vision

TEXT = """
import sys, importlib.util
from fastattention_vllm.integration.cpu.stand_ins import vision
vision.spare_torchvision()
vision.spare_torchvision()
assert vision.IMPORTER not in sys.modules, "imported only when it is needed"
assert sum(getattr(finder, "name", "") == vision.IMPORTER for finder in sys.meta_path) == 1
import transformers.models.qwen2_vl.image_processing_qwen2_vl as processing
assert processing.smart_resize
assert not any(name.startswith("torchvision") for name in sys.modules)
assert importlib.util.find_spec("torchvision") is None
"""


@pytest.mark.more
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_the_image_processor_is_imported_without_torchvision() -> None:
    subprocess.run([sys.executable, "-c", TEXT], check=True)


def test_an_installed_torchvision_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    before = list(sys.meta_path)
    vision.spare_torchvision()
    assert sys.meta_path == before
