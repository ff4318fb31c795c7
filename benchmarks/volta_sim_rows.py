"""Simulated rows: the time of one launch of our kernels, or of the peer's, on the simulated V100.

Used by: volta_sim.py.

The time of a launch is computed from one SM:

1. Which CTAs the SM gets: CTAs start in the order of their number, each where another has ended (`dispatch`; a CTA's
   work is the number of keys that it visits). The SM that ends last is chosen, so the time includes tails and the
   unequal CTAs of a causal launch.
2. The machine code of these CTAs is run, which also gives the error against float64. Their traces are timed on one SM,
   as many at a time as fit. Neighbouring CTAs come from different heads, because CTAs of one head would find each
   other's keys in L1 more often than on a real GPU. The simulated memory holds as many heads as this needs, not 256.
3. For long launches only some of the SM's CTAs are simulated: the first ones if all are alike; every n-th up to the
   last one in causal launches, so that long and short ones are included. The time of the others is added in
   proportion to their work, at the rate by which the simulated CTAs take longer than half of them. The row then says,
   for example, "60 of 410 CTAs".

Decoding is fed from DRAM: 817 GB/s for all SMs (7.4 bytes per cycle and SM, 450 cycles of latency). So is the kernel
that sums the parts, whose time is added. The time from one launch to the next is not simulated.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable

import numpy
import torch
import volta_peer
from volta_launches import (
    BATCH,
    HEADS,
    MASKS,
    PAGE,
    PAGES,
    RAGGED_ENDS,
    Launch,
    Time,
    compiled_out,
    cubin,
    everything,
    keys_and_values,
    mapped,
    one_sequence,
    our_prefill,
    peer_prefill,
    softmax_error,
    whole_launch,
)
from volta_sim_report import (
    FEED,
    GROUPED,
    OURS,
    PEER,
    Measured,
)

from fastattention_vllm.attention.volta import kernels as volta
from fastattention_vllm.attention.volta import launch as volta_kernels
from fastattention_vllm.attention.volta.launch import CHUNK, Divisor, Split
from kernels.volta import variants
from kernels.volta.sim import V100, Cubin, Simulation, Timing, Trace, default_timing, static_bound
from kernels.volta.sim.dispatch import dispatch
from kernels.volta.variants import COMBINE, Variant

NOTHING = 10.0
"""Number of keys that take as long as a CTA without keys."""


def feed_timing() -> Timing:
    return default_timing(l2_latency=450, l2_bytes_per_cycle=7.4)


def prefill_flops(tokens: int, head_size: int, causal: bool, heads: int) -> float:
    """Two products for each visible pair of query and key."""
    pairs = tokens * (tokens + 1) / 2 if causal else tokens * tokens
    return 4.0 * head_size * pairs * heads


def prefill_row(
    name: str, made: tuple[Launch, Callable[[], float]], tokens: int, head_size: int, causal: bool
) -> Measured:
    launch, error = made
    found = whole_launch(launch, BATCH * HEADS)
    tera = prefill_flops(tokens, head_size, causal, BATCH * HEADS) / 1e12
    return {
        "kind": "prefill",
        "kernel": name,
        "head_size": head_size,
        "tokens": tokens,
        "causal": causal,
        **_prefill_facts(launch, found, tera, error),
    }


def _prefill_facts(launch: Launch, found: Time, tera: float, error: Callable[[], float]) -> Measured:
    """``tera``: 10^12 operations of the launch."""
    return {
        "tflops": tera / found.seconds,
        "milliseconds": 1e3 * found.seconds,
        "bound_tflops": tera / found.bound_seconds,
        "bound_unit": found.bound_unit,
        "error": error(),
        "simulated": found.how,
        "registers": launch.simulation.image.registers,
        "ctas_per_sm": launch.simulation.occupancy.ctas,
    }


def grouped_row(head_size: int, tokens: int, causal: bool, page: int) -> Measured:
    """Prefill with several query heads per KV head, as ``GROUPED`` says."""
    group, kv_heads = GROUPED
    launch, error = our_prefill(tokens, head_size, causal, page=page, group=group, kv_heads=kv_heads)
    found = whole_launch(launch, BATCH * kv_heads)
    tera = prefill_flops(tokens, head_size, causal, BATCH * kv_heads * group) / 1e12
    return {
        "kind": "grouped",
        "kernel": OURS,
        "head_size": head_size,
        "group": group,
        "kv_heads": kv_heads,
        "page": page,
        "batch": BATCH,
        "tokens": tokens,
        "causal": causal,
        **_prefill_facts(launch, found, tera, error),
    }


def decode_row(
    head_size: int, group: int, page: int, tokens: int, batch: int, *, queries: int = 1, kv_heads: int | None = None
) -> Measured:
    """``queries`` new tokens per sequence. ``kv_heads``: by default, as many as give about 32 query heads."""
    kv_heads, mapped_heads, rows = kv_heads or HEADS // group, 2, queries * group
    wide = volta_kernels.kind_of(rows) == "decode_wide"
    variant = variants.decode_wide(head_size) if wide else variants.decode(head_size)
    minimum = volta_kernels.min_parts(kv_heads)
    parts = volta_kernels.decode_parts(tokens, minimum)
    problem = one_sequence(tokens, group, mapped_heads, head_size, page, True, queries)
    out = torch.full((queries, group * mapped_heads, head_size), 7.0, dtype=torch.float16)
    partial_out = numpy.full((mapped_heads, parts, rows, head_size), numpy.nan, numpy.float16)
    partial_lse = numpy.full((mapped_heads, parts, rows), numpy.nan, numpy.float32)

    def ready(variant: Variant, grid: tuple[int, int, int], threads: int) -> Simulation:
        simulation = Simulation(cubin(variant), variant.kernel)
        argument = volta.parameters(problem, out, None, mapped(simulation))
        where = simulation.map(partial_out), simulation.map(partial_lse)
        whole = Split(argument, *where, Divisor.by(parts), rows, minimum)
        simulation.launch(grid, (threads, 1, 1), bytes(whole), variant.shared_bytes)
        return simulation

    attention = ready(variant, (mapped_heads, 1, parts), variant.threads)
    combine = ready(COMBINE, (rows, mapped_heads, 1), head_size // CHUNK)
    seconds = []
    time_of_parts: dict[str, float] = {}
    length = volta_kernels.part_length(tokens, minimum)
    # 0: the grid has more parts than the sequence
    keys = [max(0.0, min(length, tokens - x * length)) for x in range(parts)]
    for simulation, works in ((attention, keys), (combine, [1.0] * rows)):
        traces: dict[float, list[Trace]] = {work: [] for work in works}
        for head, (x, work) in itertools.product(range(mapped_heads), enumerate(works)):
            traces[work].append(simulation.trace(*((head, 0, x) if simulation is attention else (x, head))))
        for alike in traces.values():  # neighbours are out of step and read different keys
            random.Random(0).shuffle(alike)
        turns = {work: itertools.cycle(alike) for work, alike in traces.items()}
        heads = kv_heads * batch  # parts are ordered one after the other, rows of one head together
        all_works = [work for work in works for _ in range(heads)] if simulation is attention else works * heads
        of_sms = dispatch([work or NOTHING for work in all_works], resident=simulation.occupancy.ctas, sms=V100.sms)
        mine = max(of_sms, key=lambda of_sm: sum(all_works[number] for number in of_sm))  # they share the SM's feed
        order = [next(turns[all_works[number]]) for number in mine]
        seconds.append(V100.seconds(simulation.time(order, timing=feed_timing()).cycles))
        if simulation is attention:
            for work in works:
                for unit, busy in static_bound(simulation, traces[work][0]).items():
                    slow = default_timing().l2_bytes_per_cycle / feed_timing().l2_bytes_per_cycle if unit == "L2" else 1
                    time_of_parts[unit] = time_of_parts.get(unit, 0.0) + busy * slow
    unit = max(time_of_parts, key=lambda name: time_of_parts[name])
    bound = V100.seconds(time_of_parts[unit] * kv_heads * batch / V100.sms)
    giga = 4.0 * head_size * tokens * kv_heads * batch / 1e9
    errors = []
    for head, token in itertools.product(range(mapped_heads), range(queries)):
        query, found = (
            tensor[token, head * group : (head + 1) * group].double().numpy() for tensor in (problem.query, out)
        )
        visible = numpy.full(group, tokens - queries + 1 + token)
        errors.append(softmax_error(query, *keys_and_values(problem, head), visible, found))
    return {
        "kind": "decode",
        "kernel": OURS,
        "head_size": head_size,
        "group": group,
        "queries": queries,
        "kv_heads": kv_heads,
        "page": page,
        "tokens": tokens,
        "batch": batch,
        "gbs": giga / sum(seconds),
        "part_of_feed": giga / sum(seconds) / FEED,
        "bound_gbs": giga / bound,
        "bound_unit": unit,
        "milliseconds": 1e3 * sum(seconds),
        "combine_milliseconds": 1e3 * seconds[1],
        "error": max(errors),
        "registers": attention.image.registers,
        "ctas_per_sm": attention.occupancy.ctas,
    }


PUBLISHED = [
    # head size, tokens, CTAs (0: two waves; None: a whole launch of 64 heads), TFLOPS: see volta_peer.py
    (64, 2048, 0, 35.4),
    (64, 2048, 24, 36.6),
    (64, 2048, None, 36.1),
    (64, 4096, None, 36.8),
    (128, 2048, 0, 43.1),
    (128, 2048, 24, 44.0),
    (128, 2048, None, 43.7),
    (128, 4096, None, 44.8),
    (256, 2048, 0, 33.9),
]
"""The peer's figures from the simulator's prototype, which this method must reproduce."""


def method_row(content: Cubin, head_size: int, tokens: int, ctas: int | None, published: float) -> Measured:
    launch, _ = peer_prefill(content, tokens, head_size, False)
    if ctas is None:
        tera = prefill_flops(tokens, head_size, False, 64) / 1e12
        found = tera / whole_launch(launch, 64).seconds
        what = "whole launch of 64 heads"
    else:
        resident = launch.simulation.occupancy.ctas
        count = ctas or 2 * resident
        cycles = launch.simulation.time([launch.trace(0, place) for place in range(count)]).cycles
        of_cta = 4.0 * head_size * tokens * volta_peer.kernel_for(head_size).rows
        found = of_cta * count * V100.sms / V100.seconds(cycles) / 1e12
        what = f"{count} CTAs per SM"
    return {
        "kind": "method",
        "kernel": PEER,
        "head_size": head_size,
        "tokens": tokens,
        "what": what,
        "tflops": found,
        "prototype": published,
        "ratio": found / published,
    }


WITHOUT = {
    "masks": functools.partial(compiled_out, MASKS),
    "paging": functools.partial(compiled_out, PAGES),
    "masks and paging": functools.partial(compiled_out, (*MASKS, *PAGES)),
    "masks, paging and ragged ends": functools.partial(compiled_out, (*MASKS, *PAGES, *RAGGED_ENDS)),
}


def masks_row(head_size: int, tokens: int, causal: bool) -> Measured:
    """The cost of masks and paging (16 tokens per page) against the fastest of several kernels from the same source.

    There are several because the compiler's order of instructions matters as much. Without masks nothing is causal, so
    the comparison uses CTAs that visit as many tiles: those of the last rows, whose last tiles have masks.
    """

    def seconds(with_masks: bool, page: int | None, edit: Callable[[str], str]) -> float:
        launch, error = our_prefill(tokens, head_size, with_masks, page=page, edit=edit)
        launch.alike = True  # number 0 has the last rows
        count = 4 * launch.simulation.occupancy.ctas
        cycles = launch.simulation.time([launch.trace(0, place) for place in range(count)]).cycles
        if error() > 2e-3:
            raise RuntimeError(f"prefill of head size {head_size} is wrong by {error():.1e}.")
        return V100.seconds(cycles)

    whole = seconds(causal, PAGE, everything)
    less = {name: seconds(False, PAGE if name == "masks" else None, edit) for name, edit in WITHOUT.items()}
    fastest = min(less, key=lambda name: less[name])
    return {
        "kind": "masks",
        "kernel": OURS,
        "head_size": head_size,
        "tokens": tokens,
        "causal": causal,
        "cost": whole / less[fastest] - 1,
        "against": f"without {fastest}",
        "costs": {name: whole / value - 1 for name, value in less.items()},
    }
