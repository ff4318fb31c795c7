"""Takes the registration of this package's quantisation name back."""

from __future__ import annotations

from vllm.model_executor.layers import quantization

from fastattention_vllm.integration.cuda.quantised.scope import NAME


def unregister() -> None:
    """In place, because vLLM's configuration keeps the list that it found first."""
    while NAME in quantization.QUANTIZATION_METHODS:
        quantization.QUANTIZATION_METHODS.remove(NAME)
    quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.pop(NAME, None)
