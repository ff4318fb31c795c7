"""Memory that the ranks of one machine share: of their GPUs, if these can access each other, or of the host."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import TypeVar

from fastattention_vllm import cuda_driver
from fastattention_vllm.parallel.shared_segment import Exchange

Result = TypeVar("Result")


_registered: list[mmap.mmap] = []
"""Segments that the driver knows. Unmapped memory would stay registered, and torch may get its addresses anew."""


def in_gpu_memory(rank: int, size: int, exchange: Exchange) -> list[int]:
    """``size`` zeroed bytes of each rank's GPU: their addresses for this rank. They live as long as the process.

    Raises:
        DriverError: memory cannot be shared this way; raised on all ranks.
    """

    def own() -> tuple[int, bytes]:
        address = cuda_driver.allocate(size)
        cuda_driver.clear(address, size)
        return address, cuda_driver.handle_of(address)

    allocated = on_all(exchange, own)

    def opened() -> list[int]:
        return [
            address if peer == rank else cuda_driver.open_handle(handle)
            for peer, (address, handle) in enumerate(allocated)
        ]

    return on_all(exchange, opened)[rank]


def on_gpus(segments: list[mmap.mmap], rank: int, size: int, exchange: Exchange) -> list[int]:
    """The addresses at which this rank's GPU sees each rank's segment of ``size`` bytes, as long as the process lives.

    Raises:
        DriverError: memory cannot be registered; raised on all ranks.
    """
    _registered.extend(segments)
    return on_all(
        exchange,
        lambda: [
            cuda_driver.register_host(ctypes.addressof(ctypes.c_char.from_buffer(segment)), size)
            for segment in segments
        ],
    )[rank]


def on_all(exchange: Exchange, work: Callable[[], Result]) -> list[Result]:
    """The result of ``work`` on each rank.

    Raises:
        DriverError: it failed on some rank; raised on all ranks.
    """
    result, problem = None, ""
    try:
        result = work()
    except cuda_driver.DriverError as error:
        problem = str(error)
    answers = exchange((result, problem))
    for rank, (_, failed) in enumerate(answers):
        if failed:
            raise cuda_driver.DriverError(f"rank {rank}: {failed}")
    return [answer for answer, _ in answers]
