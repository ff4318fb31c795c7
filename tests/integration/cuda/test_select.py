"""The choice of backend by NVIDIA GPU and option."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import vllm.config
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from fastattention_vllm.integration.cuda import select as backend_cuda

VOLTA, FLASH = "FastAttentionVoltaBackend", "FastAttentionFlashBackend"


@pytest.mark.parametrize(
    ("capability", "asked", "expected"),
    [
        ((7, 0), "auto", VOLTA),
        ((7, 5), "auto", VOLTA),
        ((8, 0), "auto", FLASH),
        ((9, 0), "auto", FLASH),
        ((9, 0), "ptx", VOLTA),
        ((7, 0), None, VOLTA),
        ((9, 0), None, FLASH),
    ],
)
def test_the_gpu_and_the_option_choose(
    capability: tuple[int, int], asked: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a config, vLLM asks outside of an engine, and the GPU alone decides."""
    config = SimpleNamespace(additional_config={"fastattention": {"volta_kernels": asked}})
    monkeypatch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda: None if asked is None else config)
    monkeypatch.setattr(current_platform, "get_device_capability", lambda *_: DeviceCapability(*capability))
    found: type[Any] = backend_cuda.FastAttentionCudaBackend
    assert found.__name__ == expected


def test_the_module_has_no_other_attribute() -> None:
    with pytest.raises(AttributeError, match="other"):
        backend_cuda.other  # noqa: B018
