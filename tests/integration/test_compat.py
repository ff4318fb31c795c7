from __future__ import annotations

import pickle
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from enum import Enum
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import cloudpickle
import pytest

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.cpu.stand_ins import speculation as cpu_speculation
from fastattention_vllm.integration.refusal import Refusal

ROOT = Path(__file__).resolve().parents[2]


def test_the_name_is_accepted_in_any_case_and_resolves_to_our_class() -> None:
    from vllm.config.attention import AttentionConfig

    member = compat.ensure_backend_member()
    assert AttentionConfig.validate_backend_before("fastattention") is member
    assert AttentionConfig.validate_backend_before("FastAttention") is member
    assert member.get_class().get_name() == member.name == "FASTATTENTION"


def test_registering_twice_changes_nothing() -> None:
    assert compat.ensure_backend_member() is compat.ensure_backend_member()


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_the_member_survives_pickling_into_a_process_that_has_loaded_no_plugin(dumps: object) -> None:
    payload = dumps(compat.ensure_backend_member())  # type: ignore[operator]
    code = (
        "import pickle, sys; member = pickle.load(sys.stdin.buffer); "
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as E; "
        "assert E['FASTATTENTION'] is member; print(member.get_path())"
    )
    result = subprocess.run([sys.executable, "-c", code], input=payload, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()
    assert compat.BACKEND_PATH in result.stdout.decode()


@pytest.mark.parametrize("version", ["0.18.1", "0.19.0", "0.34.0", "1.0.0"])
def test_a_vllm_outside_the_range_is_refused_by_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(Refusal, match=version):
        compat.check_vllm_version()


@pytest.mark.parametrize("version", ["0.19.1", "0.23.0", "0.28.0", "0.32.0", "0.32.0+cpu", "0.32.1.post1", "0.32.0rc1"])
def test_builds_of_a_supported_vllm_are_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    compat.check_vllm_version()


def test_a_member_added_to_a_closed_enum_is_found_by_name_and_value() -> None:
    """The code path for vLLM <= 0.31, tested with an enum in which no version registers names."""

    class Backends(Enum):
        OTHER = "other.Backend"

    compat._add_member(Backends)
    member = Backends[compat.BACKEND_NAME]
    assert isinstance(member, Backends)
    assert Backends(compat.BACKEND_PATH) is member
    assert [member.name for member in Backends] == ["OTHER", compat.BACKEND_NAME]
    assert {member, Backends.OTHER} == set(Backends)


def kv_config(**cache: Any) -> Any:
    return SimpleNamespace(cache_config=SimpleNamespace(**cache))


@pytest.mark.parametrize("older", [{}, {"cpu_kvcache_space_bytes": 77}], ids=["newer", "0.19"])
def test_kv_bytes_reach_every_setting_that_the_version_has(older: dict[str, int]) -> None:
    config = kv_config(kv_cache_memory_bytes=None, **older)
    compat.set_kv_bytes(config, 5 << 20)
    assert set(vars(config.cache_config).values()) == {5 << 20}


def test_the_old_environment_variable_applies_where_the_version_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert compat.requested_kv_bytes(kv_config(kv_cache_memory_bytes=None)) is None
    assert compat.requested_kv_bytes(kv_config(kv_cache_memory_bytes=None, cpu_kvcache_space_bytes=77)) == 3 << 30
    assert compat.requested_kv_bytes(kv_config(kv_cache_memory_bytes=8, cpu_kvcache_space_bytes=77)) == 8


@pytest.mark.parametrize("has_executor", [True, False])
def test_ray_is_refused_where_no_executor_runs_on_cpus(has_executor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if has_executor else None)
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend="ray"))
    with nullcontext() if has_executor else pytest.raises(Refusal, match="--distributed-executor-backend mp"):
        compat.check_ray(config)
    config.parallel_config.distributed_executor_backend = "mp"
    compat.check_ray(config)


class Worker:
    """Stands for the class that allocates memory."""


class OwnWorker(Worker):
    pass


@pytest.mark.parametrize("named", ["auto", f"{__name__}.Worker", f"{__name__}.OwnWorker", OwnWorker])
def test_a_worker_class_that_inherits_is_allowed(named: object) -> None:
    compat.check_worker_class(with_worker(named), Worker)


def test_a_worker_class_that_does_not_allocate_is_refused() -> None:
    with pytest.raises(Refusal, match=r"Enum is not supported: .*test_compat\.Worker.*host_kv_layers to 0"):
        compat.check_worker_class(with_worker("enum.Enum"), Worker, compat.HOST_LAYERS_OFF)


def with_worker(named: object) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=named))


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize(("has_runner", "has_triton"), [(True, True), (True, False), (False, True), (False, False)])
def test_the_v2_runner_is_required_only_where_it_is_chosen(
    asked: bool | None, has_runner: bool, has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the environment variable alone up to 0.19, by a property of the configuration in newer versions."""
    from vllm import envs

    monkeypatch.setattr(compat, "has_v2_runner_for_cpus", lambda: has_runner)
    monkeypatch.setattr(compat, "has_triton_for_cpus", lambda: has_triton)
    missing = asked is True and not (has_runner and has_triton)
    newer: Any = SimpleNamespace(use_v2_model_runner=asked)
    assert compat.v2_runner_is_missing(newer) == missing
    # Set as an entry of the module's dict, because vLLM's module computes the attribute if there is none.
    monkeypatch.setitem(vars(envs), "VLLM_USE_V2_MODEL_RUNNER", asked)
    older: Any = SimpleNamespace()
    assert compat.v2_runner_is_missing(older) == missing


@pytest.mark.parametrize(("backends", "runs"), [({"nvidia": 1}, False), ({"nvidia": 1, "cpu": 2}, True), (None, False)])
def test_triton_runs_on_cpus_only_with_a_backend_for_them(
    backends: dict[str, int] | None, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())  # type: ignore[misc]
    installed: Any = None if backends is None else SimpleNamespace(backends=backends)
    monkeypatch.setitem(sys.modules, "triton.backends", installed)
    assert compat.has_triton_for_cpus() == runs


def test_a_runner_in_a_missing_package_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.util.find_spec", find)
    assert not compat.has_v2_runner_for_cpus()


def test_the_installed_versions_runner_finds_our_kernels() -> None:
    """The runner looks them up in its version's way: by a dispatcher, or in the module of CPU replacements."""
    if not compat.verifies_speculated_tokens():  # 0.19 has no such kernel, and none is added
        from vllm.utils import cpu_triton_utils

        compat.replace_triton_kernels(cpu_speculation.KERNELS)
        assert not hasattr(cpu_triton_utils, "expand_kernel")
        return
    calls: list[str] = []
    name = "vllm.v1.sample.rejection_sampler.expand_kernel"
    try:
        compat.replace_triton_kernels({name: lambda text: calls.append(text)})
        if compat.has_kernel_dispatcher():
            from vllm.v1.sample.rejection_sampler import expand_kernel
        else:
            from vllm.utils.cpu_triton_utils import expand_kernel
        expand_kernel[(1,)]("called")
    finally:
        compat.replace_triton_kernels(cpu_speculation.KERNELS)
    assert calls == ["called"]


def test_the_cpu_extra_installs_a_supported_vllm() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pin,) = (p.removeprefix("vllm==") for p in extras["cpu"] if p.startswith("vllm=="))
    assert compat.SUPPORTED_VLLM.contains(pin)
    assert f"vllm=={pin}" in (ROOT / "constraints" / "cpu.txt").read_text()


class Runner:
    """As in vLLM 0.19: its pass looks up all layers, and is made before layers that share a cache get theirs."""

    shared_kv_cache_layers: ClassVar[dict[str, str]] = {"on the host": "on the device"}

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _update_hybrid_attention_mamba_layout(self, kv_caches: dict[str, Any], *more: Any) -> None:
        self.seen += [kv_caches[name] for name in ("on the device", "on the host")] + list(more)


def test_layers_that_share_a_cache_have_it_before_strides_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_update_hybrid_attention_mamba_layout"
    monkeypatch.setattr(Runner, name, getattr(Runner, name))
    cache = object()
    with pytest.raises(KeyError):
        Runner()._update_hybrid_attention_mamba_layout({"on the device": cache})
    for _ in range(2):
        compat.add_shared_caches_before_layout(Runner)
    runner = Runner()
    runner._update_hybrid_attention_mamba_layout({"on the device": cache}, [16])
    assert runner.seen == [cache, cache, [16]]
    compat.add_shared_caches_before_layout(object)  # newer versions have no such pass


class Platform:
    """As in vLLM 0.19: it has none of the functions about block sizes, and answers None for whatever it lacks."""

    def __getattr__(self, name: str) -> None:
        return None


def test_a_platform_without_functions_for_block_sizes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", Platform())
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(block_size=784, user_specified_block_size=False))
    compat.settle_hybrid_block_size(config, object)
    compat.keep_block_size(config)
    assert vars(config.cache_config) == {"block_size": 784, "user_specified_block_size": False}


def test_every_callback_runs_before_profiling_and_once() -> None:
    class Worker:
        vllm_config, model_runner = "config", SimpleNamespace(get_model=lambda: "model")

        def determine_available_memory(self) -> int:
            return 7

    called: list[tuple[str, object, object]] = []

    def first(config: object, model: object) -> None:
        called.append(("first", config, model))

    def second(config: object, model: object) -> None:
        called.append(("second", config, model))

    for callback in (first, second, first):
        compat.before_profiling(Worker, callback)
    assert Worker().determine_available_memory() == 7
    assert called == [("first", "config", "model"), ("second", "config", "model")]
