"""A server without vLLM's engine: the workers' answers are made up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, make_asgi_app

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.serving.worker_stats import (
    METHOD,
    HostLayerStats,
    LayerGroup,
    TilingStats,
    WorkerStats,
)

HOST = HostLayerStats(
    host_layers=3,
    device_layers=1,
    pool_bytes=1000,
    cpu_attention_seconds=1.5,
    cpu_attention_bytes=10,
    decode_streamed_bytes=20,
    prefill_streamed_bytes=30,
    device_wait_seconds=2.5,
    plain_read_rate=12e9,
    rates=None,
)
LAYERS = [
    LayerGroup(place="device", kernels="ours", layers=[0]),
    LayerGroup(place="host", kernels="ours", layers=[1, 2, 3]),
]
TILING = {"layers": 2, "cuts": "4 blocks", "trials": []}
TRIAL = {
    "outputs": 64,
    "inputs_per_rank": 32,
    "tokens": 2048,
    "blocks": [1024, 1024],
    "collective": "nccl",
    "saved_seconds": 0.25,
}


def worker(rank: int, host_layers: HostLayerStats | None = HOST) -> dict[str, Any]:
    tiling = TilingStats.model_validate(TILING | {"trials": [TRIAL]})
    stats = WorkerStats(
        rank=rank,
        host="node",
        device="CPU",
        device_bytes=None,
        kernels={"ours": 4},
        layers=LAYERS,
        host_layers=host_layers,
        tiling=tiling,
    )
    return stats.model_dump()


class Engine:
    """Answers as vLLM's client does, at once or when it is told to."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = answers
        self.free = asyncio.Event()
        self.free.set()
        self.asked = 0
        backend = SimpleNamespace(name=compat.BACKEND_NAME)
        model = SimpleNamespace(model="a-model", served_model_name="demo", max_model_len=2048)
        self.vllm_config = SimpleNamespace(
            attention_config=SimpleNamespace(backend=backend),
            model_config=model,
            parallel_config=SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=1),
        )
        self.logger_manager = SimpleNamespace(stat_loggers=[])

    async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        assert method == METHOD
        self.asked += 1
        await self.free.wait()
        return list(self.answers)


def application(engine: Any, registry: CollectorRegistry, api_key: list[str] | None = None) -> FastAPI:
    app = FastAPI()
    app.mount("/metrics", make_asgi_app(registry=registry))
    app.state.engine_client = engine
    app.state.args = SimpleNamespace(api_key=api_key)
    return app


async def get(app: Any, path: str, **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        return await client.get(path, follow_redirects=True, **more)
