"""The workers' numbers, in the API server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger

from fastattention_vllm.integration.serving.worker_stats import METHOD, WorkerStats

logger = init_logger("vllm.fastattention")

FRESH_S = 1.0
"""Seconds for which numbers are not requested again, however many clients ask."""
PATIENCE_S = 2.0
"""Seconds that a client waits for new numbers. Workers answer between two steps, and a step may take longer."""


class Channel:
    """Requests the numbers from all workers through the engine, at most one request at a time."""

    def __init__(self, engine_client: Any) -> None:
        self._engine_client = engine_client
        self._request: asyncio.Task[None] | None = None
        self._received: float | None = None
        self.workers: Sequence[WorkerStats] = ()
        """The last numbers received. Empty before the first ones."""
        self.error: str | None = None
        """Why the last request failed; None if it has not."""

    def age(self) -> float | None:
        """Seconds since the numbers were received; None before the first ones."""
        return None if self._received is None else time.monotonic() - self._received

    async def refresh(self) -> None:
        """Wait for new numbers, for a short time. Afterwards :attr:`workers` has the last ones received, if any."""
        age = self.age()
        if age is not None and age < FRESH_S:
            return
        if self._request is None or self._request.done():
            self._request = asyncio.create_task(self._receive())
        await asyncio.wait({self._request}, timeout=PATIENCE_S)

    async def _receive(self) -> None:
        try:
            answers = await self._engine_client.collective_rpc(METHOD)
            self.workers = [WorkerStats.model_validate(answer) for answer in answers]
            self._received = time.monotonic()
            self.error = None
        except Exception as error:  # a dead engine is reported by vLLM itself; metrics must not end the server
            self.error = f"{type(error).__name__}: {error}"
            logger.warning_once("The workers did not report their numbers for /metrics: %s", str(error))
