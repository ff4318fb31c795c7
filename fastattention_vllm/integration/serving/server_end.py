"""A server that is told to end tells its clients, and ends.

Two gaps of vLLM are closed here. Neither has to do with the device or with this package's kernels.

``AsyncLLM.shutdown``, vLLM 0.19.1 to 0.33: it stops the engine, and two tasks are cancelled in the API server's event
loop: first the one that reads from the engine, which answers by passing on that the engine is dead, and then the one
that would take this message to the requests. Where the loop is late (a busy machine, a large step) it cancels both in
the same turn. Nobody is told then, the handlers of the requests in flight wait for ever, and so does the server, for
their connections to close. Remove when vLLM's ``shutdown`` itself calls ``OutputProcessor.propagate_error``.

``uvicorn.Server.shutdown``: without ``timeout_graceful_shutdown``, which vLLM 0.19.1 to 0.33 does not set, it waits for
ever for a client that has stopped reading its stream. Remove when vLLM sets it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

GRACE_S = 3
"""Seconds that connections have to close once the engine is gone; what was left to send is an error message."""


def install() -> None:
    """Close both gaps in this process, as soon as it imports the modules. Safe to call again and again."""
    once_imported("vllm.v1.engine.async_llm", tell_requests)
    once_imported("uvicorn.server", limit_waiting)


def tell_requests(module: Any) -> None:
    """End the requests that still wait when ``AsyncLLM`` has been shut down."""
    original = module.AsyncLLM.shutdown
    if hasattr(original, "_fastattention"):
        return

    @functools.wraps(original)
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        finally:
            # There is no such task before the first request.
            handler = getattr(self, "output_handler", None)
            if handler is not None and not handler.get_loop().is_closed():
                error = module.EngineDeadError()
                handler.get_loop().call_soon_threadsafe(self.output_processor.propagate_error, error)

    shutdown._fastattention = True  # type: ignore[attr-defined]
    module.AsyncLLM.shutdown = shutdown


def limit_waiting(module: Any) -> None:
    """Give vLLM's servers a limit for open connections, where nobody has set one. Others' servers are left alone."""
    original = module.Server.shutdown
    if hasattr(original, "_fastattention"):
        return

    @functools.wraps(original)
    async def shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
        ends_vllm = hasattr(getattr(self.config.app, "state", None), "engine_client")
        if ends_vllm and self.config.timeout_graceful_shutdown is None:
            self.config.timeout_graceful_shutdown = GRACE_S
        await original(self, *args, **kwargs)

    shutdown._fastattention = True  # type: ignore[attr-defined]
    module.Server.shutdown = shutdown


def once_imported(name: str, change: Callable[[Any], None]) -> None:
    """Call ``change`` with the module: now if it is there, else when it is first imported.

    Importing it here would cost every worker process a second and a half for what only the API server needs.
    """
    if name in sys.modules:
        change(sys.modules[name])
    elif not any(isinstance(finder, _Watch) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch(name, change))


class _Watch(MetaPathFinder):
    """Finds one module as everyone else would, once, and has it changed as soon as it has been executed."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self.name = name
        self.change = change

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
