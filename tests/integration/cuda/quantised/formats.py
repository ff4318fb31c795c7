"""Quantised matrices as checkpoints store them, written by this module alone: not by the code under test.

Each function quantises weights ``[n, k]`` and returns the checkpoint's tensors, and what they say the weights are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each 4 bits of a word, from the lowest."""
E4M3_MAX = 448.0


@dataclass(frozen=True)
class Stored:
    """One matrix."""

    tensors: dict[str, torch.Tensor]
    weight: torch.Tensor
    """fp16 ``[n, k]``, as the tensors say."""


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint."""

    config: dict[str, Any]
    """Its quantization_config."""
    store: Callable[[torch.Tensor], Stored]
    divisor: int = 8
    """Sizes must be multiples of this."""
    alike: tuple[str, ...] = field(default=())
    """Tensors that must be the same in all parts of a merged layer."""


def words(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32: the numbers of consecutive columns in a word, the first in the lowest bits."""
    per_word = 32 // bits
    parts = numbers.to(torch.int64).reshape(len(numbers), -1, per_word)
    found = sum(parts[..., column] << bits * place for place, column in enumerate(order or range(per_word)))
    return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32)


def integers(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool, groups: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers ``[n, k]``, scales (fp16) and zero points ``[n, groups]``, and the weights that they mean.

    Args:
        groups: ``[k]``, the group of each input; consecutive inputs if None.
    """
    n, k = weight.shape
    size = k if group == -1 else group
    of = torch.arange(k) // size if groups is None else groups
    count, highest = int(of.max()) + 1, (1 << bits) - 1
    scales, zeros = torch.empty(n, count, dtype=torch.float16), torch.empty(n, count, dtype=torch.int64)
    for index in range(count):
        part = weight[:, of == index].float()
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scales[:, index] = (torch.maximum(high, -low) * 2 / highest).clamp(min=1e-4)
            zeros[:, index] = 1 << bits - 1
        else:
            scales[:, index] = ((high - low) / highest).clamp(min=1e-4)
            zeros[:, index] = (-low / scales[:, index].float()).round().clamp(0, highest).to(torch.int64)
    spread_scales, spread_zeros = scales.float()[:, of], zeros[:, of]
    numbers = ((weight.float() / spread_scales).round().to(torch.int64) + spread_zeros).clamp(0, highest)
    return numbers, scales, zeros, ((numbers - spread_zeros).float() * spread_scales).half()


def awq(group: int = 128) -> Format:
    def store(weight: torch.Tensor) -> Stored:
        numbers, scales, zeros, meant = integers(weight, 4, group, symmetric=False)
        tensors = {
            "qweight": words(numbers.t(), 4, AWQ_ORDER),
            "qzeros": words(zeros.t(), 4, AWQ_ORDER),
            "scales": scales.t().contiguous(),
        }
        return Stored(tensors, meant)

    return Format({"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}, store)


def gptq(
    bits: int = 4, group: int = 128, symmetric: bool = True, ordered: bool = False, second: bool = False
) -> Format:
    """``ordered``: groups of inputs that do not follow each other, the same in matrices of the same input size."""

    def store(weight: torch.Tensor) -> Stored:
        k = weight.shape[1]
        groups = torch.arange(k) // (k if group == -1 else group)
        if ordered:
            groups = groups[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        numbers, scales, zeros, meant = integers(weight, bits, group, symmetric, groups)
        if not second:
            # The first format cannot store 0.
            zeros = zeros.clamp(min=1)
            spread = scales.float()[:, groups]
            numbers = ((weight.float() / spread).round().to(torch.int64) + zeros[:, groups]).clamp(0, (1 << bits) - 1)
            meant = ((numbers - zeros[:, groups]).float() * spread).half()
        tensors = {
            "qweight": words(numbers, bits).t().contiguous(),
            "qzeros": words(zeros.t() - (0 if second else 1), bits),
            "scales": scales.t().contiguous(),
            "g_idx": groups.to(torch.int32),
        }
        return Stored(tensors, meant)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": ordered}
    if second:
        config["checkpoint_format"] = "gptq_v2"
    return Format(config, store, alike=("g_idx",))


def packed(
    bits: int = 4, group: int = 128, symmetric: bool = True, ordered: bool = False, word: str = "group"
) -> Format:
    """compressed-tensors with integers; ``group`` -1: scales per channel.

    ``word``: for activation order.
    """

    def store(weight: torch.Tensor) -> Stored:
        k = weight.shape[1]
        groups = torch.arange(k) // (k if group == -1 else group)
        if ordered:
            groups = groups[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        numbers, scales, zeros, meant = integers(weight, bits, group, symmetric, groups)
        tensors = {
            "weight_packed": words(numbers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
        if ordered:
            tensors["weight_g_idx"] = groups.to(torch.int32)
        return Stored(tensors, meant)

    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    weights |= {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    if ordered:
        weights["actorder"] = word
    return Format(_compressed("pack-quantized", weights), store, alike=("weight_g_idx",))


def floats(strategy: str = "channel", activations: str | None = None) -> Format:
    """compressed-tensors with FP8. ``activations``: static, dynamic or None."""
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    weights |= {"strategy": strategy} | ({"block_structure": [128, 128]} if strategy == "block" else {})
    inputs = None
    if activations is not None:
        inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": activations == "dynamic"}
        inputs["strategy"] = "tensor" if activations == "static" else "token"
    kind = {"channel": "channel", "tensor": "tensor", "block": "block"}[strategy]
    return Format(
        _compressed("float-quantized", weights, inputs), _float_store(kind, "weight_scale", activations == "static")
    )


def fp8(block: bool = False, static: bool = False) -> Format:
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    if block:
        config["weight_block_size"] = [128, 128]
    return Format(
        config, _float_store("block" if block else "scalar", "weight_scale_inv" if block else "weight_scale", static)
    )


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _float_store(scales: str, name: str, static: bool) -> Callable[[torch.Tensor], Stored]:
    def store(weight: torch.Tensor) -> Stored:
        n, k = weight.shape
        whole = torch.zeros(-(-n // 128) * 128, -(-k // 128) * 128)
        whole[:n, :k] = weight.float()
        match scales:
            case "channel":
                found = weight.float().abs().amax(1, keepdim=True)
            case "block":
                found = whole.abs().unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).amax((1, 3))
            case "tensor":
                found = weight.float().abs().amax().reshape(1)
            case _:
                found = weight.float().abs().amax()
        found = (found / E4M3_MAX).clamp(min=1e-6)
        spread = found
        if scales == "block":
            spread = found.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
        numbers = (weight.float() / spread).to(torch.float8_e4m3fn)
        tensors = {"weight": numbers, name: found}
        if static:
            tensors["input_scale"] = torch.tensor(0.5) if scales == "scalar" else torch.tensor([0.5])
        return Stored(tensors, (numbers.float() * spread).half())

    return store


FORMATS: dict[str, Format] = {
    "awq": awq(),
    "awq-32": awq(32),
    "gptq": gptq(),
    "gptq-channel": gptq(group=-1),
    "gptq-8-bits": gptq(8, 32),
    "gptq-zero-points": gptq(symmetric=False),
    "gptq-second-zero-points": gptq(symmetric=False, second=True),
    "gptq-8-bits-zero-points": gptq(8, 64, symmetric=False),
    "gptq-order": gptq(ordered=True),
    "gptq-order-8-bits": gptq(8, 32, symmetric=False, ordered=True),
    "packed": packed(),
    "packed-channel": packed(group=-1),
    "packed-zero-points": packed(group=32, symmetric=False),
    "packed-8-bits": packed(8),
    "packed-8-bits-channel": packed(8, -1),
    "packed-order": packed(ordered=True),
    "packed-order-dynamic": packed(ordered=True, word="dynamic"),
    "packed-order-zero-points": packed(group=64, symmetric=False, ordered=True),
    "floats-channel": floats("channel", "dynamic"),
    "floats-tensor": floats("tensor", "static"),
    "floats-block": floats("block"),
    "fp8": fp8(),
    "fp8-static": fp8(static=True),
    "fp8-block": fp8(block=True),
}
