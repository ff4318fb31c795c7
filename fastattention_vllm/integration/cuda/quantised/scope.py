"""Which quantised checkpoints this package loads, and on which GPUs."""

from __future__ import annotations

NAME = "fastattention"
MARLIN = (7, 5)
"""The minimum compute capability of vLLM's own kernels for most formats."""
FORMATS = ("awq", "gptq", "compressed-tensors", "fp8")
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
