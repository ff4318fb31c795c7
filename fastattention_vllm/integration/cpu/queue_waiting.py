"""Processes that wait for a message sleep.

Why: vLLM's engine and workers exchange messages through shared memory. A reader yields its CPU in a loop for a second
after its last message before it sleeps, so the engine's process can take a CPU through every step of the workers. On
CPUs, the workers need it.

A sleeping reader depends on the writer's notification. vLLM's writer keeps one back at most and drops others, so a
reader that begins to sleep between two messages can miss the second one. vLLM 0.28 and newer look again after 5
seconds; older versions wait until the next message. Here the writer drops none. libzmq's socket that keeps the newest
notification only (``CONFLATE``) misses one that arrives while another is read, so readers also look again soon.
Remove when: vLLM has an option for the time, and notifications are not lost.
"""

from __future__ import annotations

import time
from typing import Any

import zmq

from fastattention_vllm.integration.serving.once_imported import once_imported

MODULE = "vllm.distributed.device_communicators.shm_broadcast"
SPIN_SECONDS = 0.0002
"""How long a reader yields its CPU after its last message before it sleeps."""
RECENT_SECONDS = 1
RECHECK_MS, IDLE_RECHECK_MS = 5, 500
"""After how many milliseconds a sleeping reader looks again: within RECENT_SECONDS of its last message, and later.

Notifications reach a reader only once its socket is connected, so that the first ones can be lost."""


def install() -> None:
    """Do this for queues that are made from now on. Idempotent."""
    once_imported(MODULE, _replace)


def _replace(module: Any) -> None:
    original: Any = module.SpinCondition
    if original.__module__ == __name__:
        return

    class SleepingCondition(original):
        __module__ = __name__

        def __init__(
            self, is_reader: bool, context: zmq.Context[Any], notify_address: str, busy_loop_s: float = SPIN_SECONDS
        ) -> None:
            if is_reader:
                super().__init__(is_reader, context, notify_address, busy_loop_s)
                return
            self.is_reader = False
            self.last_read = self.busy_loop_s = 0
            self.read_cancel_socket = self.write_cancel_socket = self.poller = None
            self.local_notify_socket = context.socket(zmq.PUB)
            self.local_notify_socket.setsockopt(zmq.SNDHWM, 0)  # no limit: readers keep the newest one only
            self.local_notify_socket.bind(notify_address)

        def wait(self, timeout_ms: int | None = None) -> None:
            recent = time.monotonic() < self.last_read + RECENT_SECONDS
            at_most = RECHECK_MS if recent else IDLE_RECHECK_MS
            super().wait(at_most if timeout_ms is None else min(timeout_ms, at_most))

    module.SpinCondition = SleepingCondition
