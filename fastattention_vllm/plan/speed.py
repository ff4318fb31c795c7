"""Predicted speed of prefill and decoding, and what limits each. Pure functions; all constants are in the data files.

Seconds of one decoding step: the attention of the host layers, plus the longer of the device's work and the CPU's work
to launch it between two host layers. The device waits for the CPU at each host layer, so its work does not overlap with
that attention.

    one host layer's attention = (b - H) / (C + P), with C the CPU's rate, P the link's rate beside it, and H the bytes
    that the link brings while the CPU waits; b / C where the CPU works alone, b / P where the link brings everything

Seconds of a prompt: for every chunk and layer, the FLOPs of the linear layers and of attention, or if that takes
longer, the time in which the link brings the context of a host layer; and two all-reduces.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Literal

from fastattention_vllm.placement.stream_split import Rates, StreamSplit, stream_split
from fastattention_vllm.plan.hardware import Machine, measured
from fastattention_vllm.plan.memory import MemoryPlan
from fastattention_vllm.plan.model import ModelShape

Limit = Literal["FLOPs", "device memory", "host memory", "CPU cores", "link", "links between devices", "launches"]
ALL_REDUCES = 2
"""Sums over the ranks in each layer."""
MIB = 1 << 20
ELEMENT = 2
"""Bytes of an activation or a weight."""


@dataclass(frozen=True)
class Prediction:
    seconds: float
    """One step, or one prompt."""
    tokens_per_second: float
    """All requests together."""
    limited_by: Limit
    """The part that takes longest."""
    parts: dict[Limit, float]
    """Seconds of each part. They add up to ``seconds``."""


Parts = defaultdict[Limit, float]
"""Seconds by what limits them."""


def _prediction(parts: Parts, tokens: int) -> Prediction:
    seconds = sum(parts.values())
    ordered: dict[Limit, float] = dict(sorted(parts.items(), key=lambda part: -part[1]))
    return Prediction(seconds, tokens / seconds, next(iter(ordered)), {k: v for k, v in ordered.items() if v})


def host_rates(machine: Machine, layer_bytes: int, heads_per_kv_head: int, width: float = 1.0) -> tuple[Rates, Limit]:
    """Rates of one rank, and what limits its CPUs. ``layer_bytes``: one layer's KV of all ranks and requests.

    ``width``: bytes of a host layer's token relative to 16 bits. A core computes as many tokens per second of any
    width.
    """
    constants, ranks = measured(), machine.ranks
    memory = 1e9 * machine.host.read_gb_per_s / ranks
    fraction = min(constants.cpu_by_mib.at(layer_bytes / MIB), constants.cpu_by_group.at(heads_per_kv_head))
    cores = 1e9 * constants.core_gb_per_s.value * machine.host.cores / ranks * width
    cpu = min(fraction * memory, cores)
    link = min(machine.host.link_bytes(ranks), memory)
    # Both read the same memory. The link keeps most of its rate there, and the CPU gets the rest.
    beside = constants.link_beside_cpu.value * link
    limit: Limit = "CPU cores" if cores < fraction * memory else "host memory"
    return Rates(memory, cpu, link, min(cpu, memory - beside), beside), limit


def decode(plan: MemoryPlan, split: StreamSplit | None = None) -> Prediction:
    """One step in which every request has its full context.

    ``split``: how much the link brings; None for the choice of the engine.
    """
    request, constants, on_host = plan.request, measured(), plan.placement.host_size
    parts = Parts(float)
    for layers, tokens in (
        (on_host.full_layers, request.context),
        (on_host.windowed_layers, min(on_host.window, request.context)),
    ):
        if layers:
            limit, seconds = _host_layer(plan, tokens * request.requests * plan.host_bytes_per_token, split)
            parts[limit] += layers * seconds
    host_layers = len(plan.placement.host)
    streams_all = split is not None and split.fraction >= 1
    launch = 1e-3 * host_layers * (constants.stream_ms if streams_all else constants.launch_ms).value
    device = _device_step(plan)
    for limit, seconds in device.items():
        parts[limit] += seconds
    parts["launches"] += max(0.0, launch - sum(device.values()))
    return _prediction(parts, request.requests)


def _host_layer(plan: MemoryPlan, layer_bytes: int, split: StreamSplit | None) -> tuple[Limit, float]:
    """Limit and seconds of one host layer's attention. ``layer_bytes``: its KV on one rank, all requests together."""
    shape, machine = plan.shape, plan.machine
    rates, cpu_limit = host_rates(
        machine,
        layer_bytes * machine.ranks,
        shape.heads_per_kv_head,
        plan.host_bytes_per_token / plan.kv_bytes_per_token,
    )
    chosen = split or stream_split(rates)
    share = chosen.of(layer_bytes)
    if share >= 1:
        return "link", layer_bytes / rates.link
    if share == 0:
        return cpu_limit, layer_bytes / rates.cpu
    streamed = share * layer_bytes
    by_link = max(0.0, streamed - chosen.head_start) / rates.link_beside_cpu
    by_cpu = (layer_bytes - streamed) / rates.cpu_beside_link
    both = rates.cpu_beside_link + rates.link_beside_cpu
    return "host memory" if both > 0.99 * rates.memory else cpu_limit, max(by_link, by_cpu)


def _device_step(plan: MemoryPlan) -> Parts:
    """Seconds of the device's own work in one decoding step."""
    shape, machine, request, constants = plan.shape, plan.machine, plan.request, measured()
    read = plan.device.weights - ELEMENT * shape.head_parameters(machine.ranks) * (not shape.tied_embeddings)
    on_device = plan.placement.device_size
    seen = on_device.full_layers * request.context + on_device.windowed_layers * min(plan.size.window, request.context)
    read += request.requests * seen * plan.kv_bytes_per_token
    if shape.linear:  # every state is read and written
        read += 2 * request.requests * len(shape.linear_layers) * shape.linear.state_bytes(machine.ranks)
    memory = read / (1e9 * machine.device.gb_per_s * constants.device_memory_fraction.value)
    weights = shape.layers_parameters(machine.ranks) + shape.head_parameters(machine.ranks)
    flops = 2 * weights * request.requests / _linear_rate(machine)
    parts = Parts(float)
    parts["launches"] = 1e-6 * shape.num_layers * constants.layer_us.value
    parts["device memory" if memory >= flops else "FLOPs"] += max(memory, flops)
    parts["links between devices"] += shape.num_layers * _all_reduces(shape, machine, request.requests)
    return parts


def _linear_rate(machine: Machine) -> float:
    return 1e12 * machine.device.tflops * measured().linear_fraction.value


def _all_reduces(shape: ModelShape, machine: Machine, tokens: int) -> float:
    """Seconds of one layer's sums over the ranks."""
    ranks = machine.ranks
    if ranks == 1:
        return 0.0
    moved = 2 * (ranks - 1) / ranks * ELEMENT * tokens * shape.hidden_size
    return ALL_REDUCES * (1e-6 * measured().all_reduce_us.value + moved / (1e9 * machine.peers.gb_per_s))


def prefill(plan: MemoryPlan) -> Prediction:
    """One prompt as long as the context, in chunks of ``batched_tokens``."""
    shape, machine, request = plan.shape, plan.machine, plan.request
    ranks, host = machine.ranks, set(plan.placement.host)
    attention_rate = 1e12 * machine.device.tflops * machine.kernels.attention_fraction(shape.head_size)
    link = min(machine.host.link_bytes(ranks), 1e9 * machine.host.read_gb_per_s / ranks)
    windowed, states = set(shape.windowed_layers), set(shape.linear_layers)
    counts = Counter(
        (index in host, index in windowed, index in states, shape.layer_parameters(ranks, index))
        for index in range(shape.num_layers)
    )
    parts = Parts(float)
    for begin in range(0, request.context, request.batched_tokens):
        new = min(request.batched_tokens, request.context - begin)
        for (on_host, has_window, has_state, weights), layers in counts.items():
            linear = 2 * weights * new / _linear_rate(machine)
            reading = (shape.matrix_bytes or ELEMENT) * weights / (1e9 * machine.device.gb_per_s)
            pairs = 0 if has_state else _pairs(begin, new, shape.window if has_window else 0)
            attention = 4 * pairs * shape.num_heads // ranks * shape.head_size / attention_rate
            streamed = min(begin, shape.window) if has_window else begin
            waiting = streamed * plan.host_bytes_per_token / link if on_host else 0.0
            compute = max(linear, reading) + attention
            parts["FLOPs" if linear >= reading else "device memory"] += layers * max(linear, reading)
            parts["FLOPs"] += layers * attention
            parts["link"] += layers * max(0.0, waiting - compute)
            parts["links between devices"] += layers * _all_reduces(shape, machine, new)
    return _prediction(parts, request.context)


def _pairs(begin: int, new: int, window: int) -> int:
    """Pairs of query and key of a chunk. Without a window (0), a query sees all keys before it."""
    full = new * begin + new * (new + 1) // 2
    return min(full, new * window) if window else full
