"""The name under which vLLM finds this package's configurations of quantised checkpoints.

vLLM asks registered names first, for every quantised checkpoint. This module is imported in every process on NVIDIA
GPUs, and the modules of the formats only where such a checkpoint is loaded.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.cuda.quantised.scope import (
    AUTO_ROUND,
    FORMATS,
    INSTEAD,
    INTEGER_BITS,
    MARLIN,
    NAME,
    VLLMS,
    auto_round_words,
    capability,
)
from fastattention_vllm.integration.refusal import Refusal


def install() -> None:
    """Register ``--quantization fastattention``. Repeated calls are safe."""
    if NAME not in quantization.QUANTIZATION_METHODS:
        quantization.register_quantization_config(NAME)(QuantisedCheckpoint)


class QuantisedCheckpoint(QuantizationConfig):
    """Chooses the configuration of the checkpoint's format. It has no instances of its own."""

    @staticmethod
    def get_config_filenames() -> list[str]:
        """vLLM names them in an error if config.json has no quantization_config."""
        return ["quantize_config.json", "quant_config.json"]

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """``NAME`` if this package loads the checkpoint; None leaves it to vLLM.

        Raises:
            Refusal: neither this package nor vLLM has kernels for this method on this GPU.
        """
        if user_quant == NAME:
            return NAME
        found = capability()
        if found is None or found >= MARLIN:
            return None
        method = method_of(hf_quant_cfg)
        if method in AUTO_ROUND:
            if _is_left_to_vllm(hf_quant_cfg, user_quant):
                return None
            return NAME if user_quant in (None, *AUTO_ROUND) else None
        if method not in FORMATS:
            refuse_what_vllm_cannot(method, found)
            return None
        if method == "gptq" and _is_left_to_vllm(hf_quant_cfg, user_quant):
            return None
        names = (method, f"{method}_marlin", f"auto_{method}", "marlin", "moe_wna16")
        return NAME if user_quant in (None, *names) else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The configuration of the checkpoint's format.

        Raises:
            Refusal: this package cannot load the format.
        """
        match method_of(config):
            case "awq":
                from fastattention_vllm.integration.cuda.quantised.awq import AwqConfig as found
            case "gptq":
                from fastattention_vllm.integration.cuda.quantised.gptq import GptqConfig as found
            case "fp8":
                from fastattention_vllm.integration.cuda.quantised.fp8 import Fp8CheckpointConfig as found
            case "compressed-tensors":
                from fastattention_vllm.integration.cuda.quantised.compressed_tensors import (
                    CompressedTensorsCheckpointConfig as found,
                )
            case "auto-round" | "inc":
                from fastattention_vllm.integration.cuda.quantised.auto_round import AutoRoundConfig as found
            case method:
                raise Refusal(f"quantization method {method!r} does not run with --quantization {NAME}; {INSTEAD}.")
        return found.from_config(config)


def method_of(config: dict[str, Any]) -> str:
    """The quant_method of a checkpoint's quantization_config, in vLLM's spelling."""
    return str(config.get("quant_method", "")).lower().replace("_", "-")


def refuse_what_vllm_cannot(method: str, found: tuple[int, int]) -> None:
    """Refuse a method whose kernels in vLLM need a newer GPU, or were never seen to have code for this one, before any
    process is started."""
    vllms = method.replace("-", "_")
    known = [name for name in (method, vllms) if name in quantization.QUANTIZATION_METHODS]
    if not known:
        return
    needed = quantization.get_quantization_config(known[0]).get_min_capability()
    if needed > found[0] * 10 + found[1]:
        raise Refusal(
            f"quantization method {method!r} needs compute capability {needed // 10}.{needed % 10}, but this GPU has "
            f"{found[0]}.{found[1]}; {INSTEAD}."
        )
    if method not in VLLMS:
        raise Refusal(
            f"quantization method {method!r} is accepted by vLLM, but whether its kernels have code for this GPU of "
            f"compute capability {found[0]}.{found[1]} was not checked; {INSTEAD}."
        )


def check_experts(vllm_config: Any) -> None:
    """Refuse experts that vLLM would read wrongly where the user has left the weights to vLLM's own method.

    Raises:
        Refusal: names what it would not read.
    """
    model = vllm_config.model_config
    checkpoint = getattr(model.hf_config, "quantization_config", None)
    if not model.is_moe or model.quantization not in ("gptq", "inc") or not isinstance(checkpoint, dict):
        return
    from fastattention_vllm.integration.cuda.quantised.experts import unread

    bits, group_size = int(checkpoint.get("bits", 4)), int(checkpoint.get("group_size", 128))
    zero_points = not checkpoint.get("sym", True)
    reason = unread("gptq", checkpoint, bits, group_size, zero_points)
    if reason is None and zero_points and bits not in INTEGER_BITS:  # vLLM's method, also without --quantization
        reason = f"zero points of {bits} bits (sym: false)"
    if reason is not None:
        raise Refusal(f"vLLM's kernels for quantised experts do not read {reason}; serve another checkpoint.")
    if zero_points:  # nothing looks for those of 16
        raise Refusal(
            f"with --quantization {model.quantization}, zero points of experts (sym: false) are not checked, and vLLM "
            "misreads some of them; leave --quantization out, or serve another checkpoint."
        )


def _is_left_to_vllm(config: dict[str, Any], user_quant: str | None) -> bool:
    """vLLM 0.19 has GPTQ kernels for these GPUs. They run if the user names them, and for 2 and 3 bits."""
    if not compat.has_own_gptq_kernels():
        return False
    if method_of(config) in AUTO_ROUND and auto_round_words(config) != "gptq":
        return False
    return user_quant in ("gptq", "inc") or config.get("bits") not in INTEGER_BITS
