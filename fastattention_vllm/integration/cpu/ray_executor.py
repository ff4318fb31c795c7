"""Tensor-parallel CPU workers under Ray."""

from __future__ import annotations

import os
from typing import Any

import psutil
import ray
from vllm.platforms import current_platform
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from fastattention_vllm.integration.serving import ray_cluster

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


class CpuRayExecutor(RayExecutorV2):
    """vLLM's Ray executor with worker slots on a CPU-only machine.

    vLLM requests one "GPU" per worker from Ray. Ray finds none on a CPU-only machine, so a cluster that is started here
    gets one slot per physical core. A cluster that RAY_ADDRESS names is used unchanged; start its nodes with
    ``ray start --num-gpus <worker slots>``.
    """

    def _init_executor(self) -> None:
        if not ray.is_initialized():
            runtime_env = self.parallel_config.ray_runtime_env
            if os.environ.get("RAY_ADDRESS"):
                ray.init(runtime_env=runtime_env)
            else:
                ray_cluster.keep_to_this_machine()
                # "auto" would join any cluster that runs on this machine.
                ray.init(
                    address="local",
                    runtime_env=runtime_env,
                    include_dashboard=False,
                    num_gpus=max(current_platform.device_count(), self.parallel_config.world_size),
                )
        super()._init_executor()
        for queue in self.response_mqs:
            ray_cluster.free_name(queue)

    def shutdown(self) -> None:
        if not ray.is_initialized():
            # Ray ended first, and its workers with it. To kill them now, Ray would start another session.
            self.ray_worker_handles: list[Any] = []
        super().shutdown()


def choose_gloo_interface() -> None:
    """Connect this worker to the others through the network interface that has the address of this Ray node.

    By default, gloo uses the address of the machine's name. On many machines that is a loopback address, which workers
    on other machines cannot reach.
    """
    address = ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            os.environ.setdefault(GLOO_INTERFACE, name)
            return
