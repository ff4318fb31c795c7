"""deploy/ray: a request to Ray Serve reaches the server's own path, whatever the application's route_prefix is."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry
from starlette.requests import Request

from fastattention_vllm.integration.serving import metrics, page, routes
from tests.integration.serving.fakes import Engine, application, worker
from tests.server.conftest import ROOT

CLIENT = "http://cluster:8000"
PREFIXES = ["", "/demo", "/team/v1"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    registry = CollectorRegistry()
    monkeypatch.setattr(routes, "REGISTRY", registry)
    monkeypatch.setattr(metrics, "REGISTRY", registry)
    app = application(Engine(worker(0)), registry, ["key"])

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body = await request.body()

        async def parts() -> Any:
            yield request.url.query.encode()
            yield body

        return StreamingResponse(parts(), 201)

    return routes.attach(app, app)


def through_ray_serve(server: Any, prefix: str, monkeypatch: pytest.MonkeyPatch) -> httpx.AsyncClient:
    """A client of Ray Serve, which passes on the whole path, and the prefix as ``root_path``."""
    monkeypatch.syspath_prepend(str(ROOT / "deploy" / "ray"))
    import forwarding

    replica = httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url=forwarding.SERVER)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await (await forwarding.forward(Request(scope, receive), replica))(scope, receive, send)

    sys.modules.pop("forwarding")
    return httpx.AsyncClient(transport=httpx.ASGITransport(answer, root_path=prefix), base_url=CLIENT)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_api_is_below_the_prefix(server: Any, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> httpx.Response:
        async with through_ray_serve(server, prefix, monkeypatch) as client:
            return await client.post(f"{prefix}/v1/completions?a=b%20c", content=b"a prompt")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.text) == (201, "a=b%20ca prompt")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_page_finds_its_files_and_numbers(server: Any, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every address in it, as a browser resolves it from the page's own address."""

    async def browse() -> set[str]:
        async with through_ray_serve(server, prefix, monkeypatch) as client:
            # A trailing slash is redirected.
            opened = await client.get(f"{prefix}{page.PAGE}/", follow_redirects=True)
            assert str(opened.url) == f"{CLIENT}{prefix}{page.PAGE}"
            here = str(opened.url)
            addresses = {urljoin(here, found) for found in re.findall(r'(?:href|src)="([^"]+)"', opened.text)}
            (script,) = [one for one in addresses if one.endswith(".js")]
            text = (await client.get(script)).text
            addresses |= {urljoin(script, found) for found in re.findall(r'from "([^"]+)"', text)}
            addresses |= {urljoin(here, found) for found in re.findall(r'const STATUS = "([^"]+)"', text)}
            for address in addresses:
                answer = await client.get(address, headers={"Authorization": "Bearer key"})
                assert answer.status_code == 200, address
            return addresses

    found = asyncio.run(browse())
    assert {one.removeprefix(CLIENT + prefix) for one in found} == set(page.FILES) - {page.PAGE} | {routes.STATUS}


@pytest.mark.parametrize("left", [True, False], ids=["left in the path", "removed"])
def test_the_server_knows_its_paths_behind_a_proxy(left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--root-path``: a proxy leaves the prefix in the path, or removes it."""
    registry = CollectorRegistry()
    monkeypatch.setattr(routes, "REGISTRY", registry)
    monkeypatch.setattr(metrics, "REGISTRY", registry)
    app: FastAPI = application(Engine(worker(0)), registry)
    app.root_path = "/demo"

    @app.post("/v1/completions")
    async def completions() -> str:
        return ""

    prefix = "/demo" if left else ""

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(routes.attach(app, app))
        async with httpx.AsyncClient(transport=transport, base_url=CLIENT, follow_redirects=True) as client:
            assert (await client.post(f"{prefix}/v1/completions")).status_code == 200
            return await client.get(f"{prefix}/metrics/"), await client.get(f"{prefix}{routes.STATUS}")

    scraped, status = asyncio.run(ask())
    assert "fastattention:kernels_info" in scraped.text, "the scrape itself asks for the numbers"
    (seen,) = status.json()["requests"]["recent"]
    assert seen["path"] == "/v1/completions"
