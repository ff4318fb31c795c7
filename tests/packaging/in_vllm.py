"""Run by the Python of an environment with the wheel and vLLM. Loads both entry points and their backend."""

from __future__ import annotations

from vllm import __version__
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum

load_general_plugins()
backend = AttentionBackendEnum["FASTATTENTION"]
print(f"vLLM {__version__}: {backend.get_class().__name__} on {type(current_platform).__name__}")
