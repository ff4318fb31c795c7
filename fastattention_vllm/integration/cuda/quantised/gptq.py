"""GPTQ checkpoints: 4 or 8 bits, with or without zero points, with or without activation order."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override, is_layer_gptq_quantized
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.parameter import PackedvLLMParameter, RowvLLMParameter

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.cuda.quantised.activation_order import order_of
from fastattention_vllm.integration.cuda.quantised.config import QuantisedConfig
from fastattention_vllm.integration.cuda.quantised.experts import experts_method
from fastattention_vllm.integration.cuda.quantised.integers import reordered, unpacked
from fastattention_vllm.integration.cuda.quantised.linear_method import ORDER, IntegerMethod, keep
from fastattention_vllm.integration.cuda.quantised.scope import INSTEAD, INTEGER_BITS
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.linear.weights import MIDDLE, QuantisedMatrix

SECOND = "gptq_v2"
"""The checkpoint_format that stores zero points as they are. The other ones store them minus 1."""
_Base: Any = get_quantization_config("gptq")


class GptqConfig(QuantisedConfig, _Base):
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GptqConfig:
        bits = config.get("bits")
        if bits not in INTEGER_BITS:
            raise Refusal(f"GPTQ with {bits} bits does not run below compute capability 7.5; {INSTEAD}.")
        # Newer versions of vLLM refuse what these kernels can compute: zero points and activation order.
        made: GptqConfig = super().from_config(dict(config) | {"sym": True, "desc_act": False})
        # Both names are in use.
        form = config.get("checkpoint_format") or config.get("format")
        made.checkpoint = dict(config) | {"checkpoint_format": form}
        return made

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """>= 0.32: by default vLLM drops g_idx, which these layers need."""
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper()

    def is_unquantised(self, layer: torch.nn.Module, prefix: str) -> bool:
        if isinstance(layer, ParallelLMHead) and not self.lm_head_quantized:
            return True
        # False: a rule of the checkpoint leaves the layer unquantised.
        if get_dynamic_override(self, layer_name=prefix) is False:
            return True
        if isinstance(layer, compat.experts_class()):  # the list has the experts one by one
            return False
        return not is_layer_gptq_quantized(prefix, self.modules_in_block_to_quantize, self.packed_modules_mapping)

    def linear_method(self, layer: torch.nn.Module, prefix: str) -> GptqMethod:
        def value(key: str, default: Any = None) -> Any:
            return get_dynamic_override(self, prefix, key, self.checkpoint.get(key, default))

        bits = value("bits")
        if bits not in INTEGER_BITS:
            raise Refusal(f"{prefix}: GPTQ with {bits} bits does not run below compute capability 7.5; {INSTEAD}.")
        return GptqMethod(
            prefix,
            bits,
            value("group_size"),
            zero_points=not value("sym", True),
            activation_order=bool(value("desc_act", False)),
            offset=int(self.checkpoint.get("checkpoint_format") != SECOND),
        )

    def experts_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        names = [f"{prefix}.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
        if any(get_dynamic_override(self, layer_name=name) is not None for name in [prefix, *names]):
            raise Refusal(
                f"{prefix}: a rule of the checkpoint (dynamic) changes how experts are stored, which vLLM's kernels "
                "for quantised experts do not read; serve another checkpoint."
            )
        return experts_method(
            layer,
            prefix,
            "gptq",
            self.checkpoint,
            bits=self.checkpoint["bits"],
            group_size=self.checkpoint["group_size"],
            zero_points=not self.checkpoint.get("sym", True),
        )


@register_weight_loader_v2_supported_method
class GptqMethod(IntegerMethod):
    """
    Args:
        activation_order: whether the checkpoint says that inputs are not in the groups' order.
        offset: what is to be added to stored zero points.
    """

    KEPT: ClassVar[str] = "qweight"

    def __init__(
        self, prefix: str, bits: int, group_size: int, zero_points: bool, activation_order: bool, offset: int
    ) -> None:
        super().__init__(prefix, bits, group_size, zero_points)
        self.activation_order, self.offset = activation_order and group_size != -1, offset

    def add_parameters(self, layer: torch.nn.Module) -> None:
        if self.activation_order and self.k != self.whole_k:
            raise self.refusal(
                "activation order (desc_act) does not run in a layer whose inputs are divided among "
                f"{self.ranks} ranks",
                "use --tensor-parallel-size 1, or a checkpoint without desc_act",
            )
        self.check_vocabulary(layer)
        self.check_sizes((self.k,), self.per_word, "an input size of")
        self.check_sizes(self.widths, self.per_word, "an output size of")
        groups, packed = self.groups, self.in_words
        self.add(layer, "qweight", PackedvLLMParameter, torch.empty(self.k // self.per_word, self.n, dtype=torch.int32),
                 input_dim=0, output_dim=1, packed_dim=0, **packed)  # fmt: skip
        self.add(layer, "g_idx", RowvLLMParameter, torch.empty(self.k, dtype=torch.int32),
                 input_dim=0, optional=not self.activation_order, alike=True)  # fmt: skip
        self.add(layer, "qzeros", self.scales_kind(packed=True),
                 torch.empty(groups, self.n // self.per_word, dtype=torch.int32),
                 packed_dim=1, **self.axes(0, 1), **packed)  # fmt: skip
        self.add(layer, "scales", self.scales_kind(packed=False), torch.empty(groups, self.n, dtype=self.dtype),
                 scales=True, **self.axes(0, 1))  # fmt: skip

    def matrix(self, layer: Any) -> QuantisedMatrix:
        numbers = layer.qweight.data
        if self.loadings["g_idx"].numbers and self.group_size != -1:
            order = order_of(layer.g_idx.data, self.group_size, self.prefix)
            if order is not None:
                numbers = reordered(numbers, order, self.bits)
                keep(layer, ORDER, order.to(torch.int32))
        stored = unpacked(layer.qzeros.data, self.bits)
        if self.zero_points:
            zeros = stored.to(torch.int16) + self.offset
            self._check_zero_points(zeros)
        else:
            zeros = None
            middle = MIDDLE[self.form.kind]
            # Tools disagree about which of the two belongs to symmetric weights.
            if not bool(((stored == middle) | (stored == middle - 1)).all()):
                raise self.refusal(
                    "the checkpoint says sym, but qzeros has other zero points", "serve another checkpoint"
                )
        return QuantisedMatrix(self.form, self.k, self.n, numbers, layer.scales.data, zeros)

    def _check_zero_points(self, zeros: torch.Tensor) -> None:
        most = 2 * MIDDLE[self.form.kind] - 1
        if int(zeros.max()) > most:
            raise self.refusal(
                f"qzeros has {most}, which some tools read as a zero point of {most + 1} and others as one of 0",
                "serve a checkpoint in the format gptq_v2, or another one",
            )
