"""Real engines with the KV cache of some layers in our own pool, against Hugging Face transformers.

The machine has no GPU, so the pool is in the same memory as vLLM's own cache. Everything else is as with a GPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import PretrainedConfig
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs

from fastattention_vllm.demo.haystack import make_haystack
from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DemoModelSpec
from fastattention_vllm.demo.tokenizer import token_id
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.host_layers import plan as host_plan
from fastattention_vllm.integration.host_layers.layers import HostLayers, describe
from fastattention_vllm.integration.refusal import Refusal, sentence
from fastattention_vllm.placement import host_attention, host_memory, prefetch
from fastattention_vllm.placement.calibrate import Rates
from fastattention_vllm.placement.kv_size import KvSize
from fastattention_vllm.placement.plan import Layers, Limits, indices_text, plan
from fastattention_vllm.placement.stream_split import StreamSplit
from tests import reference_models as reference
from tests.integration.engine import MAX_TOKENS, NGRAM, check, check_drafts, counter, engine, generate
from tests.integration.test_fp8_kv_cache import LENGTHS as FP8_LENGTHS
from tests.integration.test_models import core_first
from tests.reference_models import Answer, hugging_face_answers, random_prompts, save_random

# One token, and lengths around block, window and chunk borders; more requests than run at once.
LENGTHS = (1, 15, 17, 47, 48, 49, 64, 65, 130, 300)
LAYERS = 4
PAGE = 2 * 16 * 2 * 64 * 4
"""Bytes per block of one layer of :func:`llama`."""
KV_BYTES = 12 << 20


def llama() -> PretrainedConfig:
    return reference.llama(4, 2, 64, layers=LAYERS)


def host(layers: int | str | list[int], **more: Any) -> dict[str, Any]:
    return {"additional_config": {"fastattention": {"host_kv_layers": layers, **more}}}


@contextmanager
def small_blocks(model: Path, **changes: Any) -> Iterator[LLM]:
    """An engine with blocks of 16 tokens, so that contexts have many."""
    with engine(model, **({"block_size": 16} | changes)) as llm:
        yield llm


def host_layers_of(llm: LLM) -> HostLayers:
    layers = host_layers.find(llm.llm_engine.vllm_config)
    assert layers is not None
    return layers


def num_blocks(llm: LLM) -> int:
    count = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert count is not None
    return count


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts are fetched in many parts, and streaming is worth it for any share."""
    monkeypatch.setattr(prefetch, "STAGING_BYTES", 3 * PAGE)
    monkeypatch.setattr(host_attention, "MIN_STREAMED_BYTES", 1)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []  # not collected by a handler, because vLLM reconfigures logging when it starts
    monkeypatch.setattr(host_layers.logger, "info", lambda text, *values, **named: lines.append(text % values))
    return lines


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> list[Answer]:
    return hugging_face_answers(model, prompts, MAX_TOKENS)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_tokens_and_logprobs_equal_hugging_face(
    count: int, model: Path, prompts: list[list[int]], expected: list[Answer], log: list[str]
) -> None:
    """The same device memory also holds more blocks, because it only holds the other layers.

    A second run streams the first third of every context to the device while the CPU computes the rest.
    """
    with small_blocks(model, kv_cache_memory_bytes=KV_BYTES, **host(count)) as llm:
        layers = host_layers_of(llm)
        assert len(layers.placement.host) == count
        assert num_blocks(llm) == KV_BYTES // ((LAYERS - count) * PAGE)
        assert layers.pool is not None
        assert layers.pool.memory.nbytes == num_blocks(llm) * count * PAGE
        assert not layers.pool.memory.any()
        check(generate(llm, prompts), expected)
        assert all(cache.any() for cache in layers.pool.caches.values())
        layers.set_stream_split(StreamSplit(1 / 3))
        check(generate(llm, prompts), expected)
    table = next(line for line in log if re.match(r"  [0-9, -]+ host ", line))
    assert table.split(" host ")[0].strip() == indices_text(layers.placement.host)


def test_no_host_layers_by_default_and_on_request(model: Path) -> None:
    for changes in ({}, host(0), host([]), host("auto")):
        with small_blocks(model, kv_cache_memory_bytes=KV_BYTES, **changes) as llm:
            assert host_layers.find(llm.llm_engine.vllm_config) is None
            assert num_blocks(llm) == KV_BYTES // (LAYERS * PAGE)


def test_graphs_of_other_host_layers_are_not_reused(
    model: Path,
    prompts: list[list[int]],
    expected: list[Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiled graph omits the cache update of host layers, and all engines share one graph cache directory."""
    monkeypatch.setattr("vllm.envs.VLLM_CACHE_ROOT", str(tmp_path), raising=False)
    for layers in ([1], [2, 3]):
        with small_blocks(model, enforce_eager=False, **host(layers)) as llm:
            assert host_layers_of(llm).placement.host == tuple(layers)
            check(generate(llm, prompts), expected)
    assert any(path.is_file() for path in tmp_path.rglob("*")), "nothing was compiled that could be reused"


MODELS: dict[str, tuple[Callable[[], PretrainedConfig], int | list[int]]] = {
    "gemma2": (reference.gemma2, 2),
    "gemma3": (reference.gemma3, 5),
    "gemma3n": (reference.gemma3n, 1),
    "gpt-oss": (reference.gpt_oss, 2),
    "gpt-oss, neighbours": (reference.gpt_oss, [1, 2]),
    "mistral": (reference.mistral, 2),
    "bloom": (reference.bloom, [0, 2]),
}


@pytest.mark.parametrize("name", core_first(MODELS, ["gemma3", "gpt-oss", "bloom"]))
def test_every_kind_of_layer_equals_hugging_face(
    name: str, tmp_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, soft caps, sinks, ALiBi and shared caches; contexts are fetched in parts of up to 4 blocks."""
    make, wanted = MODELS[name]
    model = save_random(make(), tmp_path)
    monkeypatch.setattr(prefetch, "STAGING_BYTES", 4 * PAGE)
    monkeypatch.setattr(host_attention, "MIN_STREAMED_BYTES", 1)
    answers = hugging_face_answers(model, prompts, MAX_TOKENS)
    with small_blocks(model, **host(wanted)) as llm:
        placement = host_layers_of(llm).placement
        assert len(placement.host) == (wanted if isinstance(wanted, int) else len(wanted))
        check(generate(llm, prompts), answers)
        host_layers_of(llm).set_stream_split(StreamSplit(0.5))
        check(generate(llm, prompts), answers)


@pytest.mark.parametrize("kv_cache_dtype", core_first(["fp8_e4m3", "fp8_e5m2"], ["fp8_e4m3"]))
def test_an_fp8_cache_gives_the_same_answers_in_both_places(kv_cache_dtype: str, model: Path) -> None:
    """Equal to the last bit for any scales. test_fp8_kv_cache compares the engine without host layers with torch."""
    answers = {}
    for layers in (0, 3):
        for scales in ((0.25, 0.125), (1.0, 1.0))[: 1 if layers else 2]:
            with small_blocks(model, kv_cache_dtype=kv_cache_dtype, **host(layers)) as llm:
                for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values():
                    layer._k_scale_float, layer._v_scale_float = scales
                if layers:
                    assert host_layers_of(llm).pool.caches  # type: ignore[union-attr]
                answers[layers, scales] = answers_of(generate(llm, random_prompts(FP8_LENGTHS)))
    assert answers[3, (0.25, 0.125)] == answers[0, (0.25, 0.125)]
    assert answers[0, (0.25, 0.125)] != answers[0, (1.0, 1.0)], "the scales must change the answers"


def answers_of(outputs: Sequence[Any]) -> list[Answer]:
    completions = [output.outputs[0] for output in outputs]
    return [
        Answer(list(c.token_ids), [step[token].logprob for step, token in zip(c.logprobs, c.token_ids, strict=True)])
        for c in completions
    ]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("block_size", [8, 24, 128])
def test_prefixes_are_served_from_both_caches(block_size: int, model: Path) -> None:
    """Prefixes come from earlier requests or from one in the same step, with the CPU alone or with both."""
    shared = random_prompts([256], seed=7)[0]
    prompts = [shared + tail for tail in random_prompts([3, 40, 90, 1], seed=8)]
    answers = hugging_face_answers(model, prompts, MAX_TOKENS)
    whole = 256 // block_size * block_size
    arguments = {"enable_prefix_caching": True, "block_size": block_size, "max_num_batched_tokens": 1024}
    with small_blocks(model, **arguments, **host(2)) as llm:
        for share in (0.0, 0.7):
            host_layers_of(llm).set_stream_split(StreamSplit(share))
            llm.reset_prefix_cache()
            together, later = (generate(llm, prompts) for _ in range(2))
            check(together, answers)
            check(later, answers)
            assert [output.num_cached_tokens for output in together] == [0, whole, whole, whole]
            assert all(output.num_cached_tokens >= whole for output in later)


@pytest.mark.usefixtures("small_parts")
def test_a_prefix_that_another_request_computes_in_the_same_step(model: Path) -> None:
    """One computes many tokens and one a few, in either order, so the device and the CPU wait for each other."""
    long, short = random_prompts([256, 8], seed=12)
    steps = [[[*long, 5], [*long, 6]], [short, short + random_prompts([60], seed=13)[0]]]
    arguments = {"enable_prefix_caching": True, "block_size": 8, "max_num_batched_tokens": 1024}
    with small_blocks(model, **arguments, **host(2)) as llm:
        for share in (0.0, 1.0):
            host_layers_of(llm).set_stream_split(StreamSplit(share))
            for prompts in steps:
                llm.reset_prefix_cache()
                outputs = generate(llm, prompts)
                check(outputs, hugging_face_answers(model, prompts, MAX_TOKENS))
                assert [output.num_cached_tokens for output in outputs] == [0, len(prompts[0]) // 8 * 8]


@pytest.mark.usefixtures("small_parts")
def test_preemption_recomputes_to_the_same_answers(model: Path) -> None:
    prompts = random_prompts([60, 61, 62, 63], seed=9)
    answers = hugging_face_answers(model, prompts, 80)
    # 4 requests grow to 140 tokens = 9 blocks each; 20 blocks hold two of them.
    with small_blocks(model, block_size=16, num_gpu_blocks_override=21, max_model_len=256, **host(2)) as llm:
        assert host_layers_of(llm).pool.memory.nbytes == 21 * 2 * PAGE  # type: ignore[union-attr]
        outputs = generate(llm, prompts, max_tokens=80)
        assert counter(llm, "vllm:num_preemptions") > 0, "the case must preempt to test anything"
    check(outputs, answers)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("name", core_first(["llama", "gemma2"], ["llama"]))
def test_ngram_speculation_changes_no_token(name: str, tmp_path: Path) -> None:
    """Several new tokens of a request at once, some of which are rejected."""
    model = save_random({"llama": reference.llama(4, 2, 64), "gemma2": reference.gemma2()}[name], tmp_path)
    prompts = [part * 4 for part in random_prompts([5, 17, 33])]
    answers = hugging_face_answers(model, prompts, 40)
    with small_blocks(model, speculative_config=NGRAM, **host(2)) as llm:
        check(generate(llm, prompts, max_tokens=40), answers)
        host_layers_of(llm).set_stream_split(StreamSplit(0.5))
        check(generate(llm, prompts, max_tokens=40), answers)
        check_drafts(llm)


def test_the_host_budget_limits_the_blocks_and_the_log_says_so(
    model: Path, prompts: list[list[int]], expected: list[Answer], log: list[str]
) -> None:
    gib = 80.5 * 2 * PAGE / (1 << 30)
    with small_blocks(model, kv_cache_memory_bytes=KV_BYTES, **host(2, host_kv_gib=gib)) as llm:
        assert num_blocks(llm) == 80
        check(generate(llm, prompts), expected)
    (line,) = [line for line in log if "instead of" in line]
    assert line.startswith(f"KV cache: 80 blocks instead of {KV_BYTES // (2 * PAGE)}, ")


def test_a_part_of_a_block_that_is_left_over_is_no_limit(log: list[str]) -> None:
    limits = Limits(device_bytes=1 << 20, host_bytes=1 << 30, tokens=64)
    placement = plan(Layers((0, 1)), KvSize(16, 1024, full_layers=2), [1], limits)
    found = HostLayers(cast(Any, None), cast(Any, None), placement, {}, 1 << 30, 64, [], "auto", torch.float32)
    assert found.clamp(100 * 1024 + 1000) == 100 * 1024
    assert log == []
    found.budget = 50 * 1024
    assert found.clamp(100 * 1024 + 1000) == 50 * 1024
    assert [line.split(",")[0] for line in log] == ["KV cache: 50 blocks instead of 100"]


def test_a_budget_too_small_for_one_request_is_refused_with_the_length_that_fits(model: Path) -> None:
    gib = 30.5 * 2 * PAGE / (1 << 30)
    with pytest.raises(Refusal, match=r"max_model_len 1024.*raise host_kv_gib") as caught:
        with small_blocks(model, **host(2, host_kv_gib=gib)):
            pass
    assert is_one_sentence(caught.value)
    fits = int(str(caught.value).split("--max-model-len ")[1].split()[0])
    assert fits == 29 * 16  # the null block has a page in the pool as well
    with small_blocks(model, max_model_len=fits, **host(2, host_kv_gib=gib)) as llm:
        assert len(generate(llm, random_prompts([fits - 4]), max_tokens=4)[0].outputs[0].token_ids) == 4
    with pytest.raises(Refusal), small_blocks(model, max_model_len=fits + 1, **host(2, host_kv_gib=gib)):
        pass


def test_the_log_predicts_the_time_that_host_layers_add_per_token(model: Path, log: list[str]) -> None:
    """It uses the measured rates of reading KV, in pieces or in a graph; without rates it predicts nothing."""
    with small_blocks(model, **host(3)) as llm:
        layers = host_layers_of(llm)
        assert not [line for line in log if "Prediction" in line]
        graph, shared = SimpleNamespace(over_link=None), SimpleNamespace(over_link=object())
        for cpu, calls, rate in ((95e9, None, 95), (60e9, None, 40 + 30), (60e9, graph, 60), (60e9, shared, 40 + 15)):
            layers.graph_calls = cast(Any, calls)
            layers.draft_rates = Rates(100e9, cpu, link=50e9, cpu_beside_link=40e9, link_beside_cpu=30e9, in_place=25e9)
            (line,) = [line for line in describe(layers, num_blocks(llm)) if "Prediction" in line]
            milliseconds = 3 * (1024 // 16) * PAGE / (rate * 1e9) * 1e3
            assert f"Prediction: after 1024 tokens the host layers add {milliseconds:.3g} ms" in line
            assert line.endswith(f"at {rate} GB/s).")
        layers.graph_calls, layers.drafts_per_request = None, 2
        (line,) = [line for line in describe(layers, num_blocks(llm)) if "Prediction" in line]
        assert "ms to each step with all drafts (" in line
        layers.max_filled_tokens, layers.filled_steps_until = 40, 7.5 * PAGE
        (line,) = [line for line in describe(layers, num_blocks(llm)) if "n-gram" in line]
        assert "up to 40 tokens whose contexts have fewer than 120 tokens in total" in line
        layers.filled_steps_until = 1e12
        assert f"fewer than {16 * num_blocks(llm)} tokens in total" in "".join(describe(layers, num_blocks(llm)))


@pytest.mark.parametrize("asked", [True, False])
def test_an_automatic_length_fits_the_host_budget(asked: bool, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is the configured one, or half of the free memory, which shrinks once the engine has started."""
    pool = int(30.5 * 2 * PAGE)
    free = iter([1 << 30, KV_BYTES + 2 * pool])
    if not asked:
        monkeypatch.setattr(host_plan, "available_bytes", lambda: next(free))
    budget = {"host_kv_gib": pool / (1 << 30)} if asked else {}
    with small_blocks(model, max_model_len=-1, kv_cache_memory_bytes=KV_BYTES, **host(2, **budget)) as llm:
        assert num_blocks(llm) == 30
        fitted = llm.llm_engine.vllm_config.model_config.max_model_len
        assert fitted == 29 * 16
        prompts = random_prompts([fitted - MAX_TOKENS])
        check(generate(llm, prompts), hugging_face_answers(model, prompts, MAX_TOKENS))


def test_a_budget_too_small_for_any_length_is_refused_in_one_sentence(model: Path) -> None:
    gib = 1.5 * 2 * PAGE / (1 << 30)
    with pytest.raises(ValueError, match=r"the 2 host layers cannot hold one block of 16 tokens; raise") as caught:
        with small_blocks(model, max_model_len=-1, **host(2, host_kv_gib=gib)):
            pass
    assert is_one_sentence(caught.value)


def test_a_pool_too_large_for_the_machine_is_refused_in_one_sentence(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 0)
    monkeypatch.setattr(host_memory, "PATIENCE", 0.0)
    with pytest.raises(Refusal, match=r"the host layers' KV cache needs 0\.06 GiB, but only 0\.00 of") as caught:
        with small_blocks(model, **host(2)):
            pass
    assert is_one_sentence(caught.value)


def is_one_sentence(error: BaseException) -> bool:
    text = sentence(error)
    return text is not None and text.startswith("fastattention: ") and "\n" not in text and text.endswith(".")


def test_an_abandoned_prompt_leaves_nothing_behind(model: Path) -> None:
    """Its blocks go to the next request while its context is still being copied."""
    first, second = random_prompts([700, 300], seed=11)
    answers = hugging_face_answers(model, [second], MAX_TOKENS)
    arguments = {"num_gpu_blocks_override": 65, "enable_prefix_caching": True}
    with small_blocks(model, **arguments, **host(3)) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        llm.llm_engine.add_request("abandoned", {"prompt_token_ids": first}, params)
        for _ in range(3):
            llm.llm_engine.step()
        llm.llm_engine.abort_request(["abandoned"])
        check(generate(llm, [second]), answers)


@pytest.mark.usefixtures("small_parts")
def test_prompts_abandoned_half_way_do_not_affect_other_requests(model: Path) -> None:
    """Two prompts are abandoned, in different steps, while others are decoded, computed or still waiting.

    Their blocks are reused at once, and in the end all of them go to one request.
    """
    decoding, coming = random_prompts([40, 130], seed=14), random_prompts([300], seed=15)
    abandoned, whole = random_prompts([700, 600], seed=16), random_prompts([1024 - MAX_TOKENS], seed=17)
    answers = hugging_face_answers(model, decoding + coming + whole, MAX_TOKENS)
    arguments = {"num_gpu_blocks_override": 1 + 1024 // 16, "long_prefill_token_threshold": 24}
    with small_blocks(model, **arguments, **host(3, stream_fraction=0.5)) as llm:
        add(llm, {"abandoned": abandoned[0], "first": decoding[0], "later": abandoned[1], "second": decoding[1]})
        outputs = steps(llm, 5)
        computed = [request.num_computed_tokens for request in scheduler(llm).running]
        assert computed[0] == 5 * 24
        assert 24 < computed[2] < 600
        llm.llm_engine.abort_request(["abandoned"])
        add(llm, {"coming": coming[0]})
        outputs |= steps(llm, 3)
        llm.llm_engine.abort_request(["later"])
        outputs |= steps(llm, 40)
        assert not llm.llm_engine.has_unfinished_requests(), "a request waits for something that never arrives"
        check([outputs[name] for name in ("first", "second", "coming")], answers[:3])
        add(llm, {"whole": whole[0]})
        check([steps(llm, 1024 // 24 + MAX_TOKENS + 5)["whole"]], answers[3:])


def add(llm: LLM, requests: dict[str, list[int]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
    for name, prompt in requests.items():
        llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)


def steps(llm: LLM, most: int) -> dict[str, Any]:
    """Run up to this many steps; returns what finished in them, by name."""
    finished = {}
    while most and llm.llm_engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
        most -= 1
    return finished


def scheduler(llm: LLM) -> Any:
    core: Any = llm.llm_engine.engine_core
    return core.engine_core.scheduler


class TestRefusals:
    """Refusals while vLLM's configuration is created, before any process is started for it."""

    def config(self, model: Path, layers: Any, **arguments: Any) -> Any:
        settings = {
            "model": str(model),
            "attention_backend": "fastattention",
            "max_model_len": 256,
            "kv_cache_memory_bytes": 64 << 20,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
        }
        return EngineArgs(**(settings | host(layers) | arguments)).create_engine_config()

    @pytest.mark.parametrize(
        ("layers", "words"),
        [
            (99, "host_kv_layers 99 is not possible.*possible values: 0-3"),
            (4, "host_kv_layers 4 is not possible.*possible values: 0-3"),
            (-1, "-1"),
            ([0, -1], "-1"),
            ("some", "'some'"),
            (1.5, "1.5"),
            (True, "True"),
            ([0, 4], "layer 4.*0-3"),
            ([0, 1, 2, 3], "no full-attention layer on the device"),
        ],
    )
    def test_wrong_values(self, layers: Any, words: str, model: Path) -> None:
        with pytest.raises(ValueError, match=words) as caught:
            self.config(model, layers)
        assert is_one_sentence(caught.value)

    def test_a_model_without_a_cache_has_no_host_layers(self, tmp_path: Path) -> None:
        reference.bert().save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertModel"]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="host_kv_layers 1 is not possible") as caught:
            self.config(tmp_path, 1, runner="pooling")
        assert is_one_sentence(caught.value)

    def test_a_layer_whose_cache_is_shared_is_refused(self, tmp_path: Path) -> None:
        config = reference.gemma3n()
        config.architectures = ["Gemma3nForCausalLM"]
        config.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="layer 2, but other layers share its KV cache") as caught:
            self.config(tmp_path, [2])
        assert is_one_sentence(caught.value)

    def test_the_decision_is_part_of_the_configuration(self, model: Path) -> None:
        """Compiled graphs are looked up by it."""
        decided = [self.config(model, layers) for layers in (2, [2, 0], "auto", 0)]
        sections = [config.additional_config["fastattention"]["host_kv_layers"] for config in decided]
        assert sections == [[1, 3], [0, 2], [], []]
        first, second, third, fourth = (config.compute_hash() for config in decided)
        assert len({first, second, third}) == 3
        assert third == fourth

    def test_an_automatic_length_is_fitted_to_the_host_budget(self, model: Path) -> None:
        """This happens before the engine starts, because vLLM's own fit is off by a block up to 0.29."""
        budget = host(2, host_kv_gib=30.5 * 2 * PAGE / (1 << 30))
        config = self.config(model, 2, max_model_len=-1, block_size=16, dtype="float32", **budget)
        assert config.model_config.max_model_len == 29 * 16

    @pytest.mark.parametrize("layers", [1, 0])
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
            ({"tensor_parallel_size": 4, "decode_context_parallel_size": 2}, "context parallelism"),
            ({"kv_offloading_size": 1.0}, "a KV connector"),
        ],
    )
    def test_features_that_conflict_with_host_layers_are_refused(
        self, arguments: dict[str, Any], words: str, layers: int, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each check is tested separately: without a GPU, some options are refused with or without host layers."""
        monkeypatch.setattr("fastattention_vllm.integration.cpu.platform.check_supported", lambda config: None)
        if not layers:
            self.config(model, layers, **arguments)
            return
        with pytest.raises(
            ValueError, match=f"{words} is not supported with host layers.*host_kv_layers to 0"
        ) as caught:
            self.config(model, layers, **arguments)
        assert is_one_sentence(caught.value)


@pytest.mark.usefixtures("small_parts")
def test_the_device_streams_the_configured_fraction(
    model: Path, prompts: list[list[int]], expected: list[Answer]
) -> None:
    """The fraction applies to every host layer. The default is none, because the device is the host itself."""
    with small_blocks(model, **host(2)) as llm:
        assert host_layers_of(llm).group.stream_split == StreamSplit(0.0)
    with small_blocks(model, **host(2, stream_fraction=0.25)) as llm:
        assert host_layers_of(llm).group.stream_split == StreamSplit(0.25)
        check(generate(llm, prompts), expected)


def test_two_ranks_equal_hugging_face(model: Path, prompts: list[list[int]], expected: list[Answer]) -> None:
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with small_blocks(model, **ranks, kv_cache_memory_bytes=KV_BYTES, **host(3)) as llm:
        assert num_blocks(llm) == KV_BYTES // (PAGE // 2)
        check(generate(llm, prompts), expected)


@pytest.mark.usefixtures("small_parts")
def test_the_needle_is_found_over_host_layers(tmp_path: Path) -> None:
    """The answer needs every head of every layer; a single wrong page changes it."""
    spec = DemoModelSpec(num_heads=4, num_kv_heads=2, dtype="bfloat16")
    path = build_demo_model(tmp_path / "demo", spec)
    prompts = [list(make_haystack(3000, {"alpha": "7319"}, depths=[d], ask="alpha").token_ids) for d in (0.1, 0.6)]
    length = {"max_model_len": 4096, "max_num_batched_tokens": 512}
    with small_blocks(path, dtype="bfloat16", **length, **host(spec.num_layers - 1)) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        for share in (0.0, 0.5):
            host_layers_of(llm).set_stream_split(StreamSplit(share))
            # The last chunk of a prompt may have only a few tokens, which the CPU computes.
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            assert [output.outputs[0].token_ids[0] for output in outputs] == [token_id("7319")] * 2
