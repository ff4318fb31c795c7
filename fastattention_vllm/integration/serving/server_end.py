"""Makes a server that is stopped inform its clients and end.

This closes two gaps in vLLM. Neither depends on the device or on this package's kernels.

``AsyncLLM.shutdown``, vLLM 0.19.1 to 0.33, stops the engine and cancels two tasks in the API server's event loop: first
the task that reads from the engine, which then reports that the engine is dead, and then the task that would pass this
report on to the requests. If the loop is late (a busy machine, a large step), it cancels both in the same iteration.
Then nothing is reported, the handlers of the requests in flight wait forever, and the server waits for their
connections. Remove this when vLLM's ``shutdown`` itself calls ``OutputProcessor.propagate_error``.

``uvicorn.Server.shutdown`` waits forever for a client that has stopped reading its stream, unless
``timeout_graceful_shutdown`` is set, which vLLM 0.19.1 to 0.33 does not do. Remove this when vLLM sets it.
"""

from __future__ import annotations

import functools
from typing import Any

from fastattention_vllm.integration.serving.once_imported import once_imported

GRACE_S = 3
"""Seconds for connections to close after the engine has ended. All that remains to be sent is an error message."""


def install() -> None:
    """Close both gaps in this process as soon as it imports the modules. Repeated calls are safe."""
    once_imported("vllm.v1.engine.async_llm", tell_requests)
    once_imported("uvicorn.server", limit_waiting)


def tell_requests(module: Any) -> None:
    """End all waiting requests with an error after ``AsyncLLM`` has shut down."""
    original = module.AsyncLLM.shutdown
    if hasattr(original, "_fastattention"):
        return

    @functools.wraps(original)
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        finally:
            # The task does not exist before the first request.
            handler = getattr(self, "output_handler", None)
            if handler is not None and not handler.get_loop().is_closed():
                error = module.EngineDeadError()
                handler.get_loop().call_soon_threadsafe(self.output_processor.propagate_error, error)

    shutdown._fastattention = True  # type: ignore[attr-defined]
    module.AsyncLLM.shutdown = shutdown


def limit_waiting(module: Any) -> None:
    """Limit the time that vLLM's servers wait for connections, if no limit is set. Other servers are not changed."""
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
