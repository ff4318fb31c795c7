"""Which CPUs each rank computes on, and how many bytes of KV cache this machine can afford."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import psutil

from fastattention_vllm.integration.refusal import Refusal

GIB = 1 << 30
DEFAULT_KV_BYTES = 4 * GIB
THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"


def physical_cpus() -> list[int]:
    """One logical CPU per physical core of this process's affinity mask, ascending (SMT siblings left out)."""
    chosen: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = siblings.read_text().strip() if siblings.exists() else str(cpu)
        chosen.setdefault(core, cpu)
    return sorted(chosen.values())


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
    if local_rank < len(groups) and groups[local_rank] not in ("", "auto", "nobind"):
        return _parse_cpu_list(groups[local_rank])
    return physical_cpus()


def _parse_cpu_list(text: str) -> list[int]:
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return sorted(cpus)


def available_bytes() -> int:
    """Memory this process may still take: the machine's available memory, or the cgroup's headroom if smaller."""
    available = int(psutil.virtual_memory().available)
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, usage = Path(limit_file).read_text().strip(), Path(usage_file).read_text()
        except OSError:
            continue
        if limit != "max":
            available = min(available, max(0, int(limit) - int(usage)))
    return available


def kv_bytes_per_rank(
    requested: int | None, bytes_per_block: int, block_size: int, max_model_len: int, ranks: int
) -> int:
    """KV cache bytes of each rank: what the user asked for, else a default this machine can hold.

    The default is 4 GiB over all ranks, bounded by a quarter of the available memory; more, up to half of it, where
    one request of ``max_model_len`` tokens needs more. vLLM's own default (92 % of all RAM) aborts on a busy machine.

    Args:
        requested: ``--kv-cache-memory-bytes``, or None.
        bytes_per_block: KV bytes of one block over all layers of one rank.
        block_size: tokens per block.
        max_model_len: tokens one request may hold.
        ranks: processes that share this machine's memory.

    Raises:
        Refusal: one request of ``max_model_len`` does not fit; names the largest length that does.
    """
    # Block 0 is vLLM's null block and never holds tokens.
    one_request = (-(-max_model_len // block_size) + 1) * bytes_per_block
    available = available_bytes() // ranks
    if requested is not None:
        budget, source = requested, f"--kv-cache-memory-bytes {requested}"
    else:
        budget = max(min(DEFAULT_KV_BYTES // ranks, available // 4), min(one_request, available // 2))
        source = f"{available / GIB:.1f} GiB of available memory per rank, half of it for KV,"
    if one_request > budget:
        fits = max(0, (budget // bytes_per_block - 1) * block_size)
        raise Refusal(
            f"one request of max_model_len {max_model_len} needs {one_request / GIB:.2f} GiB of KV cache per rank, "
            f"but {source} gives {budget / GIB:.2f} GiB; pass --max-model-len {fits} or less, or raise "
            "--kv-cache-memory-bytes."
        )
    return budget
