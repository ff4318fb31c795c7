"""Which CPUs each rank computes on, and how many bytes of KV cache this machine can afford."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.placement import cgroups, host_memory
from fastattention_vllm.placement.cgroups import read_text
from fastattention_vllm.placement.host_memory import GIB, available_bytes
from fastattention_vllm.placement.kv_size import KvSize

DEFAULT_KV_BYTES = 4 * GIB
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"
NOBIND = "nobind"
"""Value of THREADS_BIND with which no thread is kept on a CPU."""
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


def cpus_in_reach(local_rank: int) -> list[int]:
    """Where ``local_rank``'s threads may run: on the CPUs bound to it, or on all of this process where it floats."""
    return sorted(os.sched_getaffinity(0)) if floats() else cpus_of_rank(local_rank)


def floats() -> bool:
    """Whether threads are left to Linux's scheduler, as the platform (or the user) put it into the environment."""
    return os.environ.get(THREADS_BIND) == NOBIND


def quota_is_smaller() -> bool:
    """Whether a CPU quota pays for fewer CPUs than there are.

    Then nobody can know which CPUs are free: all containers of a host would choose the same first ones. Threads as many
    as are paid for, that Linux moves, find the idle ones; their memory is interleaved over the NUMA nodes in reach.
    """
    quota = _quota_cpus()
    return quota is not None and quota < len(_physical_cpus())


def share_of_rank(local_rank: int, ranks: int) -> int:
    """Threads for one of so many ranks that float over the same CPUs: together they are as many as can run at once."""
    return len(split_cpus(physical_cpus(), ranks)[local_rank])


def _quota_cpus() -> int | None:
    """CPUs that the cgroups' quota pays for, rounded up, or None without a quota."""
    return cgroups.cpus(host_memory.CGROUP)


def split_cpus(cpus: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide ``cpus`` into one contiguous, disjoint group per rank; with fewer CPUs than ranks, they are shared."""
    if len(cpus) < ranks:
        return [[cpus[rank % len(cpus)]] for rank in range(ranks)]
    bounds = [rank * len(cpus) // ranks for rank in range(ranks + 1)]
    return [list(cpus[low:high]) for low, high in pairwise(bounds)]


def format_bind(groups: Iterable[Sequence[int]]) -> str:
    """vLLM's ``VLLM_CPU_OMP_THREADS_BIND`` syntax: ``0,1|2,3``."""
    return "|".join(",".join(map(str, group)) for group in groups)


def cpus_of_rank(local_rank: int) -> list[int]:
    """The CPUs bound to ``local_rank``, as the platform (or the user) put them into the environment."""
    groups = os.environ.get(THREADS_BIND, "").split("|")
    if local_rank < len(groups) and groups[local_rank] not in ("", "auto", NOBIND):
        return parse_cpu_list(groups[local_rank])
    return physical_cpus()


def describe_pinning(threads: int, cpus: Sequence[int], of_caller: Iterable[int]) -> str:
    """Where the attention threads run, for the log: the pool's are pinned one by one, the calling thread is not ours.

    ``cpus``: none where nothing is pinned. ``of_caller``: the affinity of the thread that calls, which computes too.
    """
    own = sorted(set(of_caller))
    if not cpus:
        return f"{threads} threads, none pinned: they float over {len(own)} CPUs"
    caller = f"CPU {own[0]}" if len(own) == 1 else f"any of {len(own)} CPUs"
    pinned = [cpus[worker % len(cpus)] for worker in range(1, threads)]
    text = f"{threads} threads: vLLM's own on {caller}"
    if pinned:
        text += f", {len(pinned)} pinned one by one to CPUs {','.join(map(str, pinned))}"
    return text + (f"; more threads than the {len(cpus)} CPUs" if threads > len(cpus) else "")


def check_bind(text: str, ranks: int) -> None:
    """Refuse a ``VLLM_CPU_OMP_THREADS_BIND`` of the user's that vLLM would trip over in a worker.

    Raises:
        Refusal: not the syntax of :func:`format_bind`, or not one group per rank.
    """
    if text == NOBIND:
        return
    groups = text.split("|")
    try:
        for group in groups:
            parse_cpu_list(group)
    except ValueError:
        groups = []
    if len(groups) != ranks:
        raise Refusal(
            f"{THREADS_BIND}={text} does not name the CPUs of {ranks} rank(s); write them as in "
            f"{format_bind([[2 * rank, 2 * rank + 1] for rank in range(ranks)])!r}, or unset it."
        )


def parse_cpu_list(text: str) -> list[int]:
    """CPU numbers of vLLM's and the kernel's list syntax: ``0,2-5``."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return sorted(cpus)


def checkpoint_bytes(model: str) -> int:
    """Size of the weights in a local model directory, which will be in memory beside the KV cache; 0 if not local."""
    files = (path for suffix in ("safetensors", "bin") for path in Path(model).glob(f"*.{suffix}"))
    return sum(path.stat().st_size for path in files)


def kv_bytes_per_rank(
    requested: int | None,
    size: KvSize,
    max_model_len: int | None,
    weight_bytes: int,
    ranks: int,
) -> int:
    """KV cache bytes of each rank: what the user asked for, else a default this machine can hold.

    The default is 4 GiB over all ranks, bounded by a quarter of the memory that the weights leave; more, up to half of
    it, where one request of ``max_model_len`` tokens needs more. vLLM's own default (92 % of all RAM) aborts on a busy
    machine.

    Args:
        requested: ``--kv-cache-memory-bytes``, or None.
        size: what a request takes on one rank.
        max_model_len: tokens one request may hold; None if vLLM is to fit it to the cache.
        weight_bytes: the checkpoint's, over all ranks.
        ranks: processes that share this machine's memory.

    Raises:
        Refusal: one request of ``max_model_len`` does not fit; names the largest length that does.
    """
    one_request = 0 if max_model_len is None else size.of_request(max_model_len)
    available = max(0, available_bytes() - weight_bytes) // ranks
    space = os.environ.get(KV_SPACE)  # vLLM heeds this variable before its option
    option = KV_SPACE if space else "--kv-cache-memory-bytes"
    if requested is not None:
        budget, source = requested, f"{option} {space or requested} is"
    else:
        budget = max(min(DEFAULT_KV_BYTES // ranks, available // 4), min(one_request, available // 2))
        source = f"half of the {_size(available)} that are free beside the weights are"
    if one_request > budget:
        fits = size.longest_request(budget)
        shorter = f"pass --max-model-len {fits} or less, or " if fits > 0 else ""
        raise Refusal(
            f"one request of max_model_len {max_model_len} needs {_size(one_request)} of KV cache per rank, but "
            f"{source} {_size(budget)}; {shorter}raise {option}."
        )
    return budget


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / (1 << 20):.2f} MiB"
