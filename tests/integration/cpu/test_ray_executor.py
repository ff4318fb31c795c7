"""What a Ray worker on another machine decides there, without a cluster (tests/cluster/ starts one)."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from fastattention_vllm.integration import binding, compat
from fastattention_vllm.integration.cpu import platform, ray_executor
from fastattention_vllm.placement import cpus as topology


def at(address: str, monkeypatch: pytest.MonkeyPatch) -> str | None:
    found = {"lo": [SimpleNamespace(address="127.0.0.1")], "eth1": [SimpleNamespace(address="10.0.0.2")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address)
    ray_executor.choose_gloo_interface()
    return os.environ.get(ray_executor.GLOO_INTERFACE)


def test_gloo_uses_the_interface_of_the_ray_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ray_executor.GLOO_INTERFACE, "")  # so that it is restored
    monkeypatch.delenv(ray_executor.GLOO_INTERFACE)
    assert at("10.0.0.3", monkeypatch) is None
    assert at("10.0.0.2", monkeypatch) == "eth1"


def test_the_users_interface_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ray_executor.GLOO_INTERFACE, "ib0")
    assert at("10.0.0.2", monkeypatch) == "ib0"


def parallel(ranks: int, slots: list[int] | None) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            local_world_size=ranks,
            assigned_physical_gpu_ids=slots,
            distributed_executor_backend=platform.RAY_EXECUTOR,
        ),
    )


@pytest.mark.parametrize(("slots", "ranks"), [([3], 1), ([0, 1], 2), (None, 4)])
def test_ranks_of_one_machine_are_counted(slots: list[int] | None, ranks: int) -> None:
    assert compat.ranks_on_this_machine(parallel(4, slots)) == ranks


def test_a_worker_takes_cpus_of_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's list comes with its environment. A machine with one of the four ranks gives it all CPUs."""
    monkeypatch.setattr(topology, "physical_cpus", lambda: [4, 5, 6, 7])
    monkeypatch.setattr(topology, "quota_is_smaller", lambda: False)
    monkeypatch.setattr(ray_executor, "choose_gloo_interface", lambda: None)
    monkeypatch.setenv(binding.THREADS_BIND, "0|1|2|3")
    monkeypatch.setenv(binding.OWN_BIND, "0|1|2|3")
    platform.FastAttentionCpuPlatform.prepare_worker(parallel(4, [0]))
    assert binding.cpus_of_rank(0) == [4, 5, 6, 7]
    monkeypatch.setenv(binding.THREADS_BIND, "6")
    platform.FastAttentionCpuPlatform.prepare_worker(parallel(4, [0]))
    assert binding.cpus_of_rank(0) == [6], "the user's own list"
