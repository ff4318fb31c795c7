"""Layers that the checkpoint leaves unquantised, in a model whose other layers are quantised."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import UnquantizedLinearMethod, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from fastattention_vllm.integration.cuda.quantised.loading import UNQUANTISED, Loading, fused_outputs


@register_weight_loader_v2_supported_method
class UnquantisedMethod(UnquantizedLinearMethod):
    """vLLM's method, with a check that the checkpoint has the weights. Some of vLLM's models skip tensors for which a
    layer has no parameter, so quantised weights would leave the memory as it was."""

    loading: Loading

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Any,
        **named: Any,
    ) -> None:
        self.loading = Loading(
            self.prefix,
            "weight",
            get_tensor_model_parallel_world_size(),
            unless=UNQUANTISED,
            fused=fused_outputs(layer, output_partition_sizes, output_size),
        )
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype)
        super().create_weights(layer, *sizes, weight_loader=self.loading.wrap(weight_loader), **named)
        layer.weight.data.fill_(torch.nan)

    def process_weights_after_loading(self, layer: Any) -> None:
        """
        Raises:
            Refusal: the checkpoint lacks the weights, or a part of them.
        """
        # Some models load some layers in another way, of which no count is kept. Dummy weights are not loaded at all.
        # A reload leaves the memory as it is, so there a part that is missing shows in the count alone.
        if self.loading.counted or bool(layer.weight.isnan().any()):
            self.loading.check(layer.weight)
        self.loading.numbers.clear()
        super().process_weights_after_loading(layer)


class UnquantisedHead(UnquantizedEmbeddingMethod):
    """The same for the matrix of logits."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.loading = Loading(
            prefix, "weight", get_tensor_model_parallel_world_size(), unless=UNQUANTISED, divided=False
        )

    def create_weights(self, layer: Any, *sizes: Any, weight_loader: Any, **named: Any) -> None:
        # Kept, because vLLM 0.19.1 has no current configuration while it loads weights again.
        self.vllm_config = get_current_vllm_config()
        super().create_weights(layer, *sizes, weight_loader=self.loading.wrap(weight_loader), **named)
        layer.weight.data.fill_(torch.nan)

    def process_weights_after_loading(self, layer: Any) -> None:
        """
        Raises:
            Refusal: the checkpoint lacks the weights, or a part of them.
        """
        # A matrix may be tied to the embeddings, or be that of the model for which a drafter drafts.
        alone = self.vllm_config.speculative_config is None
        if self.loading.counted or (alone and bool(layer.weight[:, 0].isnan().any())):
            self.loading.check(layer.weight)
        self.loading.numbers.clear()
        super().process_weights_after_loading(layer)
