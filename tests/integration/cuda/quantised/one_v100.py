"""A process in which vLLM's layers are created as on one V100. Import both fixtures."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability


class Model:
    """What vLLM's layers read of a model's configuration."""

    dtype = torch.float16
    is_moe = False
    quantization = "fastattention"


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    config = VllmConfig()
    object.__setattr__(config, "model_config", Model())
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{Path(folder) / 'ranks'}", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        yield
    torch.set_default_dtype(default)


@pytest.fixture(autouse=True)
def v100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, **__: DeviceCapability(7, 0))
