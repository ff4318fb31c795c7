"""A linear layer that the checkpoint leaves unquantised, in a model whose other layers are quantised."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import UnquantizedLinearMethod, register_weight_loader_v2_supported_method

from fastattention_vllm.integration.cuda.quantised.loading import UNQUANTISED, Loading


@register_weight_loader_v2_supported_method
class UnquantisedMethod(UnquantizedLinearMethod):
    """vLLM's method, with a check that the checkpoint has the weights. Some of vLLM's models skip tensors for which a
    layer has no parameter, so quantised weights would leave the memory as it was."""

    loading: Loading

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def create_weights(self, layer: Any, *sizes: Any, weight_loader: Any, **named: Any) -> None:
        self.loading = Loading(self.prefix, "weight", get_tensor_model_parallel_world_size(), unless=UNQUANTISED)
        super().create_weights(layer, *sizes, weight_loader=self.loading.wrap(weight_loader), **named)
        layer.weight.data.fill_(torch.nan)

    def process_weights_after_loading(self, layer: Any) -> None:
        """
        Raises:
            Refusal: the checkpoint lacks the weights, or a part of them.
        """
        # Some models load some layers in another way, of which no count is kept. Dummy weights are not loaded at all.
        if bool(layer.weight.isnan().any()):
            self.loading.check(layer.weight)
        self.loading.numbers.clear()
        super().process_weights_after_loading(layer)
