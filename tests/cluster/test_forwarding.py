"""deploy/ray: a request to Ray Serve reaches the server's own path, whatever the application's route_prefix is."""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin

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


class InProcess(httpx.ASGITransport):
    """Asks an application for the target that httpcore would send to its server."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.url = httpx.URL(f"http://server{request.extensions['target'].decode()}")
        return await super().handle_async_request(request)


@pytest.fixture
def forwarding(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "deploy" / "ray"))
    yield importlib.import_module("forwarding")
    sys.modules.pop("forwarding")


def through_ray_serve(forwarding: Any, server: Any, prefix: str) -> httpx.AsyncClient:
    """A client of Ray Serve, which passes on the whole path, and the prefix as ``root_path``."""
    replica = httpx.AsyncClient(transport=InProcess(server), base_url=forwarding.SERVER)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await (await forwarding.forward(Request(scope, receive), replica))(scope, receive, send)

    return httpx.AsyncClient(transport=httpx.ASGITransport(answer, root_path=prefix), base_url=CLIENT)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    "path",
    [
        b"/v1/models/a%2Fb",
        b"/v1/a%252Fb",
        b"//v1/completions",
        b"//other:80/v1",
        b"/v1//x/../y/.",
        b"/v1/caf%C3%A9%ff",
        b"/v1/\xc3\xa9\xff",
        b"/v1/a%3Fb%23c",
        b"/%76%31/completions",
        b"/",
        b"/demo/team/v1",
    ],
)
def test_the_target_reaches_the_server_as_it_was_sent(
    path: bytes, prefix: str, forwarding: Any, tmp_path: Path
) -> None:
    """With the replica's own transport, to a server that answers with the target that it was sent."""
    query = b"a=b%20c&d=%2F+%252F&e=\xff&&" if prefix else b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        while await reader.readline() != b"\r\n":
            pass
        target = line.split(b" ", 1)[1].rpartition(b" ")[0]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(target) + target)
        writer.close()

    async def ask() -> bytes:
        sent = prefix.encode() + path
        # As uvicorn, in which Ray Serve's proxy runs, gives it.
        scope = {
            "type": "http",
            "method": "GET",
            "path": unquote(sent.decode("latin-1"), "utf-8"),
            "raw_path": sent,
            "root_path": prefix,
            "query_string": query,
            "headers": [(b"host", b"cluster:8000"), (b"x-other", b"\xff")],
        }
        socket = str(tmp_path / "socket")
        async with (
            await asyncio.start_unix_server(answer, socket),
            httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=socket, verify=False), base_url=forwarding.SERVER
            ) as client,
        ):
            forwarded = await forwarding.forward(Request(scope, no_body), client)
            return b"".join([part async for part in forwarded.body_iterator])

    allowed = path.replace(b"\xc3\xa9\xff", b"%C3%A9%FF") + b"?" * bool(query) + query.replace(b"\xff", b"%FF")
    assert asyncio.run(ask()) == allowed


async def no_body() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


def test_a_prefix_is_found_however_the_client_wrote_it(forwarding: Any) -> None:
    def below(**scope: Any) -> bytes:
        return bytes(forwarding.path_below(scope))

    assert below(path="/démo/v1", raw_path=b"/d%C3%A9m%6F/v1", root_path="/démo") == b"/v1"
    assert below(path="/demo", raw_path=b"/demo", root_path="/demo") == b"/"
    assert below(path="/demo/a b/é", root_path="/demo") == b"/a%20b/%C3%A9", "an ASGI server may leave raw_path out"
    assert below(path="/v1/x", raw_path=b"/v1/x", root_path="/demo") == b"/v1/x", "a proxy has removed the prefix"


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_api_is_below_the_prefix(server: Any, prefix: str, forwarding: Any) -> None:
    async def ask() -> httpx.Response:
        async with through_ray_serve(forwarding, server, prefix) as client:
            return await client.post(f"{prefix}/v1/completions?a=b%20c", content=b"a prompt")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.text) == (201, "a=b%20ca prompt")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_page_finds_its_files_and_numbers(server: Any, prefix: str, forwarding: Any) -> None:
    """Every address in it, as a browser resolves it from the page's own address."""

    async def browse() -> set[str]:
        async with through_ray_serve(forwarding, server, prefix) as client:
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
