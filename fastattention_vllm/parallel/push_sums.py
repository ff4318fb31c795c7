"""Sums of small tensors over the GPUs of one machine, by one kernel in which all ranks write to all others.

A decode step of a model sums a few kilobytes after every attention and every MLP. NCCL waits several times for such a
sum: others have measured about 20 microseconds on four V100s without NVLink. Here, a rank waits once, until the others'
numbers are there (``push.cu``). Every rank sends everything to every other one, so larger tensors are left to NCCL.
Where the limit is, :func:`measure` finds out.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fastattention_vllm import cuda_driver
from fastattention_vllm.attention.volta import images
from fastattention_vllm.parallel import boards
from fastattention_vllm.parallel.agreement import agreed
from fastattention_vllm.parallel.push_launch import (
    CHUNK_BYTES,
    CONSTANTS,
    CTAS,
    STRUCTURES,
    Push,
    Variant,
    layout_of,
)
from fastattention_vllm.parallel.shared_segment import Exchange, share

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
KIB = 1024
SIZES = tuple(KIB << shift for shift in range(2, 9))
"""Bytes of the tensors that are timed: 4 to 256 KiB."""
MAX_BYTES = SIZES[-1]
LOOKS = 2_000_000
"""How often a thread looks for a chunk in :meth:`PushSums.works`: a second or more."""
ROUNDS, CALLS = 7, 20
GAIN = 0.95
"""Sums must take at most this fraction of NCCL's time. Less than 5 % may be chance."""

Sum = Callable[[torch.Tensor], torch.Tensor]


class PushSums:
    """All ranks must make the same calls in the same order, on one stream at a time."""

    device = "cuda"

    def __init__(
        self, rank: int, ranks: int, exchange: Exchange, peer_to_peer: bool, max_bytes: int = MAX_BYTES
    ) -> None:
        """All ranks call this with the same arguments, with their GPU current.

        Args:
            ranks: at most ``MOST_RANKS``.
            peer_to_peer: whether boards are in GPU memory; otherwise they are in host memory.
            max_bytes: of a tensor.

        Raises:
            OSError: /dev/shm is too small; raised on every rank.
            DriverError: memory cannot be shared this way; raised on every rank.
            ImageError: the kernels are not built, or do not match this code.
        """
        self.rank, self.ranks, self.max_bytes = rank, ranks, max_bytes
        self._kernels = load_all()
        self._layout = layout_of(ranks, max_bytes)
        if peer_to_peer:
            self._boards = boards.in_gpu_memory(rank, self._layout.bytes, exchange)
        else:
            segments = share(self._layout.bytes, exchange)
            self._boards = boards.on_gpus(segments, rank, self._layout.bytes, exchange)
        self._calls = torch.zeros(CTAS, dtype=torch.int32, device=self.device)
        self._late = torch.zeros(1, dtype=torch.int32, device=self.device)
        torch.cuda.synchronize()
        exchange(None)  # nobody writes to a board that is not zeroed yet

    def can_sum(self, x: torch.Tensor) -> bool:
        return (
            x.dtype in NAMES
            and x.is_contiguous()
            and 0 < x.nbytes <= self.max_bytes
            and x.nbytes % CHUNK_BYTES == 0
            and x.data_ptr() % CHUNK_BYTES == 0
        )

    def sum(self, x: torch.Tensor, looks: int = 0) -> torch.Tensor:
        """The sum over all ranks, in fp32 in the order of ranks, rounded once: the same bits on every rank.

        Args:
            x: fp16, bf16 or fp32 on this rank's GPU, for which :meth:`can_sum` is true.
            looks: how often to look for another rank's numbers; 0 waits as long as it takes.
        """
        out = torch.empty_like(x)
        kernel, threads = self._kernels[x.dtype]
        argument = Push.of(
            x.data_ptr(),
            out.data_ptr(),
            self._calls.data_ptr(),
            self._late.data_ptr(),
            self._boards,
            x.nbytes // CHUNK_BYTES,
            self._layout.slots,
            self.rank,
            looks,
        )
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch((CTAS, 1, 1), (threads, 1, 1), 0, argument, stream)
        return out

    def works(self, dtype: torch.dtype, exchange: Exchange) -> bool:
        """Whether sums are right on all ranks. Ends also if GPUs do not reach each other, whatever the driver says."""
        random = torch.Generator().manual_seed(0)
        largest = self.max_bytes // dtype.itemsize
        right = True
        for length in (largest, 4, largest // 3 // 8 * 8, largest, 8):
            parts = [torch.randn(length, generator=random).to(dtype) for _ in range(self.ranks)]
            expected = functools.reduce(torch.add, (part.float() for part in parts)).to(dtype)
            found = self.sum(parts[self.rank].to(self.device), LOOKS)
            right &= torch.equal(found.cpu(), expected)
            if self._late.item():
                break
        return all(exchange(right and not self._late.item()))


def open_sums(rank: int, ranks: int, exchange: Exchange, peer_to_peer: bool) -> PushSums | str:
    """As :class:`PushSums`, or on all ranks why some rank cannot, as the end of a sentence without a full stop."""
    try:
        with agreed(exchange) as among:
            return PushSums(rank, ranks, among, peer_to_peer)
    except (OSError, RuntimeError) as error:  # of the driver, an image, torch without memory, or of another rank
        return str(error).rstrip(".")


@functools.cache
def load_all() -> dict[torch.dtype, tuple[cuda_driver.Kernel, int]]:
    """For each type of numbers the kernel, and its threads.

    Raises:
        ImageError: the kernels are not built, or do not match this code.
        DriverError: the driver cannot load them.
    """
    return {dtype: _load(name) for dtype, name in NAMES.items()}


def _load(number: str) -> tuple[cuda_driver.Kernel, int]:
    """The kernel, and its number of threads. V100 and Turing run machine code, newer GPUs the PTX."""
    found = images.described(images.IMAGES, "push", Variant, STRUCTURES, CONSTANTS)
    (variant,) = (one for one in found if one.number == number)
    suffix = "cubin" if torch.cuda.get_device_capability()[0] == 7 else "ptx"
    return images.load(images.IMAGES, variant, suffix), variant.threads


@dataclass(frozen=True)
class Timed:
    """Of one size."""

    bytes: int
    seconds: float
    """Of a sum by push."""
    peer_seconds: float


def measure(sums: PushSums, peer: Sum, dtype: torch.dtype, exchange: Exchange) -> list[Timed]:
    """Both ways in CUDA graphs, as decoding runs them. The slowest rank counts. All ranks call this together."""
    found = []
    for size in SIZES:
        x = torch.zeros(size // dtype.itemsize, dtype=dtype, device="cuda")  # a peer may sum in place, again and again
        graphs = [_captured(way, x) for way in (sums.sum, peer)]
        taken: list[list[float]] = [[], []]
        for _, way in itertools.product(range(ROUNDS), (0, 1)):
            taken[way].append(_replay_seconds(graphs[way], exchange))
        every = exchange([statistics.median(one) / CALLS for one in taken])
        found.append(Timed(size, *(max(one[way] for one in every) for way in (0, 1))))
    return found


def limit(timed: Sequence[Timed]) -> int:
    """The largest size in bytes up to which sums by push are faster; 0 if they are not."""
    faster = itertools.takewhile(lambda one: one.seconds <= GAIN * one.peer_seconds, timed)
    return max((one.bytes for one in faster), default=0)


def _captured(work: Sum, x: torch.Tensor) -> torch.cuda.CUDAGraph:
    work(x)  # what is set up in a first call cannot be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work(x)
    return graph


def _replay_seconds(graph: torch.cuda.CUDAGraph, exchange: Exchange) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    exchange(None)
    graph.replay()  # the ranks do not begin at once, and after this they do
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000
