"""Makes a server whose engine has died exit with status 1 and one line that says which worker ended.

vLLM 0.19.1 to 0.33 stops such a server as if a user had stopped it: status 0, and a log that ends in tracebacks of the
processes that noticed. A supervisor that restarts failed services would not restart it.

The executor knows which worker ended, and it runs in the engine's process. That process leaves one line in a file for
its parent, the API server. Remove this when vLLM's server itself fails with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

from fastattention_vllm.integration.refusal import EngineEnded
from fastattention_vllm.integration.serving.once_imported import once_imported

UNKNOWN = "its process ended, and the log above has the error"

stopped: WeakSet[Any] = WeakSet()
"""Engine clients of this process that were stopped, so that the end of their engine is no failure."""


def install() -> None:
    """Change the modules in this process as soon as it imports them. Repeated calls are safe."""
    once_imported("vllm.v1.executor.multiproc_executor", watch_processes)
    once_imported("vllm.v1.executor.ray_executor_v2", watch_ray)
    once_imported("vllm.v1.engine.async_llm", note_stops)
    once_imported("uvicorn.server", fail_with_the_engine)


def watch_processes(module: Any) -> None:
    """Record which worker process ended before the executor ends the others."""
    _record_at_shutdown(module.MultiprocExecutor, ended_processes)


def watch_ray(module: Any) -> None:
    """Record which Ray worker ended before the executor ends the others."""
    _record_at_shutdown(module.RayExecutorV2, ended_ray_workers)


def _record_at_shutdown(executor: Any, ended: Callable[[Any], list[str]]) -> None:
    original = executor.shutdown
    if hasattr(original, "_fastattention"):
        return

    @functools.wraps(original)
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(self, "shutting_down", True):
            # The executor has to end whatever happens here.
            with contextlib.suppress(Exception):
                record(ended(self))
        original(self, *args, **kwargs)

    shutdown._fastattention = True  # type: ignore[attr-defined]
    executor.shutdown = shutdown


def ended_processes(executor: Any) -> list[str]:
    processes = [(worker.rank, worker.proc) for worker in getattr(executor, "workers", None) or []]
    return [
        f"worker {rank} on {socket.gethostname()} (process {process.pid}) {how(process.exitcode)}"
        for rank, process in processes
        if process.exitcode is not None
    ]


def how(exit_code: int) -> str:
    """How a process ended, from multiprocessing's exit code."""
    if exit_code >= 0:
        return f"ended with status {exit_code}"
    return f"was ended by {signal.Signals(-exit_code).name}"


def ended_ray_workers(executor: Any) -> list[str]:
    import ray

    workers = {worker.run_ref: worker for worker in executor.ray_worker_handles if worker.run_ref is not None}
    if not ray.is_initialized() or not workers:
        return []
    done, _ = ray.wait([*workers], num_returns=len(workers), timeout=0)
    if not done:
        return []
    nodes = {node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in ray.nodes()}
    return [f"worker {worker.rank} on {nodes[worker.node_id]} ended" for worker in map(workers.get, done) if worker]


def place(server: int) -> Path:
    """Where the engine leaves the reason for the server with this process id."""
    return Path(tempfile.gettempdir()) / f"fastattention-{os.getuid()}-{server}.end"


def record(reasons: list[str]) -> None:
    """Leave the reason to this process's parent. The first one counts: later ends follow from it."""
    if reasons:
        # O_EXCL: no link that another user may have put there is followed.
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(place(os.getppid()), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write("; ".join(reasons))


def take() -> str:
    """The reason that this process's engine left, which is then removed. Empty if there is none."""
    path = place(os.getpid())
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return ""
    with os.fdopen(descriptor) as file:
        text = file.read() if os.fstat(descriptor).st_uid == os.getuid() else ""
    with contextlib.suppress(OSError):
        path.unlink()
    return text


def note_stops(module: Any) -> None:
    """Remember which engine clients were stopped."""
    original = module.AsyncLLM.shutdown
    if hasattr(original, "_fastattention_notes"):
        return

    @functools.wraps(original)
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
        stopped.add(self)
        original(self, *args, **kwargs)

    shutdown._fastattention_notes = True  # type: ignore[attr-defined]
    module.AsyncLLM.shutdown = shutdown


def fail_with_the_engine(module: Any) -> None:
    """Fail when vLLM's server ends because its engine has died. Other servers are not changed."""
    original = module.Server.shutdown
    if hasattr(original, "_fastattention_fails"):
        return

    @functools.wraps(original)
    async def shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
        engine = getattr(getattr(self.config.app, "state", None), "engine_client", None)
        # vLLM stops the engine before the server if it was asked to end, and after it otherwise.
        died = engine is not None and engine not in stopped and engine.errored
        await original(self, *args, **kwargs)
        reason = take() if engine is not None else ""
        if died:
            raise EngineEnded(f"the server ended because the engine died: {reason or UNKNOWN}.")

    shutdown._fastattention_fails = True  # type: ignore[attr-defined]
    module.Server.shutdown = shutdown
