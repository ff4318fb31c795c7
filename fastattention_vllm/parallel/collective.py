"""The sum of a block over the ranks of a group, running beside the computation."""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class CollectiveError(RuntimeError):
    """A rank is gone or did not answer in time: what has been computed with it is lost."""


class Collective(ABC):
    """One group of ranks. All of them must start the same sums in the same order."""

    rank: int
    """In the group."""
    size: int
    multiprocessors: int = 0
    """Of a GPU, which the matmul leaves free while a sum runs beside it. A matmul that fills the GPU with blocks that
    live as long as it does would else keep the sum waiting for its end."""

    @abstractmethod
    def start(self, block: torch.Tensor) -> Any:
        """Begin to sum ``block`` (contiguous) over the ranks in place, once the computation so far is done.

        Nothing may touch the block until :meth:`wait` has been called with what this returns.

        Raises:
            CollectiveError: a rank is known to be gone.
        """

    @abstractmethod
    def wait(self, started: Any) -> None:
        """Let the computation go on only once the sum is there.

        Raises:
            CollectiveError: a rank is gone, or has not taken part within the timeout. Only gloo reports it here. NCCL's
                watchdog ends the process. Sums by copies wait on the GPU without a limit: vLLM's executor ends all
                workers as soon as one is gone, or after VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS.
        """

    def totals(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """Sums over the ranks of each of ``numbers``, to the last bit the same on all of them."""
        total = torch.tensor(numbers, dtype=torch.float64, device=device)
        self.wait(self.start(total))
        sums: list[float] = total.tolist()
        return sums


class ProcessGroupCollective(Collective):
    """A torch process group of its own, so that its sums never mix with those that others order.

    gloo sums on its own threads, and waiting keeps the caller. NCCL sums on a stream of its own, which begins where the
    computation's stream is now, and waiting keeps that stream alone.
    """

    def __init__(self, group: dist.ProcessGroup, multiprocessors: int = 0) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.multiprocessors = multiprocessors

    def start(self, block: torch.Tensor) -> Any:
        try:
            return dist.all_reduce(block, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._failed() from error

    def wait(self, started: Any) -> None:
        try:
            started.wait()
        except RuntimeError as error:
            raise self._failed() from error

    def _failed(self) -> CollectiveError:
        return CollectiveError(
            f"the all-reduce of a block failed on rank {self.rank} of {self.size}: another rank has ended or has not "
            "answered in time; see the first error in the other ranks' logs, and restart all of them."
        )


def open_collective(
    groups: Sequence[Sequence[int]], device_type: str, timeout: float, channels: int | None = None
) -> ProcessGroupCollective:
    """Open a process group for each of ``groups``; returns the one that this process is in.

    Args:
        groups: global ranks of each. Every process of the world calls this with the same ones, its own among them.
        device_type: "cpu" (gloo) or "cuda" (NCCL).
        timeout: seconds that a rank waits for the others. gloo then raises; NCCL's watchdog ends the process.
        channels: of NCCL's; each works on a multiprocessor, which the matmul then leaves free. None: NCCL chooses, and
            the matmul leaves none.

    Raises:
        ValueError: no such device type.
    """
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"no all-reduce for device type {device_type!r}; available: cpu, cuda.")
    limit = datetime.timedelta(seconds=timeout)
    mine = None
    for ranks in groups:
        if device_type == "cpu":
            group = dist.new_group(list(ranks), timeout=limit, backend="gloo")
        else:
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            if channels is not None:
                options.config.min_ctas = options.config.max_ctas = channels
            group = dist.new_group(list(ranks), timeout=limit, backend="nccl", pg_options=options)
        if dist.get_rank() in ranks:
            mine = group
    assert mine is not None, f"rank {dist.get_rank()} is in none of the groups {groups}"
    return ProcessGroupCollective(mine, channels or 0)
