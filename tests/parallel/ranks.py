"""Processes that form the ranks of one gloo world and run tasks one after the other."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

SECONDS = 300.0
"""Timeout of a task, so that a hung rank fails the test and not the whole run. The first task includes the imports."""


class Ranks:
    """``size`` spawned processes, as a context manager that ends them whatever they are doing."""

    def __init__(self, size: int, timeout: float = 120.0) -> None:
        """``timeout``: seconds for which a rank waits for another in a sum."""
        self._directory = tempfile.TemporaryDirectory()
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = spawn.Pipe()
            store = str(Path(self._directory.name) / "store")
            process = spawn.Process(target=_rank, args=(theirs, rank, size, store, timeout), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def start(self, task: Callable[..., Any], *arguments: Any) -> None:
        """Start ``task(rank, *arguments)`` on every rank."""
        for pipe in self._pipes:
            pipe.send((task, arguments))

    def result(self, rank: int) -> Any:
        """The result of the task, or the exception that it raised.

        Raises:
            EOFError: The process has ended.
        """
        if not self._pipes[rank].poll(SECONDS):
            raise TimeoutError(f"rank {rank} did not answer within {SECONDS} s")
        return self._pipes[rank].recv()

    def run(self, task: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Results of all ranks. The first rank that raised fails the test, with its traceback."""
        self.start(task, *arguments)
        results = [self.result(rank) for rank in range(len(self._pipes))]
        for rank, result in enumerate(results):
            if isinstance(result, Raised):
                raise AssertionError(f"rank {rank}: {result.traceback}")
        return results

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._directory.cleanup()


class Raised:
    """An exception of a rank as text, because not every exception can be pickled."""

    def __init__(self, error: BaseException) -> None:
        self.kind = type(error).__name__
        self.message = str(error)
        self.traceback = "".join(traceback.format_exception(error))


def _rank(pipe: Connection, rank: int, size: int, store: str, timeout: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from fastattention_vllm.parallel.collective import open_collective
    from tests.parallel import tasks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    tasks.COLLECTIVE = open_collective([list(range(size))], "cpu", timeout)
    while True:
        task, arguments = pipe.recv()
        try:
            answer = task(rank, *arguments)
        except Exception as error:
            answer = Raised(error)
        pipe.send(answer)
