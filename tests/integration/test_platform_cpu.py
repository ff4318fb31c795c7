"""The platform's own decisions, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastattention_vllm.integration import compat, cpu_ops
from fastattention_vllm.integration.cpu_resources import THREADS_BIND, physical_cpus
from fastattention_vllm.integration.platform_cpu import FastAttentionCpuPlatform as Platform
from fastattention_vllm.integration.refusal import Refusal


def with_ranks(ranks: int) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(local_world_size=ranks))


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS_BIND, "")
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.setattr(Platform, "_own_bind", "")


@pytest.mark.usefixtures("unbound")
class TestBinding:
    def bound(self, ranks: int) -> list[str]:
        import os

        Platform._bind_cpus(with_ranks(ranks))
        return os.environ[THREADS_BIND].split("|")

    def test_one_rank_gets_every_core(self) -> None:
        assert self.bound(1) == [",".join(map(str, physical_cpus()))]

    def test_a_second_engine_of_the_process_is_bound_anew(self) -> None:
        assert [len(self.bound(ranks)) for ranks in (1, 2, 1)] == [1, 2, 1]

    def test_what_the_user_set_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(THREADS_BIND, "0|0")
        assert self.bound(1) == ["0", "0"]


def test_our_backend_is_the_default_where_vllm_has_no_kernels() -> None:
    cpu_ops.define_missing_ops()
    assert Platform.get_attn_backend_cls(None, None) == compat.BACKEND_PATH
    assert Platform.get_attn_backend_cls(compat.ensure_backend_member(), None) == compat.BACKEND_PATH


def test_another_backend_is_refused_rather_than_replaced() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    with pytest.raises(Refusal, match="TRITON_ATTN"):
        Platform.get_attn_backend_cls(AttentionBackendEnum.TRITON_ATTN, None)


def test_a_vllm_with_kernels_of_its_own_keeps_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "_compiled_vllm", True)
    assert not Platform._uses_fastattention(None)
    assert Platform._uses_fastattention(compat.ensure_backend_member())


def test_quantised_weights_are_refused() -> None:
    with pytest.raises(Refusal, match="awq"):
        Platform._check_weights(SimpleNamespace(model_config=SimpleNamespace(quantization="awq")))  # type: ignore[arg-type]
