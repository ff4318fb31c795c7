"""Requests that are waiting when a server ends get an error, even if the event loop is late."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
import uvicorn.server
from vllm.v1.engine import async_llm, core_client

from fastattention_vllm.integration.serving import server_end


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_llm.AsyncLLM, "shutdown", async_llm.AsyncLLM.shutdown)
    monkeypatch.setattr(uvicorn.server.Server, "shutdown", uvicorn.server.Server.shutdown)
    read = core_client.AsyncMPClient.get_output_async
    monkeypatch.setattr(core_client.AsyncMPClient, "get_output_async", read)
    server_end.install()


class Engine:
    """Stops as vLLM's client does: its reading task is cancelled in the loop, and then passes the cancellation on."""

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[BaseException] = asyncio.Queue()
        self.reader = asyncio.create_task(self.read())

    async def read(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.outputs.put_nowait(async_llm.EngineDeadError())

    def shutdown(self, timeout: float | None = None) -> None:
        loop = self.reader.get_loop()
        loop.call_soon_threadsafe(time.sleep, 0.2)
        loop.call_soon_threadsafe(self.reader.cancel)


async def shut_down() -> list[BaseException]:
    """The errors that requests in flight get from vLLM's own ``shutdown`` in a late event loop."""
    told: list[BaseException] = []
    engine = Engine()

    async def handle_output() -> None:
        told.append(await engine.outputs.get())

    frontend: Any = object.__new__(async_llm.AsyncLLM)
    frontend.engine_core = engine
    frontend.output_handler = asyncio.create_task(handle_output())
    frontend.output_processor = SimpleNamespace(propagate_error=told.append)
    await asyncio.sleep(0)
    await asyncio.to_thread(frontend.shutdown, timeout=0)
    await asyncio.sleep(0.1)
    del frontend.engine_core, frontend.output_handler  # otherwise vLLM's __del__ shuts down again
    return told


def test_requests_get_their_error_from_a_late_loop() -> None:
    told = asyncio.run(shut_down())
    assert told
    assert all(isinstance(error, async_llm.EngineDeadError) for error in told)


def test_requests_are_told_that_the_server_was_stopped() -> None:
    """vLLM's stream generators log an error of any other class with a traceback."""
    import vllm.entrypoints.openai.completion.serving as serving

    told = asyncio.run(shut_down())[-1]
    assert isinstance(told, serving.GenerationError)
    assert str(told) == server_end.STOPPED
    assert told.status_code == 503


async def read_after_the_end(stopped: bool) -> BaseException | None:
    """What vLLM's task that reads from the engine gets once the engine has ended."""
    client: Any = object.__new__(core_client.AsyncMPClient)
    client.outputs_queue = asyncio.Queue()
    client.outputs_queue.put_nowait(core_client.EngineDeadError())
    client.resources = SimpleNamespace(engine_dead=True, output_queue_task=object())
    if stopped:
        server_end.stopped.add(client)
    task = asyncio.create_task(client.get_output_async())
    await asyncio.wait([task])
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def test_a_stop_cancels_the_reader_and_a_death_fails_it() -> None:
    assert isinstance(asyncio.run(read_after_the_end(stopped=True)), asyncio.CancelledError)
    assert isinstance(asyncio.run(read_after_the_end(stopped=False)), core_client.EngineDeadError)


async def end_with_an_open_stream(app: Any) -> None:
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    server.should_exit = True
    try:
        await asyncio.wait_for(serving, 60)
    finally:
        writer.close()


class App:
    """Sends the beginning of an answer and then nothing."""

    def __init__(self, **state: object) -> None:
        self.state = SimpleNamespace(**state)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await asyncio.Event().wait()


def test_vllms_server_does_not_wait_forever_for_open_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_end, "GRACE_S", 0.1)
    asyncio.run(end_with_an_open_stream(App(engine_client=None)))


def test_other_servers_of_the_process_are_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    async def shutdown(self: Any, sockets: Any = None) -> None:
        seen.append(self.config.timeout_graceful_shutdown)

    module = SimpleNamespace(Server=type("Server", (), {"shutdown": shutdown}))
    server_end.limit_waiting(module)
    for app, limit in [(App(), None), (App(engine_client=1), None), (App(engine_client=1), 60)]:
        server = module.Server()
        server.config = SimpleNamespace(app=app, timeout_graceful_shutdown=limit)
        asyncio.run(server.shutdown())
    assert seen == [None, server_end.GRACE_S, 60]
