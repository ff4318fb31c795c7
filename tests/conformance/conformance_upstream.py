"""pytest plugin that makes upstream's backend tests run FASTATTENTION, in every cache layout it declares.

It replaces the list of backends passed to upstream's ``_test_backend_correctness``; for vLLM >= 0.29 the layout, which
upstream would choose once; the position of keys and values in a page; and the number of blocks in the cache, most of
which are never read. Cases in which upstream leaves this backend out (a KV cache dtype that it does not declare) are
skipped, because they would test nothing.
"""

from __future__ import annotations

import functools
import inspect
import socket
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from fastattention_vllm.integration import compat

BACKEND = compat.ensure_backend_member()
CHECK = "_test_backend_correctness"


@pytest.fixture
def default_vllm_config() -> Iterator[Any]:
    """Copied from upstream's conftest.py, which is not loaded because it imports what its other tests need."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture(scope="session", autouse=True)
def _one_rank() -> Iterator[None]:
    """The backend asks for its rank, which every vLLM worker has."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
    yield
    cleanup_dist_env_and_memory()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        if hasattr(module, CHECK):
            _redirect(module)


def _redirect(module: ModuleType) -> None:
    check, run, configure = getattr(module, CHECK), module.run_attention_backend, module.create_vllm_config
    ran: list[str] = []

    parameters = inspect.signature(run)

    def run_and_count(backend: Any, *arguments: Any, **named: Any) -> Any:
        ran.append(backend.name)
        given = parameters.bind(backend, *arguments, **named)
        given.arguments["kv_cache"] = _arranged(given.arguments["kv_cache"])
        return run(*given.args, **given.kwargs)

    def configure_with(blocks: int, *arguments: Any, **named: Any) -> Any:
        # Upstream's mock methods take other arguments than the real ones, which this backend's platform calls.
        return configure(*arguments, **(named | {"add_mock_model_methods": False, "num_gpu_blocks": blocks}))

    def check_ours(batch_spec: Any, model: str, backends: Any, *arguments: Any, **named: Any) -> None:
        dtype = named.get("kv_cache_dtype", "auto")
        if not BACKEND.get_class().supports_kv_cache_dtype(dtype):
            pytest.skip(f"this backend does not declare kv_cache_dtype {dtype}; upstream leaves such backends out")
        # Upstream copies its 8192 blocks of up to 128 tokens several times: 4 GB each, of which few are read.
        block_size = named.get("block_size", 16)
        blocks = 1 + sum(-(-length // block_size) for length in batch_spec.seq_lens)
        module.create_vllm_config = functools.partial(configure_with, blocks)  # type: ignore[attr-defined]
        for layout in _layouts(check, named):
            ran.clear()
            check(batch_spec, model, [BACKEND], *arguments, **(named | layout))
            assert ran == [BACKEND.name], "upstream's check must run this backend"

    module.run_attention_backend = run_and_count  # type: ignore[attr-defined]
    setattr(module, CHECK, check_ours)


def _arranged(kv_cache: torch.Tensor) -> torch.Tensor:
    """Upstream writes each token's value beside its key. The backend may place them elsewhere in the same page."""
    if kv_cache.dim() == 5:
        return kv_cache
    arranged = torch.empty_strided(kv_cache.shape, kv_cache.stride(), dtype=kv_cache.dtype)
    head_size = kv_cache.shape[3] // 2
    halves = (compat.keys_before_values(arranged, head_size), compat.split_kv_cache(kv_cache, head_size))
    for ours, theirs in zip(*halves, strict=True):
        ours.copy_(theirs)
    return arranged


def _layouts(check: Any, named: dict[str, Any]) -> list[dict[str, Any]]:
    if "layout" not in inspect.signature(check).parameters or named.get("layout") is not None:
        return [{}]
    return [{"layout": layout} for layout in BACKEND.get_class().supported_kv_cache_layouts()]
