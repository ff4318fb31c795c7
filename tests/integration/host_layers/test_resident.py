"""Engines with copies of host layers' blocks on the "device", against Hugging Face transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.placement import host_attention, prefetch
from fastattention_vllm.placement.host_attention import HostAttention
from fastattention_vllm.placement.stream_split import StreamSplit
from tests import reference_models as reference
from tests.integration.engine import MAX_TOKENS, NGRAM, check, check_drafts, counter, generate
from tests.integration.host_layers.test_layers import PAGE, host, host_layers_of, llama, small_blocks
from tests.reference_models import hugging_face_answers, random_prompts, save_random

GIB = 1 << 30
LENGTHS = (1, 17, 48, 65, 130, 300)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "STAGING_BYTES", 3 * PAGE)
    monkeypatch.setattr(host_attention, "MIN_STREAMED_BYTES", 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(llama(), tmp_path_factory.mktemp("llama"))


def copies(blocks: int, layers: int = 2, page: int = PAGE) -> dict[str, Any]:
    """Room for so many blocks of each host layer."""
    return host(layers, resident_kv_gib=blocks * layers * page / GIB)


@pytest.mark.parametrize("blocks", [pytest.param(3, marks=pytest.mark.more), 14])
def test_answers_equal_hugging_face(blocks: int, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some requests lie on the device, some in part, and some not at all; then the link helps as well."""
    lines: list[str] = []
    monkeypatch.setattr(host_layers.logger, "info", lambda text, *values, **_: lines.append(text % values))
    prompts = random_prompts(LENGTHS)
    answers = hugging_face_answers(model, prompts, MAX_TOKENS)
    with small_blocks(model, **copies(blocks)) as llm:
        layers = host_layers_of(llm)
        assert layers.group.resident is not None
        assert len(layers.group.resident.block_of) == blocks
        check(generate(llm, prompts), answers)
        layers.set_stream_split(StreamSplit(0.5))
        check(generate(llm, prompts), answers)
        counters = layers.counters()
        assert counters.resident_bytes > 0
        assert counters.cpu_bytes > 0
        assert counters.decode_streamed_bytes > 0
    assert f"copies on the device: {16 * blocks} tokens of 2 host layers" in "\n".join(lines)


def test_requests_that_fit_do_not_use_the_cpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, each takes the rows of the one before."""

    def fail(*_: Any) -> None:
        raise AssertionError("the CPU was asked")

    monkeypatch.setattr(HostAttention, "_attend_together", fail)
    prompts = random_prompts([200, 130])
    with small_blocks(model, **copies(14)) as llm:
        for prompt in prompts:
            check(generate(llm, [prompt]), hugging_face_answers(model, [prompt], MAX_TOKENS))
        assert host_layers_of(llm).counters().cpu_bytes == 0


@pytest.mark.more
def test_prefixes_are_served_from_the_copies(model: Path) -> None:
    shared = random_prompts([256], seed=7)[0]
    prompts = [shared + tail for tail in random_prompts([3, 40, 90, 1], seed=8)]
    answers = hugging_face_answers(model, prompts, MAX_TOKENS)
    arguments = {"enable_prefix_caching": True, "block_size": 8, "max_num_batched_tokens": 1024}
    with small_blocks(model, **arguments, **copies(38, page=PAGE // 2)) as llm:
        together, later = (generate(llm, prompts) for _ in range(2))
        check(together, answers)
        check(later, answers)
        assert [output.num_cached_tokens for output in together] == [0, 256, 256, 256]


@pytest.mark.more
def test_preemption_recomputes_to_the_same_answers(model: Path) -> None:
    prompts = random_prompts([30, 31, 32], seed=9)
    answers = hugging_face_answers(model, prompts, 30)
    # 3 requests grow to 62 tokens = 4 blocks each; 8 blocks hold two of them.
    arguments = {"block_size": 16, "num_gpu_blocks_override": 9, "max_model_len": 64}
    with small_blocks(model, **arguments, **copies(5)) as llm:
        outputs = generate(llm, prompts, max_tokens=30)
        assert counter(llm, "vllm:num_preemptions") > 0, "the case must preempt to test anything"
        assert host_layers_of(llm).counters().resident_bytes > 0
    check(outputs, answers)


@pytest.mark.more
def test_speculation_changes_no_token(tmp_path: Path) -> None:
    model = save_random(reference.llama(4, 2, 64), tmp_path)
    prompts = [part * 4 for part in random_prompts([5, 17, 33])]
    answers = hugging_face_answers(model, prompts, 40)
    with small_blocks(model, speculative_config=NGRAM, **copies(14)) as llm:
        check(generate(llm, prompts, max_tokens=40), answers)
        check_drafts(llm)
        assert host_layers_of(llm).counters().resident_bytes > 0


@pytest.mark.more
def test_windows_have_no_copies(tmp_path: Path) -> None:
    """A layer with a window beside a full one, and sinks."""
    model = save_random(reference.gpt_oss(), tmp_path)
    prompts = random_prompts(LENGTHS)
    answers = hugging_face_answers(model, prompts, MAX_TOKENS)
    with small_blocks(model, **host(2, resident_kv_gib=30 * PAGE / GIB)) as llm:
        layers = host_layers_of(llm)
        assert {layer.window is None for layer in layers.group.layers} == {True, False}
        assert all((layer.copies is None) == (layer.window is not None) for layer in layers.group.layers)
        check(generate(llm, prompts), answers)
        assert layers.counters().resident_bytes > 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "with --kv-cache-dtype fp8_e4m3"),
        ({"host_kv_dtype": "int8"}, "with host_kv_dtype int8"),
    ],
    ids=["an fp8 cache", "8 bits on the host"],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], why: str, model: Path) -> None:
    options = {"host_kv_dtype": changes.pop("host_kv_dtype", "auto")}
    with pytest.raises(Refusal, match=f"resident_kv_gib is not supported {why}; set it to 0"):
        with small_blocks(model, **changes, **host(2, resident_kv_gib=0.001, **options)):
            pass


def test_memory_for_no_block_is_refused(model: Path) -> None:
    with pytest.raises(Refusal, match=r"holds no block of 16 tokens of all 2 host layers.*raise it to"):
        with small_blocks(model, **host(2, resident_kv_gib=1.5 * PAGE / GIB)):
            pass
