"""Which Ray clusters are kept to this machine, without starting one. test_tensor_parallel.py starts one."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from vllm.platforms import current_platform

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.serving import ray_cluster

OURS = compat.ensure_backend_member()


@pytest.fixture(autouse=True)
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs and no Ray cluster."""
    monkeypatch.setattr(type(current_platform), "device_count", lambda self: 2)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    for name in ("RAY_ADDRESS", ray_cluster.SEVERAL_MACHINES):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)


class Queue:
    def __init__(self, name: str) -> None:
        self.buffer = SimpleNamespace(shared_memory=SimpleNamespace(name=name))


class Executor:
    """vLLM's, as far as it is used."""

    def __init__(self, backend: Any, ranks: int = 2) -> None:
        self.vllm_config = SimpleNamespace(attention_config=SimpleNamespace(backend=backend))
        self.parallel_config = SimpleNamespace(world_size_across_dp=ranks)
        self.response_mqs: list[Any] = []
        self.called: list[Any] = []

    def _init_executor(self) -> None:
        self.constant = ray._private.ray_constants.ENABLE_RAY_CLUSTER
        self.variable = os.environ.get(ray_cluster.SEVERAL_MACHINES)
        self.response_mqs = [Queue("of_rank_0"), SimpleNamespace(buffer=None)]

    def collective_rpc(self, method: Any) -> None:
        self.called.append(method)


def started(**options: Any) -> Executor:
    kind: Any = type("Own", (Executor,), {"_init_executor": Executor._init_executor})
    for _ in range(2):
        ray_cluster.change_executor(SimpleNamespace(RayExecutorV2=kind))
    executor: Executor = kind(**{"backend": OURS} | options)
    executor._init_executor()
    return executor


def listens_here_only(**options: Any) -> bool:
    executor = started(**options)
    assert (executor.variable == "0") is not executor.constant
    return not executor.constant


def test_a_cluster_for_this_machine_listens_on_this_machine() -> None:
    assert listens_here_only()


def test_ranks_on_other_machines_reach_the_cluster() -> None:
    assert not listens_here_only(ranks=3)


@pytest.mark.parametrize(("address", "own"), [("10.0.0.1:6379", False), ("ray://10.0.0.1", False), ("local", True)])
def test_a_cluster_that_is_named_is_joined_unchanged(address: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert listens_here_only() is own


def test_a_cluster_that_ray_start_has_started_here_is_joined_unchanged(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    ray._private.utils.write_ray_address("10.0.0.1:6379")
    assert not listens_here_only()


def test_a_cluster_that_this_process_has_joined_is_used_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert not listens_here_only()


def test_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ray_cluster.SEVERAL_MACHINES, "1")
    assert not listens_here_only()


def test_the_names_of_queues_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "SHARED_MEMORY", tmp_path)
    for name in ("of_rank_0", "of_others"):
        (tmp_path / name).touch()
    assert started().called == [ray_cluster.free_group_name]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["of_others"]


def test_servers_with_another_backend_are_not_changed() -> None:
    executor = started(backend=None)
    assert executor.constant
    assert executor.called == []
