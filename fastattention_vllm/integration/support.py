"""What the attention backend runs and what it refuses at start, as data.

The start-up check and ``docs/supported.md`` both read these tables, so the two cannot disagree.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from fastattention_vllm.attention.cpu.kernels import HEAD_SIZE_MULTIPLE, MAX_HEAD_SIZE
from fastattention_vllm.integration import compat, drafter, multimodal
from fastattention_vllm.integration.drafter import SPECULATION, WITH_STATES
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.fastattention")

FP8_CACHES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""vLLM's names, and the dtype of the bytes. vLLM allocates these caches as uint8."""
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", *FP8_CACHES)
ATTENTION_TYPES = ("decoder", "encoder_only")
EXPERT_MODELS = ("gpt_oss", "mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text")
"""Model types whose routing was tested. vLLM's CPU router ignores a routing bias, which some other models need."""
LINEAR_MODELS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Model types whose linear attention is computed here: Gated DeltaNet."""
OTHER_LINEAR_ATTENTION = {
    "BailingMoeV2_5ForCausalLM": "lightning attention",
    "BailingMoeV3ForCausalLM": "Kimi Delta Attention",
    "BailingMoeV3VLForConditionalGeneration": "Kimi Delta Attention",
    "Glm5NextForCausalLM": "Kimi Delta Attention",
    "Glm5NextForConditionalGeneration": "Kimi Delta Attention",
    "KimiK3ForConditionalGeneration": "Kimi Delta Attention",
    "KimiLinearForCausalLM": "Kimi Delta Attention",
    "MiniMaxForCausalLM": "lightning attention",
    "MiniMaxM1ForCausalLM": "lightning attention",
    "MiniMaxText01ForCausalLM": "lightning attention",
    "Qwen4ExpForCausalLM": "Gated DeltaNet beside sparse attention",
    "Qwen4ExpForConditionalGeneration": "Gated DeltaNet beside sparse attention",
}
"""Architectures in vLLM's registry whose linear attention was never run beside this backend, on any device.

The refusal does not need this list: it names every model with states that is not of ``LINEAR_MODELS``. The list says
what the layers are, and names models that an older or newer vLLM does not call hybrid.
"""
OWN_ATTENTION = {
    "HrmTextForCausalLM": "a prompt's tokens attend in both directions",
    "InklingForCausalLM": "relative attention",
    "InklingForConditionalGeneration": "relative attention",
    "MiniMaxM3SparseForCausalLM": "sparse attention",
    "MiniMaxM3SparseForConditionalGeneration": "sparse attention",
    "Step5ForCausalLM": "sparse attention",
    "Step5ForConditionalGeneration": "sparse attention",
}
"""Architectures in vLLM's registry that compute attention in layers of their own, on any device."""
WHOLE_KV_HEADS = ("gpt_oss", "param2moe")
"""Model types whose code in vLLM divides the KV heads among the ranks, and cannot copy one to several ranks."""
UNTESTED_ATTENTION = ("attention_chunk_size", "dual_chunk_attention_config", "param_sink_number")
"""Entries of a model's config that select an attention variant which is not tested here."""

Question = Callable[["VllmConfig"], object]
"""Returns the value that requests the feature, or a falsy value if the configuration does not request it."""


@dataclass(frozen=True)
class Supported:
    """A feature that runs, and the test that shows it."""

    feature: str
    scope: str
    """Models that use it, or its limits."""
    tested_by: str
    """A pytest node of this repository."""


@dataclass(frozen=True)
class Unsupported:
    """A feature that stops the start."""

    feature: str
    why: str
    instead: str
    """What the user can do instead."""
    asked_for: Question


def check_supported(vllm_config: VllmConfig, rows: tuple[Unsupported, ...] | None = None) -> None:
    """Refuse unsupported features in the API server, before any process is started.

    Args:
        rows: the features of a device other than a CPU: ``WITHOUT_KERNELS`` (GPUs of compute capability 8.0 and newer),
            ``UNTESTED_ON_VOLTA`` or ``UNTESTED_ON_NPUS``.

    Raises:
        Refusal: the first feature found, with the reason and the flag to change.
    """
    for row in UNSUPPORTED if rows is None else rows:
        value = row.asked_for(vllm_config)
        if value:
            named = "" if value is True else f" ({value})"
            raise Refusal(f"{row.feature}{named} is not supported: {row.why}; {row.instead}.")


def check_kv_cache(vllm_config: VllmConfig) -> None:
    """Check the KV cache alone. GPUs need no more, because vLLM's own code handles the other features there.

    Raises:
        Refusal: the kernels cannot read this quantised cache.
    """
    check_supported(vllm_config, (QUANTISED_CACHE, SCALES_PER_HEAD))


def kv_cache_scheme(vllm_config: VllmConfig) -> dict[str, Any] | None:
    """What the checkpoint says about the KV cache, where vLLM looks for it. None: it leaves the choice to the user."""
    model: Any = vllm_config.model_config.hf_config
    places = (model, "quantization_config"), (getattr(model, "text_config", None), "quantization_config")
    for config, name in (*places, (model, "compression_config")):
        weights = getattr(config, name, None)
        if isinstance(weights, dict):
            method = str(weights.get("quant_method", "")).replace("_", "-")
            scheme = weights.get("kv_cache_scheme") if method == "compressed-tensors" else None
            return scheme if isinstance(scheme, dict) else None
    return None


def kv_cache_dtype(vllm_config: VllmConfig) -> str:
    """``--kv-cache-dtype``, or what vLLM replaces it by when it makes the first attention layer."""
    asked: str = vllm_config.cache_config.cache_dtype
    if kv_cache_scheme(vllm_config) is None:
        return asked
    return "fp8" if asked == "auto" or compat.checkpoint_overrides_kv_cache_dtype() else asked


def name_of_cache(dtype: str, vllm_config: VllmConfig) -> str:
    """What to call a KV cache of this dtype in a message: by the option, or by what the checkpoint says."""
    if dtype in FP8_CACHES and kv_cache_scheme(vllm_config) is not None:
        return f"the {dtype} KV cache of this checkpoint (kv_cache_scheme)"
    return f"--kv-cache-dtype {dtype}"


def say_what_chooses_the_cache(vllm_config: VllmConfig) -> None:
    """Log it if the checkpoint chooses the KV cache's dtype. vLLM 0.19 overrides the option without a word."""
    asked, chosen = vllm_config.cache_config.cache_dtype, kv_cache_dtype(vllm_config)
    if asked != chosen and FP8_CACHES.get(asked) != FP8_CACHES[chosen]:
        option = "" if asked == "auto" else f"; --kv-cache-dtype {asked} has no effect with this vLLM"
        logger.info_once("KV cache: %s, because the checkpoint's kv_cache_scheme says so%s.", chosen, option)


def has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def _text_config(config: VllmConfig) -> Any:
    return config.model_config.hf_text_config


def _head_size(config: VllmConfig) -> object:
    text = _text_config(config)
    sizes = [config.model_config.get_head_size(), getattr(text, "global_head_dim", None)]
    wrong = [size for size in sizes if size and (size > MAX_HEAD_SIZE or size % HEAD_SIZE_MULTIPLE)]
    return wrong and f"head_size {wrong[0]}"


def _kv_cache_quantisation(config: VllmConfig) -> object:
    cache = config.cache_config
    dtype = kv_cache_dtype(config)
    if dtype not in KV_CACHE_DTYPES:
        return f"--kv-cache-dtype {dtype}"
    if dtype not in FP8_CACHES:
        return False
    if cache.kv_cache_dtype_skip_layers:
        return f"--kv-cache-dtype-skip-layers {' '.join(cache.kv_cache_dtype_skip_layers)}"
    if compat.calculates_kv_scales(config):
        return "--calculate-kv-scales"
    return False


def _scales_per_head(config: VllmConfig) -> object:
    scheme = kv_cache_scheme(config)
    return scheme is not None and scheme.get("strategy") == "attn_head" and "kv_cache_scheme: attn_head"


def _not_attention_alone(config: VllmConfig) -> object:
    # This check comes first because attn_type is not reliable for pooling models.
    model, kind = config.model_config, _text_config(config).model_type
    if model.is_hybrid or model.is_attention_free:
        return kind not in LINEAR_MODELS and kind
    return False if model.attn_type in ATTENTION_TYPES else model.attn_type


def _linear_attention(config: VllmConfig) -> str:
    """The type of a model with linear-attention layers, or an empty string."""
    return str(_text_config(config).model_type) if config.model_config.is_hybrid else ""


def _other_attention(config: VllmConfig) -> object:
    text = _text_config(config)
    if getattr(config.model_config, "rswa_window", None) is not None:
        return "rswa_window"
    for name in UNTESTED_ATTENTION:
        if getattr(text, name, None):
            return name
    return _value_size(config)


def _value_size(config: VllmConfig) -> object:
    value_size = getattr(_text_config(config), "v_head_dim", None)
    if value_size and not config.model_config.use_mla and value_size != config.model_config.get_head_size():
        return f"v_head_dim {value_size}"
    return False


def _other_linear_attention(config: VllmConfig) -> object:
    named = _architectures(config)
    known = next((f"{OTHER_LINEAR_ATTENTION[one]}, {one}" for one in named if one in OTHER_LINEAR_ATTENTION), False)
    return known or _other_states(config)


def _other_states(config: VllmConfig) -> object:
    """The architecture of a model with states, if their computation was not run beside this backend."""
    model = config.model_config
    keeps_states = model.is_hybrid or model.is_attention_free
    return keeps_states and _text_config(config).model_type not in LINEAR_MODELS and _architectures(config)[0]


def _own_attention(config: VllmConfig) -> object:
    return next((f"{OWN_ATTENTION[one]}, {one}" for one in _architectures(config) if one in OWN_ATTENTION), False)


def _kv_heads(config: VllmConfig) -> object:
    text = _text_config(config)
    if text.model_type not in WHOLE_KV_HEADS:
        return False
    heads, ranks = text.num_key_value_heads, config.parallel_config.tensor_parallel_size
    return heads < ranks and f"{text.model_type}: {heads} KV heads, {ranks} ranks"


def _architectures(config: VllmConfig) -> list[str]:
    return list(getattr(config.model_config.hf_config, "architectures", None) or [_text_config(config).model_type])


def prepares_drafts() -> bool:
    return compat.has_compiled_cpu_ops() or compat.has_kernel_dispatcher()


def _experts(config: VllmConfig) -> object:
    if compat.has_compiled_cpu_ops() or not config.model_config.is_moe:
        return False
    kind = _text_config(config).model_type
    return False if kind in EXPERT_MODELS else kind


def _batch_invariance(config: VllmConfig) -> object:
    from vllm import envs

    return "VLLM_BATCH_INVARIANT" if envs.VLLM_BATCH_INVARIANT else False


def _microbatches(config: VllmConfig) -> object:
    parallel: Any = config.parallel_config
    if getattr(parallel, "ubatch_size", 0) > 1:
        return f"--ubatch-size {parallel.ubatch_size}"
    return "--enable-dbo" if parallel.enable_dbo else False


def _speculation(config: VllmConfig) -> object:
    speculative = config.speculative_config
    if speculative is None:
        return False
    sampling = speculative.rejection_sample_method
    return speculative.method if speculative.method not in SPECULATION else sampling != "standard" and sampling


def _speculation_beside_states(config: VllmConfig) -> object:
    if config.speculative_config is None or config.speculative_config.method in WITH_STATES:
        return False
    return _linear_attention(config) and config.speculative_config.method


def _drafter_beside_images(config: VllmConfig) -> object:
    speculative: Any = config.speculative_config
    reads_text = speculative is not None and speculative.method in drafter.READING_TEXT
    return reads_text and multimodal.takes_images(config) and speculative.method


def _draft_model(config: VllmConfig) -> object:
    """The feature for which a draft model would be refused as a model, with its value."""
    alone = drafter.seen_alone(config)
    if alone is None:
        return False
    asked = ((row, row.asked_for(alone)) for row in UNSUPPORTED)
    return next((f"{row.feature}{'' if value is True else f': {value}'}" for row, value in asked if value), False)


def _another_backend(config: VllmConfig) -> object:
    chosen = getattr(config.attention_config, "backend_per_kind", {})
    return next((f"{kind}: {one.name}" for kind, one in chosen.items() if one.name != compat.BACKEND_NAME), False)


_ANOTHER_MODEL = "serve a decoder-only model with standard attention (Llama, Qwen, Mistral, Gemma, ...)"
_ALSO_LINEAR = f"{_ANOTHER_MODEL}, Qwen3-Next or Qwen3.5"

SUPPORTED: tuple[Supported, ...] = (
    Supported(
        "causal decoder attention",
        "Llama, Qwen, Phi, OPT, ...: multi-head, grouped-query and multi-query",
        "tests/integration/test_engine.py::test_tokens_and_logprobs_equal_hugging_face",
    ),
    Supported(
        "head sizes",
        f"multiples of {HEAD_SIZE_MULTIPLE} up to {MAX_HEAD_SIZE}",
        "tests/integration/test_models.py::test_head_sizes_equal_hugging_face",
    ),
    Supported(
        "sliding-window attention",
        "Mistral (every layer), Gemma-2, Gemma-3, GPT-OSS (mixed with full layers)",
        "tests/integration/test_models.py::test_tokens_and_logprobs_equal_hugging_face[gemma3]",
    ),
    Supported(
        "attention logit soft-capping",
        "Gemma-2",
        "tests/integration/test_models.py::test_tokens_and_logprobs_equal_hugging_face[gemma2]",
    ),
    Supported(
        "ALiBi position bias",
        "Bloom; not the square-root variant",
        "tests/integration/test_models.py::test_tokens_and_logprobs_equal_hugging_face[bloom]",
    ),
    Supported(
        "attention sinks",
        "GPT-OSS in bf16 (the published checkpoints are quantised, see below)",
        "tests/integration/test_models.py::test_tokens_and_logprobs_equal_hugging_face[gpt-oss]",
    ),
    Supported(
        "KV cache sharing between layers",
        "Gemma-3n",
        "tests/integration/test_models.py::test_tokens_and_logprobs_equal_hugging_face[gemma3n]",
    ),
    Supported(
        "encoder-only attention",
        "embedding models: BERT, ModernBERT (vLLM 0.23 makes its window one token too short), ...",
        "tests/integration/test_encoder.py::test_embeddings_equal_hugging_face",
    ),
    Supported(
        "causal embedding models",
        "any supported decoder with `--runner pooling`",
        "tests/integration/test_encoder.py::test_causal_embeddings_equal_hugging_face",
    ),
    Supported(
        "speculative decoding",
        f"methods: {', '.join(SPECULATION)}; all but ngram with vLLM 0.32 or newer",
        "tests/integration/test_speculation.py::test_drafts_change_no_token",
    ),
    Supported(
        "speculative decoding beside linear attention",
        f"methods: {', '.join(WITH_STATES)} (the MTP layers of Qwen3-Next and Qwen3.5)",
        "tests/integration/test_speculation.py::test_states_follow_accepted_drafts",
    ),
    Supported(
        "LoRA",
        "adapters are chosen per request; prompt_logprobs is refused",
        "tests/integration/test_lora.py::test_adapters_equal_hugging_face",
    ),
    Supported(
        "mixture-of-experts models",
        f"unquantised experts: {', '.join(EXPERT_MODELS)}",
        "tests/integration/test_models.py::test_tokens_and_logprobs_equal_hugging_face[qwen3-moe]",
    ),
    Supported(
        "linear attention (Gated DeltaNet) beside full attention",
        "Qwen3-Next, and Qwen3.5, dense and with experts, with a pure-Python vLLM 0.32; head sizes of "
        "these layers are multiples of 8 up to 256",
        "tests/integration/test_linear_attention.py::test_tokens_and_logprobs_equal_hugging_face",
    ),
    Supported(
        "images",
        f"{', '.join(multimodal.IMAGE_MODELS)}, with vLLM 0.32; the encoder is vLLM's own with torch's attention; no "
        "videos; torchvision is not needed",
        "tests/integration/test_images.py::test_tokens_and_logprobs_equal_hugging_face",
    ),
    Supported(
        "the text of models whose images are attended to in both directions",
        f"{', '.join(multimodal.TEXT_OF_IMAGE_MODELS)}, with `{multimodal.TEXT_ONLY}` and vLLM 0.32",
        "tests/integration/test_images.py::test_the_text_of_a_model_with_two_way_images",
    ),
    Supported(
        "dtypes",
        "fp32, fp16, bf16; the KV cache uses the model's dtype, fp16 or bf16",
        "tests/integration/test_engine.py::test_half_precision_stays_near_fp32",
    ),
    Supported(
        "fp8 KV cache",
        "`--kv-cache-dtype fp8_e4m3` (or `fp8`) and `fp8_e5m2`; computed in fp32, on AMX with bf16 queries "
        "[in part in bf16](configuration.md#rounding-on-cpus); each layer has one scale for K and one for V",
        "tests/integration/test_fp8_kv_cache.py::test_answers_equal_those_over_rounded_keys_and_values",
    ),
    Supported(
        "torch.compile",
        "vLLM's default on CPUs; `--enforce-eager` starts sooner",
        "tests/integration/test_engine.py::test_compiled_equals_hugging_face",
    ),
    Supported(
        "chunked prefill and prefix caching",
        "any block size",
        "tests/integration/test_engine.py::test_prefix_caching_serves_from_cache_without_changing_answers",
    ),
    Supported(
        "host layers (KV cache in host memory)",
        "`host_kv_layers`; meant for GPUs and for NPUs (docs/ascend.md); on CPUs it is useful for tests only",
        "tests/integration/host_layers/test_layers.py::test_tokens_and_logprobs_equal_hugging_face",
    ),
    Supported(
        "host layers of 8 bits",
        "`host_kv_dtype` int8, with a factor for each token and KV head, or fp8_e4m3 and fp8_e5m2; keys and values are "
        "rounded, all else is computed in fp32, on AMX with bf16 queries [in part in "
        "bf16](configuration.md#rounding-on-cpus)",
        "tests/integration/host_layers/test_host_kv_dtype.py::test_answers_equal_those_over_rounded_keys_and_values",
    ),
    Supported(
        "copies of host layers' first blocks on the device",
        "`resident_kv_gib`; the device attends to them, and the CPU to the rest",
        "tests/integration/host_layers/test_resident.py::test_answers_equal_hugging_face",
    ),
    Supported(
        "preemption",
        "by recomputation",
        "tests/integration/test_engine.py::test_preemption_recomputes_to_the_same_answers",
    ),
    Supported(
        "tensor parallelism",
        "gloo, with the mp and Ray executors",
        "tests/integration/test_tensor_parallel.py::test_two_ranks_equal_hugging_face",
    ),
)

QUANTISED_CACHE = Unsupported(
    "this quantised KV cache",
    "the kernels store KV in one dtype for all layers: fp32, fp16, bf16, or fp8 with one scale for K and one for V "
    "in each layer",
    "pass only --kv-cache-dtype auto, fp8_e4m3 or fp8_e5m2",
    _kv_cache_quantisation,
)

SCALES_PER_HEAD = Unsupported(
    "a KV cache with one scale per head",
    "the kernels read one scale for K and one for V in each layer",
    "serve a checkpoint whose kv_cache_scheme has the strategy tensor, or an unquantised one",
    _scales_per_head,
)

KV_CONNECTOR = Unsupported(
    "a KV connector",
    "KV transfer and offloading connectors are untested with this backend's cache layout",
    "remove --kv-transfer-config and --kv-offloading-size",
    lambda c: c.kv_transfer_config is not None or c.cache_config.kv_offloading_size is not None,
)

BATCH_INVARIANCE = Unsupported(
    "batch invariance",
    "how a request's sums are rounded depends on the other requests in its batch",
    "unset VLLM_BATCH_INVARIANT",
    _batch_invariance,
)

PUSH = Unsupported(
    "all-reduces by push",
    "the kernel writes to the memory of other NVIDIA GPUs",
    "remove push_all_reduce",
    lambda c: options_of(c).push_all_reduce != "off" and "push_all_reduce",
)
CONTEXT_PARALLELISM = Unsupported(
    "context parallelism",
    "the backend keeps all tokens of a KV head on one rank",
    "use --tensor-parallel-size instead",
    lambda c: c.parallel_config.decode_context_parallel_size > 1 or c.parallel_config.prefill_context_parallel_size > 1,
)

HEAD_SIZE = Unsupported(
    "this head size",
    f"the kernels support multiples of {HEAD_SIZE_MULTIPLE} up to {MAX_HEAD_SIZE}",
    "serve another model",
    _head_size,
)

TWO_WAY_IMAGES = Unsupported(
    "a model whose images are attended to in both directions",
    "the kernels let a token attend to earlier tokens only",
    f"serve Qwen2.5-VL, Qwen3-VL or Qwen3.5 for images, or pass {multimodal.TEXT_ONLY} to serve the text of Gemma-3",
    multimodal.two_way_images,
)

LATENT_ATTENTION = Unsupported(
    "multi-head latent attention",
    "fastattention has no kernels for MLA models",
    _ANOTHER_MODEL,
    lambda c: c.model_config.use_mla and _text_config(c).model_type,
)

OWN_LAYERS = Unsupported(
    "this model's attention",
    "its layers were never run beside this backend",
    _ANOTHER_MODEL,
    _own_attention,
)

KV_HEADS = Unsupported(
    "this model on more ranks than it has KV heads",
    "vLLM's code for it does not copy a KV head to several ranks",
    "set --tensor-parallel-size to the number of KV heads or less",
    _kv_heads,
)

UNSUPPORTED: tuple[Unsupported, ...] = (
    LATENT_ATTENTION,
    OWN_LAYERS,
    KV_HEADS,
    Unsupported(
        "cross attention",
        "the backend attends only to a request's own tokens, not to an encoder's",
        _ANOTHER_MODEL,
        lambda c: c.model_config.attn_type == "encoder_decoder" and _text_config(c).model_type,
    ),
    Unsupported(
        "a model with state-space or linear-attention layers",
        "fastattention has no kernels for these layers",
        _ALSO_LINEAR,
        _not_attention_alone,
    ),
    Unsupported(
        "linear attention with this vLLM",
        "fastattention computes these layers only with vLLM 0.32 or newer, installed without compiled CPU kernels",
        "install such a vLLM (`make setup` does so), or serve a model without linear-attention layers",
        lambda c: _linear_attention(c) and not compat.has_cpu_linear_attention() and _linear_attention(c),
    ),
    Unsupported(
        "this speculative decoding method beside linear-attention layers",
        "its drafter is untested beside these layers",
        f"use one of: {', '.join(WITH_STATES)}, or remove --speculative-config",
        _speculation_beside_states,
    ),
    Unsupported(
        "LoRA on a model with linear-attention layers",
        "vLLM does not apply adapters to these layers on CPUs",
        "remove --enable-lora and merge the adapter into the weights",
        lambda c: c.lora_config is not None and _linear_attention(c),
    ),
    TWO_WAY_IMAGES,
    Unsupported(
        "a multimodal model",
        "its vision or audio encoder is untested with this backend",
        f"serve a text-only model, or one of these with images: {', '.join(multimodal.IMAGE_MODELS)}",
        multimodal.untested_model,
    ),
    Unsupported(
        "a multimodal model with this vLLM version",
        "image encoders were tested only with vLLM 0.32 or newer",
        "install such a vLLM, or serve a text-only model",
        lambda c: c.model_config.is_multimodal_model and not compat.has_kernel_dispatcher(),
    ),
    Unsupported(
        "an input other than text and images",
        "videos and audio are untested on CPUs",
        "remove it from --limit-mm-per-prompt",
        multimodal.other_inputs,
    ),
    Unsupported(
        "this option of image encoders",
        "on CPUs, each rank computes its part of the encoder with torch's attention",
        "remove the option",
        multimodal.encoder_options,
    ),
    Unsupported(
        "LoRA on a model with images",
        "adapters of such a model are untested",
        "remove --enable-lora and merge the adapter into the weights",
        lambda c: c.lora_config is not None and c.model_config.is_multimodal_model,
    ),
    Unsupported(
        "this attention variant",
        "chunked attention, dual-chunk attention, static sinks, and keys and values of different sizes are untested",
        _ANOTHER_MODEL,
        _other_attention,
    ),
    HEAD_SIZE,
    QUANTISED_CACHE,
    SCALES_PER_HEAD,
    Unsupported(
        "speculative decoding with this vLLM version",
        "its CPU worker does not verify speculated tokens",
        "install vLLM 0.23 or newer, or remove --speculative-config",
        lambda c: c.speculative_config is not None and not compat.verifies_speculated_tokens(),
    ),
    Unsupported(
        "this speculative decoding method",
        "its drafter or its sampler is untested with this backend",
        f"use one of: {', '.join(SPECULATION)}, or remove --speculative-config",
        _speculation,
    ),
    Unsupported(
        "n-gram speculative decoding without numba",
        "vLLM's n-gram proposer needs numba, which is not installed",
        "run `pip install numba`, or remove --speculative-config",
        lambda c: c.speculative_config is not None and c.speculative_config.method == "ngram" and not has_numba(),
    ),
    Unsupported(
        "a drafter with layers and this vLLM version",
        "fastattention can replace the Triton kernels of these drafters only from vLLM 0.32 on",
        "install vLLM 0.32, use ngram, or remove --speculative-config",
        lambda c: drafter.model_of(c) is not None and not prepares_drafts() and c.speculative_config.method,
    ),
    Unsupported(
        "this drafter beside images",
        "vLLM passes it embeddings of images, which it does not take",
        f"use mtp, eagle3 or ngram, pass {multimodal.TEXT_ONLY}, or remove --speculative-config",
        _drafter_beside_images,
    ),
    Unsupported(
        "this way of drafting",
        "it is untested on CPUs",
        "remove this entry from --speculative-config",
        drafter.untested_way,
    ),
    Unsupported(
        "the V2 model runner",
        "it needs vLLM 0.23 or newer and Triton for CPUs, and at least one of them is missing",
        "set VLLM_USE_V2_MODEL_RUNNER=0",
        lambda c: compat.v2_runner_is_missing(c) and f"vLLM {metadata.version('vllm')}",
    ),
    KV_CONNECTOR,
    Unsupported(
        "data parallelism",
        "fastattention divides this machine's CPUs and memory among the ranks of a single engine",
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
        "a mixture-of-experts model with this vLLM version",
        "its experts need compiled CPU kernels, which fastattention can replace only in vLLM 0.30 and newer",
        "install vLLM 0.30 or newer, or serve a dense model",
        lambda c: not compat.has_compiled_cpu_ops() and c.model_config.is_moe and not compat.has_cpu_expert_router(),
    ),
    Unsupported(
        "this mixture-of-experts model",
        f"with a pure-Python vLLM, only {', '.join(EXPERT_MODELS)} are tested",
        "serve one of these, or a dense model",
        _experts,
    ),
    Unsupported(
        "LoRA with this vLLM version",
        "it pins the adapters' tensors in memory, which needs a GPU driver",
        "install vLLM 0.26 or newer, or remove --enable-lora and merge the adapter into the weights",
        lambda c: c.lora_config is not None and compat.pins_memory_without_a_gpu(),
    ),
    Unsupported(
        "LoRA on a mixture-of-experts model",
        "vLLM computes such experts with Triton, which has no CPU target here",
        "remove --enable-lora and merge the adapter into the weights",
        lambda c: c.lora_config is not None and c.model_config.is_moe and _text_config(c).model_type,
    ),
    Unsupported(
        "expert parallelism",
        "the CPU kernels for experts keep every expert on every rank",
        "remove --enable-expert-parallel, and use --tensor-parallel-size to divide each expert",
        lambda c: c.parallel_config.enable_expert_parallel,
    ),
    Unsupported(
        "weight quantisation",
        "it needs vLLM's compiled CPU kernels, which a pure-Python vLLM does not include",
        "serve the unquantised model",
        lambda c: not compat.has_compiled_cpu_ops() and c.model_config.quantization,
    ),
    BATCH_INVARIANCE,
    Unsupported(
        "microbatching",
        "it overlaps communication between GPUs, and this engine runs on CPUs",
        "remove --enable-dbo and --ubatch-size",
        _microbatches,
    ),
    CONTEXT_PARALLELISM,
    PUSH,
    # The last row, because it asks the others about a draft model.
    Unsupported(
        "this drafter",
        "its layers are untested on CPUs",
        "use another drafter, or remove --speculative-config",
        lambda c: drafter.untested_layers(c) or _draft_model(c),
    ),
)

_NEVER_RUN = "it has never been run with the kernels of this device"

_UNKNOWN_ATTENTION = (
    Unsupported(
        "this linear attention or state-space model",
        "these layers were never run beside this backend",
        _ALSO_LINEAR,
        _other_linear_attention,
    ),
    OWN_LAYERS,
    LATENT_ATTENTION,
    Unsupported(
        "attention with values of another size than keys",
        "the kernels have one head size for both",
        _ANOTHER_MODEL,
        _value_size,
    ),
)

WITHOUT_KERNELS: tuple[Unsupported, ...] = (*_UNKNOWN_ATTENTION, HEAD_SIZE, KV_HEADS)
"""Models that are refused at start on GPUs of compute capability 8.0 and newer. vLLM's code runs the others there."""

UNTESTED_ON_VOLTA: tuple[Unsupported, ...] = (
    *_UNKNOWN_ATTENTION,
    KV_HEADS,
    KV_CONNECTOR,
    CONTEXT_PARALLELISM,
    Unsupported("microbatching", _NEVER_RUN, "remove --enable-dbo and --ubatch-size", _microbatches),
    Unsupported(
        "fast prefill",
        _NEVER_RUN,
        "remove --kv-sharing-fast-prefill",
        lambda c: c.cache_config.kv_sharing_fast_prefill and "--kv-sharing-fast-prefill",
    ),
    Unsupported(
        "a second attention backend",
        _NEVER_RUN,
        "remove backend_per_kind from --attention-config",
        _another_backend,
    ),
)
"""Features that are refused at start on V100 and T4, whose kernels check the head size themselves."""

UNTESTED_ON_NPUS: tuple[Unsupported, ...] = (
    # vllm-ascend's own backend runs latent attention.
    *(row for row in UNTESTED_ON_VOLTA if row is not LATENT_ATTENTION),
    BATCH_INVARIANCE,
    PUSH,
    Unsupported(
        "speculative decoding",
        _NEVER_RUN,
        "remove --speculative-config",
        lambda c: c.speculative_config is not None and c.speculative_config.method,
    ),
)
"""Features that are refused at start on NPUs, where this backend computes the dense attention layers."""
