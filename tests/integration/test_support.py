"""Every row of the refusal table applies to vLLM's own configuration of such a model, and a plain decoder passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import transformers
from transformers import PretrainedConfig
from vllm.config import ModelConfig
from vllm.config.cache import CacheDType
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.transformers_utils.configs.deepseek_v4 import DeepseekV4Config
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)

from fastattention_vllm.integration import compat, support
from fastattention_vllm.integration.refusal import Refusal, sentence
from fastattention_vllm.integration.support import (
    LATENT_ATTENTION,
    SUPPORTED,
    UNSUPPORTED,
    UNTESTED_ON_NPUS,
    UNTESTED_ON_VOLTA,
    WITHOUT_KERNELS,
    check_supported,
)
from tests import image_references
from tests.reference_models import VOCAB, llama

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def model(kind: str, architecture: str, **changes: Any) -> PretrainedConfig:
    config: PretrainedConfig = getattr(transformers, kind)(**(SMALL | changes))
    config.architectures = [architecture]
    return config


def with_name(config: PretrainedConfig, architecture: str) -> PretrainedConfig:
    config.architectures = [architecture]
    return config


def plain(**changes: Any) -> PretrainedConfig:
    config = llama(4, 2, changes.pop("head_size", 64))
    config.architectures = ["LlamaForCausalLM"]
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def engine_config(config: PretrainedConfig, path: Path, **arguments: Any) -> Any:
    config.save_pretrained(path)
    settings = {
        "model": str(path),
        "attention_backend": "fastattention",
        "dtype": "bfloat16",
        "max_model_len": 256,
        "kv_cache_memory_bytes": 64 << 20,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_num_batched_tokens": 256,
    }
    asked = arguments.get("speculative_config", {})
    if asked.get("model") == READS_TEXT:
        plain().save_pretrained(path / "draft")
        arguments["speculative_config"] = asked | {"model": str(path / "draft")}
    if asked.get("model") == ITSELF:
        arguments["speculative_config"] = asked | {"model": str(path)}
    return EngineArgs(**(settings | arguments)).create_engine_config()


ITSELF, READS_TEXT = "the model itself", "a model of text"
DRAFT = {"method": "draft_model", "model": ITSELF, "num_speculative_tokens": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}

HYBRID = model(
    "Qwen3NextConfig",
    "Qwen3NextForCausalLM",
    num_hidden_layers=4,
    head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    num_experts=4,
)
QWEN3_MOE = model("Qwen3MoeConfig", "Qwen3MoeForCausalLM", head_dim=64, num_experts=4)

SCALES_PER_HEAD = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head", "symmetric": True},
}

QWEN25_VL = with_name(image_references.qwen2_5_vl(), "Qwen2_5_VLForConditionalGeneration")
GEMMA3 = with_name(image_references.gemma3(), "Gemma3ForConditionalGeneration")
PALIGEMMA = with_name(image_references.paligemma(), "PaliGemmaForConditionalGeneration")
TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0}}

# The model and the engine arguments for each row.
CASES: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "all-reduces by push": (plain(), {"additional_config": {"fastattention": {"push_all_reduce": "auto"}}}),
    "multi-head latent attention": (model("DeepseekV3Config", "DeepseekV3ForCausalLM"), {}),
    "this model on more ranks than it has KV heads": (
        model("GptOssConfig", "GptOssForCausalLM", num_attention_heads=4, head_dim=64, num_local_experts=4),
        {"tensor_parallel_size": 4},
    ),
    "this model's attention": (with_name(plain(), "HrmTextForCausalLM"), {}),
    "cross attention": (
        model(
            "WhisperConfig",
            "WhisperForConditionalGeneration",
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
        ),
        {},
    ),
    "a model with state-space or linear-attention layers": (model("MambaConfig", "MambaForCausalLM"), {}),
    "linear attention with this vLLM": (HYBRID, {}),
    "this speculative decoding method beside linear-attention layers": (
        HYBRID,
        {"speculative_config": NGRAM | {"method": "ngram_gpu"}},
    ),
    "LoRA on a model with linear-attention layers": (HYBRID, {"enable_lora": True}),
    "a model whose images are attended to in both directions": (GEMMA3, {}),
    "a multimodal model with this vLLM version": (QWEN25_VL, {}),
    "an input other than text and images": (QWEN25_VL, {"limit_mm_per_prompt": {"video": 1}}),
    "this option of image encoders": (QWEN25_VL, {"mm_encoder_tp_mode": "data"}),
    "LoRA on a model with images": (QWEN25_VL, {"enable_lora": True}),
    "a multimodal model": (model("Qwen2AudioConfig", "Qwen2AudioForConditionalGeneration"), {}),
    "this attention variant": (plain(attention_chunk_size=64), {}),
    "this head size": (plain(head_size=512), {}),
    "this quantised KV cache": (plain(), {"kv_cache_dtype": "fp8_inc"}),
    "a KV cache with one scale per head": (plain(quantization_config=SCALES_PER_HEAD), {}),
    "this speculative decoding method": (
        plain(),
        {"speculative_config": NGRAM | {"method": "ngram_gpu"}},
    ),
    "speculative decoding with this vLLM version": (plain(), {"speculative_config": NGRAM}),
    "n-gram speculative decoding without numba": (plain(), {"speculative_config": NGRAM}),
    "a drafter with layers and this vLLM version": (plain(), {"speculative_config": DRAFT}),
    "this drafter beside images": (
        QWEN25_VL,
        {"speculative_config": DRAFT | {"model": READS_TEXT}},
    ),
    "this way of drafting": (plain(), {"speculative_config": DRAFT | {"draft_sample_method": "probabilistic"}}),
    "this drafter": (
        model("MistralConfig", "MistralForCausalLM", head_dim=64, sliding_window=32),
        {"speculative_config": DRAFT},
    ),
    "the V2 model runner": (plain(), {}),
    "a KV connector": (plain(), {"kv_offloading_size": 1.0}),
    "data parallelism": (plain(), {"data_parallel_size": 2}),
    "pipeline parallelism": (plain(), {"pipeline_parallel_size": 2}),
    "this mixture-of-experts model": (
        model("OlmoeConfig", "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
        {},
    ),
    "a mixture-of-experts model with this vLLM version": (QWEN3_MOE, {}),
    "LoRA with this vLLM version": (plain(), {"enable_lora": True}),
    "LoRA on a mixture-of-experts model": (QWEN3_MOE, {"enable_lora": True}),
    "expert parallelism": (QWEN3_MOE, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "weight quantisation": (
        plain(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}),
        {"dtype": "float16"},
    ),
    "batch invariance": (plain(), {}),
    "microbatching": (plain(), {"enable_dbo": True}),
    "context parallelism": (plain(), {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}),
}


def test_every_row_has_a_case() -> None:
    assert set(CASES) == {row.feature for row in UNSUPPORTED}


def test_every_supported_feature_names_a_test_that_exists() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/integration"]
    nodes = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    for row in SUPPORTED:
        exact = "[" in row.tested_by
        assert any(n == row.tested_by if exact else n.partition("[")[0] == row.tested_by for n in nodes), row


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
        ({"v_head_dim": 32}, "v_head_dim 32"),
        ({"rswa_window": 32}, "rswa_window"),
    ],
)
def test_other_kinds_of_attention_are_refused_too(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        engine_config(plain(**changes), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "--kv-cache-dtype int8_per_token_head"),
        ({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]}, "--kv-cache-dtype-skip-layers 1"),
    ],
)
def test_other_quantised_caches_are_refused_too(arguments: dict[str, Any], named: str, tmp_path: Path) -> None:
    if arguments["kv_cache_dtype"] not in get_args(CacheDType):
        pytest.skip(f"this vLLM does not know {arguments['kv_cache_dtype']}")
    with pytest.raises(ValueError, match=named) as caught:
        engine_config(plain(), tmp_path, **arguments)
    assert "pass only --kv-cache-dtype auto, fp8_e4m3 or fp8_e5m2" in str(caught.value)


def test_scales_taken_from_the_first_prompt_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "calculates_kv_scales", lambda config: True)
    with pytest.raises(ValueError, match="--calculate-kv-scales"):
        engine_config(plain(), tmp_path, kv_cache_dtype="fp8")


@pytest.mark.parametrize("asked", ["auto", "fp8"])
def test_scales_per_head_are_refused(asked: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one scale per head \(kv_cache_scheme: attn_head\)"):
        engine_config(plain(quantization_config=SCALES_PER_HEAD), tmp_path, kv_cache_dtype=asked)


def test_a_pooling_model_without_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="state-space or linear-attention layers"):
        engine_config(model("MambaConfig", "MambaForCausalLM"), tmp_path, runner="pooling", convert="embed")


@pytest.mark.parametrize("feature", CASES)
def test_the_sentence_names_feature_reason_and_remedy(
    feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, arguments = CASES[feature]
    # Conditions that depend on the installed packages, fixed here.
    monkeypatch.setattr(
        compat, "verifies_speculated_tokens", lambda: feature != "speculative decoding with this vLLM version"
    )
    monkeypatch.setattr(support, "has_numba", lambda: "without numba" not in feature)
    monkeypatch.setattr(support, "prepares_drafts", lambda: feature != "a drafter with layers and this vLLM version")
    monkeypatch.setattr(
        compat, "has_cpu_expert_router", lambda: feature != "a mixture-of-experts model with this vLLM version"
    )
    monkeypatch.setattr(compat, "has_kernel_dispatcher", lambda: feature != "a multimodal model with this vLLM version")
    monkeypatch.setattr(compat, "has_cpu_linear_attention", lambda: feature != "linear attention with this vLLM")
    monkeypatch.setattr(compat, "pins_memory_without_a_gpu", lambda: feature == "LoRA with this vLLM version")
    monkeypatch.setattr(compat, "v2_runner_is_missing", lambda config: feature == "the V2 model runner")
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", feature == "batch invariance", raising=False)
    (row,) = (row for row in UNSUPPORTED if row.feature == feature)
    with pytest.raises(ValueError, match=feature) as caught:
        engine_config(config, tmp_path, **arguments)
    message = sentence(caught.value)
    assert message is not None
    assert message.startswith(f"fastattention: {feature}")
    assert row.why in message
    assert row.instead in message
    assert "\n" not in message


@pytest.mark.skipif(not support.prepares_drafts(), reason="this vLLM's kernels are not replaced")
def test_a_drafter_that_reads_text_runs_without_images(tmp_path: Path) -> None:
    engine_config(QWEN25_VL, tmp_path, speculative_config=DRAFT | {"model": READS_TEXT}, **TEXT_ONLY)


@pytest.mark.parametrize(("config", "kind"), [(GEMMA3, "gemma3"), (PALIGEMMA, "paligemma")])
def test_two_way_images_are_named(config: PretrainedConfig, kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"in both directions \({kind}\) is not supported.*--limit-mm-per-prompt"):
        engine_config(config, tmp_path)


def test_without_images_only_a_tested_model_runs(tmp_path: Path) -> None:
    """A PaliGemma attends to the text of a prompt in both directions, too."""
    config = engine_config(GEMMA3, tmp_path / "gemma3", **TEXT_ONLY)
    assert not config.model_config.is_mm_prefix_lm
    with pytest.raises(ValueError, match=r"a multimodal model \(paligemma\) is not supported"):
        engine_config(PALIGEMMA, tmp_path / "paligemma", **TEXT_ONLY)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"limit_mm_per_prompt": {"image": 2, "video": 3}}, r"\(video: 3\)"),
        ({"limit_mm_per_prompt": {"audio": 1}}, r"\(audio: 1\)"),
        ({"mm_encoder_attn_backend": "FLASH_ATTN"}, "--mm-encoder-attn-backend"),
        ({"mm_encoder_only": True}, "--mm-encoder-only"),
    ],
)
def test_other_inputs_and_encoders_are_refused(arguments: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        engine_config(QWEN25_VL, tmp_path, **arguments)


@pytest.mark.parametrize(
    ("limits", "images"), [({}, 999), ({"image": 2}, 2), ({"video": 0}, 999), ({"image": 0, "video": 0}, 0)]
)
def test_videos_are_off_beside_images(limits: dict[str, int], images: int, tmp_path: Path) -> None:
    config = engine_config(QWEN25_VL, tmp_path, limit_mm_per_prompt=limits)
    found = config.model_config.multimodal_config
    assert [found.get_limit_per_prompt(kind) for kind in ("image", "video")] == [images, 0]
    check_supported(config)  # a second time, as in every process that vLLM starts


@pytest.mark.parametrize(
    ("changes", "arguments"),
    [
        ({}, {}),
        ({"head_size": 80}, {}),
        ({"layer_types": ["full_attention"] * 3}, {}),
        ({}, {"kv_cache_dtype": "float16"}),
        ({}, {"kv_cache_dtype": "fp8"}),
        ({}, {"kv_cache_dtype": "fp8_e4m3"}),
        ({}, {"kv_cache_dtype": "fp8_e5m2"}),
        ({}, {"tensor_parallel_size": 2}),
        pytest.param(
            {},
            {"enable_lora": True},
            marks=pytest.mark.skipif(compat.pins_memory_without_a_gpu(), reason="this vLLM pins LoRA's memory"),
        ),
        pytest.param(
            {},
            {"speculative_config": NGRAM},
            marks=[
                pytest.mark.skipif(not compat.verifies_speculated_tokens(), reason="no speculation in vLLM 0.19"),
                pytest.mark.skipif(not support.has_numba(), reason="numba is not installed"),
            ],
        ),
        pytest.param(
            {},
            {"speculative_config": DRAFT},
            marks=pytest.mark.skipif(not support.prepares_drafts(), reason="this vLLM's kernels are not replaced"),
        ),
    ],
)
def test_supported_configurations_are_accepted(
    changes: dict[str, Any], arguments: dict[str, Any], tmp_path: Path
) -> None:
    config = engine_config(plain(**changes), tmp_path, **arguments)
    assert config.attention_config.backend.name == "FASTATTENTION"
    # vLLM's own platform may silently fall back to another dtype.
    assert config.cache_config.cache_dtype == arguments.get("kv_cache_dtype", config.cache_config.cache_dtype)


def test_an_fp8_cache_is_hidden_from_a_platform_without_support(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.19's platform, simulated in any version."""
    theirs = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def refuse_fp8(cls: type, vllm_config: Any) -> None:
        if vllm_config.cache_config.cache_dtype.startswith("fp8"):
            raise RuntimeError("not compatible with FP8 KV cache")
        theirs(cls, vllm_config)

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(refuse_fp8))
    config = engine_config(plain(), tmp_path, kv_cache_dtype="fp8_e5m2")
    assert config.cache_config.cache_dtype == "fp8_e5m2"


def test_a_refusal_is_a_value_error() -> None:
    assert issubclass(Refusal, ValueError)


ON_OTHER_DEVICES: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "all-reduces by push": CASES["all-reduces by push"],
    "this linear attention or state-space model": (
        model("MiniMaxConfig", "MiniMaxForCausalLM", num_local_experts=2),
        {},
    ),
    "this model's attention": CASES["this model's attention"],
    "multi-head latent attention": CASES["multi-head latent attention"],
    "attention with values of another size than keys": (plain(v_head_dim=32), {}),
    "this head size": CASES["this head size"],
    "this model on more ranks than it has KV heads": CASES["this model on more ranks than it has KV heads"],
    "a KV connector": (plain(), {"kv_offloading_size": 1.0}),
    "context parallelism": (plain(), {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}),
    "microbatching": (plain(), {"enable_dbo": True}),
    "fast prefill": (plain(), {"kv_sharing_fast_prefill": True}),
    "a second attention backend": (plain(), {}),
    "batch invariance": (plain(), {}),
    "speculative decoding": (plain(), {"speculative_config": NGRAM}),
}


def test_every_row_of_other_devices_has_a_case() -> None:
    assert set(UNTESTED_ON_VOLTA) - {LATENT_ATTENTION} < set(UNTESTED_ON_NPUS)
    assert set(ON_OTHER_DEVICES) == {row.feature for row in (*WITHOUT_KERNELS, *UNTESTED_ON_NPUS)}


@pytest.mark.parametrize("feature", ON_OTHER_DEVICES)
def test_what_was_never_run_on_another_device_is_refused_there(
    feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastattention_vllm.integration.cpu.platform.check_supported", lambda config: None)
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", feature == "batch invariance", raising=False)
    config = engine_config(ON_OTHER_DEVICES[feature][0], tmp_path, **ON_OTHER_DEVICES[feature][1])
    if feature == "microbatching":
        config.parallel_config.enable_dbo = True  # vLLM's CPU platform turns it off
    if feature == "a second attention backend":
        config.attention_config = SimpleNamespace(backend_per_kind={"full": SimpleNamespace(name="TRITON_ATTN")})
    for rows in (WITHOUT_KERNELS, UNTESTED_ON_VOLTA, UNTESTED_ON_NPUS):
        if feature in {row.feature for row in rows}:
            with pytest.raises(Refusal, match=f"^{feature}.* is not supported: .*; .*[.]$"):
                check_supported(config, rows)
        else:
            check_supported(config, rows)


def test_a_plain_model_passes_on_other_devices(tmp_path: Path) -> None:
    config = engine_config(plain(), tmp_path)
    for rows in (WITHOUT_KERNELS, UNTESTED_ON_VOLTA, UNTESTED_ON_NPUS):
        check_supported(config, rows)


@pytest.mark.parametrize(("named", "kind"), support.OTHER_LINEAR_ATTENTION.items())
def test_other_linear_attention_is_named(named: str, kind: str) -> None:
    """Kimi-Linear and Ring-2.5 have latent attention too, which is not what the sentence names."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=True, hf_config=SimpleNamespace(architectures=[named]))
    )
    with pytest.raises(
        Refusal,
        match=rf"^this linear attention or state-space model \({kind}, {named}\) is not supported: .*Qwen3-Next or Q",
    ):
        check_supported(config, WITHOUT_KERNELS)


@pytest.mark.parametrize(("kind", "named"), [("JambaConfig", "JambaForCausalLM"), ("MambaConfig", "MambaForCausalLM")])
def test_other_states_are_refused_by_kind(kind: str, named: str, tmp_path: Path) -> None:
    """No list of ours has these: vLLM's own class says that the model keeps states."""
    assert named not in support.OTHER_LINEAR_ATTENTION
    getattr(transformers, kind)(architectures=[named]).save_pretrained(tmp_path)
    config: Any = SimpleNamespace(model_config=ModelConfig(model=str(tmp_path), skip_tokenizer_init=True))
    for rows in (WITHOUT_KERNELS, UNTESTED_ON_VOLTA, UNTESTED_ON_NPUS):
        with pytest.raises(Refusal, match=rf"^this linear attention or state-space model \({named}\) is not "):
            check_supported(config, rows)


@pytest.mark.parametrize(
    ("kind", "named", "sentence_begins"),
    [
        ("Qwen4ExpConfig", "Qwen4ExpForConditionalGeneration", "this linear attention .*Gated DeltaNet beside sparse"),
        ("Glm5NextConfig", "Glm5NextForConditionalGeneration", "this linear attention .*Kimi Delta Attention"),
        ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", "multi-head latent attention"),
        ("DeepseekV4Config", "DeepseekV4ForCausalLM", "multi-head latent attention"),
        ("KimiLinearConfig", "KimiLinearForCausalLM", "this linear attention .*Kimi Delta Attention"),
        ("MiniMaxM3VLConfig", "MiniMaxM3SparseForConditionalGeneration", "this model's attention .*sparse attention"),
    ],
)
def test_this_years_models_are_refused_by_their_configs(kind: str, named: str, sentence_begins: str) -> None:
    """With the genuine class of each configuration. The model's class is not asked, because it needs GPU kernels."""
    if kind == "DeepseekV4Config":  # vLLM reads it with a class of its own
        config: Any = DeepseekV4Config(compress_ratios=[0, 4], head_dim=512, architectures=[named])
    else:
        config = getattr(transformers, kind)(architectures=[named])
    text = config.get_text_config()
    converted = MODEL_ARCH_CONFIG_CONVERTORS.get(config.model_type, ModelArchConfigConvertorBase)(config, text)
    described: Any = SimpleNamespace(
        hf_config=config,
        hf_text_config=text,
        use_mla=converted.is_deepseek_mla(),
        is_hybrid=False,
        is_attention_free=False,
    )
    for rows in (WITHOUT_KERNELS, UNTESTED_ON_VOLTA):
        with pytest.raises(Refusal, match=f"^{sentence_begins}.* is not supported: "):
            check_supported(SimpleNamespace(model_config=described), rows)


def test_gated_delta_net_passes_on_other_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastattention_vllm.integration.cpu.platform.check_supported", lambda config: None)
    config = engine_config(HYBRID, tmp_path)
    for rows in (WITHOUT_KERNELS, UNTESTED_ON_VOLTA, UNTESTED_ON_NPUS):
        check_supported(config, rows)
