"""A server without vLLM's engine: the workers' answers are made up."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, make_asgi_app

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.serving.worker_stats import (
    METHOD,
    HostLayerStats,
    HostRates,
    LayerGroup,
    TilingStats,
    WorkerStats,
)

SHAPES = Path(__file__).resolve().parents[2] / "plan" / "shapes"
HOST = HostLayerStats(
    host_layers=3,
    device_layers=1,
    pool_bytes=1000,
    cpu_attention_seconds=1.5,
    cpu_attention_bytes=10,
    decode_streamed_bytes=20,
    prefill_streamed_bytes=30,
    device_wait_seconds=2.5,
    saturated_numbers=17,
    resident_bytes=40,
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
        nan_logits=5,
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


def gpu_config(**changes: Any) -> SimpleNamespace:
    """What vLLM knows of a server with an 8B Llama."""
    config = json.loads((SHAPES / "llama3-8b" / "config.json").read_text())
    config = config | {"max_position_embeddings": 131072} | changes
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=SimpleNamespace(name=compat.BACKEND_NAME)),
        additional_config={},
        model_config=SimpleNamespace(
            model="llama3-8b",
            served_model_name="llama3-8b",
            max_model_len=131072,
            hf_config=SimpleNamespace(to_dict=lambda: config),
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_memory_bytes=None, gpu_memory_utilization=0.9),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
    )


def gpu_worker(host: int, rates: HostRates | None = None, rank: int = 0) -> WorkerStats:
    """A worker on an H200 with an 8B Llama, whose first ``host`` layers are host layers."""
    layers = [LayerGroup(place="device", kernels="FlashAttention", layers=list(range(host, 32)))]
    if host:
        layers.append(LayerGroup(place="host", kernels="FlashAttention", layers=list(range(host))))
    update = {"host_layers": host, "device_layers": 32 - host, "rates": rates, "pool_bytes": 12 << 30}
    return WorkerStats(
        rank=rank,
        host="node",
        device="NVIDIA H200",
        device_bytes=int(139.72 * (1 << 30)),
        kernels={"FlashAttention": 32},
        layers=layers,
        nan_logits=0,
        host_layers=HOST.model_copy(update=update) if host else None,
        tiling=None,
    )
