"""Changes a module when it is first imported, so that processes which never import it do not pay for it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def once_imported(name: str, change: Callable[[Any], None]) -> None:
    """Call ``change`` with the module: now if it is imported, otherwise when it is first imported."""
    if name in sys.modules:
        change(sys.modules[name])
    elif not any(isinstance(finder, _Watch) and finder.watches(name, change) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch(name, change))


class _Watch(MetaPathFinder):
    """Finds one module in the usual way, once, and changes it right after it has been executed."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self.name = name
        self.change = change

    def watches(self, name: str, change: Callable[[Any], None]) -> bool:
        return self.name == name and self.change is change

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
