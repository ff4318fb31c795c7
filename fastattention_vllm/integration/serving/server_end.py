"""Makes a server that is stopped inform its clients and end, without the messages of a failure.

This closes three gaps in vLLM. None depends on the device or on this package's kernels.

``AsyncLLM.shutdown``, vLLM 0.19.1 to 0.33, stops the engine and cancels two tasks in the API server's event loop: first
the task that reads from the engine, which then reports that the engine is dead, and then the task that would pass this
report on to the requests. If the loop is late (a busy machine, a large step), it cancels both in the same iteration.
Then nothing is reported, the handlers of the requests in flight wait forever, and the server waits for their
connections. Remove this when vLLM's ``shutdown`` itself calls ``OutputProcessor.propagate_error``.

If the loop is not late, the same task reports a stop as the death of the engine, with tracebacks: its own, and one of
each streamed request. Remove this when vLLM tells a stop from a death.

``uvicorn.Server.shutdown`` waits forever for a client that has stopped reading its stream, unless
``timeout_graceful_shutdown`` is set, which vLLM 0.19.1 to 0.33 does not do. Remove this when vLLM sets it.
"""

from __future__ import annotations

import asyncio
import functools
from http import HTTPStatus
from typing import Any
from weakref import WeakSet

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.serving.once_imported import once_imported

GRACE_S = 3
"""Seconds for connections to close after the engine has ended. All that remains to be sent is an error message."""
STOPPED = "The server was stopped before it had answered this request; send it again."

stopped: WeakSet[Any] = WeakSet()
"""Clients of engines that this process has stopped, so that the end of the engine is no failure."""


def install() -> None:
    """Close the gaps in this process as soon as it imports the modules. Repeated calls are safe."""
    once_imported("vllm.v1.engine.async_llm", tell_requests)
    once_imported("vllm.v1.engine.core_client", stop_reading)
    once_imported("uvicorn.server", limit_waiting)


def tell_requests(module: Any) -> None:
    """End all waiting requests with an error after ``AsyncLLM`` has shut down."""
    original = module.AsyncLLM.shutdown
    if hasattr(original, "_fastattention"):
        return

    @functools.wraps(original)
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
        if (client := getattr(self, "engine_core", None)) is not None:
            stopped.add(client)
        try:
            original(self, *args, **kwargs)
        finally:
            # The task does not exist before the first request.
            handler = getattr(self, "output_handler", None)
            if handler is not None and not handler.get_loop().is_closed():
                handler.get_loop().call_soon_threadsafe(self.output_processor.propagate_error, _error_of_a_stop(module))

    shutdown._fastattention = True  # type: ignore[attr-defined]
    module.AsyncLLM.shutdown = shutdown


def _error_of_a_stop(module: Any) -> Exception:
    """An error of two classes. The first passes unchanged through vLLM to the server, and the second one the server
    sends to the client without a traceback in the log.
    """
    expected = compat.generation_error()

    class ServerStopped(module.EngineDeadError, *([expected] if expected else [])):  # type: ignore[misc]
        CLIENT_MESSAGE = STOPPED  # what vLLM 0.33 sends for an EngineDeadError

        def __init__(self) -> None:
            Exception.__init__(self, STOPPED)
            self.status_code = HTTPStatus.SERVICE_UNAVAILABLE

    return ServerStopped()


def stop_reading(module: Any) -> None:
    """End the task that reads from a stopped engine as a cancelled task, and not as one that has failed."""
    original = module.AsyncMPClient.get_output_async
    if hasattr(original, "_fastattention"):
        return

    @functools.wraps(original)
    async def get_output_async(self: Any) -> Any:
        try:
            return await original(self)
        except module.EngineDeadError:
            if self in stopped:
                raise asyncio.CancelledError from None
            raise

    get_output_async._fastattention = True  # type: ignore[attr-defined]
    module.AsyncMPClient.get_output_async = get_output_async


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
