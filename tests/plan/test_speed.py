"""Predicted speed: what it is made of, and how it depends on the machine."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.placement.stream_split import MIN_SPLIT_BYTES, StreamSplit
from fastattention_vllm.plan import speed
from fastattention_vllm.plan.errors import DoesNotFitError
from fastattention_vllm.plan.hardware import Machine, machine, measured, tables
from fastattention_vllm.plan.memory import MemoryPlan, Request, plan_memory
from fastattention_vllm.plan.model import shape_of
from fastattention_vllm.plan.speed import Way, decode, engines_way, host_rates, prefill
from fastattention_vllm.plan.weights import Stored
from scripts.plan_table import RESULTS
from tests.plan.drawn import REQUESTS, machines, shapes
from tests.plan.shapes import FOLDER, shape

K256 = 1 << 18
BY_CPU, BY_LINK = (Way(StreamSplit(fraction), in_graph=False) for fraction in (0.0, 1.0))


def pangu(computer: Machine | None = None, context: int = K256) -> MemoryPlan:
    return plan_memory(shape("pangu-38b"), computer or machine("v100-32g", 8), Request(context))


def with_host(plan: MemoryPlan, **numbers: float) -> MemoryPlan:
    host = plan.machine.host.model_copy(update=numbers)
    return dataclasses.replace(plan, machine=dataclasses.replace(plan.machine, host=host))


def test_256k_tokens_on_a_dgx_1_wait_for_its_memory() -> None:
    plan = pangu()
    found = decode(plan)
    assert found.limited_by == "host memory"
    read = len(plan.placement.host) * K256 * 8 * plan.kv_bytes_per_token
    floor = read / (1e9 * plan.machine.host.read_gb_per_s)
    assert floor < found.seconds < 1.2 * floor
    assert prefill(plan).limited_by == "FLOPs"


def test_what_limits_decoding_follows_the_machine() -> None:
    plan = pangu()
    assert decode(with_host(plan, cores=2)).limited_by == "CPU cores"
    few = plan_memory(shape("llama3-8b"), machine("h200-141g", 1), Request(8192, kv_cache_gib=0.25))
    assert decode(with_host(few, read_gb_per_s=1e5, cores=100_000)).limited_by == "launches"
    assert decode(plan, BY_LINK).limited_by == "link"
    on_device = plan_memory(shape("llama2-7b"), machine("v100-32g", 1), Request(4096))
    assert decode(on_device).limited_by == "device memory"
    many = plan_memory(shape("llama3-8b"), machine("a100-80g", 1), Request(1, requests=1024))
    assert decode(many).limited_by == "FLOPs"
    slow = machine("v100-pcie-32g", 8)
    assert prefill(plan_memory(shape("llama3-8b"), slow, Request(8192))).limited_by == "links between devices"


STORED = {
    "int4": Stored("awq", "int", 4, "group", 128),
    "int8": Stored("gptq", "int", 8, "group", 128),
    "e4m3": Stored("fp8", "float", 8, "tensor"),
}


def test_products_of_quantised_weights_take_as_long_as_counted() -> None:
    """Simulated turns and counted passes, of 270 products. The planner leaves out what a launch costs."""
    file = RESULTS / "2026-11-25-volta-counted-weights-prefill.json"
    rows, v100 = json.loads(file.read_text())["rows"], machine("v100-32g", 1)
    assert len(rows) == 270
    for row in rows:
        found = re.fullmatch(r"(\w+) .*\((\d+) x (\d+)\) (\d+) rows", row["case"])
        assert found is not None
        form, weights, tokens = STORED[found[1]], int(found[2]) * int(found[3]), int(found[4])
        before, again = speed.repeated(form, weights, tokens)
        assert (before > 0) == (row["chosen"] == "unpacked"), row["case"]
        assert form.bytes is not None
        packed, rate = form.bytes * weights, speed._memory_rate(v100)
        product = max((packed + again) / rate, 2 * weights * tokens / speed._linear_rate(v100))
        ratio = (product + before / rate) / (1e-6 * row[f"{row['chosen']}_us"])
        assert (0.85 if packed > 20e6 else 0.65) < ratio < 1.15, row["case"]


def quantised(config: dict[str, Any], device: str = "v100-16g", **asked: Any) -> MemoryPlan:
    whole = json.loads((FOLDER / "qwen3-32b" / "config.json").read_text()) | {"quantization_config": config}
    return plan_memory(shape_of(whole, "here"), machine(device, 4), Request(16, **asked))


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(("config", "most"), [(AWQ, 7), (AWQ | {"quant_method": "gptq", "bits": 8}, 4)])
def test_a_v100_reads_quantised_weights_again_for_every_16_requests(config: dict[str, Any], most: int) -> None:
    def bytes_of(requests: int, device: str = "v100-32g") -> float:
        """That a step reads and writes beside its KV cache and the matrix of logits."""
        plan = quantised(config, device, requests=requests)
        seconds = sum(seconds for limit, seconds in decode(plan).parts.items() if limit in ("device memory", "FLOPs"))
        cache = requests * 16 * 64 * plan.kv_bytes_per_token + 2 * plan.shape.head_parameters(4)
        return seconds * speed._memory_rate(plan.machine) - cache

    once = bytes_of(1)
    for requests in (2, 15, 16):
        assert bytes_of(requests) == pytest.approx(once, rel=0.01)
    assert bytes_of(17) == pytest.approx(2 * once, rel=0.01)
    assert bytes_of(16 * most) == pytest.approx(most * once, rel=0.01)
    # Unpacked: read, written in fp16, and either read or multiplied.
    plain = 2 * shape("qwen3-32b").layers_parameters(4)
    assert 0.99 * (once + 2 * plain) < bytes_of(16 * most + 1) < once + 3.5 * plain
    assert bytes_of(17, "a100-80g") == pytest.approx(bytes_of(1, "a100-80g"), rel=0.01)


def test_prompts_unpack_quantised_weights_for_every_chunk() -> None:
    plan = quantised(AWQ, "v100-32g")
    small, large = (
        prefill(dataclasses.replace(plan, request=Request(8192, batched_tokens=tokens))).parts["device memory"]
        for tokens in (256, 4096)
    )
    assert small == pytest.approx(16 * large, rel=0.01)
    moved = plan.device.weights - 4 * plan.shape.head_parameters(4) + 2 * plan.shape.layers_parameters(4)
    assert large == pytest.approx(2 * moved / speed._memory_rate(plan.machine), rel=0.01)


def test_a_slow_link_limits_the_prompt_of_host_layers() -> None:
    plan = pangu()
    slow = with_host(plan, link_gb_per_s=0.1, links_gb_per_s=0.8)
    assert prefill(slow).limited_by == "link"
    assert prefill(slow).seconds > prefill(plan).seconds


def test_linear_attention_reads_states_and_no_keys() -> None:
    """A prompt of one chunk: all matrices once per token, and pairs of tokens in the 16 full layers only."""
    computer, tokens = machine("h200-141g", 1), 4096
    plan = plan_memory(shape("qwen3.5-27b"), computer, Request(tokens))
    assert plan.shape.linear is not None
    matrices = plan.shape.parameters() - 2 * plan.shape.head_parameters()
    rate = 1e12 * computer.device.tflops
    attention = 16 * 4 * (tokens * (tokens + 1) // 2) * 24 * 256
    expected = 2 * matrices * tokens / (rate * measured().linear_fraction.value)
    expected += attention / (rate * computer.kernels.attention_fraction(256))
    assert prefill(plan).seconds == pytest.approx(expected)
    without = dataclasses.replace(plan.shape.linear, layers=())
    less = decode(dataclasses.replace(plan, shape=dataclasses.replace(plan.shape, linear=without)))
    states = (
        2
        * 48
        * plan.shape.linear.state_bytes(1)
        / (1e9 * computer.device.gb_per_s * measured().device_memory_fraction.value)
    )
    assert decode(plan).parts["device memory"] - less.parts["device memory"] == pytest.approx(states)


def test_the_split_is_the_engines() -> None:
    """With 4 query heads per KV head the CPU does not reach the memory's rate, so the link helps; with 1 it does."""
    computer = machine("h200-141g", 1, "h200-16-cores")
    large = 1 << 30
    grouped, _ = host_rates(computer, large, 4)
    alone, _ = host_rates(computer, large, 1)
    assert speed.stream_split(grouped).of(large) > 0
    assert speed.stream_split(alone).fraction == 0
    assert grouped.cpu_beside_link + grouped.link_beside_cpu == pytest.approx(grouped.memory)


def h200(tokens: int = 8192, **asked: Any) -> MemoryPlan:
    """31 host layers of (32,8,128), on the host that was measured."""
    computer = machine("h200-141g", 1, "h200-16-cores")
    return of_length(plan_memory(shape("llama3-8b"), computer, Request(8192, kv_cache_gib=0.25, **asked)), tokens)


def of_length(plan: MemoryPlan, tokens: int) -> MemoryPlan:
    return dataclasses.replace(plan, request=dataclasses.replace(plan.request, context=tokens))


def with_kernels(plan: MemoryPlan, name: str) -> MemoryPlan:
    return dataclasses.replace(plan, machine=dataclasses.replace(plan.machine, kernels=tables().kernels[name]))


def with_windows(plan: MemoryPlan, window: int) -> MemoryPlan:
    """Every second host layer has a window."""
    layers = len(plan.placement.host)
    size = dataclasses.replace(
        plan.placement.host_size, full_layers=layers - layers // 2, windowed_layers=layers // 2, window=window
    )
    return dataclasses.replace(plan, placement=dataclasses.replace(plan.placement, host_size=size))


def test_attention_of_one_host_layer_in_pieces_is_the_formula() -> None:
    plan = h200()
    layers, size = len(plan.placement.host), 8192 * plan.kv_bytes_per_token
    rates, _ = host_rates(plan.machine, size, 4)
    by_cpu = decode(plan, BY_CPU).parts["host memory"]
    assert by_cpu == pytest.approx(layers * size / rates.cpu)
    by_link = decode(plan, BY_LINK).parts["link"]
    assert by_link == pytest.approx(layers * size / rates.link)
    half = decode(plan, Way(StreamSplit(0.5), in_graph=False)).parts["host memory"]
    assert half == pytest.approx(layers * size / 2 / min(rates.cpu_beside_link, rates.link_beside_cpu))
    launches = decode(plan, BY_CPU).parts["launches"]
    assert launches <= 1e-3 * layers * measured().launch_ms.value


def test_attention_of_one_host_layer_in_a_graph_is_the_formula() -> None:
    plan = h200()
    layers, size = len(plan.placement.host), 8192 * plan.kv_bytes_per_token
    rates, _ = host_rates(plan.machine, size, 4)
    in_place = measured().link_in_place.value * rates.link
    beside = measured().link_in_place.value * rates.link_beside_cpu
    for fraction, rate in ((0.1, rates.cpu_beside_link / 0.9), (0.9, beside / 0.9)):
        shared = decode(plan, Way(StreamSplit(fraction), in_graph=True, shares=True)).parts["host memory"]
        assert shared == pytest.approx(layers * size / rate)
    everything = decode(plan, Way(StreamSplit(1.0), in_graph=True, shares=True)).parts["link"]
    assert everything == pytest.approx(layers * size / in_place)
    alone = decode(plan, Way(StreamSplit(0.5), in_graph=True)).parts
    assert alone["host memory"] == pytest.approx(layers * size / rates.cpu)
    ring, merge = (1e-6 * layers * constant.value for constant in (measured().ring_us, measured().merge_us))
    assert alone["launches"] == pytest.approx(32e-6 * measured().layer_us.value + ring)
    merged = decode(plan, Way(StreamSplit(0.0), in_graph=True, shares=True)).parts["launches"]
    assert merged == pytest.approx(alone["launches"] + merge)


def test_the_way_is_the_engines() -> None:
    """Where it shares with the link, a graph needs no more than pieces. CPU and link finish together in it."""
    plan = h200(K256)
    rates, _ = speed._rates(plan, 2 << 30)
    way = engines_way(plan)
    assert way == Way(speed.stream_split(rates), in_graph=True, shares=True)
    size = K256 * plan.kv_bytes_per_token
    share = way.fraction(size, windowed=False)
    assert share * size / rates.in_graph() == pytest.approx((1 - share) * size / rates.cpu_beside_link)
    assert share == way.fraction(1, windowed=False), "of any length"
    assert decode(plan) == decode(plan, way)
    until = speed.whole_steps_until(way.split, rates, in_graph=True)
    long = int(until) // plan.kv_bytes_per_token
    assert engines_way(of_length(plan, long)).in_graph
    assert not engines_way(of_length(plan, long + 1)).in_graph


def test_where_a_graph_does_not_share() -> None:
    """There, the CPU reads alone in it, or steps run in pieces from the engine's length on."""
    short, long = (MIN_SPLIT_BYTES // 4096 * factor for factor in (1, 2))
    eight_bits, copies = h200(long, host_kv_dtype="int8"), h200(long, resident_kv_gib=1.0)
    for plan in (eight_bits, copies):
        assert not engines_way(plan).shares
        assert engines_way(of_length(plan, short - 1)).in_graph
        assert not engines_way(of_length(plan, 2 * long)).in_graph
    merged = decode(of_length(copies, 1024)).parts["launches"] - decode(of_length(eight_bits, 1024)).parts["launches"]
    assert merged == pytest.approx(1e-6 * len(copies.placement.host) * measured().merge_us.value)
    volta, ascend = (with_kernels(h200(), name) for name in ("volta", "ascend"))
    assert engines_way(volta).in_graph
    assert not engines_way(volta).shares
    assert not engines_way(of_length(volta, 2 * long)).in_graph
    assert not engines_way(with_kernels(copies, "volta")).in_graph
    assert not engines_way(ascend).in_graph


def test_the_link_reads_nothing_of_layers_with_a_window() -> None:
    window = 2 * MIN_SPLIT_BYTES // 4096
    plan = with_windows(h200(2 * window), window)
    full = plan.placement.host_size.full_layers
    windowed = plan.placement.host_size.windowed_layers
    rates, _ = speed._rates(plan, window * plan.kv_bytes_per_token)
    for way in (engines_way(plan), dataclasses.replace(engines_way(plan), in_graph=False)):
        without = dataclasses.replace(plan.placement.host_size, windowed_layers=0)
        less = dataclasses.replace(plan, placement=dataclasses.replace(plan.placement, host_size=without))
        seconds = decode(plan, way).parts["host memory"] - decode(less, way).parts["host memory"]
        assert seconds == pytest.approx(windowed * window * plan.kv_bytes_per_token / rates.cpu)
    launches = decode(plan).parts["launches"] - 32e-6 * measured().layer_us.value
    rings = (full + windowed) * measured().ring_us.value
    assert launches == pytest.approx(1e-6 * (rings + full * measured().merge_us.value))


def test_reading_weights_and_cache_is_the_formula() -> None:
    plan = plan_memory(shape("llama2-7b"), machine("v100-32g", 1), Request(4096))
    model = plan.shape
    read = 2 * (model.parameters() - model.head_parameters()) + 4096 * 32 * plan.kv_bytes_per_token
    rate = 900e9 * measured().device_memory_fraction.value
    assert decode(plan).parts["device memory"] == pytest.approx(read / rate)
    assert decode(plan).parts["launches"] == pytest.approx(32e-6 * measured().layer_us.value)


def test_flops_of_a_prompt_are_the_formula() -> None:
    plan = plan_memory(shape("llama2-7b"), machine("v100-32g", 1), Request(4096, batched_tokens=1024))
    model = plan.shape
    linear = 2 * 32 * model.layer_parameters() * 4096 / (125e12 * measured().linear_fraction.value)
    attention = 4 * 32 * (4096 * 4097 // 2) * 32 * 128 / (125e12 * plan.machine.kernels.attention_fraction(128))
    assert prefill(plan).seconds == pytest.approx(linear + attention)


def test_windows_cost_less() -> None:
    full = plan_memory(shape("llama3-8b"), machine("h200-141g", 1), Request(8192))
    windowed = dataclasses.replace(
        full,
        shape=dataclasses.replace(full.shape, window=512, windowed_layers=tuple(range(0, 32, 2))),
        size=dataclasses.replace(full.size, window=512),
        placement=dataclasses.replace(
            full.placement, device_size=dataclasses.replace(full.size, full_layers=16, windowed_layers=16, window=512)
        ),
    )
    assert prefill(windowed).seconds < prefill(full).seconds
    assert decode(windowed).seconds < decode(full).seconds


def test_sums_are_shared_by_two_devices_and_more() -> None:
    one, two = (plan_memory(shape("llama3-8b"), machine("h200-141g", n), Request(8192)) for n in (1, 2))
    assert "links between devices" not in prefill(one).parts
    moved = 2 * 32 * 2 * 8192 * 4096 / (1e9 * two.machine.peers.gb_per_s)
    starts = 2 * 32e-6 * measured().all_reduce_us.value
    assert prefill(two).parts["links between devices"] == pytest.approx(moved + starts)
    assert prefill(two).seconds < prefill(one).seconds


@settings(max_examples=40, deadline=None)
@given(st.data(), REQUESTS)
def test_parts_add_up_and_faster_hardware_is_never_slower(data: st.DataObject, request: Request) -> None:
    model = data.draw(shapes())
    computer = data.draw(machines(model))
    try:
        plan = plan_memory(model, computer, request)
    except DoesNotFitError:
        return
    for found in (prefill(plan), decode(plan)):
        assert found.seconds == pytest.approx(sum(found.parts.values()))
        assert found.parts[found.limited_by] == max(found.parts.values())
        assert all(seconds > 0 for seconds in found.parts.values())
    faster = dataclasses.replace(
        computer,
        device=computer.device.model_copy(
            update={"tflops": 2 * computer.device.tflops, "gb_per_s": 2 * computer.device.gb_per_s}
        ),
    )
    doubled = dataclasses.replace(plan, machine=faster)
    assert prefill(doubled).seconds <= prefill(plan).seconds * (1 + 1e-9)
    assert decode(doubled).seconds <= decode(plan).seconds * (1 + 1e-9)
    assert decode(with_host(plan, read_gb_per_s=2 * computer.host.read_gb_per_s)).seconds <= (
        decode(plan).seconds * (1 + 1e-9)
    )


@settings(max_examples=40, deadline=None)
@given(st.data(), REQUESTS, st.integers(1, 1 << 20))
def test_a_longer_prompt_takes_longer(data: st.DataObject, request: Request, longer: int) -> None:
    model = data.draw(shapes())
    computer = data.draw(machines(model))
    first, second = sorted((request.context, longer))
    try:
        plans = [plan_memory(model, computer, dataclasses.replace(request, context=n)) for n in (first, second)]
    except DoesNotFitError:
        return
    assert prefill(plans[0]).seconds <= prefill(plans[1]).seconds * (1 + 1e-9)
