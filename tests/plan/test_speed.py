"""Predicted speed: what it is made of, and how it depends on the machine."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.placement.stream_split import StreamSplit
from fastattention_vllm.plan import speed
from fastattention_vllm.plan.errors import DoesNotFitError
from fastattention_vllm.plan.hardware import Machine, machine, measured
from fastattention_vllm.plan.memory import MemoryPlan, Request, plan_memory
from fastattention_vllm.plan.speed import decode, host_rates, prefill
from tests.plan.drawn import REQUESTS, machines, shapes
from tests.plan.shapes import shape

K256 = 1 << 18


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
    assert decode(plan, StreamSplit(1.0)).limited_by == "link"
    on_device = plan_memory(shape("llama2-7b"), machine("v100-32g", 1), Request(4096))
    assert decode(on_device).limited_by == "device memory"
    many = plan_memory(shape("llama3-8b"), machine("a100-80g", 1), Request(1, requests=1024))
    assert decode(many).limited_by == "FLOPs"
    slow = machine("v100-pcie-32g", 8)
    assert prefill(plan_memory(shape("llama3-8b"), slow, Request(8192))).limited_by == "links between devices"


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


def test_attention_of_one_host_layer_is_the_formula() -> None:
    plan = plan_memory(shape("llama3-8b"), machine("h200-141g", 1, "h200-16-cores"), Request(8192, kv_cache_gib=0.25))
    layers, size = len(plan.placement.host), 8192 * plan.kv_bytes_per_token
    rates, _ = host_rates(plan.machine, size, 4)
    by_cpu = decode(plan, StreamSplit(0.0)).parts["host memory"]
    assert by_cpu == pytest.approx(layers * size / rates.cpu)
    by_link = decode(plan, StreamSplit(1.0)).parts["link"]
    assert by_link == pytest.approx(layers * size / rates.link)
    half = decode(plan, StreamSplit(0.5)).parts["host memory"]
    assert half == pytest.approx(layers * size / 2 / min(rates.cpu_beside_link, rates.link_beside_cpu))
    launches = decode(plan, StreamSplit(0.0)).parts["launches"]
    assert launches <= 1e-3 * layers * measured().launch_ms.value


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
