"""This package's part of vLLM's server: fresh numbers for ``/metrics``, and the routes under ``/fastattention``."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from prometheus_client import REGISTRY

from fastattention_vllm.integration.serving import page
from fastattention_vllm.integration.serving.channel import Channel
from fastattention_vllm.integration.serving.engine_stats import EngineStats
from fastattention_vllm.integration.serving.metrics import WorkerMetrics
from fastattention_vllm.integration.serving.recent_requests import RecentRequests, path_of
from fastattention_vllm.integration.serving.status import Status, StatusSource

METRICS = "/metrics"
STATUS = "/fastattention/status"


class FreshMetrics:
    """ASGI middleware that asks the workers for new numbers before ``/metrics`` is read."""

    def __init__(self, app: Any, channel: Channel, prefix: str = "") -> None:
        self.app = app
        self.channel = channel
        self.prefix = prefix

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and path_of(scope, self.prefix).rstrip("/") == METRICS:
            await self.channel.refresh()
        await self.app(scope, receive, send)


def attach(app: FastAPI, served: Any) -> FreshMetrics:
    """Add the routes and the metrics to vLLM's application, before it serves its first request.

    Args:
        served: the application with all middleware that the server has added.

    Returns:
        The application to serve instead.
    """
    engine_client = app.state.engine_client
    prefix = (getattr(app, "root_path", None) or "").rstrip("/")
    channel, engine, requests = Channel(engine_client), EngineStats(), RecentRequests(served, prefix)
    engine.listen(engine_client)
    REGISTRY.register(WorkerMetrics(channel))
    source = StatusSource(channel, engine, requests, engine_client.vllm_config)
    app.include_router(router(channel, source, api_keys(app)))
    app.include_router(page.router())
    return FreshMetrics(requests, channel, prefix)


def api_keys(app: FastAPI) -> list[str]:
    """The keys of ``--api-key`` or ``VLLM_API_KEY``; empty if none is set."""
    # Not at the top: vLLM is imported by then, and tests of this module need none.
    from vllm import envs

    given = getattr(getattr(app.state, "args", None), "api_key", None) or envs.VLLM_API_KEY or []
    return [given] if isinstance(given, str) else [key for key in given if key]


def router(channel: Channel, source: StatusSource, keys: list[str]) -> APIRouter:
    routes = APIRouter()

    @routes.get(STATUS)
    async def status(request: Request) -> Status:
        """The workers' kernels, the place of each layer's KV cache, and the measured speeds."""
        check_key(request, keys)
        await channel.refresh()
        return source.now()

    return routes


def check_key(request: Request, keys: list[str]) -> None:
    """vLLM itself checks keys only below /v1. This accepts the same headers as its ``AuthenticationMiddleware``.

    Raises:
        HTTPException: 401 if the server has a key and the request does not contain it.
    """
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    right = [secrets.compare_digest(given.encode(), key.encode()) for key in keys]
    if keys and not (scheme.lower() == "bearer" and any(right)):
        raise HTTPException(401, "Send the server's API key in the header `Authorization: Bearer KEY`.")
