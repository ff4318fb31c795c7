"""FP8 checkpoints: e4m3 weights with a scale per tensor or per 128 x 128 block."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.cuda.quantised.config import QuantisedConfig
from fastattention_vllm.integration.cuda.quantised.fp8_method import Fp8Method
from fastattention_vllm.integration.cuda.quantised.scope import INSTEAD
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.linear.weights import BLOCK

_Base: Any = get_quantization_config("fp8")


class Fp8CheckpointConfig(QuantisedConfig, _Base):
    ignored_layers: list[str]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp8CheckpointConfig:
        block = config.get("weight_block_size")
        if block is not None and list(block) != [BLOCK, BLOCK]:
            raise Refusal(
                f"this FP8 checkpoint has weight_block_size = {block}, but only {[BLOCK, BLOCK]} and scales per tensor "
                f"run below compute capability 7.5; {INSTEAD}."
            )
        made: Fp8CheckpointConfig = super().from_config(dict(config))
        made.checkpoint = dict(config)
        return made

    def is_unquantised(self, layer: torch.nn.Module, prefix: str) -> bool:
        if isinstance(layer, ParallelLMHead):
            return True
        # Some lists name whole parts of a model, such as its vision tower.
        if any(prefix.startswith(f"{name}.") for name in self.ignored_layers):
            return True
        return compat.is_layer_skipped(prefix, self.ignored_layers, self.packed_modules_mapping, whole=True)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Also for names of parts of a model: vLLM's rules for them end with a dot."""
        as_parts = hf_to_vllm_mapper.apply_list([f"{name}." for name in self.ignored_layers])
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        self.ignored_layers = [*self.ignored_layers, *(name.removesuffix(".") for name in as_parts)]

    def linear_method(self, layer: torch.nn.Module, prefix: str) -> Fp8CheckpointMethod:
        blocks = self.weight_block_size is not None
        scales = "weight_scale_inv" if blocks else "weight_scale"
        return Fp8CheckpointMethod(prefix, "block" if blocks else "tensor", scales, self.activation_scheme == "static")


@register_weight_loader_v2_supported_method
class Fp8CheckpointMethod(Fp8Method):
    """As :class:`Fp8Method`. vLLM knows classes by their names."""
