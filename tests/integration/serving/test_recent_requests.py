"""The ring of recent requests: what is kept of each response, and that responses stay as they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse

from fastattention_vllm.integration.serving.recent_requests import KEPT, PATH_CHARACTERS, RecentRequests

PROMPT = "a secret prompt"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3}


def application() -> RecentRequests:
    app = FastAPI()

    @app.post("/v1/completions")
    async def completions() -> dict[str, Any]:
        return {"id": "cmpl-1", "choices": [{"text": PROMPT, "id": "no"}] * 500, "usage": USAGE}

    @app.post("/v1/chat/completions")
    async def chat(usage: bool = False) -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            for number in range(5):
                yield f"data: {json.dumps({'id': 'chatcmpl-2', 'choices': [number]})}\n\n"
            if usage:
                yield f"data: {json.dumps({'id': 'chatcmpl-2', 'choices': [], 'usage': USAGE})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events())

    @app.post("/v1/embeddings")
    async def refused() -> None:
        raise HTTPException(400, "no")

    @app.post("/v1/rerank")
    async def other_model() -> None:
        raise HTTPException(404, "The model does not exist.")

    @app.post("/v1/broken")
    async def broken() -> None:
        raise RuntimeError("broken")

    @app.get("/v1/models")
    async def models() -> list[str]:
        return []

    return RecentRequests(app)


async def call(app: Any, method: str, path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        return await client.request(method, path, content=PROMPT)


def test_a_response_is_passed_on_and_its_numbers_are_kept() -> None:
    app = application()
    answer = asyncio.run(call(app, "POST", "/v1/completions"))
    assert answer.json()["usage"] == USAGE
    assert len(answer.json()["choices"]) == 500
    (seen,) = app
    assert (seen.response_id, seen.status, seen.complete) == ("cmpl-1", 200, True)
    assert (seen.prompt_tokens, seen.new_tokens) == (7, 3)
    assert seen.seconds is not None


@pytest.mark.parametrize(("query", "tokens"), [("", (None, None)), ("?usage=true", (7, 3))])
def test_streams_have_tokens_if_they_end_with_the_usage(query: str, tokens: tuple[int | None, int | None]) -> None:
    app = application()
    answer = asyncio.run(call(app, "POST", f"/v1/chat/completions{query}"))
    assert answer.text.count("data: ") == 6 + bool(query)
    (seen,) = app
    assert (seen.response_id, seen.complete) == ("chatcmpl-2", True)
    assert (seen.prompt_tokens, seen.new_tokens) == tokens


def test_errors_are_kept_and_other_paths_are_not() -> None:
    app = application()

    async def calls() -> None:
        await call(app, "GET", "/v1/models")
        await call(app, "POST", "/v1/embeddings")
        await call(app, "POST", "/v1/rerank")
        await call(app, "POST", "/v1/unknown")
        with pytest.raises(RuntimeError):
            await call(app, "POST", "/v1/broken")

    asyncio.run(calls())
    broken, unserved, refused = app
    assert (unserved.path, unserved.status) == ("/v1/rerank", 404)
    assert (refused.status, refused.complete, refused.response_id) == (400, True, None)
    assert broken.complete == (broken.status == 500)
    assert broken.seconds is not None


def test_an_answer_that_is_cut_off_is_not_complete() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"id": "cmpl-3"', "more_body": True})
        raise asyncio.CancelledError

    async def send(message: Any) -> None: ...

    recent = RecentRequests(app)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(recent(scope, None, send))
    (seen,) = recent
    assert (seen.status, seen.complete, seen.response_id) == (200, False, "cmpl-3")
    assert seen.seconds is not None


@pytest.mark.parametrize(
    "asked", ["team:a/7", "a b", 'with "quotes" and \\ and \n', "ü", "\U0001f600", "x" * 900, "1", "]}", "\x7f"]
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_an_id_may_have_any_characters(asked: str, ascii_only: bool) -> None:
    """The header X-Request-Id becomes a part of it."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = json.dumps({"id": f"cmpl-{asked}", "usage": USAGE}, ensure_ascii=ascii_only).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    recent = RecentRequests(app)
    asyncio.run(call(recent, "POST", "/v1/completions"))
    (seen,) = recent
    assert seen.response_id == f"cmpl-{asked}"
    assert seen.prompt_tokens == 7


@pytest.mark.parametrize("body", [b'{"id": "', b'{"id": "\xff"}', b'{"id": "\\"}', b'{"id": "\\x"}', b'{"id": 7}', b""])
def test_an_answer_without_an_id_is_kept_without_one(body: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    recent = RecentRequests(app)
    asyncio.run(call(recent, "POST", "/v1/completions"))
    (seen,) = recent
    assert (seen.response_id, seen.complete) == (None, True)


def test_requests_that_wait_are_shown_and_what_is_turned_away_leaves_nothing() -> None:
    async def calls() -> None:
        go, shown = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            status = int(scope["path"].rpartition("/")[2][:3])
            if status == 200:
                shown.set()
                await go.wait()
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        recent = RecentRequests(app)
        waiting = asyncio.create_task(call(recent, "POST", f"/v1/200{'a' * 60_000}"))
        await shown.wait()
        for status in [400, 500] + [401, 403, 404, 405] * KEPT:
            await call(recent, "POST", f"/v1/{status}")
        assert [seen.status for seen in recent] == [500, 400, None]
        for _ in range(KEPT):
            await call(recent, "POST", "/v1/400")
        go.set()
        await waiting
        latest = list(recent)
        assert len(latest) == KEPT
        assert [seen.status for seen in latest].count(200) == 1
        assert max(len(seen.path) for seen in latest) == PATH_CHARACTERS
        assert not recent._waiting

    asyncio.run(calls())


def test_neither_prompts_nor_outputs_are_kept_and_only_the_last_requests() -> None:
    app = application()

    async def calls() -> None:
        for _ in range(KEPT + 5):
            await call(app, "POST", "/v1/completions")

    asyncio.run(calls())
    assert len(list(app)) == KEPT
    assert PROMPT not in str([vars(seen) for seen in app])
