"""A test's copy engine: memcpy and flags in shared memory, executed immediately by the rank itself."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from fastattention_vllm.parallel.copy_collective import PARTIAL, PHASES, Copies
from fastattention_vllm.parallel.shared_segment import Exchange, share

SECONDS = 120.0


class SharedCopies(Copies):
    def __init__(self, rank: int, size: int, exchange: Exchange, channels: int, board_bytes: int) -> None:
        self.rank, self.size, self.channels, self.board_bytes = rank, size, channels, board_bytes
        flag_bytes = 4 * channels * PHASES * size
        segments = share(flag_bytes + channels * board_bytes, exchange)
        whole = [np.frombuffer(segment, dtype=np.uint8) for segment in segments]
        self._flags = [one[:flag_bytes].view(np.uint32).reshape(channels, PHASES, size) for one in whole]
        self._boards = [one[flag_bytes:].reshape(channels, board_bytes) for one in whole]
        self.pieces = 0

    def begin(self, channel: int) -> None:
        pass

    def put(self, channel: int, offset: int, tensor: torch.Tensor) -> None:
        self._place(channel, self.rank, offset, tensor)[:] = tensor.view(torch.uint8).numpy()

    def fetch(self, channel: int, peer: int, offset: int, tensor: torch.Tensor) -> None:
        tensor.view(torch.uint8).numpy()[:] = self._place(channel, peer, offset, tensor)

    def add(self, channel: int, tensor: torch.Tensor, peer: int, offset: int) -> None:
        fetched = torch.empty_like(tensor)
        self.fetch(channel, peer, offset, fetched)
        tensor.add_(fetched)

    def tell(self, channel: int, phase: int) -> None:
        self.pieces += phase == PARTIAL
        for peer in range(self.size):
            if peer != self.rank:
                assert self._flags[peer][channel, phase, self.rank] == 0, "a flag must be read before it is set again"
                self._flags[peer][channel, phase, self.rank] = 1

    def hear(self, channel: int, phase: int) -> None:
        until = time.monotonic() + SECONDS
        for peer in range(self.size):
            if peer != self.rank:
                while self._flags[self.rank][channel, phase, peer] == 0:
                    time.sleep(0)
                    assert time.monotonic() < until, f"rank {peer} has not set phase {phase}"
                self._flags[self.rank][channel, phase, peer] = 0

    def end(self, channel: int) -> Any:
        return None

    def wait(self, ended: Any) -> None:
        pass

    def _place(self, channel: int, rank: int, offset: int, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        place = self._boards[rank][channel, offset : offset + tensor.nbytes]
        assert place.nbytes == tensor.nbytes, "must be within the board"
        return place
