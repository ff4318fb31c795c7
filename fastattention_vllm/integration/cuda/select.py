"""Selects the backend for an NVIDIA GPU. The choice needs the options, so it is made when vLLM requests the class."""

from __future__ import annotations

from typing import Any

NAME = "FastAttentionCudaBackend"
FLASH = (8, 0)
"""The minimum compute capability for vLLM's FlashAttention."""


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return chosen()


def chosen() -> type[Any]:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.platforms import current_platform

    from fastattention_vllm.integration.options import options_of

    config = get_current_vllm_config_or_none()
    asked = config is not None and options_of(config).volta_kernels != "auto"
    capability = current_platform.get_device_capability()
    if asked or (capability is not None and capability < FLASH):
        from fastattention_vllm.integration.cuda import xformers as backend_xformers

        reason = backend_xformers.why_volta_refuses(config)
        if reason is not None:
            backend_xformers.check_asked(config, reason)
            return backend_xformers.FastAttentionXformersBackend
        from fastattention_vllm.integration.cuda.volta import FastAttentionVoltaBackend

        return FastAttentionVoltaBackend
    from fastattention_vllm.integration.cuda.flash import FastAttentionFlashBackend

    return FastAttentionFlashBackend
