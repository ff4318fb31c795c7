"""Replicas of `vllm serve` under Ray Serve, as many as the load needs. docs/ray.md says how to run it.

Each replica starts the `vllm` command and passes requests on to it through a Unix socket. So a replica is the same
server as one without Ray Serve, of whatever vLLM is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from forwarding import SERVER, forward
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve.config import AutoscalingConfig
from starlette.requests import Request
from starlette.responses import Response

START_S = 1800
END_S = 30


class Arguments(BaseModel):
    """``args`` of the application in serve.yaml."""

    model_config = ConfigDict(extra="forbid")

    model: str
    options: list[str] = []
    """Further options of `vllm serve`, one word each."""
    min_replicas: int = 1
    max_replicas: int = 2
    requests_per_replica: int = 4
    """Requests in flight per replica, above which another one is started."""
    cpus_per_replica: float = 1
    gpus_per_replica: float = 0
    upscale_delay_s: float = 30
    downscale_delay_s: float = 600


def application(given: dict[str, Any]) -> serve.Application:
    arguments = Arguments.model_validate(given)
    scaling = AutoscalingConfig(
        min_replicas=arguments.min_replicas,
        max_replicas=arguments.max_replicas,
        target_ongoing_requests=arguments.requests_per_replica,
        upscale_delay_s=arguments.upscale_delay_s,
        downscale_delay_s=arguments.downscale_delay_s,
    )
    resources = {"num_cpus": arguments.cpus_per_replica, "num_gpus": arguments.gpus_per_replica}
    replica = Replica.options(  # type: ignore[attr-defined]
        autoscaling_config=scaling,
        ray_actor_options=resources,
        # vLLM itself queues requests.
        max_ongoing_requests=64 * arguments.requests_per_replica,
    )
    return replica.bind(arguments.model, arguments.options)


@serve.deployment(health_check_timeout_s=60, graceful_shutdown_timeout_s=2 * END_S)
class Replica:
    """One `vllm serve`."""

    def __init__(self, model: str, options: list[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fastattention-"))
        socket = self.folder / "socket"
        command = [str(Path(sys.executable).parent / "vllm"), "serve", model, "--attention-backend", "fastattention"]
        self.server = subprocess.Popen([*command, "--uds", str(socket), *options], preexec_fn=end_with_parent)
        # vLLM itself queues requests. It closes idle connections, so none is kept for a later request.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(uds=str(socket), limits=limits)
        self.client = httpx.AsyncClient(transport=transport, base_url=SERVER, timeout=None)
        self.wait_until_ready(socket)  # Ray Serve sends requests as soon as this returns

    def wait_until_ready(self, socket: Path) -> None:
        """Raises ``RuntimeError`` if the server has ended, or has not started in time."""
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url=SERVER) as client:
            for _ in range(START_S):
                self.check_health()
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/health").status_code == 200:
                        return
                time.sleep(1)
        raise RuntimeError(f"vllm serve did not become ready within {START_S} s.")

    def check_health(self) -> None:
        """Ray Serve replaces a replica for which this raises."""
        if self.server.poll() is not None:
            raise RuntimeError(f"vllm serve ended with status {self.server.returncode}; its log has the reason.")

    async def __call__(self, request: Request) -> Response:
        return await forward(request, self.client)

    def __del__(self) -> None:
        self.server.send_signal(signal.SIGINT)
        try:
            self.server.wait(END_S)
        except subprocess.TimeoutExpired:
            self.server.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def end_with_parent() -> None:
    """Runs in the child before exec: get SIGTERM when the replica ends for any reason (Linux PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
