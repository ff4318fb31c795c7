"""What is refused at start, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastattention_vllm.attention.cpu import HEAD_SIZE_MULTIPLE, MAX_HEAD_SIZE
from fastattention_vllm.integration import cpu_ops
from fastattention_vllm.integration.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KV_CACHE_DTYPES = ("auto", "float16", "bfloat16")


@dataclass(frozen=True)
class Unsupported:
    """One feature the backend does not run (yet)."""

    feature: str
    why: str
    instead: str
    """What the user can change to get going."""
    asked_for: Callable[[VllmConfig], object]
    """The offending value in this configuration, or something falsy."""


def check_supported(vllm_config: VllmConfig) -> None:
    """Refuse what the attention backend does not run, in the API server, before any process is started.

    Raises:
        Refusal: the first feature found, with the reason and the flag to change.
    """
    for row in UNSUPPORTED:
        value = row.asked_for(vllm_config)
        if value:
            named = "" if value is True else f" ({value})"
            raise Refusal(f"{row.feature}{named} is not supported: {row.why}; {row.instead}.")


def _text_config(config: VllmConfig) -> Any:
    return config.model_config.hf_text_config


def _sliding_window(config: VllmConfig) -> object:
    text = _text_config(config)
    if config.model_config.disable_sliding_window:
        return False
    layer_types: Iterator[str] = iter(getattr(text, "layer_types", None) or ())
    if any(kind == "sliding_attention" for kind in layer_types):
        return f"sliding_window {getattr(text, 'sliding_window', None)}"
    window = config.model_config.get_sliding_window()
    return f"sliding_window {window}" if window else False


def _alibi(config: VllmConfig) -> object:
    text = _text_config(config)
    return getattr(text, "alibi", False) or text.model_type in ("bloom", "jais")


def _head_size(config: VllmConfig) -> object:
    head_size = config.model_config.get_head_size()
    supported = 0 < head_size <= MAX_HEAD_SIZE and head_size % HEAD_SIZE_MULTIPLE == 0
    return False if supported else f"head_size {head_size}"


def _kv_cache_dtype(config: VllmConfig) -> object:
    dtype = config.cache_config.cache_dtype
    return False if dtype in KV_CACHE_DTYPES else f"--kv-cache-dtype {dtype}"


def _attention_type(config: VllmConfig) -> object:
    kind = config.model_config.attn_type
    return False if kind == "decoder" else kind


_ANOTHER_MODEL = "serve a decoder-only model with standard attention (Llama, Qwen, Mistral, ...)"
_NOT_YET = "it is not implemented yet in the fastattention backend"

UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported(
        "multi-head latent attention",
        "MLA models need their own kernels, which fastattention does not have",
        _ANOTHER_MODEL,
        lambda c: c.model_config.use_mla and _text_config(c).model_type,
    ),
    Unsupported(
        "a model whose attention is not causal decoder attention",
        "encoder, cross-attention, hybrid state-space and attention-free models need more than paged causal attention",
        _ANOTHER_MODEL,
        _attention_type,
    ),
    Unsupported(
        "a multimodal model",
        "its vision or audio tower is untested on this path",
        "serve a text-only model",
        lambda c: c.model_config.is_multimodal_model and _text_config(c).model_type,
    ),
    Unsupported(
        "sliding-window attention",
        _NOT_YET,
        "serve a model without one, or try --disable-sliding-window, which caps the length at the window",
        _sliding_window,
    ),
    Unsupported(
        "attention logit soft-capping",
        _NOT_YET,
        _ANOTHER_MODEL,
        lambda c: getattr(_text_config(c), "attn_logit_softcapping", None),
    ),
    Unsupported("ALiBi position bias", _NOT_YET, _ANOTHER_MODEL, _alibi),
    Unsupported(
        "attention sinks",
        _NOT_YET,
        _ANOTHER_MODEL,
        lambda c: _text_config(c).model_type == "gpt_oss" and "gpt_oss",
    ),
    Unsupported(
        "this head size",
        f"the kernels take multiples of {HEAD_SIZE_MULTIPLE} up to {MAX_HEAD_SIZE}",
        "serve another model",
        _head_size,
    ),
    Unsupported(
        "a quantised KV cache",
        "the kernels store KV as fp32, fp16 or bf16",
        "pass --kv-cache-dtype auto",
        _kv_cache_dtype,
    ),
    Unsupported(
        "speculative decoding",
        "several query tokens per decode step are untested in the fastattention backend",
        "remove --speculative-config",
        lambda c: c.speculative_config is not None,
    ),
    Unsupported(
        "a KV connector",
        "KV transfer and offloading connectors are untested with this backend's cache layout",
        "remove --kv-transfer-config and --kv-offloading-size",
        lambda c: c.kv_transfer_config is not None or c.cache_config.kv_offloading_size is not None,
    ),
    Unsupported(
        "data parallelism",
        "the CPUs and the memory of this machine are divided among the ranks of one engine only",
        "remove --data-parallel-size, or start one server per replica",
        lambda c: c.parallel_config.data_parallel_size > 1 and c.parallel_config.data_parallel_size,
    ),
    Unsupported(
        "pipeline parallelism",
        "vLLM's CPU workers fail when they pass activations between stages",
        "use --tensor-parallel-size instead",
        lambda c: c.parallel_config.pipeline_parallel_size > 1 and c.parallel_config.pipeline_parallel_size,
    ),
    Unsupported(
        "LoRA",
        "it is untested on this path",
        "remove --enable-lora and merge the adapter into the weights",
        lambda c: c.lora_config is not None,
    ),
    Unsupported(
        "a mixture-of-experts model",
        "its experts need vLLM's compiled CPU kernels, which a pure-Python vLLM does not have",
        "serve a dense model",
        lambda c: not cpu_ops.has_compiled_vllm_ops() and c.model_config.is_moe and _text_config(c).model_type,
    ),
    Unsupported(
        "quantised weights",
        "they need vLLM's compiled CPU kernels, which a pure-Python vLLM does not have",
        "serve the unquantised model",
        lambda c: not cpu_ops.has_compiled_vllm_ops() and c.model_config.quantization,
    ),
    Unsupported(
        "context parallelism",
        "the backend keeps all of a request's KV heads' tokens on one rank",
        "use --tensor-parallel-size instead",
        lambda c: (
            c.parallel_config.decode_context_parallel_size > 1 or c.parallel_config.prefill_context_parallel_size > 1
        ),
    ),
)
