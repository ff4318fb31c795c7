"""Ray clusters that a server starts for itself: they listen on 127.0.0.1, and their workers leave no shared memory.

The CPU executor uses these functions itself. On GPUs, vLLM's own executor runs, which ``install`` changes.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.serving.once_imported import once_imported

SEVERAL_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
SHARED_MEMORY = Path("/dev/shm")


def install() -> None:
    """Change vLLM's executor in this process as soon as it is imported. Repeated calls are safe.

    vLLM 0.19.1 does not have it. The older executor looks for Ray's resource of the machine's own address, which a
    cluster on 127.0.0.1 lacks.
    """
    once_imported("vllm.v1.executor.ray_executor_v2", change_executor)


def change_executor(module: Any) -> None:
    """Servers with other attention backends are not changed."""
    original = module.RayExecutorV2._init_executor
    if hasattr(original, "_fastattention"):
        return

    @functools.wraps(original)
    def _init_executor(self: Any) -> None:
        ours = self.vllm_config.attention_config.backend is compat.ensure_backend_member()
        if ours and starts_a_cluster_for_itself(self.parallel_config):
            keep_to_this_machine()
        original(self)
        if ours:
            free_names(self)

    _init_executor._fastattention = True  # type: ignore[attr-defined]
    module.RayExecutorV2._init_executor = _init_executor


def starts_a_cluster_for_itself(parallel_config: Any) -> bool:
    """Whether vLLM's ``ray.init`` will start a cluster that needs no other machine.

    Without RAY_ADDRESS, ``ray.init`` joins a cluster that ``ray start`` has started on this machine. If this machine
    has too few GPUs, vLLM waits for machines that join its new cluster.
    """
    # Not at the top: only this executor needs Ray.
    import ray
    from vllm.platforms import current_platform

    if ray.is_initialized() or os.environ.get("RAY_ADDRESS") not in (None, "", "local"):
        return False
    if parallel_config.world_size_across_dp > current_platform.device_count():
        return False
    services: Any = ray._private.services
    return services.canonicalize_bootstrap_address(None) is None


def keep_to_this_machine() -> None:
    """Make a cluster that is started here listen on 127.0.0.1 instead of all addresses.

    Ray has no option for this: 2.60 replaces ``_node_ip_address="127.0.0.1"`` by the machine's own address, except on
    Windows and macOS, where it does not support clusters of several machines. The variable below controls that support.
    Ray's processes read it when they start; this process read it when it imported Ray, so the constant is set, too.
    """
    import ray

    if os.environ.setdefault(SEVERAL_MACHINES, "0") == "0":
        constants: Any = ray._private.ray_constants
        constants.ENABLE_RAY_CLUSTER = False


def free_names(executor: Any) -> None:
    """Remove the names of all queues that the workers have made."""
    for queue in executor.response_mqs:
        free_name(queue)
    executor.collective_rpc(free_group_name)


def free_group_name(worker: Any = None) -> None:
    """Remove the name of the queue of a tensor-parallel group. Its workers call this; ``collective_rpc`` names them."""
    from vllm.distributed.parallel_state import get_tp_group

    free_name(get_tp_group().mq_broadcaster)


def free_name(queue: Any) -> None:
    """Remove the name of a worker's message queue in /dev/shm. Its memory is freed with the last process that has it.

    Ray kills a worker together with the process that would remove the name. Call this once all readers have the queue
    open. A queue to other machines only has no such memory.
    """
    if (memory := getattr(getattr(queue, "buffer", None), "shared_memory", None)) is not None:
        (SHARED_MEMORY / memory.name).unlink(missing_ok=True)
