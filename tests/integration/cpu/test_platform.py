"""Decisions of the platform, without an engine."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.binding import OWN_BIND, THREADS_BIND
from fastattention_vllm.integration.cpu import platform
from fastattention_vllm.integration.cpu.platform import FastAttentionCpuPlatform as Platform
from fastattention_vllm.integration.cpu.stand_ins import linear as cpu_linear
from fastattention_vllm.integration.cpu.stand_ins import ops as cpu_ops
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.placement import cpu_claims, host_memory
from fastattention_vllm.placement import cpus as topology
from fastattention_vllm.placement.cpus import physical_cpus


def with_ranks(ranks: int) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(local_world_size=ranks, distributed_executor_backend="mp"))


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS_BIND, "")
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.setenv(OWN_BIND, "")
    # Other tests' engines may run at the same time.
    monkeypatch.setattr(cpu_claims, "claim", lambda cpus: [])


def forbidden(process: int, cpus: object) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.usefixtures("unbound")
class TestBinding:
    def bound(self, ranks: int) -> list[str]:
        Platform._bind_cpus(with_ranks(ranks))
        return os.environ[THREADS_BIND].split("|")

    def test_one_rank_gets_every_core(self) -> None:
        assert self.bound(1) == [",".join(map(str, physical_cpus()))]

    def test_a_second_engine_of_the_process_is_bound_anew(self) -> None:
        assert [len(self.bound(ranks)) for ranks in (1, 2, 1)] == [1, 2, 1]

    def test_a_quota_below_the_number_of_cpus_binds_no_thread(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Otherwise all containers of a host would choose the same first CPUs."""
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(1000, 1008)))
        monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
        (tmp_path / "cpu.max").write_text("300000 100000\n")
        assert self.bound(1) == ["nobind"]
        assert self.bound(2) == ["nobind"], "a second engine must do the same"
        (tmp_path / "cpu.max").write_text("800000 100000\n")
        assert self.bound(1) == [",".join(map(str, range(1000, 1008)))]

    @pytest.mark.parametrize("asked", ["auto", "0"])
    def test_where_the_system_forbids_it_no_thread_is_bound(self, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """As systemd does with ``SystemCallFilter=~@resources``. Not even to the user's own list."""
        said: list[str] = []
        monkeypatch.setattr(platform.logger, "warning", lambda text, *values: said.append(text % values))
        monkeypatch.setattr(os, "sched_setaffinity", forbidden)
        monkeypatch.setenv(THREADS_BIND, asked)
        assert self.bound(1) == ["nobind"]
        assert self.bound(1) == ["nobind"], "a second engine must do the same"
        assert said == 2 * [
            "Threads are not bound to CPUs, because the system does not allow it (Operation not permitted)."
        ]

    @pytest.mark.parametrize("reserved", [1, 3])
    def test_reserved_cpus_stay_free(self, monkeypatch: pytest.MonkeyPatch, reserved: int) -> None:
        monkeypatch.setattr(topology, "physical_cpus", lambda: list(range(10, 18)))
        monkeypatch.setattr(topology, "quota_is_smaller", lambda: False)
        monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", str(reserved))
        assert self.bound(1) == [",".join(map(str, range(10, 18 - reserved)))]
        assert ",".join(self.bound(2)) == ",".join(map(str, range(10, 18 - reserved)))

    @pytest.mark.parametrize("reserved", [-1, 8, 100])
    def test_reserving_every_cpu_is_refused(self, monkeypatch: pytest.MonkeyPatch, reserved: int) -> None:
        monkeypatch.setattr(topology, "physical_cpus", lambda: list(range(8)))
        monkeypatch.setattr(topology, "quota_is_smaller", lambda: False)
        monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", str(reserved))
        with pytest.raises(Refusal, match=f"VLLM_CPU_NUM_OF_RESERVED_CPU={reserved} is not between 0 and 7"):
            self.bound(1)

    def test_cpus_of_another_server_bind_no_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[list[int]] = []
        said: list[str] = []
        monkeypatch.setattr(topology, "physical_cpus", lambda: list(range(8)))
        monkeypatch.setattr(topology, "quota_is_smaller", lambda: False)
        monkeypatch.setattr(platform.logger, "warning", lambda text, *values: said.append(text % values))
        monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
        monkeypatch.setattr(cpu_claims, "claim", lambda cpus: asked.append([*cpus]) or [3])
        assert self.bound(2) == ["nobind"]
        assert asked == [list(range(7))]
        assert "on CPUs 3 too" in said[0]
        assert "VLLM_CPU_NUM_OF_RESERVED_CPU=1 has no effect" in said[0]
        monkeypatch.setattr(cpu_claims, "claim", lambda cpus: [])
        assert len(self.bound(2)) == 2, "a second engine is bound once the other server has ended"

    def test_the_users_list_is_announced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        announced: list[set[int]] = []
        monkeypatch.setattr(cpu_claims, "claim", announced.append)
        monkeypatch.setenv(THREADS_BIND, "0-2|5")
        assert self.bound(2) == ["0-2", "5"]
        assert announced == [{0, 1, 2, 5}]

    def test_a_binding_set_by_the_user_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(THREADS_BIND, "0|0")
        assert self.bound(2) == ["0", "0"]

    def test_the_platform_resolves_auto(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(THREADS_BIND, "auto")
        assert len(self.bound(2)) == 2

    @pytest.mark.parametrize("bind", ["auto", "0"])
    @pytest.mark.parametrize(("asked", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
    def test_openmp_threads_sleep_between_parallel_regions(
        self, bind: str, asked: str | None, policy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """This holds whoever chose the CPUs, because the attention pool runs on the same ones."""
        import os

        monkeypatch.setenv(THREADS_BIND, bind)
        monkeypatch.delenv("OMP_WAIT_POLICY")
        if asked:
            monkeypatch.setenv("OMP_WAIT_POLICY", asked)
        self.bound(1)
        assert os.environ["OMP_WAIT_POLICY"] == policy

    def test_a_binding_for_another_number_of_ranks_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(THREADS_BIND, "0|0")
        with pytest.raises(Refusal, match=r"0\|0"):
            self.bound(1)


@pytest.mark.parametrize(("asked", "kept"), [(None, str(cpu_linear.PRIMITIVES)), ("7", "7")])
@pytest.mark.parametrize("name", cpu_linear.PRIMITIVE_CACHES)
def test_a_worker_limits_onednns_primitive_cache(
    name: str, asked: str | None, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is set before the first linear layer. A value set by the user is kept."""
    import os

    for each in cpu_linear.PRIMITIVE_CACHES:
        monkeypatch.setenv(each, "")  # so that it is restored
    monkeypatch.delenv(name)
    if asked:
        monkeypatch.setenv(name, asked)
    Platform.get_attn_backend_cls(None, None)
    assert os.environ[name] == kept


def test_our_backend_is_the_default_where_vllm_has_no_kernels() -> None:
    cpu_ops.define_missing_ops()
    assert Platform.get_attn_backend_cls(None, None) == compat.BACKEND_PATH
    assert Platform.get_attn_backend_cls(compat.ensure_backend_member(), None) == compat.BACKEND_PATH


def test_another_backend_is_refused_rather_than_replaced() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    with pytest.raises(Refusal, match="TRITON_ATTN"):
        Platform.get_attn_backend_cls(AttentionBackendEnum.TRITON_ATTN, None)


def test_a_vllm_with_compiled_kernels_keeps_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "has_compiled_cpu_ops", lambda: True)
    assert not Platform._uses_fastattention(None)
    assert Platform._uses_fastattention(compat.ensure_backend_member())


def test_compiling_without_python_headers_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm.config import CompilationMode

    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(mode=CompilationMode.DYNAMO_TRACE_ONCE))
    Platform._check_compiler(config)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(Refusal, match="python3-dev"):
        Platform._check_compiler(config)


def test_the_cpu_backend_does_not_claim_gpus() -> None:
    from vllm.platforms.interface import DeviceCapability

    from fastattention_vllm.integration.cpu.backend import FastAttentionBackend

    assert not FastAttentionBackend.supports_compute_capability(DeviceCapability(9, 0))
