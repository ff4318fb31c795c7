"""Changes a module when it is first imported, so that processes which never import it do not pay for it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def once_imported(name: str, change: Callable[[Any], None]) -> None:
    """Call ``change`` with the module: now if it is imported, otherwise when it is first imported."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        _watch(_Watch(name, change))


def import_within(name: str, surroundings: Callable[[], AbstractContextManager[Any]]) -> None:
    """Execute the module in this context when it is first imported. Nothing happens if it is imported already."""
    if name not in sys.modules:
        _watch(_Watch(name, _unchanged, surroundings))


def _watch(watch: _Watch) -> None:
    if not any(isinstance(finder, _Watch) and vars(finder) == vars(watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, watch)


def _unchanged(module: ModuleType) -> None:
    pass


class _Watch(MetaPathFinder):
    """Finds one module in the usual way, once, and changes it right after it has been executed."""

    def __init__(
        self,
        name: str,
        change: Callable[[Any], None],
        surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.name = name
        self.change = change
        self.surroundings = surroundings

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with self.surroundings():
                    execute(module)
                self.change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
