"""AutoRound checkpoints: matrices in the words of AWQ or GPTQ, with rules for single layers."""

from __future__ import annotations

from typing import Any, Literal

import torch
from vllm.model_executor.layers.quantization import get_quantization_config

from fastattention_vllm.integration.cuda.quantised.awq import BITS as AWQ_BITS
from fastattention_vllm.integration.cuda.quantised.awq import AwqMethod
from fastattention_vllm.integration.cuda.quantised.config import QuantisedConfig
from fastattention_vllm.integration.cuda.quantised.experts import experts_method
from fastattention_vllm.integration.cuda.quantised.gptq import GptqMethod
from fastattention_vllm.integration.cuda.quantised.linear_method import QuantisedLinearMethod
from fastattention_vllm.integration.cuda.quantised.scope import INSTEAD, INTEGER_BITS, auto_round_words
from fastattention_vllm.integration.refusal import Refusal

UNQUANTISED_BITS = 16
_Base: Any = get_quantization_config("inc")


class AutoRoundConfig(QuantisedConfig, _Base):
    """vLLM's configuration reads the rules: which blocks are quantised, and how single layers differ."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AutoRoundConfig:
        made: AutoRoundConfig = super().from_config(dict(config))
        made.checkpoint = dict(config)
        return made

    @property
    def in_awq_words(self) -> bool:
        return auto_round_words(self.checkpoint) == "awq"

    def is_unquantised(self, layer: torch.nn.Module, prefix: str) -> bool:
        rules = self.extra_config or {}
        # Some names begin with a part of the model that vLLM leaves out.
        if rules.get(f"model.{prefix}", {}).get("bits", 0) >= UNQUANTISED_BITS:
            return True
        return bool(self.get_layer_config(layer, prefix)[0] >= UNQUANTISED_BITS)

    def linear_method(self, layer: torch.nn.Module, prefix: str) -> QuantisedLinearMethod:
        bits, group_size, symmetric = self._read(layer, prefix)
        if self.in_awq_words:
            return AwqMethod(prefix, bits, group_size, zero_points=True)  # which it has even if they are all alike
        return GptqMethod(prefix, bits, group_size, not symmetric, activation_order=False, offset=1)

    def experts_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        bits, group_size, symmetric = self._read(layer, prefix)
        kind: Literal["awq", "gptq"] = "awq" if self.in_awq_words else "gptq"
        checkpoint = {"quant_method": kind, "bits": bits, "group_size": group_size, "sym": symmetric}
        zero_points = self.in_awq_words or not symmetric
        return experts_method(
            layer, prefix, kind, checkpoint, bits=bits, group_size=group_size, zero_points=zero_points
        )  # fmt: skip

    def _read(self, layer: torch.nn.Module, prefix: str) -> tuple[int, int, bool]:
        """Bits, group size, and whether the zero points are in the middle.

        Raises:
            Refusal: the kernels do not read such numbers.
        """
        bits, group_size, symmetric = self.get_layer_config(layer, prefix)
        if bits not in ((AWQ_BITS,) if self.in_awq_words else INTEGER_BITS):
            packed = "AWQ" if self.in_awq_words else "GPTQ"
            raise Refusal(
                f"{prefix}: AutoRound weights of {bits} bits in {packed} packing do not run below compute capability "
                f"7.5; {INSTEAD}."
            )
        return int(bits), int(group_size), bool(symmetric)
