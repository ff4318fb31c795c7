from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.integration.cpu import resources as cpu_resources
from fastattention_vllm.integration.cpu.resources import format_bind, kv_bytes_per_rank, split_cpus
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.placement import host_memory
from fastattention_vllm.placement.host_memory import GIB
from fastattention_vllm.placement.kv_size import KvSize


@given(st.sets(st.integers(0, 300), min_size=1, max_size=64), st.integers(1, 16))
def test_every_rank_gets_cpus_and_none_is_given_twice_where_they_suffice(cpus: set[int], ranks: int) -> None:
    groups = split_cpus(sorted(cpus), ranks)
    assert len(groups) == ranks
    assert all(groups)
    assert {cpu for group in groups for cpu in group} <= cpus
    if len(cpus) >= ranks:
        assert sorted(cpu for group in groups for cpu in group) == sorted(cpus)
        assert max(map(len, groups)) - min(map(len, groups)) <= 1


@given(st.lists(st.sets(st.integers(0, 99), min_size=1), min_size=1, max_size=8))
def test_a_rank_reads_back_the_cpus_it_was_given(groups: list[set[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cpu_resources.THREADS_BIND, format_bind(sorted(group) for group in groups))
        for rank, group in enumerate(groups):
            assert cpu_resources.cpus_of_rank(rank) == sorted(group)


def test_cpu_ranges_and_missing_ranks_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_resources.THREADS_BIND, "0-2,5|7")
    assert cpu_resources.cpus_of_rank(0) == [0, 1, 2, 5]
    assert cpu_resources.cpus_of_rank(1) == [7]
    assert cpu_resources.cpus_of_rank(2) == cpu_resources.physical_cpus()


@pytest.mark.parametrize(("text", "ranks"), [("0,a", 1), ("0|1", 1), ("0", 2), ("0||1", 3), ("-3", 1)])
def test_a_binding_that_vllm_would_trip_over_is_refused(text: str, ranks: int) -> None:
    with pytest.raises(Refusal, match="VLLM_CPU_OMP_THREADS_BIND") as caught:
        cpu_resources.check_bind(text, ranks)
    assert text in str(caught.value)


@pytest.mark.parametrize(("text", "ranks"), [("0-1,4", 1), ("0|1", 2), ("nobind", 4)])
def test_a_good_binding_is_accepted(text: str, ranks: int) -> None:
    cpu_resources.check_bind(text, ranks)


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    return tmp_path


def test_a_cpu_quota_limits_the_cpus(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(1000, 1064)))
    assert len(cpu_resources.physical_cpus()) == 64
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert len(cpu_resources.physical_cpus()) == 64
    (cgroup / "cpu.max").write_text("250000 100000\n")
    assert cpu_resources.physical_cpus() == [1000, 1001, 1002]


def test_ranks_that_float_share_the_threads_and_reach_every_cpu(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(1000, 1064)))
    monkeypatch.setenv(cpu_resources.THREADS_BIND, cpu_resources.NOBIND)
    assert cpu_resources.floats()
    assert [cpu_resources.share_of_rank(rank, 4) for rank in range(4)] == [16] * 4
    assert len(cpu_resources.cpus_in_reach(1)) == 64
    (cgroup / "cpu.max").write_text("600000 100000\n")
    assert [cpu_resources.share_of_rank(rank, 4) for rank in range(4)] == [1, 2, 1, 2]
    assert len(cpu_resources.cpus_in_reach(1)) == 64
    monkeypatch.setenv(cpu_resources.THREADS_BIND, "1000,1001|1002")
    assert cpu_resources.cpus_in_reach(1) == [1002]


def test_the_weights_of_a_local_checkpoint_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x" * 10)
    (tmp_path / "b.safetensors").write_bytes(b"x" * 5)
    (tmp_path / "config.json").write_bytes(b"x")
    assert cpu_resources.checkpoint_bytes(str(tmp_path)) == 15
    assert cpu_resources.checkpoint_bytes("owner/name") == 0


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_resources, "available_bytes", lambda: 16 * GIB)


@pytest.mark.usefixtures("memory")
class TestKvBytes:
    BLOCK = 1 << 20
    SIZE = KvSize(block_size=16, bytes_per_block=BLOCK, full_layers=1)

    def test_default_is_4_gib(self) -> None:
        assert kv_bytes_per_rank(None, self.SIZE, 1024, 0, 1) == 4 * GIB

    def test_the_weights_come_first(self) -> None:
        assert kv_bytes_per_rank(None, self.SIZE, 1024, 12 * GIB, 1) == 1 * GIB

    def test_an_automatic_length_is_never_refused(self) -> None:
        assert kv_bytes_per_rank(None, self.SIZE, None, 0, 1) == 4 * GIB
        assert kv_bytes_per_rank(self.BLOCK, self.SIZE, None, 0, 1) == self.BLOCK

    def test_no_length_is_proposed_where_none_fits(self) -> None:
        with pytest.raises(Refusal) as caught:
            kv_bytes_per_rank(100_000, self.SIZE, 1024, 0, 1)
        assert "--max-model-len" not in str(caught.value)
        assert "0.10 MiB" in str(caught.value)

    def test_the_variable_is_named_where_it_was_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        with pytest.raises(Refusal, match=r"VLLM_CPU_KVCACHE_SPACE 1 is 1\.00 GiB.*raise VLLM_CPU_KVCACHE_SPACE"):
            kv_bytes_per_rank(GIB, self.SIZE, 16 * 2048, 0, 1)

    def test_default_is_shared_by_the_ranks(self) -> None:
        assert kv_bytes_per_rank(None, self.SIZE, 1024, 0, 2) == 2 * GIB

    def test_a_long_request_may_take_up_to_half_of_what_is_free(self) -> None:
        tokens = 16 * (6 * GIB // self.BLOCK)
        assert kv_bytes_per_rank(None, self.SIZE, tokens, 0, 1) == 6 * GIB + self.BLOCK

    def test_an_explicit_size_is_honoured(self) -> None:
        assert kv_bytes_per_rank(10 * GIB, self.SIZE, 1024, 0, 1) == 10 * GIB

    @pytest.mark.parametrize(("requested", "tokens"), [(None, 16 * 9000), (64 << 20, 1024)])
    def test_what_does_not_fit_is_refused_with_the_length_that_does(self, requested: int | None, tokens: int) -> None:
        with pytest.raises(Refusal, match="--max-model-len") as caught:
            kv_bytes_per_rank(requested, self.SIZE, tokens, 0, 1)
        fits = int(str(caught.value).split("--max-model-len ")[1].split()[0])
        assert fits % 16 == 0
        assert kv_bytes_per_rank(requested, self.SIZE, fits, 0, 1) > 0
        with pytest.raises(Refusal):
            kv_bytes_per_rank(requested, self.SIZE, fits + 1, 0, 1)


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that numbers its CPUs across two nodes in turn, and has a third node of memory alone."""
    root = tmp_path / "node"
    for node, cpus in {0: "1000-1003,1008", 1: "1004-1007", 2: ""}.items():
        (root / f"node{node}").mkdir(parents=True)
        (root / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    (root / "online").write_text("0-2\n")
    monkeypatch.setattr(cpu_resources, "NODES", root)
    return root


def test_numa_nodes_are_those_of_the_cpus(two_nodes: Path) -> None:
    assert cpu_resources.numa_nodes([1000, 1008], two_nodes) == [0]
    assert cpu_resources.numa_nodes([1004]) == [1]
    assert cpu_resources.numa_nodes([1008, 1005]) == [0, 1]
    assert cpu_resources.numa_nodes([]) == []


def test_a_machine_with_one_node_or_without_any_has_nothing_to_choose(tmp_path: Path) -> None:
    assert cpu_resources.numa_nodes([0], tmp_path) == []
    assert cpu_resources.numa_nodes([0], tmp_path / "absent") == []
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text("0-3\n")
    assert cpu_resources.numa_nodes([0], tmp_path) == []


def test_cpus_are_counted_node_by_node(two_nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CGROUP", two_nodes)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(1000, 1009)))
    assert cpu_resources.physical_cpus() == [1000, 1001, 1002, 1003, 1008, 1004, 1005, 1006, 1007]
    (two_nodes / "cpu.max").write_text("500000 100000\n")
    assert cpu_resources.numa_nodes(cpu_resources.physical_cpus()) == [0]


@pytest.mark.parametrize(
    ("threads", "cpus", "of_caller", "text"),
    [
        (1, [0, 1], [0, 1], "1 threads: vLLM's own on any of 2 CPUs"),
        (3, [], [4, 5, 7], "3 threads, none pinned: they float over 3 CPUs"),
        (3, [4, 5, 6], [4], "3 threads: vLLM's own on CPU 4, 2 pinned one by one to CPUs 5,6"),
        (
            4,
            [4, 5],
            [4],
            "4 threads: vLLM's own on CPU 4, 3 pinned one by one to CPUs 5,4,5; more threads than the 2 CPUs",
        ),
    ],
)
def test_the_log_says_where_threads_run(threads: int, cpus: list[int], of_caller: list[int], text: str) -> None:
    assert cpu_resources.describe_pinning(threads, cpus, of_caller) == text
