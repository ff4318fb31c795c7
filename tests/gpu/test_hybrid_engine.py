"""A model with Gated DeltaNet layers on a GPU, with none and most of its full layers on the host.

The model is a small Qwen3-Next with random weights, and heads of the sizes that Qwen3-Next and Qwen3.5 have. GDN layers
refuse fp32, so no single tolerance fits: FLASH_ATTN of the same vLLM computes the same answers, and this backend may be
at most twice as far from Hugging Face in fp32 as it is. Prompts are longer than a step's tokens.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForConditionalGeneration

from fastattention_vllm.integration.cuda.gated_delta import OPERATION, GatedDeltaRule
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.placement import host_attention
from fastattention_vllm.placement.stream_split import StreamSplit
from tests import image_references
from tests import reference_models as reference
from tests.gpu.apart import apart
from tests.gpu.test_decode_graph import TILING
from tests.gpu.test_engine import ALLOWED, LENGTHS, Steps
from tests.gpu.test_volta_models import distance, saved
from tests.integration.engine import MAX_TOKENS, engine, generate
from tests.reference_models import Answer, hugging_face_answers, random_prompts

LAYERS = 12
FULL = (3, 7, 11)
SETTINGS: dict[str, Any] = {
    "dtype": "float16",
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 512 << 20,
    "mamba_ssm_cache_dtype": "float32",
}
BLOCK, SMALL_BLOCK = 256, 144
"""Tokens per block: 268 288 bytes of a state are 131 tokens of 2 KV heads of 256. The least multiples of 128 and 16."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = reference.qwen3_next(layers=LAYERS)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 12, 2, 256
    config.linear_key_head_dim = config.linear_value_head_dim = 128
    # vLLM 0.23 needs one layer with experts. Rounding chooses others least in the first layer.
    config.mlp_only_layers = list(range(1, LAYERS))
    return saved(config, tmp_path_factory.mktemp("qwen3-next"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> Sequence[Answer]:
    return hugging_face_answers(model, prompts, MAX_TOKENS)


def settings(host: int | list[int] | None, **changes: Any) -> dict[str, Any]:
    """``host``: None for FLASH_ATTN. FlashInfer's kernel for GDN layers is compiled when it first runs."""
    ours = {"attention_backend": "FLASH_ATTN"} if host is None else {}
    options = {} if host is None else {"fastattention": {"host_kv_layers": host}}
    return SETTINGS | ours | {"additional_config": {"gdn_prefill_backend": "triton"} | options} | changes


def steps(outputs: Sequence[Any]) -> list[Steps]:
    completions = [output.outputs[0] for output in outputs]
    return [
        [(token, step[token].logprob) for token, step in zip(found.token_ids, found.logprobs, strict=True)]
        for found in completions
    ]


@pytest.fixture(scope="module")
def bound(model: Path, prompts: list[list[int]], expected: Sequence[Answer]) -> Callable[[bool], float]:
    """The permitted distance from fp32, by whether the model is compiled, which changes the rounding.

    Asked for before a test's own engine, because it starts one, and vLLM has state that engines of a process share.
    """

    @functools.cache
    def twice_flash_attn(eager: bool) -> float:
        with engine(model, **settings(None, enforce_eager=eager)) as llm:
            return max(ALLOWED, 2 * distance(steps(generate(llm, prompts)), expected))

    return twice_flash_attn


Bound = Callable[[bool], float]
TILED_LAYERS = TILING | {"tiling_full_form": False}
"""The full form refuses experts."""


@pytest.mark.parametrize("host", [0, 2])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_answers_equal_hugging_face(
    host: int, eager: bool, model: Path, prompts: list[list[int]], expected: Sequence[Answer], bound: Bound
) -> None:
    allowed = bound(eager)
    with engine(model, **settings(host, enforce_eager=eager)) as llm:
        cache = llm.llm_engine.vllm_config.cache_config
        assert cache.block_size == (BLOCK if host else SMALL_BLOCK)
        assert distance(steps(generate(llm, prompts)), expected) <= allowed


def answer_apart(model: Path, prompts: list[list[int]], changes: dict[str, Any]) -> list[Steps]:
    with engine(model, **changes) as llm:
        return steps(generate(llm, prompts))


@pytest.mark.parametrize("host", [0, 2])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_the_v2_runner(
    host: int,
    eager: bool,
    model: Path,
    prompts: list[list[int]],
    expected: Sequence[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM chooses it only for some models without Gated DeltaNet, but it has such layers."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    theirs = apart(answer_apart, model, prompts, settings(None, enforce_eager=eager))
    found = apart(answer_apart, model, prompts, settings(host, enforce_eager=eager))
    apart_from_theirs = distance(theirs, expected)
    assert distance(found, expected) <= max(ALLOWED, 2 * apart_from_theirs), f"FLASH_ATTN: {apart_from_theirs}"


def volta(host: int) -> dict[str, Any]:
    """The V100's kernels, from their PTX."""
    ours = {"host_kv_layers": host, "volta_kernels": "ptx"}
    return settings(host, additional_config={"gdn_prefill_backend": "triton", "fastattention": ours})


@pytest.mark.parametrize("host", [0, 2])
def test_v100_kernels_and_operators(
    host: int, model: Path, prompts: list[list[int]], expected: Sequence[Answer], bound: Bound
) -> None:
    """Prompts of Gated DeltaNet layers by cuBLAS."""
    allowed = bound(True)
    with engine(model, **volta(host)) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        found = [layer for layer in layers if isinstance(getattr(layer, OPERATION, None), GatedDeltaRule)]
        assert len(found) == LAYERS - len(FULL)
        assert distance(steps(generate(llm, prompts)), expected) <= allowed


class Reference(NamedTuple):
    model: Path
    answers: Sequence[Answer]
    allowed: float
    """Twice the distance of FLASH_ATTN from them."""


TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0, "video": 0}}


@pytest.fixture(scope="module")
def with_images(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Reference:
    config = image_references.qwen3_5(layers=LAYERS)
    text = config.text_config
    text.num_attention_heads, text.num_key_value_heads, text.head_dim = 12, 2, 256
    text.linear_key_head_dim = text.linear_value_head_dim = 128
    text.rope_parameters["mrope_section"] = [16, 8, 8]  # of a quarter of the head
    path = image_references.save_with_processor(config, tmp_path_factory.mktemp("qwen3-5"))
    (file,) = path.glob("*.safetensors")
    save_file({name: w.half().float() for name, w in load_file(file).items()}, file, metadata={"format": "pt"})
    expected = hugging_face_answers(path, prompts, MAX_TOKENS, kind=Qwen3_5ForConditionalGeneration)
    with engine(path, **settings(None, **TEXT_ONLY)) as llm:
        allowed = max(ALLOWED, 2 * distance(steps(generate(llm, prompts)), expected))
    return Reference(path, expected, allowed)


@pytest.mark.parametrize("host", [0, 2])
def test_text_for_a_model_with_images(host: int, prompts: list[list[int]], with_images: Reference) -> None:
    """Qwen3.5 on the V100's kernels: vLLM 0.19.1 has it only with an image encoder."""
    with engine(with_images.model, **volta(host), **TEXT_ONLY) as llm:
        assert distance(steps(generate(llm, prompts)), with_images.answers) <= with_images.allowed


def test_the_plan_is_vllms(model: Path) -> None:
    """One full layer stays, so each of the nine states has a block table of its own."""
    with engine(model, **settings(2)) as llm:
        config = llm.llm_engine.vllm_config
        placed = host_layers.find(config)
        assert placed is not None
        size = placed.placement.device_size
        assert (size.block_size, size.full_layers, size.state_layers) == (BLOCK, 1, LAYERS - len(FULL))
        blocks = placed.placement.max_blocks(SETTINGS["kv_cache_memory_bytes"], placed.budget)
        assert config.cache_config.num_gpu_blocks == blocks
        assert placed.pool is not None
        assert sum(cache.nbytes for cache in placed.pool.caches.values()) == placed.placement.host_bytes(blocks)


def test_a_repeated_prompt_continues_from_states_and_from_host_memory(
    model: Path, prompts: list[list[int]], expected: Sequence[Answer], bound: Bound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what the pool holds, the answers would be others."""
    allowed = bound(True)
    monkeypatch.setattr(host_attention, "MIN_STREAMED_BYTES", 1)
    with engine(model, **settings(2, enable_prefix_caching=True)) as llm:
        placed = host_layers.find(llm.llm_engine.vllm_config)
        assert placed is not None
        assert placed.pool is not None
        assert distance(steps(generate(llm, prompts)), expected) <= allowed
        for share in (0.0, 0.5, 1.0):
            placed.set_stream_split(StreamSplit(share))
            outputs = generate(llm, prompts)
            assert distance(steps(outputs), expected) <= allowed
        assert outputs[-1].num_cached_tokens >= LENGTHS[-1] // BLOCK * BLOCK - BLOCK
        placed.pool.memory.zero_()
        (broken,) = generate(llm, prompts[-1:])
        assert broken.num_cached_tokens >= LENGTHS[-1] // BLOCK * BLOCK - BLOCK
        ours, answer = steps([broken])[0], expected[-1]
        assert abs(ours[0][1] - answer.logprobs[0]) > allowed or ours[0][0] != answer.token_ids[0]


def test_preemption_recomputes_states_and_host_layers(model: Path, bound: Bound) -> None:
    """Three of four requests begin in 10 blocks each, one of tokens and nine of states. Two find no next block."""
    prompts = random_prompts([BLOCK - 6] * 4, seed=9)
    expected = hugging_face_answers(model, prompts, MAX_TOKENS)
    allowed = bound(True)
    with engine(model, **settings([3, 11], num_gpu_blocks_override=32)) as llm:
        outputs = generate(llm, prompts)
        preempted = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    assert preempted > 0, "the case must preempt to test anything"
    assert distance(steps(outputs), expected) <= allowed


def with_drafter(model: Path, path: Path) -> Path:
    """The model with an MTP layer: the attention of its first full layer, and the experts of its first layer."""
    shutil.copytree(model, path, dirs_exist_ok=True)
    (file,) = path.glob("*.safetensors")
    weights = load_file(file)
    parts = {
        f"layers.{FULL[0]}.": ("self_attn.", "input_layernorm.", "post_attention_layernorm."),
        "layers.0.": ("mlp.",),
    }
    drafter = {}
    for layer, names in parts.items():
        for name, weight in weights.items():
            own = name.removeprefix(f"model.{layer}")
            if own != name and own.startswith(names):
                drafter[f"mtp.layers.0.{own}"] = weight.clone()
    hidden = len(weights["model.norm.weight"])
    drafter["mtp.fc.weight"] = 0.1 * torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(5)).half()
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    drafter |= {f"mtp.{name}.weight": torch.zeros(hidden) for name in norms}
    save_file({name: weight.float() for name, weight in (weights | drafter).items()}, file, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("kernels", ["", "ptx"])
def test_rejected_drafts_of_mtp_leave_no_trace(
    kernels: str, model: Path, prompts: list[list[int]], expected: Sequence[Answer], bound: Bound, tmp_path: Path
) -> None:
    """The drafter's layer stays on the device, in the block table of the full layer that stays there."""
    allowed = bound(True)
    own = volta(2) if kernels else settings(2)
    own["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 2}
    with engine(with_drafter(model, tmp_path), **own) as llm:
        config = llm.llm_engine.vllm_config
        placed = host_layers.find(config)
        assert placed is not None
        size = placed.placement.device_size
        assert (size.draft_layers, size.groups(), size.state_blocks) == (1, 6, 3)
        blocks = placed.placement.max_blocks(SETTINGS["kv_cache_memory_bytes"], placed.budget)
        assert config.cache_config.num_gpu_blocks == blocks
        assert distance(steps(generate(llm, prompts)), expected) <= allowed
        drafted = sum(one.value for one in llm.get_metrics() if one.name == "vllm:spec_decode_num_draft_tokens")
    assert drafted > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("section", [{}, {"volta_kernels": "ptx"}, TILED_LAYERS], ids=["flash", "volta", "tiling"])
def test_two_gpus(
    section: dict[str, Any],
    eager: bool,
    model: Path,
    prompts: list[list[int]],
    expected: Sequence[Answer],
    bound: Bound,
) -> None:
    """Each rank has one KV head, half of each state, and a pool of its own."""
    allowed = bound(eager)
    ours = {"fastattention": section | {"host_kv_layers": 2}, "gdn_prefill_backend": "triton"}
    with engine(model, **settings(2, enforce_eager=eager, additional_config=ours), tensor_parallel_size=2) as llm:
        assert distance(steps(generate(llm, prompts)), expected) <= allowed
