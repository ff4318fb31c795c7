"""Experts with 4- or 8-bit integers, on vLLM's own kernels. They contain code for compute capability 7.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Config, MoeWNA16Method

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.cuda.quantised.integers import unpacked
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
    reason = unread(kind, checkpoint, bits, group_size, zero_points)
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
    if kind == "gptq" and zero_points:
        return CheckedZeroPoints(config, layer, prefix)
    return config.get_quant_method(layer, prefix)


class CheckedZeroPoints(MoeWNA16Method):
    """vLLM's method for GPTQ experts of 4 bits with zero points. It adds 1 to each stored zero point. There is no room
    for 16: the neighbouring column gets the 1."""

    def __init__(self, config: MoeWNA16Config, layer: Any, prefix: str) -> None:
        super().__init__(config, layer.moe_config)
        self.prefix = prefix

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **named: Any) -> None:
        super().create_weights(layer, *sizes, **named)
        for name in ("w13_qzeros", "w2_qzeros"):
            held: Any = getattr(layer, name)
            held.weight_loader = self.checked(held.weight_loader)

    def checked(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """A loader that looks at the checkpoint's words first.

        Raises:
            Refusal: a stored zero point is 15.
        """

        def checked_load(held: Any, words: torch.Tensor, *where: Any, **named: Any) -> Any:
            if bool((unpacked(words, 4) == 15).any()):
                raise Refusal(
                    f"{self.prefix}: qzeros contains 15, a zero point of 16, which vLLM's kernels for quantised "
                    "experts cannot read; serve another checkpoint."
                )
            return load(held, words, *where, **named)

        return checked_load


def unread(
    kind: Literal["awq", "gptq"], checkpoint: dict[str, Any], bits: int, group_size: int, zero_points: bool
) -> str | None:
    """What vLLM drops or misreads without a word, so that answers would be wrong, or fails at without a sentence."""
    if checkpoint.get("desc_act"):
        return "activation order (desc_act)"
    if kind == "gptq" and zero_points and bits == 8:
        return "zero points of 8 bits (sym: false)"
    if zero_points and checkpoint.get("checkpoint_format") == "gptq_v2":
        return "zero points of the format gptq_v2"
    return "scales per channel (group_size -1)" if group_size == -1 else None
