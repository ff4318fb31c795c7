"""This package's part of vLLM's server: fresh numbers for ``/metrics``, and ``GET /fastattention/status``."""

from __future__ import annotations

import secrets
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, HTTPException, Request
from prometheus_client import REGISTRY
from pydantic import BaseModel, ConfigDict

from fastattention_vllm import __version__
from fastattention_vllm.integration.serving.channel import Channel
from fastattention_vllm.integration.serving.metrics import WorkerMetrics
from fastattention_vllm.integration.serving.worker_stats import WorkerStats

METRICS = "/metrics"
STATUS = "/fastattention/status"


class Status(BaseModel):
    """The answer of ``GET /fastattention/status``."""

    model_config = ConfigDict(frozen=True)

    schema_version: Literal[1] = 1
    version: str
    """Of this package."""
    age_seconds: float | None
    """Seconds since the workers reported; None if they have not yet."""
    workers: list[WorkerStats]


class FreshMetrics:
    """ASGI middleware that asks the workers for new numbers before ``/metrics`` is read."""

    def __init__(self, app: Any, channel: Channel) -> None:
        self.app = app
        self.channel = channel

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].rstrip("/") == METRICS:
            await self.channel.refresh()
        await self.app(scope, receive, send)


def attach(app: FastAPI, served: Any) -> FreshMetrics:
    """Add the routes and the metrics to vLLM's application, before it serves its first request.

    Args:
        served: the application with whatever the server has wrapped around it.

    Returns:
        The application to serve instead.
    """
    channel = Channel(app.state.engine_client)
    REGISTRY.register(WorkerMetrics(channel))
    app.include_router(router(channel, api_keys(app)))
    return FreshMetrics(served, channel)


def api_keys(app: FastAPI) -> list[str]:
    """The keys of ``--api-key`` or ``VLLM_API_KEY``; empty if none is set."""
    # Not at the top: vLLM is imported by then, and tests of this module need none.
    from vllm import envs

    given = getattr(getattr(app.state, "args", None), "api_key", None) or envs.VLLM_API_KEY or []
    return [given] if isinstance(given, str) else [key for key in given if key]


def router(channel: Channel, keys: list[str]) -> APIRouter:
    routes = APIRouter()

    @routes.get(STATUS)
    async def status(request: Request) -> Status:
        """What the workers of this server compute, and where the KV cache is."""
        check_key(request, keys)
        await channel.refresh()
        return Status(version=__version__, age_seconds=channel.age(), workers=list(channel.workers))

    return routes


def check_key(request: Request, keys: list[str]) -> None:
    """vLLM itself checks keys only below /v1.

    Raises:
        HTTPException: 401, the server has a key and the request does not name it.
    """
    given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
    if keys and not any(secrets.compare_digest(given, key.encode()) for key in keys):
        raise HTTPException(401, "Send the server's API key in the header `Authorization: Bearer KEY`.")
