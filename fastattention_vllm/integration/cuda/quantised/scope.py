"""Which quantised checkpoints this package loads, and on which GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME = "fastattention"
MARLIN = (7, 5)
"""The minimum compute capability of vLLM's own kernels for most formats."""
FORMATS = ("awq", "gptq", "compressed-tensors", "fp8")
AUTO_ROUND = ("auto-round", "inc")
"""Two names of one method, whose checkpoints are in AWQ's or GPTQ's words."""
VLLMS = ("gguf", "bitsandbytes")
"""Methods whose kernels have code for compute capability 7.0, of vLLM 0.19 or of a package of their own. vLLM accepts
others, too, whose kernels are empty there, and computes garbage with them in silence."""
INSTEAD = (
    "serve the model as an AWQ, GPTQ (4 or 8 bits), compressed-tensors (int4, int8 or FP8 weights) or FP8 checkpoint, "
    "or unquantised in float16"
)
INTEGER_BITS = (4, 8)


def capability() -> tuple[int, int] | None:
    """Of this machine's GPUs; None without one. This queries the driver without initialising a GPU."""
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability()
    return None if found is None else (found.major, found.minor)


def auto_round_words(config: Mapping[str, Any]) -> str:
    """Whose words AutoRound has packed the weights in, as vLLM decides: ``gptq``, ``awq``, or the format's own name."""
    form = str(config.get("packing_format") or "auto_round:auto_gptq")
    backend = str(config.get("backend") or config.get("vllm_backend") or "")
    return next((kind for kind in ("gptq", "awq") if kind in form or kind in backend), form)
