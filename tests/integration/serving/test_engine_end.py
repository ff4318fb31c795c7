"""A server whose engine has died fails with the worker that ended; a server that is stopped does not fail."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastattention_vllm.integration.refusal import EngineEnded, sentence
from fastattention_vllm.integration.serving import engine_end


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_end.tempfile, "gettempdir", lambda: str(tmp_path))
    # The engine's process and the server's are one here.
    monkeypatch.setattr(engine_end.os, "getppid", os.getpid)
    monkeypatch.setattr(engine_end, "NOTICE_S", 0.5)


class Executor:
    def __init__(self, *processes: Any, is_failed: bool = True) -> None:
        self.workers = [SimpleNamespace(rank=rank, proc=process) for rank, process in enumerate(processes)]
        self.is_failed = is_failed
        self.shutting_down = False

    def shutdown(self) -> None:
        self.shutting_down = True
        for worker in self.workers:
            worker.proc.kill()
            worker.proc.join()


@pytest.fixture
def executor() -> Any:
    own: Any = type("Own", (Executor,), {"shutdown": Executor.shutdown})
    for _ in range(2):
        engine_end.watch_processes(SimpleNamespace(MultiprocExecutor=own))
    processes = [multiprocessing.get_context("spawn").Process(target=time.sleep, args=(100,)) for _ in range(2)]
    for process in processes:
        process.start()
    made = own(*processes)
    yield made
    Executor.shutdown(made)


def test_the_worker_that_was_killed_is_named(executor: Any) -> None:
    executor.workers[1].proc.kill()
    executor.shutdown()
    assert executor.shutting_down
    pid = executor.workers[1].proc.pid
    assert engine_end.take() == f"worker 1 on {os.uname().nodename} (process {pid}) was ended by SIGKILL"
    assert engine_end.take() == ""


def test_the_worker_is_named_if_another_one_notices_its_end_first(executor: Any) -> None:
    executor.is_failed = False
    executor.workers[0].proc.terminate()
    try:
        raise RuntimeError("a worker lost its connection")
    except RuntimeError:
        executor.shutdown()
    assert "worker 0" in engine_end.take()


def test_a_regular_end_leaves_no_reason(executor: Any) -> None:
    executor.is_failed = False
    executor.shutdown()
    assert engine_end.take() == ""


def test_a_later_end_does_not_replace_the_reason() -> None:
    engine_end.record("the first")
    engine_end.record("the second")
    assert engine_end.take() == "the first"


def test_a_link_is_neither_followed_nor_read(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("of someone else")
    engine_end.place(os.getpid()).symlink_to(tmp_path / "other")
    engine_end.record("ours")
    assert engine_end.take() == ""
    assert (tmp_path / "other").read_text() == "of someone else"


def test_exit_codes_are_explained() -> None:
    assert engine_end.how(3) == "ended with status 3"
    assert engine_end.how(-signal.SIGTERM) == "was ended by SIGTERM"
    assert engine_end.how(None) == "ended"


class Ray:
    """Ray's functions, as far as they are used."""

    def __init__(self, *ended: str) -> None:
        self.ended = ended

    def is_initialized(self) -> bool:
        return True

    def wait(self, refs: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        done = [ref for ref in refs if ref in self.ended][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def nodes(self) -> list[dict[str, str]]:
        return [
            {"NodeID": f"id{n}", "NodeManagerHostname": f"node{n}", "NodeManagerAddress": f"10.0.0.{n}"} for n in (1, 2)
        ]


@pytest.mark.parametrize(("ended", "reason"), [(["b"], "worker 1 on node2 (10.0.0.2) ended"), ([], "")])
def test_a_ray_worker_is_named_with_its_node(ended: list[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", Ray(*ended))
    workers = [SimpleNamespace(rank=n, run_ref=ref, node_id=f"id{n + 1}") for n, ref in enumerate("ab")]
    assert engine_end.ended_ray_workers(SimpleNamespace(ray_worker_handles=workers)) == reason


class Client:
    def __init__(self, errored: bool) -> None:
        self.errored = errored

    def shutdown(self) -> None:
        self.errored = True


async def end(client: Any) -> None:
    """What uvicorn does when it ends, in a server of vLLM's with this engine client."""
    module = SimpleNamespace(Server=type("Server", (), {"shutdown": lambda self: asyncio.sleep(0)}))
    engine_end.fail_with_the_engine(module)
    engine_end.fail_with_the_engine(module)
    server = module.Server()
    state = SimpleNamespace(engine_client=client) if client else SimpleNamespace()
    server.config = SimpleNamespace(app=SimpleNamespace(state=state))
    await server.shutdown()


@pytest.mark.parametrize("reason", ["worker 1 on node2 ended", ""])
def test_a_server_with_a_dead_engine_fails_with_one_sentence(reason: str) -> None:
    engine_end.record(reason)
    with pytest.raises(EngineEnded) as failure:
        asyncio.run(end(Client(errored=True)))
    expected = f"fastattention: the server ended because the engine died: {reason or engine_end.UNKNOWN}."
    assert sentence(failure.value) == expected


def test_a_server_that_is_stopped_does_not_fail() -> None:
    own = type("Own", (Client,), {"shutdown": Client.shutdown})
    for _ in range(2):
        engine_end.note_stops(SimpleNamespace(AsyncLLM=own))
    client = own(errored=False)
    client.shutdown()
    assert client.errored
    engine_end.record("ended with the others")
    asyncio.run(end(client))
    assert engine_end.take() == "", "the file must not stay"


def test_other_servers_of_the_process_do_not_fail() -> None:
    asyncio.run(end(None))
    asyncio.run(end(Client(errored=False)))
