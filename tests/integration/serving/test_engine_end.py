"""A server whose engine has died fails with the worker that ended; a server that is stopped does not fail."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.executor import multiproc_executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProcHandle

from fastattention_vllm.integration.refusal import EngineEnded, sentence
from fastattention_vllm.integration.serving import engine_end
from tests.other_user import as_another_user, needs_another_user

GETPPID = os.getppid


@pytest.fixture(autouse=True)
def own_pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine's process and the server's are one here."""
    monkeypatch.setattr(engine_end, "NOTICE_S", 0.5)
    monkeypatch.setattr(engine_end, "_own", None)
    monkeypatch.setenv(engine_end.PIPE, "")
    engine_end.make_pipe()
    monkeypatch.setattr(engine_end, "_inherited", os.environ[engine_end.PIPE])
    monkeypatch.setattr(engine_end.os, "getppid", os.getpid)
    yield
    own: Any = engine_end._own
    os.close(own[1])
    os.close(int(os.environ[engine_end.PIPE].split()[1]))


@pytest.fixture
def executor() -> Any:
    """vLLM's own default executor with two workers, as its ``_init_executor`` leaves it when they are ready."""
    for _ in range(2):
        engine_end.watch_processes(multiproc_executor)
    processes = [multiprocessing.get_context("spawn").Process(target=time.sleep, args=(100,)) for _ in range(2)]
    for process in processes:
        process.start()
    made: Any = object.__new__(MultiprocExecutor)
    made.is_failed = False
    made.failure_callback = None
    made.workers = [
        WorkerProcHandle(proc=process, rank=rank, worker_response_mq=None, peer_worker_response_mqs=[])
        for rank, process in enumerate(processes)
    ]
    made.rpc_broadcast_mq, made.response_mqs = None, []
    yield made
    for process in processes:
        process.kill()
        process.join()


def test_the_executor_of_the_tests_has_what_vllms_has() -> None:
    """The names that vLLM's own code gives an executor before it serves."""
    names = set()
    for function in (MultiprocExecutor.__init__, MultiprocExecutor._init_executor):
        names |= set(re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(function)))
    assert {"is_failed", "failure_callback", "workers", "rpc_broadcast_mq", "response_mqs"} <= names
    assert "shutting_down" not in names
    assert not hasattr(MultiprocExecutor, "shutting_down"), "engine_end asks whether it is there"


def test_the_worker_that_was_killed_is_named(executor: Any) -> None:
    """vLLM's own monitor finds it."""
    died = threading.Event()
    executor.register_failure_callback(died.set)
    executor.start_worker_monitor()
    process = executor.workers[1].proc
    process.kill()
    assert died.wait(60)
    assert executor.shutting_down
    assert engine_end.take() == f"worker 1 on {os.uname().nodename} (process {process.pid}) was ended by SIGKILL"
    assert engine_end.take() == ""


def test_the_worker_is_named_if_another_one_notices_its_end_first(executor: Any) -> None:
    executor.workers[0].proc.terminate()
    try:
        raise RuntimeError("a worker lost its connection")
    except RuntimeError:
        executor.shutdown()
    assert "worker 0" in engine_end.take()


@pytest.mark.parametrize("how", [None, SystemExit, KeyboardInterrupt])
def test_a_regular_end_leaves_no_reason(how: type[BaseException] | None, executor: Any) -> None:
    """vLLM ends an engine that is stopped by SystemExit. Ctrl-C ends its workers at the same moment."""
    executor.workers[0].proc.terminate()
    executor.workers[0].proc.join()
    try:
        if how:
            raise how
        executor.shutdown()
    except BaseException:
        executor.shutdown()
    assert executor.shutting_down
    assert engine_end.take() == ""


def test_an_executor_that_could_not_start_ends_at_once(caplog: pytest.LogCaptureFixture) -> None:
    engine_end.watch_processes(multiproc_executor)
    began = time.monotonic()
    try:
        raise RuntimeError("no room for its queues")
    except RuntimeError:
        object.__new__(MultiprocExecutor).shutdown()
    assert time.monotonic() - began < engine_end.NOTICE_S
    assert engine_end.take() == ""


def test_a_later_end_does_not_replace_the_reason() -> None:
    engine_end.record("the first")
    engine_end.record("the second")
    assert engine_end.take() == "the first"
    assert engine_end.take() == ""


def test_a_long_reason_is_cut_and_never_waited_for() -> None:
    for _ in range(200):
        engine_end.record("\udcff" + "ü" * 100_000)
    assert engine_end.take() == "?" + "ü" * 499 + "\ufffd"
    for _ in range(3):
        engine_end.take()
    assert engine_end.take() == ""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_the_reason_comes_from_a_child_and_not_from_its_children(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_end.os, "getppid", GETPPID)
    child = multiprocessing.get_context("fork").Process(target=records, args=(start, "its own"))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert engine_end.take() == "its own"


def records(start: str, reason: str) -> None:
    """An engine, whose own child has no business with the server."""
    if start == "spawn":
        importlib.reload(engine_end)  # a new process imports it
    if reason == "its own":
        engine_end.make_pipe()
        child = multiprocessing.get_context("fork").Process(target=records, args=(start, "of a child's child"))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert engine_end.take() == "of a child's child"
    engine_end.record(reason)


@pytest.mark.parametrize("told", ["", "{} x", "{} 0", "{} 0 1 2", "{} -1 1 2", "{0} {1} 5 6", "{0} {2} {3} {4}"])
def test_nothing_is_written_to_what_is_not_the_parents_pipe(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the process that has the parent's number now had a file, or another pipe, at the pipe's descriptor."""
    other = tmp_path / "other"
    with other.open("wb") as file:
        found = os.fstat(file.fileno())
        writes = os.environ[engine_end.PIPE].split()[1]
        text = told.format(os.getpid(), writes, file.fileno(), found.st_dev, found.st_ino)
        monkeypatch.setattr(engine_end, "_inherited", text)
        engine_end.record("ours")
    assert engine_end.take() == ""
    assert other.read_bytes() == b""


@needs_another_user
def test_other_users_can_neither_hold_up_a_server_nor_speak_for_its_engine() -> None:
    process, writes, *_ = os.environ[engine_end.PIPE].split()
    name = Path(tempfile.gettempdir()) / f"fastattention-{os.getuid()}-{os.getpid()}.end"

    def act() -> None:
        os.mkfifo(name, 0o666)
        with pytest.raises(PermissionError):
            os.open(f"/proc/{process}/fd/{writes}", os.O_WRONLY)

    taken: list[str] = []
    try:
        as_another_user(act)
        server = threading.Thread(target=lambda: taken.append(engine_end.take()), daemon=True)
        server.start()
        server.join(10)
        assert taken == [""]
    finally:
        name.unlink()


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
    assert engine_end.take() == "", "the reason must not stay"


def test_other_servers_of_the_process_do_not_fail() -> None:
    asyncio.run(end(None))
    asyncio.run(end(Client(errored=False)))
