"""Lets models with images run where torchvision is missing, text-only use of them included.

Why: vLLM's modules of Qwen-VL, Qwen3.5 and Gemma-3 import image processors, which import a part of torchvision. They
need it for their own code only, and transformers has the same processors with Pillow and numpy. On PyPI, torchvision
exists only as a build for CUDA, which cannot be imported beside a torch for CPUs.
Remove when: vLLM imports the processors that transformers chooses.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from fastattention_vllm.integration.serving.once_imported import import_within, once_imported

IMPORTERS = (
    "transformers.models.gemma3.image_processing_gemma3",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl",
)
NEEDED = "torchvision.transforms.v2.functional"
PROCESSORS = "transformers.processing_utils"
VIDEO_SETTINGS = ("fastattention_vllm.integration.cpu.stand_ins.video_settings", "VideoSettings")


def spare_torchvision() -> None:
    """Let images be processed without torchvision. If torchvision is installed, nothing is changed.

    Transformers chooses its own image processors of Pillow and numpy then, and has no processors of videos.
    """
    if importlib.util.find_spec("torchvision") is None:
        for name in IMPORTERS:
            import_within(name, _empty_torchvision)
        once_imported(PROCESSORS, _load_settings_of_videos)


def _load_settings_of_videos(processors: Any) -> None:
    """Let a processor of images, videos and text be loaded: its video part becomes ``VIDEO_SETTINGS``."""
    mapping = getattr(processors, "MODALITY_TO_AUTOPROCESSOR_MAPPING", None)
    if not hasattr(mapping, "_MAPPING_NAMES") or not hasattr(processors, "MODALITY_TO_BASE_CLASS_MAPPING"):
        return  # Another transformers. It says itself that it needs torchvision.
    processors.MODALITY_TO_AUTOPROCESSOR_MAPPING._MAPPING_NAMES["video_processor"] = VIDEO_SETTINGS
    processors.MODALITY_TO_BASE_CLASS_MAPPING["video_processor"] = "BaseImageProcessor"


@contextmanager
def _empty_torchvision() -> Iterator[None]:
    """Empty modules in torchvision's place. They vanish again, so that transformers knows that there is none."""
    parts = NEEDED.split(".")
    names = [".".join(parts[: count + 1]) for count in range(len(parts))]
    modules = {name: ModuleType(name) for name in names}
    for name in names[1:]:
        package, _, child = name.rpartition(".")
        setattr(modules[package], child, modules[name])
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name)
