"""The CPUs of this machine that this process may use: physical cores, NUMA nodes, quotas, and how ranks share them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from fastattention_vllm.placement import cgroups, host_memory
from fastattention_vllm.placement.cgroups import read_text

NODES = Path("/sys/devices/system/node")


def physical_cpus() -> list[int]:
    """One logical CPU per physical core of this process's affinity mask (SMT siblings left out), node by node.

    Where a container's CPU quota is smaller, only as many as it pays for: threads beyond it would be throttled. Some
    machines number their CPUs across NUMA nodes in turn; in this order, neighbours share a node, and so do ranks.
    """
    return _physical_cpus()[: _quota_cpus()]


def _physical_cpus() -> list[int]:
    chosen: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = siblings.read_text().strip() if siblings.exists() else str(cpu)
        chosen.setdefault(core, cpu)
    node_of = {cpu: node for node, cpus in _cpus_of_nodes(NODES).items() for cpu in cpus}
    return sorted(chosen.values(), key=lambda cpu: (node_of.get(cpu, 0), cpu))


def numa_nodes(cpus: Iterable[int], root: Path | None = None) -> list[int]:
    """The NUMA nodes that ``cpus`` belong to, ascending; none where the machine has one node or does not say.

    ``root``: the directory that holds ``node0`` and so on, ``/sys/devices/system/node`` by default.
    """
    nodes = _cpus_of_nodes(root or NODES)
    wanted = set(cpus)
    return sorted(node for node, members in nodes.items() if wanted & members) if len(nodes) > 1 else []


def _cpus_of_nodes(root: Path) -> dict[int, set[int]]:
    """CPUs by NUMA node. A node without CPUs (memory alone, or offline) is there, with none."""
    lists = {int(path.name.removeprefix("node")): read_text(path / "cpulist", "") for path in root.glob("node[0-9]*")}
    return {node: set(parse_cpu_list(text)) if text else set() for node, text in lists.items()}


def quota_is_smaller() -> bool:
    """Whether a CPU quota pays for fewer CPUs than there are.

    Then nobody can know which CPUs are free: all containers of a host would choose the same first ones. Threads as many
    as are paid for, that Linux moves, find the idle ones; their memory is interleaved over the NUMA nodes in reach.
    """
    quota = _quota_cpus()
    return quota is not None and quota < len(_physical_cpus())


def _quota_cpus() -> int | None:
    """CPUs that the cgroups' quota pays for, rounded up, or None without a quota."""
    return cgroups.cpus(host_memory.CGROUP)


def split_cpus(cpus: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide ``cpus`` into one contiguous, disjoint group per rank; with fewer CPUs than ranks, they are shared."""
    if len(cpus) < ranks:
        return [[cpus[rank % len(cpus)]] for rank in range(ranks)]
    bounds = [rank * len(cpus) // ranks for rank in range(ranks + 1)]
    return [list(cpus[low:high]) for low, high in pairwise(bounds)]


def share_of_rank(local_rank: int, ranks: int) -> int:
    """Threads for one of so many ranks that float over the same CPUs: together they are as many as can run at once."""
    return len(split_cpus(physical_cpus(), ranks)[local_rank])


def describe_pinning(threads: int, cpus: Sequence[int], of_caller: Iterable[int]) -> str:
    """Where the attention threads run, for the log: the pool's are pinned one by one, the calling thread is not ours.

    ``cpus``: none where nothing is pinned. ``of_caller``: the affinity of the thread that calls, which computes too.
    """
    own = sorted(set(of_caller))
    if not cpus:
        return f"{threads} threads, not pinned, on any of {len(own)} CPUs"
    caller = f"CPU {own[0]}" if len(own) == 1 else f"any of {len(own)} CPUs"
    pinned = [cpus[worker % len(cpus)] for worker in range(1, threads)]
    text = f"{threads} threads: vLLM's own on {caller}"
    if pinned:
        text += f", {len(pinned)} pinned to CPUs {','.join(map(str, pinned))}"
    return text + (f"; there are more threads than CPUs ({len(cpus)})" if threads > len(cpus) else "")


def parse_cpu_list(text: str) -> list[int]:
    """CPU numbers of vLLM's and the kernel's list syntax: ``0,2-5``."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return sorted(cpus)
