from __future__ import annotations

from pathlib import Path

import pytest

from fastattention_vllm.integration.cpu import resources as cpu_resources
from fastattention_vllm.integration.cpu.resources import kv_bytes_per_rank
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.placement.host_memory import GIB
from fastattention_vllm.placement.kv_size import KvSize


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

    def test_memory_for_the_weights_is_reserved_first(self) -> None:
        assert kv_bytes_per_rank(None, self.SIZE, 1024, 12 * GIB, 1) == 1 * GIB

    def test_an_automatic_length_is_never_refused(self) -> None:
        assert kv_bytes_per_rank(None, self.SIZE, None, 0, 1) == 4 * GIB
        assert kv_bytes_per_rank(self.BLOCK, self.SIZE, None, 0, 1) == self.BLOCK

    def test_no_length_is_proposed_where_none_fits(self) -> None:
        with pytest.raises(Refusal) as caught:
            kv_bytes_per_rank(100_000, self.SIZE, 1024, 0, 1)
        assert "--max-model-len" not in str(caught.value)
        assert "0.10 MiB" in str(caught.value)

    def test_the_refusal_names_the_variable_that_set_the_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        with pytest.raises(Refusal, match=r"VLLM_CPU_KVCACHE_SPACE 1 is 1\.00 GiB.*raise VLLM_CPU_KVCACHE_SPACE"):
            kv_bytes_per_rank(GIB, self.SIZE, 16 * 2048, 0, 1)

    def test_default_is_shared_by_the_ranks(self) -> None:
        assert kv_bytes_per_rank(None, self.SIZE, 1024, 0, 2) == 2 * GIB

    def test_a_long_request_may_take_up_to_half_of_the_free_memory(self) -> None:
        tokens = 16 * (6 * GIB // self.BLOCK)
        assert kv_bytes_per_rank(None, self.SIZE, tokens, 0, 1) == 6 * GIB + self.BLOCK

    def test_an_explicit_size_is_honoured(self) -> None:
        assert kv_bytes_per_rank(10 * GIB, self.SIZE, 1024, 0, 1) == 10 * GIB

    @pytest.mark.parametrize(("weights", "ranks"), [(7 * GIB, 1), (0, 2)])
    def test_an_explicit_size_beyond_the_free_memory_is_refused(self, weights: int, ranks: int) -> None:
        """Linux would end a worker while it fills the cache, and the server's log would name no reason."""
        with pytest.raises(Refusal, match=r"^--kv-cache-memory-bytes \d+ is 10\.00 GiB .* remain free .*; lower --kv"):
            kv_bytes_per_rank(10 * GIB, self.SIZE, 1024, weights, ranks)

    def test_a_model_without_a_kv_cache_takes_any_size(self) -> None:
        none = KvSize(block_size=16, bytes_per_block=0, full_layers=0)
        assert kv_bytes_per_rank(100 * GIB, none, 1024, 0, 1) == 100 * GIB

    @pytest.mark.parametrize(("requested", "tokens"), [(None, 16 * 9000), (64 << 20, 1024)])
    def test_a_length_that_does_not_fit_is_refused_with_one_that_does(self, requested: int | None, tokens: int) -> None:
        with pytest.raises(Refusal, match="--max-model-len") as caught:
            kv_bytes_per_rank(requested, self.SIZE, tokens, 0, 1)
        fits = int(str(caught.value).split("--max-model-len ")[1].split()[0])
        assert fits % 16 == 0
        assert kv_bytes_per_rank(requested, self.SIZE, fits, 0, 1) > 0
        with pytest.raises(Refusal):
            kv_bytes_per_rank(requested, self.SIZE, fits + 1, 0, 1)
