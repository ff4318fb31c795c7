"""Sums of blocks over the ranks of a group, in parallel with the computation."""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class CollectiveError(RuntimeError):
    """A rank has ended or did not answer in time. The results computed with it are lost."""


class Collective(ABC):
    """One group of ranks. All ranks must start the same sums in the same order."""

    rank: int
    """This rank's number in the group."""
    size: int
    multiprocessors: int = 0
    """Number of the GPU's multiprocessors that the matmul leaves free while a sum runs. Otherwise a matmul whose thread
    blocks fill the GPU until it ends would delay the sum."""

    @abstractmethod
    def start(self, block: torch.Tensor) -> Any:
        """Start summing ``block`` (contiguous) over the ranks in place. It begins after the computation so far.

        The block must not be used until :meth:`wait` has been called with the result of this call.

        Raises:
            CollectiveError: a rank is known to have ended.
        """

    @abstractmethod
    def wait(self, started: Any) -> None:
        """Make the following computation wait for the sum.

        Raises:
            CollectiveError: a rank has ended, or has not taken part within the timeout. Only gloo reports this here.
                NCCL's watchdog ends the process. Sums with copy engines wait on the GPU without a limit; vLLM's
                executor ends all workers as soon as one has ended, or after VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS.
        """

    def totals(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """The sum of each of ``numbers`` over the ranks, bit-identical on all ranks."""
        total = torch.tensor(numbers, dtype=torch.float64, device=device)
        self.wait(self.start(total))
        sums: list[float] = total.tolist()
        return sums


class ProcessGroupCollective(Collective):
    """Sums in a separate torch process group, so that they never mix with other code's sums.

    gloo sums in its own threads, and waiting blocks the caller. NCCL sums on a separate stream, after the work so far
    on the computation's stream, and waiting blocks only that stream.
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
    """Open a process group for each of ``groups``, and return the one that contains this process.

    Args:
        groups: the global ranks of each group. All processes of the world pass the same groups.
        device_type: "cpu" (gloo) or "cuda" (NCCL).
        timeout: seconds that a rank waits for the others. Then gloo raises, and NCCL's watchdog ends the process.
        channels: number of NCCL channels. Each uses one multiprocessor, which the matmul leaves free. None: NCCL
            chooses, and the matmul leaves none free.

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
