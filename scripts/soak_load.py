"""The load of a soak: clients that ask, stream, drop their connections and send bad input.

Used by: soak.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
from typing import Any

import httpx

from fastattention_vllm.demo.haystack import make_haystack
from scripts.soak_report import Result

MAX_REQUESTS = 200_000
CHUNKS_BEFORE_A_DROP = 3
BAD: list[tuple[str, Any]] = [
    ("/v1/completions", {"model": "demo", "prompt": "alpha=", "max_tokens": -1}),
    ("/v1/completions", {"model": "demo", "prompt": "alpha=", "temperature": -1}),
    ("/v1/completions", {"model": "demo", "prompt": [10**9]}),
    ("/v1/completions", {"model": "none", "prompt": "alpha="}),
    ("/v1/completions", {"model": "demo", "prompt": [5] * 70_000, "max_tokens": 4}),
    ("/v1/chat/completions", {"model": "demo", "messages": "alpha"}),
    ("/v1/chat/completions", "no JSON object"),
]


async def bodies_that_vllm_itself_fails_on(url: str) -> list[tuple[str, Any]]:
    """JSON texts that are not objects: vLLM 0.23's API server answers them with 500 and closes the connection.

    This happens before the request reaches an engine or plugin, and no longer in 0.32.
    """
    failing = []
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        for path, body in BAD:
            if not isinstance(body, dict) and (await client.post(path, json=body)).status_code == 500:
                failing.append((path, body))
    return failing


class Load:
    """Clients that ask, stream, disconnect and send bad input. Each sends one request after the other."""

    def __init__(
        self, url: str, options: argparse.Namespace, result: Result, seed: int, bad: list[tuple[str, Any]]
    ) -> None:
        self.url = url
        self.bodies = bad
        self.options = options
        self.result = result
        self.random = random.Random(seed)

    async def run(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        # vLLM closes a connection after 5 idle seconds; a request at that very moment is reset.
        reuse = httpx.Limits(keepalive_expiry=2)
        async with httpx.AsyncClient(base_url=self.url, timeout=None, trust_env=False, limits=reuse) as self.client:
            await asyncio.gather(*(self.ask_on() for _ in range(self.options.clients)))

    async def ask_on(self) -> None:
        kinds = [self.needle, self.stream, self.drop, self.drop_early, self.bad]
        while time.monotonic() < self.deadline and sum(self.result.done.values()) < MAX_REQUESTS:
            (kind,) = self.random.choices(kinds, weights=[10, 5, 2, 2, 2])
            try:
                await kind()
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                self.failed(f"{kind.__name__}: {error!r}")
                await asyncio.sleep(1)
            self.result.done[kind.__name__] = self.result.done.get(kind.__name__, 0) + 1

    def failed(self, what: str) -> None:
        if len(self.result.failures) < 20:
            self.result.failures.append(what)

    def question(self) -> tuple[dict[str, Any], str]:
        value = str(self.random.randrange(1000, 10_000))
        # Lengths from a few tokens to the maximum, with as many short ones as long ones.
        tokens = int(64 * (self.options.tokens / 64) ** self.random.random())
        seed, depth = self.random.randrange(10**6), self.random.random()
        text = make_haystack(tokens, {"alpha": value}, depths=[depth], ask="alpha", seed=seed).text
        return {"model": "demo", "prompt": text, "max_tokens": 4, "temperature": 0}, value

    async def needle(self) -> None:
        body, value = self.question()
        answer = await self.client.post("/v1/completions", json=body)
        self.check(answer.json()["choices"][0]["text"], value)

    async def stream(self) -> None:
        body, value = self.question()
        text = ""
        async with self.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        self.check(text, value)

    def check(self, text: str, value: str) -> None:
        if text.strip() != value:
            self.failed(f"the answer is {text.strip()!r}, but {value} was in the text")

    async def drop(self) -> None:
        """Disconnect in the middle of a long answer."""
        body, _ = self.question()
        body |= {"stream": True, "ignore_eos": True, "max_tokens": 4000}
        chunks = 0
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                chunks += 1
                if chunks == CHUNKS_BEFORE_A_DROP:
                    return
        self.failed(f"a stream of 4000 tokens ended after {chunks} chunks")

    async def drop_early(self) -> None:
        """Disconnect before the answer begins, at any stage of the prompt."""
        body, _ = self.question()
        with contextlib.suppress(httpx.TimeoutException):
            await self.client.post("/v1/completions", json=body, timeout=self.random.uniform(0.01, 0.5))

    async def bad(self) -> None:
        path, body = self.random.choice(self.bodies)
        # A separate connection: vLLM 0.23 closes the connection after some errors without announcing it, and the next
        # request on it would be reset.
        answer = await self.client.post(path, json=body, headers={"Connection": "close"})
        if not 400 <= answer.status_code < 500:
            self.failed(f"{str(body)[:80]} was answered with {answer.status_code}")
