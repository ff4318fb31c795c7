"""Copies with the copy engines of one machine's GPUs. Signals are flags in host memory, which every GPU polls."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from fastattention_vllm import cuda_driver
from fastattention_vllm.cuda_driver import Operations
from fastattention_vllm.parallel import boards
from fastattention_vllm.parallel.copy_collective import PHASES, Copies
from fastattention_vllm.parallel.shared_segment import Exchange, share

LINE = 64
"""Distance between flags in bytes."""
PAGE = 4096


class CudaCopies(Copies):
    """Copies between GPUs of one machine, one process each. Run on two H200s; with more ranks only in tests on CPUs."""

    def __init__(
        self, rank: int, size: int, exchange: Exchange, peer_to_peer: bool, channels: int, board_bytes: int
    ) -> None:
        """All ranks call this with the same arguments, with their GPU current.

        Args:
            peer_to_peer: whether boards are in GPU memory; otherwise they are in host memory.
            board_bytes: size of the board of one channel.

        Raises:
            OSError: /dev/shm is too small; raised on every rank.
            DriverError: memory cannot be shared this way.
        """
        self.rank, self.size, self.channels, self.board_bytes = rank, size, channels, board_bytes
        torch.empty(1, device="cuda")  # the driver's calls need the context that torch makes late
        all_boards = channels * board_bytes
        flag_bytes = -(-channels * PHASES * size * LINE // PAGE) * PAGE
        segment_bytes = flag_bytes + (0 if peer_to_peer else all_boards)
        self._flags = boards.on_gpus(share(segment_bytes, exchange), rank, segment_bytes, exchange)
        if peer_to_peer:
            self._boards = boards.in_gpu_memory(rank, all_boards, exchange)
        else:
            self._boards = [address + flag_bytes for address in self._flags]
        self._tells, self._hears = self._all_flags()
        self._streams = [torch.cuda.Stream(priority=-1) for _ in range(channels)]
        self._numbers = [stream.cuda_stream for stream in self._streams]
        self._fetched = [
            torch.empty(board_bytes // (1 if size == 2 else size), dtype=torch.uint8, device="cuda")
            for _ in range(channels)
        ]
        torch.cuda.synchronize()
        exchange(None)

    def begin(self, channel: int) -> None:
        self._streams[channel].wait_stream(torch.cuda.current_stream())

    def put(self, channel: int, offset: int, tensor: torch.Tensor) -> None:
        cuda_driver.copy(
            self._board(channel, self.rank, offset), tensor.data_ptr(), tensor.nbytes, self._stream(channel)
        )

    def fetch(self, channel: int, peer: int, offset: int, tensor: torch.Tensor) -> None:
        cuda_driver.copy(tensor.data_ptr(), self._board(channel, peer, offset), tensor.nbytes, self._stream(channel))

    def add(self, channel: int, tensor: torch.Tensor, peer: int, offset: int) -> None:
        fetched = self._fetched[channel][: tensor.nbytes].view(tensor.dtype)
        self.fetch(channel, peer, offset, fetched)
        with torch.cuda.stream(self._streams[channel]):
            tensor.add_(fetched)

    def tell(self, channel: int, phase: int) -> None:
        cuda_driver.run(self._tells[channel, phase], self._stream(channel))

    def hear(self, channel: int, phase: int) -> None:
        cuda_driver.run(self._hears[channel, phase], self._stream(channel))

    def end(self, channel: int) -> Any:
        return self._streams[channel].record_event()

    def wait(self, ended: Any) -> None:
        torch.cuda.current_stream().wait_event(ended)

    def _all_flags(self) -> tuple[dict[tuple[int, int], Operations], dict[tuple[int, int], Operations]]:
        """The signal and wait operations by channel and phase, created once because all pieces use the same."""
        others = [peer for peer in range(self.size) if peer != self.rank]
        tells, hears = {}, {}
        for channel, phase in itertools.product(range(self.channels), range(PHASES)):
            heard = [self._flag(channel, phase, self.rank, peer) for peer in others]
            tells[channel, phase] = cuda_driver.operations(
                [(cuda_driver.WRITE, self._flag(channel, phase, peer, self.rank), 1) for peer in others]
            )
            hears[channel, phase] = cuda_driver.operations(
                [step for flag in heard for step in ((cuda_driver.WAIT, flag, 1), (cuda_driver.WRITE, flag, 0))]
            )
        return tells, hears

    def _stream(self, channel: int) -> int:
        return self._numbers[channel]

    def _board(self, channel: int, rank: int, offset: int) -> int:
        return self._boards[rank] + channel * self.board_bytes + offset

    def _flag(self, channel: int, phase: int, rank: int, teller: int) -> int:
        """The position of the flag by which ``teller`` signals ``rank``."""
        return self._flags[rank] + ((channel * PHASES + phase) * self.size + teller) * LINE
