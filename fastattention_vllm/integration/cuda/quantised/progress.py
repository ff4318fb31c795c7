"""How far the repacking of a model's quantised weights is, in the log."""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger

logger = init_logger("vllm.fastattention")

SECONDS = 10.0
"""Between two lines."""


class Progress:
    """Of the layers of one model. vLLM makes all of them before it loads them, and then has them repacked one by one;
    so again whenever it loads other weights.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._layers = self._bytes = self._done = self._repacked = 0
        self._began = self._said = 0.0
        self._complete = False

    def expect(self, nbytes: int) -> None:
        """A layer has been made, whose checkpoint has so many bytes."""
        if self._complete:  # of another model
            self._layers = self._bytes = 0
            self._complete = False
        self._layers += 1
        self._bytes += nbytes

    def begin(self) -> None:
        """A layer is about to be repacked."""
        if not self._done:
            self._began = self._said = self._clock()
            _say("Repacking the quantised weights of %d layers (%.2f GiB).", self._layers, self._bytes / 2**30)

    def end(self, nbytes: int) -> None:
        """The layer has been repacked."""
        self._done += 1
        self._repacked += nbytes
        now, gib = self._clock(), self._repacked / 2**30
        if self._done >= self._layers:
            _say("Repacked %d layers with quantised weights (%.2f GiB) in %.1f s.", self._done, gib, now - self._began)
            self._done = self._repacked = 0  # the same layers may be loaded again
            self._complete = True
        elif now - self._said >= SECONDS:
            self._said = now
            _say("Repacked %d of %d layers with quantised weights (%.2f GiB).", self._done, self._layers, gib)


def _say(line: str, *values: float) -> None:
    """All ranks have as much to do, so the first of them speaks."""
    if get_tensor_model_parallel_rank() == 0:
        logger.info(line, *values)
