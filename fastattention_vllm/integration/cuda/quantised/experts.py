"""Experts with 4- or 8-bit integers, on vLLM's own kernels. They contain code for compute capability 7.0."""

from __future__ import annotations

from typing import Any, Literal

import torch

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.refusal import Refusal


def experts_method(
    layer: torch.nn.Module,
    prefix: str,
    kind: Literal["awq", "gptq"],
    checkpoint: dict[str, Any],
    *,
    bits: int,
    group_size: int,
    zero_points: bool,
) -> Any:
    """vLLM's method.

    Raises:
        Refusal: a vLLM that may choose other kernels, or a checkpoint that it would read wrongly.
    """
    from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Config

    reason = unread(checkpoint, group_size, zero_points)
    if reason is not None:
        raise Refusal(f"{prefix}: vLLM's kernels for quantised experts do not read {reason}; serve another checkpoint.")
    if not compat.has_integer_experts_without_marlin():
        raise Refusal(
            f"{prefix}: this vLLM may run quantised experts with Marlin, which needs compute capability 7.5; "
            "install vLLM 0.19.1, or serve a dense model."
        )
    # Named "gptq" at first: for AWQ, vLLM demands compute capability 7.5, which its dense layers need and these do not.
    config = MoeWNA16Config("gptq", bits, group_size, zero_points, False, [], checkpoint)
    config.linear_quant_method = kind
    return config.get_quant_method(layer, prefix)


def unread(checkpoint: dict[str, Any], group_size: int, zero_points: bool) -> str | None:
    """What vLLM drops or misreads without a word, so that answers would be wrong, or fails at without a sentence."""
    if checkpoint.get("desc_act"):
        return "activation order (desc_act)"
    if zero_points and checkpoint.get("checkpoint_format") == "gptq_v2":
        return "zero points of the format gptq_v2"
    return "scales per channel (group_size -1)" if group_size == -1 else None
