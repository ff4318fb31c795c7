from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.placement import cpus as topology
from fastattention_vllm.placement import host_memory
from fastattention_vllm.placement.cpus import split_cpus


@given(st.sets(st.integers(0, 300), min_size=1, max_size=64), st.integers(1, 16))
def test_every_rank_gets_cpus_and_shares_none_if_there_are_enough(cpus: set[int], ranks: int) -> None:
    groups = split_cpus(sorted(cpus), ranks)
    assert len(groups) == ranks
    assert all(groups)
    assert {cpu for group in groups for cpu in group} <= cpus
    if len(cpus) >= ranks:
        assert sorted(cpu for group in groups for cpu in group) == sorted(cpus)
        assert max(map(len, groups)) - min(map(len, groups)) <= 1


@pytest.mark.parametrize(
    ("count", "ranks", "left"),
    [(1, 1, 0), (1, 2, 0), (2, 1, 1), (16, 1, 1), (2, 2, 1), (7, 2, 1), (8, 2, 2), (16, 4, 2)],
)
def test_attention_leaves_cpus_to_vllm(count: int, ranks: int, left: int) -> None:
    cpus = list(range(16, 16 + count))
    assert topology.beside_a_device(cpus, ranks) == cpus[left:]


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    return tmp_path


def test_a_cpu_quota_limits_the_cpus(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(1000, 1064)))
    assert len(topology.physical_cpus()) == 64
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert len(topology.physical_cpus()) == 64
    (cgroup / "cpu.max").write_text("250000 100000\n")
    assert topology.physical_cpus() == [1000, 1001, 1002]


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that numbers its CPUs alternately across two nodes and has a third node without CPUs."""
    root = tmp_path / "node"
    for node, cpus in {0: "1000-1003,1008", 1: "1004-1007", 2: ""}.items():
        (root / f"node{node}").mkdir(parents=True)
        (root / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    (root / "online").write_text("0-2\n")
    monkeypatch.setattr(topology, "NODES", root)
    return root


def test_numa_nodes_are_those_of_the_cpus(two_nodes: Path) -> None:
    assert topology.numa_nodes([1000, 1008], two_nodes) == [0]
    assert topology.numa_nodes([1004]) == [1]
    assert topology.numa_nodes([1008, 1005]) == [0, 1]
    assert topology.numa_nodes([]) == []


def test_machines_with_at_most_one_node_need_no_choice(tmp_path: Path) -> None:
    assert topology.numa_nodes([0], tmp_path) == []
    assert topology.numa_nodes([0], tmp_path / "absent") == []
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text("0-3\n")
    assert topology.numa_nodes([0], tmp_path) == []


def test_cpus_are_counted_node_by_node(two_nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CGROUP", two_nodes)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(1000, 1009)))
    assert topology.physical_cpus() == [1000, 1001, 1002, 1003, 1008, 1004, 1005, 1006, 1007]
    (two_nodes / "cpu.max").write_text("500000 100000\n")
    assert topology.numa_nodes(topology.physical_cpus()) == [0]


@pytest.mark.parametrize(
    ("threads", "cpus", "of_caller", "text"),
    [
        (1, [0, 1], [0, 1], "1 threads: vLLM's own on any of 2 CPUs"),
        (3, [], [4, 5, 7], "3 threads, not pinned, on any of 3 CPUs"),
        (3, [4, 5, 6], [4], "3 threads: vLLM's own on CPU 4, 2 pinned to CPUs 5,6"),
        (
            4,
            [4, 5],
            [4],
            "4 threads: vLLM's own on CPU 4, 3 pinned to CPUs 5,4,5; there are more threads than CPUs (2)",
        ),
    ],
)
def test_the_log_names_the_cpus_of_threads(threads: int, cpus: list[int], of_caller: list[int], text: str) -> None:
    assert topology.describe_pinning(threads, cpus, of_caller) == text


SCHED_SETAFFINITY = {"x86_64": 203, "aarch64": 122}


def forbid_binding() -> None:
    """Let the kernel refuse sched_setaffinity in this process, as systemd's ``SystemCallFilter=~@resources`` does."""
    load, jump_if_equal, give = 0x20, 0x15, 0x06
    error = 0x00050000 | errno.EPERM
    program = [
        (load, 0, 0, 0),
        (jump_if_equal, 0, 1, SCHED_SETAFFINITY[platform.machine()]),
        (give, 0, 0, error),
        (give, 0, 0, 0x7FFF0000),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    filtering = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp = 38, 22
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(seccomp, 2, filtering) == 0, os.strerror(ctypes.get_errno())


def test_a_system_may_forbid_to_bind_threads() -> None:
    before = os.sched_getaffinity(0)
    assert topology.why_not_bound() == ""
    assert os.sched_getaffinity(0) == before
    child = os.fork()
    if child == 0:
        try:
            forbid_binding()
            os._exit(0 if topology.why_not_bound() == "Operation not permitted" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
