"""AWQ checkpoints: 4 bits with zero points, in words of eight columns."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.parameter import PackedvLLMParameter

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.cuda.quantised.config import QuantisedConfig
from fastattention_vllm.integration.cuda.quantised.experts import experts_method
from fastattention_vllm.integration.cuda.quantised.integers import awq_numbers, awq_zeros
from fastattention_vllm.integration.cuda.quantised.linear_method import IntegerMethod
from fastattention_vllm.integration.cuda.quantised.scope import INSTEAD
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.linear.weights import QuantisedMatrix

BITS = 4
_Base: Any = get_quantization_config("awq")


class AwqConfig(QuantisedConfig, _Base):
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AwqConfig:
        bits = config.get("bits", config.get("w_bit"))
        zero_point, version = config.get("zero_point", True), str(config.get("version", "gemm")).lower()
        if bits != BITS or not zero_point or version != "gemm":
            raise Refusal(
                f"this AWQ checkpoint has bits = {bits}, zero_point = {zero_point} and version = {version!r}, but only "
                f"4 bits with zero points in the version 'gemm' run below compute capability 7.5; {INSTEAD}."
            )
        made: AwqConfig = super().from_config(dict(config) | {"zero_point": True})
        made.checkpoint = dict(config)
        return made

    def is_unquantised(self, layer: torch.nn.Module, prefix: str) -> bool:
        if isinstance(layer, ParallelLMHead) and not self.checkpoint.get("lm_head", False):
            return True
        return compat.is_layer_skipped(prefix, self.modules_to_not_convert, self.packed_modules_mapping)

    def linear_method(self, layer: torch.nn.Module, prefix: str) -> AwqMethod:
        return AwqMethod(prefix, BITS, self.group_size, zero_points=True)

    def experts_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        return experts_method(
            layer, prefix, "awq", self.checkpoint, bits=BITS, group_size=self.group_size, zero_points=True
        )


@register_weight_loader_v2_supported_method
class AwqMethod(IntegerMethod):
    KEPT: ClassVar[str] = "qweight"

    def add_parameters(self, layer: torch.nn.Module) -> None:
        self.check_vocabulary(layer)
        self.check_sizes(self.widths, self.per_word, "an output size of")
        packed = self.in_words | {"packed_dim": 1}
        words, groups = self.n // self.per_word, self.groups
        self.add(layer, "qweight", PackedvLLMParameter, torch.empty(self.k, words, dtype=torch.int32),
                 input_dim=0, output_dim=1, **packed)  # fmt: skip
        self.add(layer, "qzeros", self.scales_kind(packed=True), torch.empty(groups, words, dtype=torch.int32),
                 **self.axes(0, 1), **packed)  # fmt: skip
        self.add(layer, "scales", self.scales_kind(packed=False), torch.empty(groups, self.n, dtype=self.dtype),
                 scales=True, **self.axes(0, 1))  # fmt: skip

    def matrix(self, layer: Any) -> QuantisedMatrix:
        return QuantisedMatrix(
            self.form, self.k, self.n,
            awq_numbers(layer.qweight.data), layer.scales.data, awq_zeros(layer.qzeros.data),
        )  # fmt: skip
