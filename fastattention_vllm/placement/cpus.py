"""The CPUs of this machine that this process may use: physical cores, NUMA nodes, quotas, and how ranks share them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from fastattention_vllm.placement import cgroups, host_memory
from fastattention_vllm.placement.cgroups import read_text

NODES = Path("/sys/devices/system/node")
MANY_CPUS = 8
"""From this many CPUs of a rank on, attention leaves a second one to vLLM. An estimate: with 16 CPUs, leaving one and
leaving three were measured (benchmarks/notes/host_layers.md)."""


def physical_cpus() -> list[int]:
    """One logical CPU per physical core in this process's affinity mask (without SMT siblings), node by node.

    If a container's CPU quota is smaller, only as many as the quota allows, because more threads would be throttled.
    Some machines number their CPUs alternately across NUMA nodes. In the order returned here, neighbouring CPUs share a
    node, and so do the CPUs of a rank.
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
    """The NUMA nodes of ``cpus``, ascending. Empty if the machine has one node or does not report nodes.

    ``root``: the directory that holds ``node0`` and so on, ``/sys/devices/system/node`` by default.
    """
    nodes = _cpus_of_nodes(root or NODES)
    wanted = set(cpus)
    return sorted(node for node, members in nodes.items() if wanted & members) if len(nodes) > 1 else []


def _cpus_of_nodes(root: Path) -> dict[int, set[int]]:
    """The CPUs of each NUMA node. Nodes without CPUs (memory only, or offline) have an empty set."""
    lists = {int(path.name.removeprefix("node")): read_text(path / "cpulist", "") for path in root.glob("node[0-9]*")}
    return {node: set(parse_cpu_list(text)) if text else set() for node, text in lists.items()}


def quota_is_smaller() -> bool:
    """Whether a CPU quota allows fewer CPUs than there are.

    Then it is unknown which CPUs are free: all containers of a host would choose the same first ones. So threads are
    not bound, and Linux moves them to idle CPUs. Their memory is interleaved over the reachable NUMA nodes.
    """
    quota = _quota_cpus()
    return quota is not None and quota < len(_physical_cpus())


def why_not_bound() -> str:
    """Why this process may not bind threads to CPUs; empty if it may.

    A sandbox may forbid the call, as systemd does with ``SystemCallFilter=~@resources``.
    """
    try:
        os.sched_setaffinity(0, [])  # no CPU at all, which changes nothing
    except OSError as error:
        return "" if error.errno == errno.EINVAL else str(error.strerror)
    return ""


def _quota_cpus() -> int | None:
    """Number of CPUs that the cgroups' quota allows, rounded up; None without a quota."""
    return cgroups.cpus(host_memory.CGROUP)


def split_cpus(cpus: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide ``cpus`` into one contiguous, disjoint group per rank. If there are fewer CPUs than ranks, share them."""
    if len(cpus) < ranks:
        return [[cpus[rank % len(cpus)]] for rank in range(ranks)]
    bounds = [rank * len(cpus) // ranks for rank in range(ranks + 1)]
    return [list(cpus[low:high]) for low, high in pairwise(bounds)]


def beside_a_device(cpus: Sequence[int], ranks: int) -> list[int]:
    """The CPUs of a rank that its attention threads run on. The others are for vLLM, whose threads wait by spinning.

    A single rank has one spinning thread. With several ranks, each has one, the engine has one, and one more returns
    answers. A thread that finds no free CPU shares an attention thread's, and the other threads of the rank wait.
    """
    left = min(2 if ranks > 1 and len(cpus) >= MANY_CPUS else 1, len(cpus) - 1)
    return list(cpus[left:])


def share_of_rank(local_rank: int, ranks: int) -> int:
    """Threads for one of several unbound ranks on the same CPUs, so that all ranks together have one per core."""
    return len(split_cpus(physical_cpus(), ranks)[local_rank])


def describe_pinning(threads: int, cpus: Sequence[int], of_caller: Iterable[int]) -> str:
    """Describe for the log where the attention threads run. The pool's threads are pinned; the calling thread is not.

    ``cpus``: empty if nothing is pinned. ``of_caller``: the affinity of the calling thread, which computes too.
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
    """Parse CPU numbers in the list syntax of vLLM and Linux: ``0,2-5``."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return sorted(cpus)
