"""A stand-in for vLLM's own support of a device: a platform for the dummy device, whose tensors are on the host.

From our CPU platform it takes what lets a vLLM without compiled kernels run. It chooses the attention backend as vLLM's
own platforms do: by the registered class, after checking what it supports.
"""

from __future__ import annotations

from typing import Any

from fastattention_vllm.integration.cpu.platform import FastAttentionCpuPlatform


class DummyPlatform(FastAttentionCpuPlatform):
    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)  # prepares the linear layers
        backend = selected_backend.get_class()
        reasons = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"Selected backend {selected_backend} is not valid: {reasons}")
        return str(selected_backend.get_path())
