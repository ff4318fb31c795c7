"""What the configurations of all formats have in common."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.cuda.quantised.linear_method import QuantisedLinearMethod
from fastattention_vllm.integration.cuda.quantised.progress import Progress
from fastattention_vllm.integration.cuda.quantised.scope import INSTEAD, MARLIN, NAME, capability
from fastattention_vllm.integration.cuda.quantised.unquantised_method import UnquantisedHead, UnquantisedMethod
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal


class QuantisedConfig:
    """Mixin placed ahead of vLLM's configuration of the same checkpoints in the MRO. That one reads the checkpoint's
    section, keeps lists of layers that are not quantised, and reads the scales of KV caches."""

    checkpoint: dict[str, Any]
    """The checkpoint's quantization_config."""

    @functools.cached_property
    def progress(self) -> Progress:
        return Progress()

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    @classmethod
    def override_quantization_method(cls, *_: Any, **__: Any) -> None:
        """Only the registered class chooses."""

    def is_unquantised(self, layer: torch.nn.Module, prefix: str) -> bool:
        """Whether the checkpoint says that this layer is unquantised."""
        raise NotImplementedError

    def linear_method(self, layer: torch.nn.Module, prefix: str) -> QuantisedLinearMethod:
        """For a layer that is quantised.

        Raises:
            Refusal: the kernels do not compute it.
        """
        raise NotImplementedError

    def experts_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """For experts that are quantised.

        Raises:
            Refusal: always, unless a format overrides this.
        """
        raise Refusal(
            f"{prefix}: quantised experts of this format do not run below compute capability 7.5; serve a "
            "GPTQ or AWQ checkpoint of the model, whose experts run on vLLM's own kernels, or a dense model."
        )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, compat.experts_class()):
            if self._leaves(layer, prefix):
                return UnquantizedFusedMoEMethod(layer.moe_config)
            return self.experts_method(layer, prefix)
        if isinstance(layer, LinearBase | ParallelLMHead):
            check_device()
            if self._leaves(layer, prefix):
                return UnquantisedMethod(prefix) if isinstance(layer, LinearBase) else UnquantisedHead(prefix)
            return self.linear_method(layer, prefix).reporting_to(self.progress)
        inherited: Any = super()
        return inherited.get_quant_method(layer, prefix)

    def _leaves(self, layer: torch.nn.Module, prefix: str) -> bool:
        """:meth:`is_unquantised`, where vLLM raises an error if this holds for some parts of a merged layer alone."""
        try:
            return self.is_unquantised(layer, prefix)
        except Refusal:
            raise
        except ValueError as error:
            raise parts_differ(prefix) from error


def check_device() -> None:
    """The kernels are for GPUs without Marlin.

    Raises:
        Refusal: a newer GPU, and ``volta_kernels`` does not ask for the kernels' PTX.
    """
    found, config = capability(), get_current_vllm_config_or_none()
    if found is None or found < MARLIN or (config is not None and options_of(config).volta_kernels != "auto"):
        return
    raise Refusal(
        f"--quantization {NAME} runs the V100's kernels, which are slow on this GPU of compute capability "
        f"{found[0]}.{found[1]}; remove --quantization {NAME}, or set volta_kernels to 'ptx' to test them."
    )


def parts_differ(prefix: str) -> Refusal:
    return Refusal(
        f"{prefix}: the checkpoint quantises the parts of this merged layer differently, or only some of them; serve a "
        "checkpoint that quantises them alike."
    )


def unsupported(prefix: str, what: str) -> Refusal:
    return Refusal(f"{prefix}: {what} does not run below compute capability 7.5; {INSTEAD}.")
