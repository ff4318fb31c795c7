"""Tensor-parallel CPU workers under Ray."""

from __future__ import annotations

import os
from typing import Any

import ray
from vllm.platforms import current_platform
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

SEVERAL_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


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
                _keep_to_this_machine()
                # "local", never "auto": auto would join whatever cluster runs on this machine.
                ray.init(
                    address="local",
                    runtime_env=runtime_env,
                    include_dashboard=False,
                    num_gpus=max(current_platform.device_count(), self.parallel_config.world_size),
                )
        super()._init_executor()


def _keep_to_this_machine() -> None:
    """Have a cluster that is started here listen on 127.0.0.1, where Ray would on all addresses.

    Ray has no option for it: 2.60 turns ``_node_ip_address="127.0.0.1"`` into the machine's own address. It does this
    everywhere but on Windows and macOS, where clusters of several machines are not supported, and this variable says
    whether they are. Its processes read it as they start; this one has read it when it imported Ray.
    """
    if os.environ.setdefault(SEVERAL_MACHINES, "0") == "0":
        constants: Any = ray._private.ray_constants
        constants.ENABLE_RAY_CLUSTER = False
