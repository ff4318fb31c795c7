"""Leaves no names of shared memory and semaphores behind when vLLM kills its engine and workers.

A server that is stopped gives requests ``--shutdown-timeout`` seconds, by default none, and then kills its engine and
workers. vLLM 0.19.1 to 0.33 gives them no time to remove the names that they have made. Python's resource tracker
then does, and warns of leaked objects in the server's last lines. The same follows if any of them is killed.

So they keep no names. A queue's name is removed once all of its readers have the queue open, and its memory is freed
with the last process that has it. Progress bars of these processes get a lock without a name.
"""

from __future__ import annotations

import functools
import multiprocessing
import threading
from typing import Any

from fastattention_vllm.integration.serving.once_imported import once_imported


def install() -> None:
    """Change this process. Repeated calls are safe."""
    once_imported("vllm.distributed.device_communicators.shm_broadcast", free_names_of_queues)
    # Other processes end in order, and their bars may share a lock with their children.
    if multiprocessing.parent_process() is not None:
        once_imported("tqdm.std", lock_threads_only)


def free_names_of_queues(module: Any) -> None:
    """Remove the name of a message queue once all readers have it open."""
    original = module.MessageQueue.wait_until_ready
    if hasattr(original, "_fastattention"):
        return

    @functools.wraps(original)
    def wait_until_ready(self: Any) -> None:
        original(self)
        # Readers open the memory before they tell the writer that they are there. A queue to other machines has none.
        # ``tensor_arena``: the option enable_shm_tensor_arena of vLLM 0.32.
        memories: list[Any] = [getattr(self, "buffer", None), getattr(self, "tensor_arena", None)]
        for memory in memories:
            if getattr(memory, "is_creator", False):
                memory.shared_memory.unlink()
                memory.is_creator = False  # or it would remove the name again at its end

    wait_until_ready._fastattention = True  # type: ignore[attr-defined]
    module.MessageQueue.wait_until_ready = wait_until_ready


def lock_threads_only(module: Any) -> None:
    """Let progress bars of this process wait for each other by a lock of its own.

    tqdm's default is a semaphore with a name, for bars of several processes. vLLM shows those of one.
    """
    if not hasattr(module.tqdm, "_lock"):
        module.tqdm.set_lock(threading.RLock())
