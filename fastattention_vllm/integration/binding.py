"""The CPUs that each rank's threads are bound to: ``VLLM_CPU_OMP_THREADS_BIND``, set by our platform or the user."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from vllm.logger import init_logger

from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.placement import cpu_claims
from fastattention_vllm.placement.cpus import parse_cpu_list, physical_cpus

logger = init_logger("vllm.fastattention")

THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"
OWN_BIND = "FASTATTENTION_THREADS_BIND"
"""Holds the value of THREADS_BIND that our platform has set, to distinguish it from a user's value."""
NOBIND = "nobind"
"""The value of THREADS_BIND that leaves all threads unbound."""


def cpus_in_reach(local_rank: int) -> list[int]:
    """CPUs on which ``local_rank``'s threads may run: those bound to it, or all of this process if it is unbound."""
    return sorted(os.sched_getaffinity(0)) if floats() else cpus_of_rank(local_rank)


def floats() -> bool:
    """Whether the environment (set by the platform or the user) leaves the threads unbound."""
    return os.environ.get(THREADS_BIND) == NOBIND


def floats_by_our_choice() -> bool:
    """Whether our platform leaves the threads unbound, and not the user."""
    return floats() and os.environ.get(OWN_BIND) == NOBIND


def cpus_of_rank(local_rank: int) -> list[int]:
    """The CPUs bound to ``local_rank`` by the environment (set by the platform or the user)."""
    groups = os.environ.get(THREADS_BIND, "").split("|")
    if local_rank < len(groups) and groups[local_rank] not in ("", "auto", NOBIND):
        return parse_cpu_list(groups[local_rank])
    return physical_cpus()


def cpus_bound_by(text: str) -> set[int]:
    """All CPUs that ``VLLM_CPU_OMP_THREADS_BIND`` names."""
    return set() if text == NOBIND else {cpu for group in text.split("|") for cpu in parse_cpu_list(group)}


def format_bind(groups: Iterable[Sequence[int]]) -> str:
    """vLLM's ``VLLM_CPU_OMP_THREADS_BIND`` syntax: ``0,1|2,3``."""
    return "|".join(",".join(map(str, group)) for group in groups)


def check_bind(text: str, ranks: int) -> None:
    """Refuse a user's ``VLLM_CPU_OMP_THREADS_BIND`` that would make vLLM fail in a worker.

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
            f"{THREADS_BIND}={text} is not a list of CPUs for {ranks} rank(s); write it like "
            f"{format_bind([[2 * rank, 2 * rank + 1] for rank in range(ranks)])!r}, or unset it."
        )


def share_with_other_servers(cpus: Sequence[int], everywhere: Iterable[int], fix: str = f"set {THREADS_BIND}") -> None:
    """Unbind this worker's threads from ``cpus`` when another server of this machine computes there too.

    ``fix``: how a user gives each server its own CPUs.
    """
    if unsure := cpu_claims.announced_by_other_users(cpus):
        logger.warning(
            "Another user's process says that it uses CPUs %s. Threads are bound to these CPUs anyway, because only "
            "servers of this user and of root count. If that process is a server, both will be slow. To give each "
            "server its own CPUs, %s.",
            ",".join(map(str, unsure)),
            fix,
        )

    def say(common: list[int]) -> None:
        logger.warning(
            "Another server computes on CPUs %s now, so threads are not bound to CPUs any more. To give each server "
            "its own CPUs, %s.",
            ",".join(map(str, common)),
            fix,
        )

    cpu_claims.unbind_beside_others(cpus, everywhere, say)
