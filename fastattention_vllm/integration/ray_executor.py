"""Tensor-parallel CPU workers under Ray."""

from __future__ import annotations

import os

import ray
from vllm.platforms import current_platform
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

HERE = "127.0.0.1"


class CpuRayExecutor(RayExecutorV2):
    """vLLM's Ray executor with worker slots on a CPU-only machine.

    vLLM asks Ray for one "GPU" per worker; on a CPU-only machine Ray counts none, so a cluster started here is given
    one slot per physical core. A cluster named by RAY_ADDRESS is joined as it is: start its nodes with
    ``ray start --num-gpus <worker slots>``.
    """

    def _init_executor(self) -> None:
        if not ray.is_initialized():
            runtime_env = self.parallel_config.ray_runtime_env
            if os.environ.get("RAY_ADDRESS"):
                ray.init(runtime_env=runtime_env)
            else:
                # "local", never "auto": auto would join whatever cluster runs on this machine.
                ray.init(
                    address="local",
                    runtime_env=runtime_env,
                    include_dashboard=False,
                    # On one machine nobody else has to reach it; Ray asks no one for a password.
                    _node_ip_address=HERE,
                    num_gpus=max(current_platform.device_count(), self.parallel_config.world_size),
                )
        super()._init_executor()
