"""Lets vLLM import the modules of Qwen3.5, text models included, where torchvision is missing.

Why: their module imports the image processor of Qwen2-VL, which imports a part of torchvision that it needs only to
process images. On PyPI, torchvision exists only as a build for CUDA, which cannot be imported beside a torch for CPUs.
Remove when: vLLM imports image processors for models with images only.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from fastattention_vllm.integration.serving.once_imported import import_within

IMPORTER = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
NEEDED = "torchvision.transforms.v2.functional"


def spare_torchvision() -> None:
    """Let ``IMPORTER`` be imported without torchvision. If torchvision is installed, nothing is changed."""
    if importlib.util.find_spec("torchvision") is None:
        import_within(IMPORTER, _empty_torchvision)


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
