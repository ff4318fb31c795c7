"""`vllm serve` with an event loop that is late just when the engine is stopped, as can happen on a busy machine."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.engine.core_client import BackgroundResources

LATE_S = 0.5


def be_late() -> None:
    """Let the loop sleep while the cancellations from the engine's end are queued."""
    stop = BackgroundResources.__call__

    def late(self: Any) -> None:
        if self.output_queue_task is not None:
            self.output_queue_task.get_loop().call_soon_threadsafe(time.sleep, LATE_S)
        stop(self)

    BackgroundResources.__call__ = late


if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    be_late()
    main()
