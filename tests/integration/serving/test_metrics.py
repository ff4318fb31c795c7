"""The workers' numbers in vLLM's server: what a scrape shows, and what happens while the workers are busy."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn.server
from fastapi import FastAPI
from prometheus_client import REGISTRY, CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families
from vllm import envs
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats
from vllm.v1.worker import worker_base

from fastattention_vllm.integration.serving import channel as channels
from fastattention_vllm.integration.serving import metrics, routes, server_start
from fastattention_vllm.integration.serving.channel import Channel
from fastattention_vllm.integration.serving.worker_stats import METHOD
from tests.integration.serving.fakes import Engine, application, get, gpu_config, gpu_worker, worker

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    own = CollectorRegistry()
    monkeypatch.setattr(routes, "REGISTRY", own)
    monkeypatch.setattr(metrics, "REGISTRY", own)
    return own


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_shows_every_worker(registry: CollectorRegistry) -> None:
    usage = Gauge(metrics.USAGE, "usage", registry=registry)
    usage.set(0.25)

    async def scrape() -> str:
        app = application(Engine(worker(0), worker(1, None)), registry)
        return (await get(routes.attach(app, app), "/metrics")).text

    found = samples(asyncio.run(scrape()))
    assert found["fastattention:attention_layers", "place=host", "rank=0"] == 3
    assert found["fastattention:attention_layers", "place=device", "rank=0"] == 1
    assert found["fastattention:attention_layers", "place=device", "rank=1"] == 4
    assert found["fastattention:nan_logits_total", "rank=1"] == 5
    assert found["fastattention:host_pool_bytes", "rank=0", "state=used"] == 250
    assert found["fastattention:host_pool_bytes", "rank=0", "state=free"] == 750
    assert found["fastattention:cpu_attention_seconds_total", "rank=0"] == 1.5
    assert found["fastattention:cpu_attention_bytes_total", "rank=0"] == 10
    assert found["fastattention:device_wait_seconds_total", "rank=0"] == 2.5
    assert found["fastattention:saturated_numbers_total", "rank=0"] == 17
    assert found["fastattention:resident_bytes_total", "rank=0"] == 40
    assert found["fastattention:plain_read_bytes_per_second", "rank=0"] == 12e9
    assert found["fastattention:streamed_bytes_total", "phase=decode", "rank=0"] == 20
    assert found["fastattention:streamed_bytes_total", "phase=prefill", "rank=0"] == 30
    assert found["fastattention:tiled_layers", "cuts=4 blocks", "rank=1"] == 2
    (saved,) = [value for name, value in found.items() if name[0].endswith("saved_seconds") and "rank=1" in name]
    assert saved == 0.25
    assert [name for name in found if name[0] == "fastattention:kernels_info" and "kernels=ours" in name]
    assert not [name for name in found if name[0].startswith("fastattention:streamed") and "rank=1" in name]


def test_the_page_lists_every_metric_with_its_labels(registry: CollectorRegistry) -> None:
    async def scrape() -> str:
        app = application(Engine(worker(0)), registry)
        return (await get(routes.attach(app, app), "/metrics")).text

    shown = {
        (sample.name, *sorted(sample.labels))
        for family in text_string_to_metric_families(asyncio.run(scrape()))
        for sample in family.samples
    } | {("fastattention:refused_requests_total",)}
    rows = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| `fastattention:")]
    listed = {(name.strip(" `"), *sorted(re.findall(r"`(\w+)`", labels))) for name, labels in rows}
    assert listed == shown


def test_the_status_has_the_same_numbers(registry: CollectorRegistry) -> None:
    async def ask() -> Any:
        app = application(Engine(worker(0)), registry)
        return (await get(routes.attach(app, app), routes.STATUS)).json()

    status = asyncio.run(ask())
    assert status["schema_version"] == 1
    assert status["workers"] == [worker(0)]
    assert 0 <= status["age_seconds"] < 60


@pytest.mark.parametrize(("sent", "code"), [(None, 401), ("Bearer wrong", 401), ("Bearer right", 200)])
def test_a_server_with_a_key_asks_for_it(registry: CollectorRegistry, sent: str | None, code: int) -> None:
    async def ask() -> Any:
        app = application(Engine(worker(0)), registry, ["other", "right"])
        return await get(routes.attach(app, app), routes.STATUS, headers={"Authorization": sent} if sent else {})

    assert asyncio.run(ask()).status_code == code


@pytest.mark.parametrize(
    "sent",
    [
        None,
        b"",
        b"right",
        b"bearer",
        b"Bearer ",
        b"bearer right",
        b"BEARER right",
        b"Bearer  right",
        b"Bearer right ",
        b"Bearer\tright",
        b"Bearer Bearer right",
        b"Basic right",
        b"Bearerright",
        b"Bearer caf\xe9",
        b"Bearer caf\xc3\xa9",
        b"Bearer \xff\xfe",
        b"Bearer wrong, Bearer right",
    ],
)
def test_vllm_accepts_the_same_keys(registry: CollectorRegistry, sent: bytes | None) -> None:
    """Its own middleware, with the same keys, before a path that it guards."""
    keys = ["other", "right", "café"]

    async def ask(app: Any, path: str) -> int:
        return (await get(app, path, headers=[(b"Authorization", sent)] if sent is not None else [])).status_code

    async def both() -> tuple[int, int]:
        app = application(Engine(worker(0)), registry, keys)
        ours, theirs = routes.attach(app, app), FastAPI()
        theirs.get("/v1/models")(lambda: {"data": []})
        theirs.add_middleware(authentication(), tokens=keys)
        return await ask(ours, routes.STATUS), await ask(theirs, "/v1/models")

    found, expected = asyncio.run(both())
    assert found == expected


def authentication() -> Any:
    """vLLM's AuthenticationMiddleware; 0.19.1 has it in another module."""
    for module in ("vllm.entrypoints.serve.middleware.authenticate", "vllm.entrypoints.openai.server_utils"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(module).AuthenticationMiddleware
    raise AssertionError("this vLLM has its AuthenticationMiddleware elsewhere")


def test_requests_without_the_key_are_not_kept(registry: CollectorRegistry) -> None:
    """With vLLM's own middleware, which is part of the application that is watched."""

    async def asks() -> Any:
        app = application(Engine(worker(0)), registry, ["right"])
        app.post("/v1/completions")(lambda: {"id": "cmpl-1"})
        app.add_middleware(authentication(), tokens=["right"])
        attached = routes.attach(app, app)
        transport, key = httpx.ASGITransport(attached), {"Authorization": "Bearer right"}
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            await client.post("/v1/completions", headers=key)
            for number in range(60):
                await client.post("/v1/completions")
                await client.post(f"/v1/{number}/{'a' * 60_000}", headers=key if number % 2 else {})
                await client.put("/v1/completions", headers=key)
        return await get(attached, routes.STATUS, headers=key)

    status = asyncio.run(asks())
    (seen,) = status.json()["requests"]["recent"]
    assert (seen["response_id"], seen["path"], seen["status"]) == ("cmpl-1", "/v1/completions", 200)
    assert len(status.content) < 10_000


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "FRESH_S", 0.0)
    monkeypatch.setattr(channels, "PATIENCE_S", 0.05)


@pytest.mark.usefixtures("impatient")
def test_busy_workers_are_asked_once_and_the_last_numbers_stay() -> None:
    async def ask() -> None:
        engine = Engine(worker(0))
        channel = Channel(engine)
        await channel.refresh()
        assert [one.rank for one in channel.workers] == [0]
        engine.answers = (worker(0), worker(1))
        engine.free.clear()
        for _ in range(3):
            await channel.refresh()
        assert engine.asked == 2
        assert [one.rank for one in channel.workers] == [0]
        engine.free.set()
        await channel.refresh()
        assert [one.rank for one in channel.workers] == [0, 1]

    asyncio.run(ask())


def test_many_clients_cost_one_question() -> None:
    async def ask() -> int:
        engine = Engine(worker(0))
        channel = Channel(engine)
        await asyncio.gather(*(channel.refresh() for _ in range(10)))
        await channel.refresh()
        return engine.asked

    assert asyncio.run(ask()) == 1


def test_an_engine_that_fails_ends_no_scrape(registry: CollectorRegistry) -> None:
    class Dead(Engine):
        async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
            raise RuntimeError("engine is dead")

    async def scrape() -> Any:
        app = application(Dead(), registry)
        return await get(routes.attach(app, app), "/metrics")

    answer = asyncio.run(scrape())
    assert answer.status_code == 200
    assert "fastattention:" not in answer.text


def test_the_status_says_why_the_workers_do_not_report(registry: CollectorRegistry) -> None:
    class Older(Engine):
        broken = True

        async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
            if self.broken:
                raise AttributeError("a worker has no static_forward_context")
            return await super().collective_rpc(method)

    async def ask() -> list[Any]:
        engine = Older(worker(0))
        app = application(engine, registry)
        served = routes.attach(app, app)
        answers = [await get(served, routes.STATUS)]
        engine.broken = False
        return [*answers, await get(served, routes.STATUS)]

    broken, whole = (answer.raise_for_status().json() for answer in asyncio.run(ask()))
    assert broken["workers_error"] == "AttributeError: a worker has no static_forward_context"
    assert broken["workers"] == []
    assert whole["workers_error"] is None
    assert whole["workers"]


@pytest.mark.parametrize("gone", ["cache_config", "scheduler_config", "parallel_config"])
def test_a_configuration_without_a_name_leaves_the_rest_of_the_status(registry: CollectorRegistry, gone: str) -> None:
    async def ask() -> Any:
        engine = Engine()
        engine.vllm_config = gpu_config()
        engine.answers = (gpu_worker(host=8).model_dump(),)
        delattr(engine.vllm_config, gone)
        app = application(engine, registry)
        return await get(routes.attach(app, app), routes.STATUS)

    status = asyncio.run(ask()).raise_for_status().json()
    assert gone in status["prediction"]["why_not"]
    assert status["workers"][0]["device"] == "NVIDIA H200"


def test_a_vllm_without_a_name_of_the_status_serves_requests(
    monkeypatch: pytest.MonkeyPatch, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_start.logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.delitem(envs.environment_variables, "VLLM_API_KEY")
    app = application(Engine(worker(0)), registry)
    config = SimpleNamespace(app=app, loaded_app=app)
    server_start.add_routes(config)
    (said,) = {record.getMessage() for record in caplog.records if record.name == server_start.logger.name}
    assert "This vLLM lacks a name" in said
    assert "VLLM_API_KEY" in said
    assert config.loaded_app is app
    assert asyncio.run(get(app, routes.STATUS)).status_code == 404


def test_only_servers_of_this_backend_are_extended(
    monkeypatch: pytest.MonkeyPatch, registry: CollectorRegistry
) -> None:
    started: list[Any] = []

    class Server:
        def __init__(self, app: Any) -> None:
            self.config = SimpleNamespace(app=app, loaded_app=app)

        async def startup(self, sockets: Any = None) -> None:
            started.append(self.config.app)

    module = SimpleNamespace(Server=Server)
    server_start.attach_at_start(module)
    server_start.attach_at_start(module)

    async def start() -> list[int]:
        other = Engine()
        other.vllm_config.attention_config.backend = SimpleNamespace(name="FLASH_ATTN")
        apps = [application(Engine(worker(0)), registry), application(other, registry), FastAPI()]
        servers = [Server(app) for app in apps]
        for server in servers:
            await server.startup()
        return [(await get(server.config.loaded_app, routes.STATUS)).status_code for server in servers]

    assert asyncio.run(start()) == [200, 404, 404]
    assert len(started) == 3


def test_the_plugin_changes_vllms_worker_and_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.server.Server, "startup", uvicorn.server.Server.startup)
    monkeypatch.setattr(worker_base.WorkerBase, METHOD, None, raising=False)
    server_start.install()
    assert hasattr(uvicorn.server.Server.startup, "_fastattention")
    assert callable(getattr(worker_base.WorkerBase, METHOD))


def test_refused_requests_are_counted() -> None:
    assert REGISTRY.get_sample_value("fastattention:refused_requests_total") is not None


def test_the_status_joins_requests_with_what_the_engine_measured(registry: CollectorRegistry) -> None:
    async def ask() -> Any:
        engine = Engine()
        engine.vllm_config = gpu_config()
        engine.answers = (gpu_worker(host=8).model_dump(),)
        app = application(engine, registry)

        @app.post("/v1/completions")
        async def completions() -> dict[str, str]:
            return {"id": "cmpl-1"}

        served = routes.attach(app, app)
        (stats,) = engine.logger_manager.stat_loggers
        done = FinishedRequestStats(FinishReason.STOP, request_id="cmpl-1-0", num_prompt_tokens=1000)
        done.num_generation_tokens, done.prefill_time, done.decode_time = 11, 0.5, 1.0
        iteration = IterationStats()
        iteration.finished_requests.append(done)
        stats.record(SchedulerStats(num_running_reqs=1, kv_cache_usage=0.25), iteration)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://server") as client:
            await client.post("/v1/completions")
            return (await client.get(routes.STATUS)).json()

    status = asyncio.run(ask())
    assert status["kv_cache"]["used_fraction"] == 0.25
    assert [point["highest"] for point in status["kv_cache"]["history"]] == [0.25]
    assert status["requests"]["running"] == 1
    (one,) = status["requests"]["recent"]
    assert (one["response_id"], one["status"], one["prompt_tokens"], one["new_tokens"]) == ("cmpl-1", 200, 1000, 11)
    assert (one["prefill_seconds"], one["decode_seconds_per_token"]) == (0.5, 0.1)
    assert 0 < one["predicted_prefill_seconds"] < 0.5
    assert 0 < one["predicted_decode_seconds_per_token"] < 0.1
    assert status["prediction"]["why_not"] is None
