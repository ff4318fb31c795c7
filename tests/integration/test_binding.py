from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.integration import binding
from fastattention_vllm.integration.binding import format_bind
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.placement import cpu_claims, host_memory
from fastattention_vllm.placement import cpus as topology


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    return tmp_path


@given(st.lists(st.sets(st.integers(0, 99), min_size=1), min_size=1, max_size=8))
def test_a_rank_reads_back_the_cpus_it_was_given(groups: list[set[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(binding.THREADS_BIND, format_bind(sorted(group) for group in groups))
        for rank, group in enumerate(groups):
            assert binding.cpus_of_rank(rank) == sorted(group)


def test_cpu_ranges_and_missing_ranks_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(binding.THREADS_BIND, "0-2,5|7")
    assert binding.cpus_of_rank(0) == [0, 1, 2, 5]
    assert binding.cpus_of_rank(1) == [7]
    assert binding.cpus_of_rank(2) == topology.physical_cpus()


@pytest.mark.parametrize(("text", "ranks"), [("0,a", 1), ("0|1", 1), ("0", 2), ("0||1", 3), ("-3", 1)])
def test_an_invalid_binding_is_refused(text: str, ranks: int) -> None:
    with pytest.raises(Refusal, match="VLLM_CPU_OMP_THREADS_BIND") as caught:
        binding.check_bind(text, ranks)
    assert text in str(caught.value)


@pytest.mark.parametrize(("text", "ranks"), [("0-1,4", 1), ("0|1", 2), ("nobind", 4)])
def test_a_good_binding_is_accepted(text: str, ranks: int) -> None:
    binding.check_bind(text, ranks)


def test_unbound_ranks_share_the_threads_and_reach_every_cpu(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(1000, 1064)))
    monkeypatch.setenv(binding.THREADS_BIND, binding.NOBIND)
    assert binding.floats()
    assert [topology.share_of_rank(rank, 4) for rank in range(4)] == [16] * 4
    assert len(binding.cpus_in_reach(1)) == 64
    (cgroup / "cpu.max").write_text("600000 100000\n")
    assert [topology.share_of_rank(rank, 4) for rank in range(4)] == [1, 2, 1, 2]
    assert len(binding.cpus_in_reach(1)) == 64
    monkeypatch.setenv(binding.THREADS_BIND, "1000,1001|1002")
    assert binding.cpus_in_reach(1) == [1002]


@pytest.mark.parametrize("announced", [[], [3]])
def test_what_other_users_announce_is_named_and_changes_nothing(
    announced: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched: list[list[int]] = []
    monkeypatch.setattr(cpu_claims, "announced_by_other_users", lambda cpus: announced)
    monkeypatch.setattr(cpu_claims, "unbind_beside_others", lambda cpus, everywhere, say: watched.append(cpus))
    monkeypatch.setattr(binding.logger, "propagate", True)
    binding.share_with_other_servers([2, 3], [0, 1, 2, 3], "set X")
    assert watched == [[2, 3]]
    assert ("Another user's process says that it uses CPUs 3." in caplog.text) == bool(announced)
    assert ("To give each server its own CPUs, set X." in caplog.text) == bool(announced)
