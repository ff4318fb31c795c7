"""Import vllm-ascend's genuine worker and model runner without CANN's Python packages and without torchvision.

Worker and runner import both, but only use them in parts that these tests do not reach.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

ABSENT = ("acl", "torchvision")


class _Stub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook: modules in which every name is an empty class."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)

        def attribute(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _import() -> tuple[Any, Any]:
    # Transformers looks for torchvision and uses it, so it is imported before the stub is installed.
    import transformers.image_utils
    import transformers.processing_utils  # noqa: F401

    stub = _Stub()
    sys.meta_path.append(stub)
    try:
        import vllm_ascend.ops  # noqa: F401  before attention_v1: they import each other
        from vllm_ascend.worker.model_runner_v1 import NPUModelRunner
        from vllm_ascend.worker.worker import NPUWorker
    finally:
        sys.meta_path.remove(stub)
    return NPUWorker, NPUModelRunner


NPUWorker, NPUModelRunner = _import()
