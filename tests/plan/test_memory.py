"""Placement and bytes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastattention_vllm.placement.budget import WORKSPACE
from fastattention_vllm.placement.kv_size import KvSize
from fastattention_vllm.placement.plan import plan
from fastattention_vllm.plan.errors import DoesNotFitError, PlanError
from fastattention_vllm.plan.hardware import GIB, Machine, machine
from fastattention_vllm.plan.memory import MAX_NUM_SEQS, MemoryPlan, Request, device_memory, plan_memory
from fastattention_vllm.plan.model import ModelShape, shape_of
from fastattention_vllm.plan.report import serve_words
from fastattention_vllm.plan.speed import decode
from fastattention_vllm.plan.weights import UNKNOWN, CacheScheme, cache_scheme
from tests.plan.drawn import REQUESTS, machines, shapes
from tests.plan.shapes import FOLDER, shape

K256 = 1 << 18


def try_plan(model: ModelShape, computer: Machine, request: Request) -> MemoryPlan | None:
    try:
        return plan_memory(model, computer, request)
    except DoesNotFitError:
        return None


def test_pangu_38b_holds_256k_tokens_on_eight_v100() -> None:
    found = plan_memory(shape("pangu-38b"), machine("v100-32g", 8), Request(K256))
    assert 16 <= found.paper.device_layers <= 20
    assert found.paper.layer_bytes == 2 * K256 * 64 * 128 * 2
    assert 16 <= len(found.placement.device) <= 20
    assert found.longest_context == K256
    assert found.longest_on_device < K256 / 2, "without host layers it does not fit"
    assert found.host_kv_gib is not None, "more than half of the host's memory"
    assert 8 * found.host_kv_needed == pytest.approx(len(found.placement.host) * 8 * GIB, rel=0.01)


def test_pangu_71b_needs_a_larger_host() -> None:
    with pytest.raises(DoesNotFitError, match="use --context "):
        plan_memory(shape("pangu-71b"), machine("v100-32g", 8), Request(K256))
    found = plan_memory(shape("pangu-71b"), machine("v100-32g", 8, "xeon-pcie3"), Request(K256))
    assert len(found.placement.host) > len(found.placement.device)


@pytest.mark.parametrize(
    ("name", "gpu", "ranks", "host_layers"),
    [
        ("llama2-7b", "v100-16g", 2, 0),
        ("llama2-70b", "v100-32g", 8, 0),
        ("llama3-8b", "rtx3090-24g", 1, 0),
        ("qwen3-32b", "v100-16g", 8, 0),
        ("qwen3-32b", "a100-80g", 1, 27),
    ],
)
def test_known_models_at_their_longest_context(name: str, gpu: str, ranks: int, host_layers: int) -> None:
    model = shape(name)
    found = plan_memory(model, machine(gpu, ranks), Request(model.max_positions))
    assert len(found.placement.host) == host_layers
    assert found.longest_context == model.max_positions


def test_kappa_of_llama2_70b() -> None:
    """2 * B * S * H_kv * d * bytes over all devices, with B requests."""
    found = plan_memory(shape("llama2-70b"), machine("v100-32g", 8), Request(4096, requests=3))
    assert found.paper.layer_bytes == 2 * 3 * 4096 * 8 * 128 * 2
    assert found.paper.free_bytes == 8 * found.device.kv
    assert found.paper.device_layers == 80


def test_many_requests_leave_less_for_the_cache_on_a_v100() -> None:
    """The kernels keep parts of every decoding request: for 256 requests of Qwen3.5-27B on two, 97 MiB."""
    model, computer = shape("qwen3.5-27b"), machine("v100-32g", 4)
    one, many = (device_memory(model, computer, Request(8192, requests=requests)) for requests in (1, 1024))
    assert many.workspace - WORKSPACE == 4 * (one.workspace - WORKSPACE) > 100 << 20
    assert one.kv - many.kv == many.workspace - one.workspace + many.activations - one.activations
    longer = device_memory(model, machine("v100-32g", 2), Request(K256))
    assert longer.workspace - WORKSPACE == pytest.approx(97 << 20, rel=0.01)
    assert device_memory(model, machine("h200-141g", 1), Request(K256)).workspace == WORKSPACE


@settings(max_examples=50, deadline=None)
@given(st.data(), REQUESTS)
def test_all_layers_are_placed_and_no_byte_is_planned_twice(data: st.DataObject, request: Request) -> None:
    model = data.draw(shapes())
    computer = data.draw(machines(model))
    found = try_plan(model, computer, request)
    assume(found is not None)
    assert found is not None
    assert sorted(found.placement.device + found.placement.host) == list(range(model.num_layers))
    assert found.paper.device_layers + found.paper.host_layers == model.num_layers
    device = found.device
    parts = (device.weights, device.driver, device.activations, device.workspace, device.staging, device.unused)
    assert all(part >= 0 for part in parts)
    assert sum(parts) + device.kv == device.total == computer.device_bytes
    assert found.device_kv_needed <= found.placement.usable(device.kv, found.host_budget) <= device.kv
    blocks = found.placement.max_blocks(device.kv, found.host_budget)
    assert found.host_kv_needed <= found.placement.host_bytes(blocks) or not found.placement.host
    assert found.host_budget <= computer.free_host_bytes
    # The very call of the server.
    assert plan(found.layers, found.size, "auto", found.limits) == found.placement


@settings(max_examples=40, deadline=None)
@given(st.data(), REQUESTS, st.integers(1, 1 << 20))
def test_more_context_never_frees_bytes(data: st.DataObject, request: Request, longer: int) -> None:
    model = data.draw(shapes(windows=False))
    computer = data.draw(machines(model))
    first, second = sorted((request.context, longer))
    small = try_plan(model, computer, dataclasses.replace(request, context=first))
    large = try_plan(model, computer, dataclasses.replace(request, context=second))
    assert small is not None or large is None, "what is longer fits less"
    assume(small is not None)
    assume(large is not None)
    assert small is not None
    assert large is not None
    assert len(small.placement.host) <= len(large.placement.host)
    assert small.device_kv_needed + small.host_kv_needed <= large.device_kv_needed + large.host_kv_needed
    assert small.paper.device_layers >= large.paper.device_layers
    assert small.largest_batch >= large.largest_batch
    assert small.longest_context == large.longest_context


@settings(max_examples=15, deadline=None)
@given(st.data(), REQUESTS)
def test_the_longest_context_and_the_largest_batch_fit_and_no_more(data: st.DataObject, request: Request) -> None:
    model = data.draw(shapes())
    computer = data.draw(machines(model))
    found = try_plan(model, computer, request)
    assume(found is not None)
    assert found is not None
    assert found.longest_context >= request.context
    assert found.largest_batch >= request.requests
    assert try_plan(model, computer, dataclasses.replace(request, context=found.longest_context))
    assert try_plan(model, computer, dataclasses.replace(request, requests=found.largest_batch))
    if found.longest_context < model.max_positions:
        assert not try_plan(model, computer, dataclasses.replace(request, context=found.longest_context + 1))
    if found.largest_batch < request.max_num_seqs:
        assert not try_plan(model, computer, dataclasses.replace(request, requests=found.largest_batch + 1))
    alone = found.largest_batch_on_device
    assert alone <= found.largest_batch
    for requests, fits in ((alone, True), (alone + 1, False)):
        need = requests * (found.size.of_request(request.context) - found.size.null_block()) + found.size.null_block()
        if 0 < requests <= request.max_num_seqs:
            assert (need <= found.device.kv) == fits


def test_without_host_memory_the_engines_block_manager_decides() -> None:
    found = plan_memory(shape("llama3-8b"), machine("rtx3090-24g", 1), Request(8192))
    size = KvSize(block_size=128, bytes_per_block=128 * 4096, full_layers=32)
    assert found.size == dataclasses.replace(size, tokens_per_step=8192)
    assert found.longest_on_device == min(8192, size.longest_request(found.device.kv))


@pytest.mark.parametrize(
    ("gpu", "ranks", "block", "kv_heads"),
    [
        ("h200-141g", 1, 896, 4),
        ("h200-141g", 2, 896, 2),
        ("h200-141g", 4, 896, 1),
        ("h200-141g", 8, 512, 1),
        ("v100-32g", 4, 784, 1),
        ("v100-32g", 8, 400, 1),
    ],
)
def test_blocks_hold_the_states_of_linear_attention(gpu: str, ranks: int, block: int, kv_heads: int) -> None:
    """vLLM's numbers with the same shape; tests/conformance/hybrid_block_tables.py and
    tests/integration/host_layers/test_hybrids.py compare them. vLLM 0.19 runs on V100s."""
    found = plan_memory(shape("qwen3.5-27b"), machine(gpu, ranks), Request(K256))
    assert found.size == KvSize(
        block_size=block,
        bytes_per_block=block * 2 * kv_heads * 256 * 2,
        full_layers=16,
        state_layers=48,
        state_blocks=2,
        tokens_per_step=8192,
    )
    assert found.layers.full == tuple(range(3, 64, 4))
    assert found.paper.device_layers == 16
    assert found.longest_context == K256


def test_host_layers_beside_linear_attention_are_refused_on_npus() -> None:
    model, computer = shape("qwen3.5-27b"), machine("ascend-910b-64g", 2)
    assert not plan_memory(model, computer, Request(4096)).placement.host
    with pytest.raises(PlanError, match=r"untested with torch_npu's .* tokens need them; lower --context to \d+\."):
        plan_memory(model, computer, Request(K256, kv_cache_gib=4))


def test_host_layers_leave_four_full_layers_beside_linear_attention() -> None:
    model, computer = shape("qwen3.5-27b"), machine("h200-141g", 1)
    found = plan_memory(model, computer, Request(K256, kv_cache_gib=4.6))
    assert len(found.placement.host) == 12
    with pytest.raises(DoesNotFitError):
        plan_memory(model, computer, Request(K256, kv_cache_gib=4.3))


@pytest.mark.parametrize(
    ("gpu", "kv_dtype", "element"),
    [("v100-32g", "auto", 2), ("v100-32g", "fp8", 1), ("h200-141g", "auto", 2), ("h200-141g", "fp8_e4m3", 1)],
)
def test_kv_dtypes(gpu: str, kv_dtype: str, element: int) -> None:
    found = plan_memory(shape("llama3-8b"), machine(gpu, 1), Request(4096, kv_dtype=kv_dtype))
    assert found.kv_bytes_per_token == 2 * 8 * 128 * element
    if kv_dtype == "auto":
        assert found.kv_dtype == ("bfloat16" if gpu == "h200-141g" else "float16"), "a V100 has no bf16"


def test_the_weights_of_a_quantised_model_are_asked_for() -> None:
    plain = shape("llama3-8b")
    formats = tuple(tuple(UNKNOWN for _ in plain.matrices(index)) for index in range(plain.num_layers))
    quantised = dataclasses.replace(plain, quantisation="aqlm", stored=formats)
    with pytest.raises(PlanError, match=r"quantised \(aqlm\).*pass --weights-gib"):
        plan_memory(quantised, machine("t4-16g", 1), Request(4096))
    found = plan_memory(quantised, machine("t4-16g", 1), Request(4096, weights_gib=5.5))
    assert found.device.weights == int(5.5 * GIB)


def test_caps_of_the_user_are_kept() -> None:
    model, computer = shape("llama3-8b"), machine("h200-141g", 1, "h200-16-cores")
    found = plan_memory(model, computer, Request(8192, kv_cache_gib=0.5, host_kv_gib=1.0))
    assert found.device.kv == GIB // 2
    assert found.host_budget == GIB
    assert found.host_kv_gib == 1.0
    assert found.placement.host


@pytest.mark.parametrize(
    ("name", "gpu", "ranks", "request_", "said"),
    [
        ("llama2-7b", "v100-32g", 1, Request(8192), "--context 8192 is longer than the model's 4096 positions"),
        ("llama2-7b", "v100-32g", 3, Request(4096), "--tp 3 does not divide"),
        ("llama2-7b", "v100-32g", 1, Request(64, batched_tokens=8), "--batched-tokens 8 is less than the 256 requests"),
        ("llama2-7b", "v100-32g", 1, Request(64, kv_dtype="int4"), "--kv-dtype int4 is not supported"),
        ("llama2-7b", "v100-32g", 1, Request(64, kv_dtype="bfloat16"), "--kv-dtype bfloat16 is not supported"),
        ("llama2-7b", "v100-32g", 1, Request(64, kv_cache_gib=99), "--kv-cache-gib 99 is more than"),
        ("llama2-7b", "v100-32g", 1, Request(64, host_kv_gib=1e4), "--host-kv-gib 10000 per rank is more than"),
        ("llama2-7b", "v100-32g", 1, Request(64, host_kv_dtype="int4"), "--host-kv-dtype int4 is not supported; use"),
        (
            "llama3-8b",
            "ascend-910b-64g",
            1,
            Request(64, host_kv_dtype="int8"),
            "--host-kv-dtype int8 is not supported with",
        ),
        (
            "llama3-8b",
            "v100-32g",
            1,
            Request(64, kv_dtype="fp8", host_kv_dtype="int8"),
            "--host-kv-dtype is int8, but --kv-dtype fp8 already stores all layers in 8 bits",
        ),
        ("pangu-38b", "v100-32g", 8, Request(K256, kv_dtype="fp8"), "--kv-dtype fp8 is not supported with host layers"),
    ],
)
def test_bad_input_is_one_sentence(name: str, gpu: str, ranks: int, request_: Request, said: str) -> None:
    with pytest.raises(PlanError) as error:
        plan_memory(shape(name), machine(gpu, ranks), request_)
    assert str(error.value).startswith(said)
    assert not isinstance(error.value, DoesNotFitError)


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(DoesNotFitError, match=r"the weights take 128\.5 GiB per device"):
        plan_memory(shape("llama2-70b"), machine("v100-32g", 1), Request(4096))


def test_a_context_that_does_not_fit_names_one_that_does() -> None:
    model, computer = shape("pangu-38b"), machine("v100-32g", 4)
    with pytest.raises(DoesNotFitError) as error:
        plan_memory(model, computer, Request(K256, requests=2))
    longest = int(str(error.value).split("--context ")[1].split(",")[0])
    assert plan_memory(model, computer, Request(longest, requests=2)).longest_context == longest


@pytest.mark.parametrize(("dtype", "row"), [("int8", 2 * (128 + 4)), ("fp8_e4m3", 2 * 128)])
def test_host_layers_of_8_bits(dtype: str, row: int) -> None:
    """A host that holds twice the tokens, and reads half the bytes; the device holds what it held."""
    model, computer = shape("qwen3-32b"), machine("a100-80g", 1)
    before = plan_memory(model, computer, Request(model.max_positions))
    found = plan_memory(model, computer, Request(model.max_positions, host_kv_dtype=dtype))
    assert found.host_bytes_per_token == 8 * row
    assert found.kv_bytes_per_token == before.kv_bytes_per_token == before.host_bytes_per_token == 8 * 2 * 128 * 2
    blocks = -(-model.max_positions // found.size.block_size) + 1
    assert found.host_kv_needed == len(found.placement.host) * blocks * found.size.block_size * 8 * row
    assert before.device.kv - found.device.kv == 256 << 20, "the device widens one buffer at a time"
    assert decode(found).seconds < decode(before).seconds
    words = serve_words(found, "model")
    assert json.loads(words[-1])["fastattention"]["host_kv_dtype"] == dtype


def test_copies_of_host_layers_take_memory_from_the_kv_cache() -> None:
    """Only where there are host layers; a limit of the KV cache does not include them."""
    model, computer = shape("qwen3-32b"), machine("a100-80g", 1)
    longest = Request(model.max_positions, requests=4)
    before = plan_memory(model, computer, longest)
    found = plan_memory(model, computer, dataclasses.replace(longest, resident_kv_gib=1))
    assert found.device.copies == GIB
    assert found.device.kv == before.device.kv - GIB
    assert len(found.placement.host) >= len(before.placement.host) > 0
    assert found.longest_on_device == before.longest_on_device
    assert json.loads(serve_words(found, "model")[-1])["fastattention"]["resident_kv_gib"] == 1
    limited = dataclasses.replace(longest, kv_cache_gib=2)
    without = plan_memory(model, computer, limited)
    beside = plan_memory(model, computer, dataclasses.replace(limited, resident_kv_gib=1))
    assert beside.device.kv == without.device.kv == 2 * GIB
    assert beside.device.unused == without.device.unused - GIB
    short = plan_memory(model, computer, Request(1024, resident_kv_gib=1))
    assert not short.placement.host
    assert short.device.copies == 0
    for changes, said in (
        ({"resident_kv_gib": 60}, "--resident-kv-gib 60 is more than the"),
        ({"resident_kv_gib": 1, "host_kv_dtype": "int8"}, "--resident-kv-gib 1 is not supported with host layers of 8"),
    ):
        with pytest.raises(PlanError) as error:
            plan_memory(model, computer, dataclasses.replace(longest, **changes))  # type: ignore[arg-type]
        assert str(error.value).startswith(said)


SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}


def with_scheme(**entries: Any) -> ModelShape:
    """Qwen3-32B with FP8 weights, whose checkpoint asks for an fp8 KV cache."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    quantisation = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "kv_cache_scheme": SCHEME | entries,
    }
    config = json.loads((FOLDER / "qwen3-32b" / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    return shape_of(config | {"quantization_config": quantisation, "rope_scaling": yarn}, "here")


@pytest.mark.parametrize(
    ("entries", "key"),
    [({"kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo"), ({"kv_cache_scheme": SCHEME}, "kv_cache_scheme")],
)
def test_modelopts_key_for_the_cache_is_named(entries: dict[str, Any], key: str) -> None:
    scheme = cache_scheme({"quant_method": "modelopt", "quant_algo": "FP8"} | entries)
    assert (scheme.dtype, scheme.key) == ("fp8", key)
    model = dataclasses.replace(with_scheme(), cache=scheme)
    with pytest.raises(PlanError, match=rf"the checkpoint's KV cache in fp8 \({key}\) .* checkpoint without {key} "):
        plan_memory(model, machine("v100-16g", 4), Request(131072))
    with pytest.raises(PlanError, match=f"the checkpoint's {key} asks for a KV cache in fp8, which"):
        plan_memory(model, machine("ascend-910b-64g", 4), Request(4096))


@pytest.mark.parametrize("name", ["v100-16g", "t4-16g", "h200-141g"])
def test_a_checkpoint_that_asks_for_an_fp8_cache_gets_it(name: str) -> None:
    """With --kv-cache-dtype auto. The same as if the user had asked for it."""
    model, computer = with_scheme(), machine(name, 4 if name != "t4-16g" else 8)
    plain = dataclasses.replace(model, cache=CacheScheme())
    asked = {dtype: plan_memory(plain, computer, Request(4096, kv_dtype=dtype)) for dtype in ("auto", "fp8")}
    found = plan_memory(model, computer, Request(4096))
    assert found.kv_dtype == "fp8"
    assert found.host_layers_refused.startswith("the checkpoint's KV cache in fp8")
    same = {name: getattr(asked["fp8"], name) for name in ("shape", "request", "host_layers_refused")}
    assert dataclasses.replace(found, **same) == asked["fp8"]
    assert found.kv_bytes_per_token * 2 == asked["auto"].kv_bytes_per_token
    assert found.largest_batch_on_device >= min(2 * asked["auto"].largest_batch_on_device, MAX_NUM_SEQS)
    assert found.longest_context == found.longest_on_device, "host layers are refused beside it"
    assert "--kv-cache-dtype" not in serve_words(found, "here")


@pytest.mark.parametrize(
    ("model", "name", "asked", "said"),
    [
        (
            with_scheme(),
            "v100-16g",
            {"context": 131072},
            "the checkpoint's KV cache in fp8 (kv_cache_scheme) is not supported with host layers, but 1 request(s) of "
            "131072 tokens need them; plan a checkpoint without kv_cache_scheme or lower --context to ",
        ),
        (with_scheme(), "v100-16g", {"kv_dtype": "float16"}, "--kv-dtype float16 has no effect: vLLM on NVIDIA V100"),
        (with_scheme(), "v100-16g", {"kv_dtype": "fp8_e5m2"}, "stores fp8, as the checkpoint's kv_cache_scheme asks;"),
        (with_scheme(), "v100-16g", {"host_kv_dtype": "int8"}, "(kv_cache_scheme) already stores all layers in 8 bits"),
        (
            with_scheme(),
            "t4-16g",
            {"context": 131072, "kv_dtype": "fp8"},
            "; use --kv-dtype float16 or lower --context",
        ),
        (
            with_scheme(),
            "a100-40g",
            {},
            "a KV cache in fp8, which vLLM's FlashAttention on NVIDIA A100 SXM 40 GB does n",
        ),
        (with_scheme(), "a100-40g", {}, "does not support; use --kv-dtype bfloat16."),
        (with_scheme(), "ascend-910b-64g", {}, "does not support; plan a checkpoint without it."),
        (with_scheme(strategy="attn_head"), "v100-16g", {}, "has scales for each KV head (attn_head), but this proj"),
        (with_scheme(strategy="attn_head"), "t4-16g", {}, "reads one for K and one for V in each layer; plan a chec"),
    ],
)
def test_what_a_scheme_of_the_cache_excludes(model: ModelShape, name: str, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as error:
        plan_memory(model, machine(name, 4), Request(**{"context": 4096, **asked}))
    assert said in str(error.value)
    assert str(error.value).endswith(".")


def test_the_user_may_choose_another_cache_than_the_checkpoint() -> None:
    """On newer GPUs, where vLLM lets --kv-cache-dtype win."""
    found = plan_memory(with_scheme(), machine("a100-40g", 2), Request(131072, kv_dtype="bfloat16", kv_cache_gib=4))
    assert (found.kv_dtype, bool(found.placement.host)) == ("bfloat16", True)
    assert "--kv-cache-dtype bfloat16" in " ".join(serve_words(found, "here"))


@pytest.mark.parametrize(
    ("name", "dtype", "served"),
    [
        ("a100-80g", "fp8", "auto, bfloat16"),
        ("rtx4090-24g", "fp8_e4m3", "auto, bfloat16"),
        ("h100-80g", "fp8_e5m2", "auto, bfloat16, fp8, fp8_e4m3"),
        ("h100-80g", "float16", "auto, bfloat16, fp8, fp8_e4m3"),
        ("ascend-910b-64g", "fp8", "auto, bfloat16"),
        ("v100-32g", "bfloat16", "auto, float16, fp8, fp8_e4m3, fp8_e5m2"),
    ],
)
def test_dtypes_that_a_device_cannot_store(name: str, dtype: str, served: str) -> None:
    """FlashAttention reads fp8 on Hopper only, and 16 bits in the model's dtype."""
    with pytest.raises(PlanError, match=rf"--kv-dtype {dtype} is not supported by .*; use one of {served}\."):
        plan_memory(shape("llama3-8b"), machine(name, 1), Request(1024, kv_dtype=dtype))


def test_no_longest_context_counts_host_layers_that_are_refused() -> None:
    model, computer = shape("pangu-38b"), machine("v100-32g", 8)
    found, plain = (plan_memory(model, computer, Request(4096, kv_dtype=dtype)) for dtype in ("fp8", "auto"))
    assert found.longest_context == found.longest_on_device < plain.longest_context
    assert found.largest_batch == found.largest_batch_on_device
    states = plan_memory(shape("qwen3.5-27b"), machine("ascend-910b-64g", 2), Request(4096))
    assert states.longest_context == states.longest_on_device
    # The length in the advice is for all requests together.
    with pytest.raises(PlanError, match="lower --context to") as error:
        plan_memory(model, computer, Request(K256, requests=3, kv_dtype="fp8"))
    longest = int(str(error.value).rpartition(" ")[2].rstrip("."))
    assert not plan_memory(model, computer, Request(longest, requests=3, kv_dtype="fp8")).placement.host
