"""Passes a request of Ray Serve on to `vllm serve`, and its answer back as it arrives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote, quote_from_bytes, unquote_to_bytes

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

SERVER = "http://server"
"""The address of each replica's server. Its Unix socket is the only thing that has this name."""
HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding", "upgrade"}


async def forward(request: Request, client: httpx.AsyncClient) -> Response:
    """The server's answer.

    Args:
        client: connected to the server, with :data:`SERVER` as its base address.
    """
    headers = [(name, text) for name, text in request.headers.raw if name.decode("latin-1") not in HOP_BY_HOP]
    # A URL of httpx's would change `//`, `%25` and `/../`.
    target = {"target": target_of(request.scope)}
    sent = client.build_request(request.method, "/", headers=headers, content=await request.body(), extensions=target)
    answer = await client.send(sent, stream=True)
    kept: dict[str, Any] = {name: text for name, text in answer.headers.items() if name not in HOP_BY_HOP}
    prefix = request.scope.get("root_path", "")
    if kept.get("location", "").startswith(f"{SERVER}/"):
        kept["location"] = prefix + kept["location"].removeprefix(SERVER)
    return StreamingResponse(parts(answer), answer.status_code, kept)


def target_of(scope: Any) -> bytes:
    """Path and query as the client sent them. Bytes that HTTP does not allow in them become `%XX`."""
    query: bytes = scope["query_string"]
    target = path_below(scope) + b"?" * bool(query) + query
    return quote_from_bytes(target, safe=bytes(range(0x21, 0x7F))).encode()


def path_below(scope: Any) -> bytes:
    """The path as the client sent it, without the application's route_prefix, of which the server does not know.

    Ray Serve leaves the prefix in the path. A client may have sent some of its characters as `%XX`.
    """
    prefix, path = scope.get("root_path", ""), scope["path"]
    sent: bytes = scope.get("raw_path") or quote(path, safe="/:@!$&'()*+,;=~").encode()
    sent = sent.partition(b"?")[0]
    if not (prefix and path.startswith(prefix)):
        return sent
    ends = (end for end in range(len(sent) + 1) if unquote_to_bytes(sent[:end]) == prefix.encode())
    return sent[next(ends, 0) :] or b"/"


async def parts(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The body as it arrives. A client that disconnects closes the connection to vLLM, which ends its request."""
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()
