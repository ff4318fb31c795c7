"""The last requests to the OpenAI API: when, how long, with which status. No prompts or outputs are kept."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

API = "/v1/"
KEPT = 50
EDGE_BYTES = 2048
"""Bytes of a response's beginning and end that are searched for its id and its number of tokens."""
ID = re.compile(rb'"id"\s*:\s*"([\w.-]{1,200})"')
USAGE = re.compile(rb'"usage"\s*:\s*\{')
PROMPT_TOKENS = re.compile(rb'"prompt_tokens"\s*:\s*(\d+)')
NEW_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')


class Seen:
    """One request, while it is answered and afterwards."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.began = time.monotonic()
        self.seconds: float | None = None
        """None while it is answered."""
        self.status: int | None = None
        """None if there was no answer yet, or never."""
        self.complete = False
        """Whether the whole answer was sent. False if the client has left, or the server failed."""
        self.response_id: str | None = None
        self.prompt_tokens: int | None = None
        self.new_tokens: int | None = None
        self._edges = b""

    def sent(self, message: Any) -> None:
        """Note an ASGI message of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.read(message.get("body", b""))
            self.complete = not message.get("more_body", False)

    def read(self, body: bytes) -> None:
        """Look for the id in the first bytes, and keep the last ones."""
        if self.response_id is None and (found := ID.search(body[:EDGE_BYTES])):
            self.response_id = found[1].decode()
        self._edges = (self._edges + body[-EDGE_BYTES:])[-EDGE_BYTES:]

    def end(self) -> None:
        self.seconds = time.monotonic() - self.began
        usage = list(USAGE.finditer(self._edges))
        if usage:
            tail = self._edges[usage[-1].start() :]
            prompt, new = PROMPT_TOKENS.search(tail), NEW_TOKENS.search(tail)
            self.prompt_tokens = int(prompt[1]) if prompt else None
            self.new_tokens = int(new[1]) if new else None
        self._edges = b""


def path_of(scope: Any, prefix: str) -> str:
    """The path of an ASGI request as the routes have it: a proxy may have left ``--root-path`` in it, or not."""
    path: str = scope["path"]
    below = path.removeprefix(prefix)
    return below if below.startswith("/") else path


class RecentRequests:
    """ASGI middleware that watches responses and passes them on unchanged."""

    def __init__(self, app: Any, prefix: str = "") -> None:
        self.app = app
        self._prefix = prefix
        self._kept: deque[Seen] = deque(maxlen=KEPT)

    def __iter__(self) -> Iterator[Seen]:
        """The latest first."""
        return reversed(self._kept)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = path_of(scope, self._prefix) if scope["type"] == "http" else ""
        if not path.startswith(API) or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        seen = Seen(path)
        self._kept.append(seen)

        async def watched(message: Any) -> None:
            await send(message)
            seen.sent(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            seen.end()
