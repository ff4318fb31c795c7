"""The collectives from which a calibration chooses, by name.

"gloo" or "nccl": a separate process group. "nccl:8": a process group on 8 multiprocessors, which the matmul leaves
free. "copies:4x16": copies on 4 channels in pieces of 16 MiB.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from fastattention_vllm.parallel.agreement import agreed
from fastattention_vllm.parallel.collective import Collective, open_collective
from fastattention_vllm.parallel.copy_collective import CopyCollective
from fastattention_vllm.parallel.shared_segment import Exchange

MIB = 1 << 20
DEFAULT_COLLECTIVES = {"cpu": ["gloo"], "cuda": ["nccl", "nccl:16", "nccl:24", "copies:4x8", "copies:2x32"]}
"""The candidates by device type. A fixed number of blocks uses the first one."""


def open_named_collectives(
    names: Sequence[str],
    groups: Sequence[Sequence[int]],
    rank: int,
    device_type: str,
    timeout: float,
    exchange: Exchange,
    complain: Callable[[str], object],
) -> dict[str, Collective]:
    """Open those collectives of ``names`` that this machine supports.

    All ranks of all groups call this with the same names and get the same result.

    Args:
        groups: the global ranks of each group, as for :func:`open_collective`.
        rank: this process's global rank.
        exchange: exchanges values within this rank's group.
        complain: called with one sentence for each collective that is not available.
    """
    (mine,) = (list(group) for group in groups if rank in group)
    collectives: dict[str, Collective] = {}
    for name in names:
        kind, _, detail = name.partition(":")
        if kind == "copies":
            channels, mib = (int(number) for number in detail.split("x"))
            try:
                with agreed(exchange) as among:
                    collectives[name] = open_copies(mine.index(rank), len(mine), among, channels, mib * MIB)
            except (OSError, RuntimeError) as error:  # of the driver, of torch without memory, or of another rank
                complain(f"{name} is not available: {error}")
        elif kind in ("nccl", "gloo"):
            collectives[name] = open_collective(groups, device_type, timeout, int(detail) if detail else None)
        else:
            raise ValueError(f"no collective {name!r}; available: gloo, nccl, nccl:CHANNELS, copies:CHANNELSxMIB.")
    return collectives


def open_copies(rank: int, size: int, exchange: Exchange, channels: int, board_bytes: int) -> CopyCollective:
    """Copies between the GPUs of one machine. Boards are in GPU memory if all GPUs can access each other.

    Raises:
        OSError: the ranks are on different machines, or their /dev/shm is too small.
        DriverError: memory cannot be shared.
    """
    from fastattention_vllm.parallel.cuda_copies import CudaCopies

    machines = exchange(machine())
    if len(set(machines)) > 1:
        raise OSError(f"the ranks are on different machines: {', '.join(sorted({str(one) for one in machines}))}")
    peer_to_peer = all(exchange(reaches_all(exchange(torch.cuda.current_device()))))
    return CopyCollective(CudaCopies(rank, size, exchange, peer_to_peer, channels, board_bytes))


def reaches_all(devices: Sequence[int]) -> bool:
    """Whether the current GPU can read the others' memory directly, unless NCCL_P2P_DISABLE=1 forbids it."""
    if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        return False
    own = torch.cuda.current_device()
    return all(device == own or torch.cuda.can_device_access_peer(own, device) for device in devices)


def machine() -> tuple[str, str]:
    """What tells this machine from others: its name, and the id of its boot if there is one."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return os.uname().nodename, file.read().strip()
    except OSError:
        return os.uname().nodename, ""
