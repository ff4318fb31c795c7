"""The last requests to the OpenAI API: when, how long, with which status. No prompts or outputs are kept.

Requests without the server's key, and to paths that it does not have, are not kept: anyone could push the others out
with them.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

API = "/v1/"
KEPT = 50
EDGE_BYTES = 2048
"""Bytes of a response's beginning and end that are searched for its id and its number of tokens."""
PATH_CHARACTERS = 200
"""Of a path that are kept."""
WITHOUT_KEY = {401, 403}
NOT_THERE = {404, 405}
"""Statuses of paths and methods that the server does not have, but also of models that it does not serve."""
ID = re.compile(rb'"id"\s*:\s*("(?:[^"\\]|\\.){1,1000}")')
"""vLLM takes the id from the header X-Request-Id, with whatever characters it has."""
USAGE = re.compile(rb'"usage"\s*:\s*\{')
PROMPT_TOKENS = re.compile(rb'"prompt_tokens"\s*:\s*(\d+)')
NEW_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')


class Seen:
    """One request, while it is answered and afterwards."""

    def __init__(self, path: str) -> None:
        self.path = path[:PATH_CHARACTERS]
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
            self.response_id = text_of(found[1])
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


def text_of(quoted: bytes) -> str | None:
    """A JSON string's text; None if it is not valid."""
    try:
        return str(json.loads(quoted))
    except ValueError:
        return None


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
        self._waiting: set[Seen] = set()
        """Those without an answer yet."""
        self._kept: deque[Seen] = deque(maxlen=KEPT)

    def __iter__(self) -> Iterator[Seen]:
        """The latest first."""
        latest = sorted([*self._waiting, *self._kept], key=lambda seen: seen.began, reverse=True)
        return itertools.islice(latest, KEPT)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = path_of(scope, self._prefix) if scope["type"] == "http" else ""
        if not path.startswith(API) or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        seen = Seen(path)
        self._waiting.add(seen)

        async def watched(message: Any) -> None:
            await send(message)
            seen.sent(message)
            if message["type"] == "http.response.start":
                self._answered(seen, scope)

        try:
            await self.app(scope, receive, watched)
        finally:
            seen.end()
            self._answered(seen, scope)

    def _answered(self, seen: Seen, scope: Any) -> None:
        # Starlette's router adds the endpoint to the scope of a path that it knows.
        turned_away = seen.status in WITHOUT_KEY or (seen.status in NOT_THERE and "endpoint" not in scope)
        if seen in self._waiting and not turned_away:
            self._kept.append(seen)
        self._waiting.discard(seen)
