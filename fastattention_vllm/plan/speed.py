"""Predicted speed of prefill and decoding, and what limits each. Pure functions; all constants are in the data files.

Seconds of one decoding step: the attention of the host layers, the device's own work, and what each host layer costs
beside its attention. The device waits for the CPU at each host layer, so its work does not overlap with that attention.
The engine's functions (``placement/stream_split.py``) choose between one graph for the step and pieces, and what the
device reads over the link.

    one host layer's attention in a graph = the longer of (1 - f) b / C and f b / P, or b / C if the CPU works alone,
        with b its bytes of KV, f the device's fraction, C the CPU's rate, and P the rate of reading in place
    in pieces = the longer of (1 - f) b / C and (f b - H) / P, with P the rate of copies, and H the bytes that are
        copied while the CPU waits
    beside attention: in a graph, ringing, waiting and merging; in pieces, the CPU's work to launch what the device
        does in between, as far as it takes longer than that

Seconds of a prompt: for every chunk and layer, the FLOPs of the linear layers and of attention, or if that takes
longer, the time in which the link brings the context of a host layer; and two all-reduces.

This package's kernels for quantised weights (V100) read the weights again for every 16 rows. For many rows, a pass
reads them and writes them in fp16, and the product reads those.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Literal

from fastattention_vllm.placement.stream_split import (
    SAMPLE_BYTES,
    Rates,
    StreamSplit,
    stream_split,
    whole_steps_until,
)
from fastattention_vllm.plan.hardware import Machine, measured
from fastattention_vllm.plan.memory import MemoryPlan
from fastattention_vllm.plan.model import ModelShape
from fastattention_vllm.plan.weights import Stored

Limit = Literal["FLOPs", "device memory", "host memory", "CPU cores", "link", "links between devices", "launches"]
ALL_REDUCES = 2
"""Sums over the ranks in each layer."""
MIB = 1 << 20
ELEMENT = 2
"""Bytes of an activation or a weight."""
TURN = 16
"""Rows for which this package's kernels read quantised weights once."""
MOST_TURNS = {("int", 4): 7, ("int", 8): 4, ("float", 8): 4}
"""By kind and bits, how often they read the weights of a matrix at most. For more rows, they unpack them. A test
compares both constants with ``linear/volta/launch.py``."""


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


@dataclass(frozen=True)
class Way:
    """How the host layers of a decoding step are computed."""

    split: StreamSplit
    """How much the link brings."""
    in_graph: bool
    """The step is one graph. Otherwise it runs in pieces."""
    shares: bool = False
    """The graph has the kernels for a share of the link, even of one of 0."""

    def fraction(self, size: int, windowed: bool) -> float:
        """What the link brings of one layer's ``size`` bytes. Of layers with a window, it brings nothing."""
        if windowed or (self.in_graph and not self.shares):
            return 0.0
        return self.split.in_graph() if self.in_graph else self.split.of(size)


def engines_way(plan: MemoryPlan) -> Way:
    """What the engine chooses at start and for this length, by the rates of a sample of its pool."""
    placement, request = plan.placement, plan.request
    blocks = placement.max_blocks(plan.device.kv, plan.host_budget)
    rates, _ = _rates(plan, min(SAMPLE_BYTES, blocks * placement.host_bytes_per_block))
    split = stream_split(rates)
    shares = split.in_graph() > 0 and rates.in_place > 0
    sharing = placement.host_size.full_layers / max(1, len(placement.host))
    until = whole_steps_until(split, rates, sharing, in_graph=shares)
    short = request.context * request.requests * plan.host_bytes_per_token < until
    return Way(split, _has_graphs(plan) and short, shares)


def _has_graphs(plan: MemoryPlan) -> bool:
    """Whether a step with host layers can be one graph. Only kernels that can share in it can use copies there."""
    graphs = plan.machine.kernels.graphs_with_host_layers
    return graphs == "shared" or (graphs == "CPU alone" and not plan.device.copies)


def _reads_in_place(plan: MemoryPlan) -> bool:
    """Whether the device can read 16-bit host KV over the link in a graph. It does not beside copies."""
    shares = plan.machine.kernels.graphs_with_host_layers == "shared"
    return shares and not plan.device.copies and plan.request.host_kv_dtype == "auto"


def _rates(plan: MemoryPlan, size: int) -> tuple[Rates, Limit]:
    """Rates of one rank that reads ``size`` bytes of one host layer, and what limits its CPUs."""
    shape, machine = plan.shape, plan.machine
    width = plan.host_bytes_per_token / plan.kv_bytes_per_token
    rates, limit = host_rates(machine, size * machine.ranks, shape.heads_per_kv_head, width)
    in_place = measured().link_in_place.value * rates.link if _reads_in_place(plan) else 0.0
    return replace(rates, in_place=in_place), limit


def decode(plan: MemoryPlan, way: Way | None = None) -> Prediction:
    """One step in which every request has its full context. ``way``: None for the engine's choice."""
    request, on_host, chosen = plan.request, plan.placement.host_size, way or engines_way(plan)
    parts = Parts(float)
    for layers, tokens, windowed in (
        (on_host.full_layers, request.context, False),
        (on_host.windowed_layers, min(on_host.window, request.context), True),
    ):
        if layers:
            limit, seconds = _host_layer(plan, tokens * request.requests * plan.host_bytes_per_token, chosen, windowed)
            parts[limit] += layers * seconds
    device = _device_step(plan)
    for limit, seconds in device.items():
        parts[limit] += seconds
    parts["launches"] += _beside_attention(plan, chosen, sum(device.values()))
    return _prediction(parts, request.requests)


def _beside_attention(plan: MemoryPlan, way: Way, device: float) -> float:
    """Seconds that the host layers of a step cost beside their attention and the ``device``'s seconds of own work."""
    constants, placement = measured(), plan.placement
    if way.in_graph:
        merged = placement.host_size.full_layers if way.shares or plan.device.copies else 0
        return 1e-6 * (len(placement.host) * constants.ring_us.value + merged * constants.merge_us.value)
    by_layer = constants.stream_ms if way.split.fraction >= 1 else constants.launch_ms
    return max(0.0, 1e-3 * len(placement.host) * by_layer.value - device)


def _host_layer(plan: MemoryPlan, size: int, way: Way, windowed: bool) -> tuple[Limit, float]:
    """Limit and seconds of one host layer's attention. ``size``: bytes of its KV on one rank, all requests together."""
    rates, cpu_limit = _rates(plan, size)
    share = way.fraction(size, windowed)
    if share == 0:
        return cpu_limit, size / rates.cpu
    if share >= 1:
        return "link", size / (rates.in_place if way.in_graph else rates.link)
    link, ahead = (rates.in_graph(), 0) if way.in_graph else (rates.link_beside_cpu, way.split.head_start)
    by_link, by_cpu = max(0.0, share * size - ahead) / link, (1 - share) * size / rates.cpu_beside_link
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
    counted = [_repeated(plan, index, request.requests) for index in range(shape.num_layers)]
    memory = (read + sum(again for _, again in counted)) / _memory_rate(machine)
    weights = shape.layers_parameters(machine.ranks) + shape.head_parameters(machine.ranks)
    flops = 2 * weights * request.requests / _linear_rate(machine)
    parts = Parts(float)
    parts["launches"] = 1e-6 * shape.num_layers * constants.layer_us.value
    parts["device memory" if memory >= flops else "FLOPs"] += max(memory, flops)
    parts["device memory"] += sum(before for before, _ in counted) / _memory_rate(machine)
    parts["links between devices"] += shape.num_layers * _all_reduces(shape, machine, request.requests)
    return parts


def _memory_rate(machine: Machine) -> float:
    return 1e9 * machine.device.gb_per_s * measured().device_memory_fraction.value


def repeated(form: Stored, weights: int, rows: int) -> tuple[float, float]:
    """Bytes that the kernels for quantised weights read and write in addition to reading a matrix once.

    Args:
        form: of the matrix.
        weights: their number.
        rows: of the product.

    Returns:
        The bytes of a pass before the product, and those of the product.
    """
    most, packed = MOST_TURNS.get((form.kind, form.bits)), form.bytes
    if not form.method or most is None or packed is None:
        return 0.0, 0.0
    turns = -(-rows // TURN)
    if turns <= most:
        return 0.0, (turns - 1) * packed * weights
    return (packed + ELEMENT) * weights, (ELEMENT - packed) * weights


def _repeated(plan: MemoryPlan, index: int, rows: int) -> tuple[float, float]:
    """:func:`repeated` of all matrices of a layer on one rank."""
    shape, ranks = plan.shape, plan.machine.ranks
    if not plan.machine.kernels.quantised_weights or not shape.stored:
        return 0.0, 0.0
    matrices = zip(shape.matrices(index), shape.stored[index], strict=True)
    found = [repeated(form, matrix.parameters(ranks), rows) for matrix, form in matrices]
    return sum(before for before, _ in found), sum(again for _, again in found)


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
    # The first layer of each kind, and the number of such layers.
    kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in range(shape.num_layers):
        formats = shape.stored[index] if shape.stored else ()
        kinds[index in host, index in windowed, index in states, shape.layer_parameters(ranks, index), formats].append(
            index
        )
    counts = [(indices[0], len(indices)) for indices in kinds.values()]
    parts = Parts(float)
    for begin in range(0, request.context, request.batched_tokens):
        new = min(request.batched_tokens, request.context - begin)
        for index, layers in counts:
            has_window = index in windowed
            before, again = _repeated(plan, index, new)
            linear = 2 * shape.layer_parameters(ranks, index) * new / _linear_rate(machine)
            reading = (_bytes(plan, index) + again) / (1e9 * machine.device.gb_per_s)
            unpacking = before / _memory_rate(machine)
            pairs = 0 if index in states else _pairs(begin, new, shape.window if has_window else 0)
            attention = 4 * pairs * shape.num_heads // ranks * shape.head_size / attention_rate
            streamed = min(begin, shape.window) if has_window else begin
            waiting = streamed * plan.host_bytes_per_token / link if index in host else 0.0
            compute = max(linear, reading) + unpacking + attention
            parts["FLOPs" if linear >= reading else "device memory"] += layers * max(linear, reading)
            parts["device memory"] += layers * unpacking
            parts["FLOPs"] += layers * attention
            parts["link"] += layers * max(0.0, waiting - compute)
            parts["links between devices"] += layers * _all_reduces(shape, machine, new)
    return _prediction(parts, request.context)


def _bytes(plan: MemoryPlan, index: int) -> float:
    """Of a layer's matrices on one rank. Those of an unknown format count as 16 bits."""
    found, ranks = plan.shape.layer_bytes(plan.machine.ranks, index), plan.machine.ranks
    return ELEMENT * plan.shape.layer_parameters(ranks, index) if found is None else found


def _pairs(begin: int, new: int, window: int) -> int:
    """Pairs of query and key of a chunk. Without a window (0), a query sees all keys before it."""
    full = new * begin + new * (new + 1) // 2
    return min(full, new * window) if window else full
