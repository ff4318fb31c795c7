"""Makes a server whose engine has died exit with status 1 and one line that says which worker ended.

vLLM 0.19.1 to 0.33 stops such a server as if a user had stopped it: status 0, and a log that ends in tracebacks of the
processes that noticed. A supervisor that restarts failed services would not restart it.

The executor knows which worker ended, and it runs in the engine's process. That process leaves one line in a pipe of
its parent, the API server, which it opens through /proc. The pipe has no name in a folder, so no other user can put
anything in its place. Remove this when vLLM's server itself fails with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing.connection
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from vllm.logger import init_logger

from fastattention_vllm.integration.refusal import EngineEnded
from fastattention_vllm.integration.serving.once_imported import once_imported

logger = init_logger("vllm.fastattention")

UNKNOWN = "its process ended, and the log above has the error"
PIPE = "FASTATTENTION_ENGINE_END"
"""The environment variable with the process, the descriptor, the device and the inode of a parent's pipe."""
MOST_BYTES = 1000
"""Of a reason. The pipe takes as many at once without a wait."""
NOTICE_S = 2.0
"""The other workers lose their connection to a worker a moment before its parent, or Ray, learns that it has ended."""

stopped: WeakSet[Any] = WeakSet()
"""Engine clients of this process that were stopped, so that the end of their engine is no failure."""


_inherited = os.environ.get(PIPE, "")
"""Where this process leaves a reason."""
_own: tuple[int, int] | None = None
"""This process, and the end of its pipe from which it reads."""


def install() -> None:
    """Change the modules in this process as soon as it imports them. Repeated calls are safe."""
    make_pipe()
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


def _record_at_shutdown(executor: Any, ended: Callable[[Any], str]) -> None:
    original = executor.shutdown
    if hasattr(original, "_fastattention"):
        return

    @functools.wraps(original)
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
        # vLLM 0.19.1 to 0.33: the default executor has no ``shutting_down`` before it shuts down, and no executor has
        # ``is_failed`` before its first lines have run.
        fails = getattr(self, "is_failed", False) or isinstance(sys.exc_info()[1], Exception)
        if fails and not getattr(self, "shutting_down", False):
            # The executor has to end whatever happens here.
            try:
                record(ended(self))
            except Exception:
                logger.exception("The worker that ended could not be determined.")
        original(self, *args, **kwargs)

    shutdown._fastattention = True  # type: ignore[attr-defined]
    executor.shutdown = shutdown


def ended_processes(executor: Any) -> str:
    """The worker process that ended first; empty if none did."""
    workers = {worker.proc.sentinel: worker for worker in getattr(executor, "workers", None) or []}
    if not workers:  # it could not start them
        return ""
    for sentinel in multiprocessing.connection.wait(workers, timeout=NOTICE_S):
        worker = workers[sentinel]
        # The sentinel is ready a little before the exit code is.
        worker.proc.join(NOTICE_S)
        where = f"on {socket.gethostname()} (process {worker.proc.pid})"
        return f"worker {worker.rank} {where} {how(worker.proc.exitcode)}"
    return ""


def how(exit_code: int | None) -> str:
    """How a process ended, from multiprocessing's exit code."""
    if exit_code is None:
        return "ended"
    if exit_code >= 0:
        return f"ended with status {exit_code}"
    return f"was ended by {signal.Signals(-exit_code).name}"


def ended_ray_workers(executor: Any) -> str:
    """The Ray worker that ended first; empty if none did."""
    import ray

    workers = {
        worker.run_ref: worker for worker in getattr(executor, "ray_worker_handles", ()) if worker.run_ref is not None
    }
    if not workers or not ray.is_initialized():
        return ""
    done, _ = ray.wait([*workers], num_returns=1, timeout=NOTICE_S)
    nodes = {node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in ray.nodes()}
    return "".join(f"worker {workers[ref].rank} on {nodes[workers[ref].node_id]} ended" for ref in done)


def make_pipe() -> None:
    """Tell the processes that this one will start where to leave a reason. Repeated calls are safe."""
    global _inherited, _own
    if _own is not None and _own[0] == os.getpid():
        return
    if _own is not None:  # forked from the process that made it
        _inherited = os.environ.get(PIPE, "")
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    found = os.fstat(writes)
    _own = os.getpid(), reads
    os.environ[PIPE] = f"{os.getpid()} {writes} {found.st_dev} {found.st_ino}"


def record(reason: str) -> None:
    """Leave the reason to this process's parent. The first one counts: later ends follow from it."""
    forked = _own is not None and _own[0] != os.getpid()
    text = os.environ.get(PIPE, "") if forked else _inherited
    if not reason or not text.startswith(f"{os.getppid()} "):
        return
    # A parent without this pipe, or another process that has its number now, gets none.
    with contextlib.suppress(OSError, ValueError):
        process, writes, *wanted = (int(word) for word in text.split())
        pipe = os.open(f"/proc/{process}/fd/{writes}", os.O_WRONLY | os.O_NONBLOCK)
        try:
            found = os.fstat(pipe)
            if stat.S_ISFIFO(found.st_mode) and [found.st_dev, found.st_ino] == wanted:
                os.write(pipe, reason.encode(errors="replace")[:MOST_BYTES] + b"\n")
        finally:
            os.close(pipe)


def take() -> str:
    """The first reason that this process's engine left. All are then removed. Empty if there is none."""
    try:
        left = os.read(_own[1], 1 << 16) if _own is not None and _own[0] == os.getpid() else b""
    except BlockingIOError:
        return ""
    return left.partition(b"\n")[0].decode(errors="replace")


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
            # The engine may have told before the executor found out which worker ended.
            deadline = time.monotonic() + 2 * NOTICE_S
            while not reason and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
                reason = take()
            raise EngineEnded(f"the server ended because the engine died: {reason or UNKNOWN}.")

    shutdown._fastattention_fails = True  # type: ignore[attr-defined]
    module.Server.shutdown = shutdown
