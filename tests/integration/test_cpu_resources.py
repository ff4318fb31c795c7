from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.integration import cpu_resources
from fastattention_vllm.integration.cpu_resources import GIB, format_bind, kv_bytes_per_rank, split_cpus
from fastattention_vllm.integration.refusal import Refusal


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


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_resources, "available_bytes", lambda: 16 * GIB)


@pytest.mark.usefixtures("memory")
class TestKvBytes:
    BLOCK = 1 << 20

    def test_default_is_4_gib(self) -> None:
        assert kv_bytes_per_rank(None, self.BLOCK, 16, 1024, 1) == 4 * GIB

    def test_default_is_shared_by_the_ranks(self) -> None:
        assert kv_bytes_per_rank(None, self.BLOCK, 16, 1024, 2) == 2 * GIB

    def test_a_long_request_may_take_up_to_half_of_what_is_free(self) -> None:
        tokens = 16 * (6 * GIB // self.BLOCK)
        assert kv_bytes_per_rank(None, self.BLOCK, 16, tokens, 1) == 6 * GIB + self.BLOCK

    def test_an_explicit_size_is_honoured(self) -> None:
        assert kv_bytes_per_rank(10 * GIB, self.BLOCK, 16, 1024, 1) == 10 * GIB

    @pytest.mark.parametrize(("requested", "tokens"), [(None, 16 * 9000), (64 << 20, 1024)])
    def test_what_does_not_fit_is_refused_with_the_length_that_does(self, requested: int | None, tokens: int) -> None:
        with pytest.raises(Refusal, match="--max-model-len") as caught:
            kv_bytes_per_rank(requested, self.BLOCK, 16, tokens, 1)
        fits = int(str(caught.value).split("--max-model-len ")[1].split()[0])
        assert fits % 16 == 0
        assert kv_bytes_per_rank(requested, self.BLOCK, 16, fits, 1) > 0
        with pytest.raises(Refusal):
            kv_bytes_per_rank(requested, self.BLOCK, 16, fits + 1, 1)
