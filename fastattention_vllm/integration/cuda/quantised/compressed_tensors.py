"""compressed-tensors checkpoints: packed integers of 4 or 8 bits, and FP8."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.parameter import BasevLLMParameter, PackedvLLMParameter, RowvLLMParameter

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.cuda.quantised.activation_order import order_of
from fastattention_vllm.integration.cuda.quantised.config import QuantisedConfig, parts_differ, unsupported
from fastattention_vllm.integration.cuda.quantised.fp8_method import Fp8Method
from fastattention_vllm.integration.cuda.quantised.integers import reordered, unpacked
from fastattention_vllm.integration.cuda.quantised.linear_method import (
    ORDER,
    IntegerMethod,
    QuantisedLinearMethod,
    keep,
)
from fastattention_vllm.integration.cuda.quantised.scope import INTEGER_BITS
from fastattention_vllm.linear.weights import BLOCK, QuantisedMatrix

PACKED = "pack-quantized"
UNNAMED = "Unable to find matching target"
"""vLLM's error for a layer that no rule of the checkpoint names."""
FLOATS = ("float-quantized", "naive-quantized")
GROUPED = ("group", "dynamic")
"""Two words for an activation order whose groups are in weight_g_idx."""
_Base: Any = get_quantization_config("compressed-tensors")


class CompressedTensorsCheckpointConfig(QuantisedConfig, _Base):
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressedTensorsCheckpointConfig:
        made: CompressedTensorsCheckpointConfig = super().from_config(dict(config))
        made.checkpoint = dict(config)
        return made

    def is_unquantised(self, layer: torch.nn.Module, prefix: str) -> bool:
        if isinstance(layer, compat.experts_class()):
            self._add_fused_moe_to_target_scheme_map()
            return self._scheme(layer, f"{prefix}.0.gate_proj") is None  # checkpoints list the experts one by one
        return not self._schemes(layer, prefix)

    def linear_method(self, layer: torch.nn.Module, prefix: str) -> QuantisedLinearMethod:
        if self.transform_config is not None or getattr(self, "sparsity_scheme_map", None):
            raise unsupported(prefix, "a compressed-tensors checkpoint with transforms or sparsity")
        method, *others = (method_of(prefix, scheme) for scheme in self._schemes(layer, prefix))
        if any(type(other) is not type(method) or vars(other) != vars(method) for other in others):
            raise parts_differ(prefix)
        return method

    def _schemes(self, layer: torch.nn.Module, prefix: str) -> list[dict[str, Any]]:
        """Of each part of a merged layer; none if it is unquantised.

        vLLM takes the first part's scheme for all parts. Versions 0.19 and 0.23 prefer a rule for all linear layers to
        rules for parts.

        Raises:
            Refusal: some of the parts are quantised.
        """
        whole = self._scheme(layer, prefix)
        parent, dot, last = prefix.rpartition(".")
        parts = [self._scheme(layer, f"{parent}{dot}{part}") for part in self.packed_modules_mapping.get(last, [last])]
        found = [scheme for scheme in parts if scheme is not None]
        if found and len(found) < len(parts):
            raise parts_differ(prefix)
        # Rules may name the merged layer itself.
        return [] if whole is None else found or [whole]

    def _scheme(self, layer: torch.nn.Module, name: str) -> dict[str, Any] | None:
        """None for a layer that is unquantised, which some versions raise an error for if no rule names it."""
        try:
            scheme: dict[str, Any] | None = self.get_scheme_dict(layer, name)
        except ValueError as error:
            if UNNAMED not in str(error):
                raise
            return None
        return None if scheme is None or scheme.get("weights") is None else scheme


def method_of(prefix: str, scheme: dict[str, Any]) -> QuantisedLinearMethod:
    """The method for a scheme of the checkpoint.

    Raises:
        Refusal: the kernels do not compute it.
    """
    weights, inputs, form = scheme["weights"], scheme.get("input_activations"), scheme.get("format")
    kind, strategy = _word(weights.type), _word(weights.strategy)
    said = f"{weights.num_bits}-bit {kind} weights per {strategy} in the format {form!r}"
    if inputs is not None and kind == "int":
        raise unsupported(prefix, f"compressed-tensors with {said} and {inputs.num_bits}-bit activations")
    if weights.dynamic or scheme.get("output_activations") is not None:
        raise unsupported(prefix, f"compressed-tensors with {said}, which are not static")
    if kind == "int" and form == PACKED and weights.num_bits in INTEGER_BITS and strategy in ("group", "channel"):
        size = weights.group_size if strategy == "group" else -1
        ordered = _word(weights.actorder) in GROUPED
        return PackedMethod(prefix, weights.num_bits, size, not weights.symmetric, ordered)
    if kind == "float" and form in FLOATS and weights.num_bits == 8 and strategy in ("tensor", "channel", "block"):
        block = getattr(weights, "block_structure", None)
        if strategy == "block" and list(block or ()) != [BLOCK, BLOCK]:
            raise unsupported(prefix, f"compressed-tensors with {said} of {block}")
        static = inputs is not None and not inputs.dynamic
        return FloatMethod(prefix, strategy, "weight_scale", static)  # type: ignore[arg-type]
    raise unsupported(prefix, f"compressed-tensors with {said}")


def _word(value: object) -> str:
    """Of a string or a member of one of compressed-tensors' enums."""
    return str(getattr(value, "value", value)).lower()


@register_weight_loader_v2_supported_method
class FloatMethod(Fp8Method):
    """As :class:`Fp8Method`. vLLM knows classes by their names."""


@register_weight_loader_v2_supported_method
class PackedMethod(IntegerMethod):
    """
    Args:
        activation_order: whether the checkpoint has a group for each input.
    """

    KEPT: ClassVar[str] = "weight_packed"

    def __init__(self, prefix: str, bits: int, group_size: int, zero_points: bool, activation_order: bool) -> None:
        super().__init__(prefix, bits, group_size, zero_points)
        self.activation_order = activation_order and group_size != -1

    def add_parameters(self, layer: torch.nn.Module) -> None:
        if self.activation_order and self.k != self.whole_k:
            raise self.refusal(
                "activation order (actorder: group) does not run in a layer whose inputs are divided among "
                f"{self.ranks} ranks",
                "use --tensor-parallel-size 1, or a checkpoint with actorder: weight or without it",
            )
        self.check_sizes((self.k,), self.per_word, "an input size of")
        groups, packed = self.groups, self.in_words
        self.add(layer, "weight_packed", PackedvLLMParameter,
                 torch.empty(self.n, self.k // self.per_word, dtype=torch.int32),
                 input_dim=1, output_dim=0, packed_dim=1, **packed)  # fmt: skip
        self.add(layer, "weight_scale", self.scales_kind(packed=False),
                 torch.empty(self.n, groups, dtype=self.dtype), scales=True, **self.axes(1, 0))  # fmt: skip
        self.add(layer, "weight_shape", BasevLLMParameter, torch.empty(2, dtype=torch.int64), optional=True)
        if self.zero_points:
            self.check_sizes(self.widths, self.per_word, "an output size of")
            self.add(layer, "weight_zero_point", self.scales_kind(packed=True),
                     torch.empty(self.n // self.per_word, groups, dtype=torch.int32),
                     packed_dim=0, **self.axes(1, 0), **packed)  # fmt: skip
        else:
            self._refuse(layer, "weight_zero_point", "without zero points (symmetric)")
        if self.activation_order:
            self.add(layer, "weight_g_idx", RowvLLMParameter, torch.empty(self.k, dtype=torch.int32),
                     input_dim=0, alike=True)  # fmt: skip
        else:
            self._refuse(layer, "weight_g_idx", "without activation order (actorder)")

    def _refuse(self, layer: torch.nn.Module, name: str, described: str) -> None:
        """A tensor that the checkpoint must not have. vLLM's models skip tensors without a parameter."""

        def load(*_: Any, **__: Any) -> None:
            raise self.refusal(
                f"the checkpoint has {name}, but its quantization_config describes this layer {described}",
                "serve another checkpoint",
            )

        self.add(layer, name, BasevLLMParameter, torch.empty(0, dtype=torch.int32), loader=load)

    def matrix(self, layer: Any) -> QuantisedMatrix:
        numbers = layer.weight_packed.data.t()
        if self.activation_order:
            order = order_of(layer.weight_g_idx.data, self.group_size, self.prefix)
            if order is not None:
                numbers = reordered(numbers, order, self.bits)
                keep(layer, ORDER, order.to(torch.int32))
        zeros = unpacked(layer.weight_zero_point.data.t(), self.bits) if self.zero_points else None
        return QuantisedMatrix(self.form, self.k, self.n, numbers, layer.weight_scale.data.t(), zeros)
