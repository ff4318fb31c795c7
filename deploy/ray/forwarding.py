"""Passes a request of Ray Serve on to `vllm serve`, and its answer back as it arrives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

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
    # Ray Serve leaves the application's route_prefix in the path. The server does not know of it.
    prefix = request.scope.get("root_path", "")
    url = httpx.URL(path=request.url.path.removeprefix(prefix) or "/", query=request.url.query.encode())
    headers = [(name, text) for name, text in request.headers.items() if name not in HOP_BY_HOP]
    sent = client.build_request(request.method, url, headers=headers, content=await request.body())
    answer = await client.send(sent, stream=True)
    kept: dict[str, Any] = {name: text for name, text in answer.headers.items() if name not in HOP_BY_HOP}
    if kept.get("location", "").startswith(f"{SERVER}/"):
        kept["location"] = prefix + kept["location"].removeprefix(SERVER)
    return StreamingResponse(parts(answer), answer.status_code, kept)


async def parts(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The body as it arrives. A client that disconnects closes the connection to vLLM, which ends its request."""
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()
