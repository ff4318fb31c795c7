"""The V100 kernels and PyTorch's own on the simulated V100: TFLOPS of prefill, GB/s of decoding, static bounds, errors.

    python benchmarks/volta_sim.py --json FILE --plot FILE.png
    python benchmarks/volta_sim.py --from FILE.json --plot FILE.png     # what an earlier run found

Needs no GPU. Every time is simulated (kernels/volta/sim/README.md says how far to trust it): 80 SMs at 1.38 GHz, peak
113 TFLOPS. The peer is what both PyTorch and xformers run on a V100, as machine code out of PyPI's wheel of torch
2.10.0 (volta_peer.py downloads 915 MB once, or takes that wheel's library by --libtorch).

A launch's time is that of one SM, as follows.

1. Which CTAs the SM gets: CTAs start in the order of their number, each where one has ended (`dispatch`; a CTA's work
   is the keys that it passes over). The SM that ends last is taken: tails, and the unequal CTAs of a causal launch, are
   in the time.
2. These CTAs' machine code is run, which is where the error against float64 comes from, and their traces are timed on
   one SM, as many at a time as fit. Neighbours are taken from different heads: those of one head would find each
   other's keys in L1 more often than real ones may. As many heads as that takes are in the simulated memory, not 256.
3. Of long launches some of the SM's CTAs are simulated: the first, where all are alike; of causal ones every n-th, up
   to the last, so that long and short ones are among them. The time of the others is added in proportion to their
   work, at the rate by which these take longer than half of them: "60 of 410 CTAs" in a row says so.

Decoding is fed from DRAM: 817 GB/s for all SMs (7.4 bytes per cycle and SM, 450 cycles of latency), and so is the
kernel that sums the parts, whose time is added. The time from one launch to the next is not simulated.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import itertools
import json
import math
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy
import torch
import volta_peer
from rich.console import Console
from rich.table import Table

from fastattention_vllm.attention import volta, volta_kernels
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.attention.volta_kernels import COMBINE, Divisor, Split, Variant
from kernels.volta.build import SOURCES
from kernels.volta.nvrtc import compile_cuda
from kernels.volta.sim import V100, Cubin, Simulation, Timing, Trace, default_timing, static_bound
from kernels.volta.sim.dispatch import dispatch

TITLE = "Simulated V100 (80 SMs at 1.38 GHz)"
BATCH, HEADS = 8, 32
HEAD_SIZES = (64, 128, 256)
TOKENS = (4096, 2048, 1024, 8192, 16384)
"""The most useful first: a run that is stopped keeps what it has."""
CONTEXTS = ((4096, 32), (16384, 16), (65536, 8))
"""Tokens and sequences that are decoded."""
FEED = 817.0
"""GB/s from DRAM."""
MOST_SIMULATED = 20 * 128 * 4096 * 64
"""Query rows times keys times head size of the CTAs of a launch that are simulated: 15 seconds of one core."""
LEAST_UNALIKE = 16
"""CTAs of a causal launch, whatever they take: 19 of 56 gave the time of all within 0.4 %, 7 within 4 %."""
NOTHING = 10.0
"""Keys in whose time a CTA sees that it has none."""
PAGE = 16
KINDS = ("method", "prefill", "decode", "masks")
OURS, PEER = "ours", "PyTorch mem-efficient"
Row = dict[str, Any]


def feed_timing() -> Timing:
    return default_timing(l2_latency=450, l2_bytes_per_cycle=7.4)


# --- launches ------------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """A kernel that is ready to run on a few heads, in the place of one on many."""

    simulation: Simulation
    works: list[float]
    """Of the CTAs of one head: keys that they pass over, and what their begin and end are worth."""
    cost: float
    """Of a unit of work to the simulator: query rows times head size."""
    heads: int
    """In the simulated memory."""
    alike: bool = False
    """All CTAs of a head do the same, so one of them stands for all."""
    together: int = 1
    """Heads whose CTAs begin one after the other, the first of each, then the second: ``blockIdx.x`` is the head then,
    else ``blockIdx.y``."""
    traces: dict[tuple[int, int], Trace] = field(default_factory=dict)

    def trace(self, x: int, head: int) -> Trace:
        key = (0 if self.alike else x, head % self.heads)
        if key not in self.traces:
            self.traces[key] = self.simulation.trace(*(key if self.together == 1 else key[::-1]))
        return self.traces[key]

    def order(self, heads: int) -> list[int]:
        """In which CTAs of a launch begin: of each, its number among those of its head."""
        numbers = range(len(self.works))
        groups = [min(self.together, heads - first) for first in range(0, heads, self.together)]
        return [number for group in groups for number in numbers for _ in range(group)]


@dataclass(frozen=True)
class Time:
    seconds: float
    ctas: int
    simulated: int
    bound_seconds: float
    bound_unit: str

    @property
    def how(self) -> str:
        return "all CTAs" if self.simulated == self.ctas else f"{self.simulated} of {self.ctas} CTAs"


def whole_launch(launch: Launch, heads: int, timing: Timing | None = None) -> Time:
    """Simulated time of the SM that ends last, in a launch of ``heads`` like those in the simulated memory."""
    resident = launch.simulation.occupancy.ctas
    order = launch.order(heads)
    works = [launch.works[number] for number in order]
    mine = dispatch(works, resident=resident, sms=V100.sms)[0]
    work_of = [works[number] for number in mine]
    all_work = sum(work_of)
    some, fewer = _sample(work_of, launch.cost, resident, launch.alike)
    traces = {place: launch.trace(order[mine[place]], place) for place in some}
    cycles = float(launch.simulation.time(list(traces.values()), timing=timing).cycles)
    work = sum(work_of[place] for place in some)
    if len(some) < len(mine):
        of_fewer = launch.simulation.time([traces[place] for place in fewer], timing=timing).cycles
        rate = (cycles - of_fewer) / (work - sum(work_of[place] for place in fewer))
        cycles += rate * (all_work - work)
    bounds: dict[str, float] = {}
    for trace in traces.values():
        for unit, busy in static_bound(launch.simulation, trace).items():
            bounds[unit] = bounds.get(unit, 0.0) + busy
    if timing is not None:
        bounds["L2"] *= default_timing().l2_bytes_per_cycle / timing.l2_bytes_per_cycle
    unit = max(bounds, key=lambda name: bounds[name])
    bound = bounds[unit] * all_work / work
    return Time(V100.seconds(cycles), len(mine), len(some), V100.seconds(bound), unit)


def _sample(works: Sequence[float], cost: float, resident: int, alike: bool) -> tuple[Sequence[int], Sequence[int]]:
    """Places of the CTAs to simulate, in order: all if there is patience for them, and about half of those."""
    count, patience = len(works), MOST_SIMULATED / cost
    if sum(works) <= patience:
        return range(count), ()
    if not alike:
        step = max(1, min(math.ceil(sum(works) / max(patience, 1)), count // LEAST_UNALIKE))
        return range((count - 1) % step, count, step), range((count - 1) % (2 * step), count, 2 * step)
    # Last waves as full as that of all of them; at least two waves, of which the first gets everything going.
    some = _congruent(max(int(patience / sum(works) * count), 2 * resident), count, resident)
    return range(min(some, count)), range(_congruent(max(some // 2 - resident, 1), count, resident))


def _congruent(number: int, to: int, modulus: int) -> int:
    return number + (to - number) % modulus


# --- ours ----------------------------------------------------------------------------------------------------


def everything(source: str) -> str:
    return source


# The source's fragments that are compiled out for comparison, and what takes their place.
MASKS = (
    ("for (; number < masked; ++number) step(number + 1 < num_tiles, tile_begin(number), tile_begin(number + 2), "
     "Masked());", ""),
    ("for (; number < unseen; ++number) {", "for (; number < 0; ++number) {"),
)  # fmt: skip
RAGGED_ENDS = (("const int key = min(tile_begin + first, last);", "const int key = tile_begin + first;"),)
PAGES = (("if (tables == nullptr) return {0, key};", "return {0, key};"),)


def compiled_out(replacements: Sequence[tuple[str, str]], source: str) -> str:
    """Prefill without some of what it has. Right for whole tiles of contiguous keys, all of which all rows see."""
    for old, new in replacements:
        if source.count(old) != 1:
            raise RuntimeError(f"prefill.cu has no single {old!r} any more; volta_sim.py must learn what to take out.")
        source = source.replace(old, new)
    return source


@functools.cache
def cubin(variant: Variant, edit: Callable[[str], str] = everything) -> Cubin:
    compiled = compile_cuda(
        edit((SOURCES / variant.source).read_text()),
        name=variant.source,
        defines=variant.defines,
        include=[SOURCES],
        options=volta_kernels.COMPILER_OPTIONS,
    )
    return Cubin(compiled.binary)


@functools.cache
def numbers(count: int) -> torch.Tensor:
    """Of unit variance, fp16; repeated after four million."""
    seed = torch.Generator().manual_seed(0)
    some = torch.randn(min(count, 4_000_037), generator=seed).half()
    return some.repeat(-(-count // len(some)))[:count]


def mapped(simulation: Simulation) -> Callable[[torch.Tensor], int]:
    """Where ``simulation`` sees a tensor; views of one storage stay views."""
    known: dict[int, int] = {}

    def address_of(tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known[storage.data_ptr()] = simulation.map(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
        return known[storage.data_ptr()] + tensor.storage_offset() * tensor.element_size()

    return address_of


def paged(tokens: int, heads: int, head_size: int, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values (views of one cache as vLLM has it: [blocks, heads, page, K | V]) and a shuffled block table."""
    blocks = -(-tokens // page)
    cache = numbers(blocks * heads * page * 2 * head_size).view(blocks, heads, page, 2 * head_size).transpose(1, 2)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).int()[None]
    return cache[..., :head_size], cache[..., head_size:], order


def one_sequence(
    tokens: int, group: int, kv_heads: int, head_size: int, page: int | None, causal: bool, queries: int
) -> AttentionProblem:
    """``page``: None for contiguous keys."""
    query = numbers(queries * group * kv_heads * head_size + 77)[77:].clone().view(queries, group * kv_heads, head_size)
    where: dict[str, Any]
    if page is None:
        size = tokens * kv_heads * head_size
        key, value = (numbers(size + at)[at:].clone().view(tokens, kv_heads, head_size) for at in (1, 2))
        where = {"kv_start_loc": torch.zeros(1, dtype=torch.int32)}
    else:
        key, value, table = paged(tokens, kv_heads, head_size, page)
        where = {"block_table": table}
    return AttentionProblem(
        query=query,
        key=key,
        value=value,
        query_start_loc=torch.tensor([0, queries], dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        scale=head_size**-0.5,
        causal=causal,
        **where,
    )


def keys_and_values(problem: AttentionProblem, head: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """float64 ``[tokens, head_size]`` each."""
    length = int(problem.seq_lens[0])

    def of(tensor: torch.Tensor) -> numpy.ndarray:
        rows = tensor[:, head] if problem.block_table is None else tensor[problem.block_table[0].long()][:, :, head]
        return rows.reshape(-1, tensor.shape[-1])[:length].double().numpy()

    return of(problem.key), of(problem.value)


def softmax_error(
    query: numpy.ndarray, key: numpy.ndarray, value: numpy.ndarray, visible: numpy.ndarray, found: numpy.ndarray
) -> float:
    """Largest difference to float64. ``visible``: keys that each row sees, from the first on."""
    scores = query @ key.T * query.shape[1] ** -0.5
    scores = numpy.where(numpy.arange(len(key)) < visible[:, None], scores, -numpy.inf)
    weights = numpy.exp(scores - scores.max(axis=1, keepdims=True))
    right = weights / weights.sum(axis=1, keepdims=True) @ value
    difference = numpy.abs(right - found)
    return float("inf") if numpy.isnan(difference).any() else float(difference.max())


def our_prefill(
    tokens: int,
    head_size: int,
    causal: bool,
    *,
    page: int | None = PAGE,
    edit: Callable[[str], str] = everything,
    variant: Variant | None = None,
) -> tuple[Launch, Callable[[], float]]:
    """The launch, and what the error of its traced CTAs is. ``variant``: another one than that which is shipped."""
    variant = variant or volta_kernels.prefill(head_size)
    simulation = Simulation(cubin(variant, edit), variant.kernel)
    heads = 2 * variant.ctas_per_sm + 1
    problem = one_sequence(tokens, 1, heads, head_size, page, causal, tokens)
    out = torch.full((tokens, heads, head_size), 7.0, dtype=torch.float16)
    grid = volta_kernels.prefill_grid(variant, tokens, heads, 1)
    argument = Split(volta.parameters(problem, out, None, mapped(simulation)), parts=Divisor.by(1), rows=tokens)
    simulation.launch(grid, (variant.threads, 1, 1), bytes(argument), variant.shared_bytes)
    begins = [(grid[1] - 1 - x) * variant.rows for x in range(grid[1])]
    works = [float(min(tokens, begin + variant.rows) if causal else tokens) + variant.tile for begin in begins]
    launch = Launch(simulation, works, variant.rows * head_size, heads, alike=not causal, together=HEADS)

    def error() -> float:
        errors = []
        for x, head in _some(launch):
            rows = numpy.arange(begins[x], min(begins[x] + variant.rows, tokens))
            visible = rows + 1 if causal else numpy.full(len(rows), tokens)
            query, found = (tensor[rows, head].double().numpy() for tensor in (problem.query, out))
            errors.append(softmax_error(query, *keys_and_values(problem, head), visible, found))
        return max(errors)

    return launch, error


def _some(launch: Launch) -> list[tuple[int, int]]:
    """Of the CTAs that have run, the ones with the most and the least to do, and the last."""
    run = list(launch.traces)
    by_work = sorted(run, key=lambda key: launch.works[key[0]])
    return list(dict.fromkeys((by_work[0], by_work[-1], run[-1])))


# --- the peer ------------------------------------------------------------------------------------------------


def peer_prefill(content: Cubin, tokens: int, head_size: int, causal: bool) -> tuple[Launch, Callable[[], float]]:
    """As :func:`our_prefill`, on contiguous keys: it knows no pages."""
    kernel = volta_peer.kernel_for(head_size)
    simulation = Simulation(content, kernel.name)
    heads = 7
    size = tokens * heads * head_size
    query, key, value = (numbers(size + at)[at:].clone().view(tokens, heads, head_size).numpy() for at in (3, 1, 2))
    out = numpy.full((tokens, heads, head_size), 7, numpy.float16)
    sums = numpy.zeros((tokens, heads, head_size), numpy.float32)
    names = ("query", "key", "value", "out", "sums")
    addresses = {name: simulation.map(a) for name, a in zip(names, (query, key, value, out, sums), strict=True)}
    block = volta_peer.parameter_block(
        simulation.image.parameter_bytes,
        **addresses,
        batch=1,
        tokens=tokens,
        heads=heads,
        head_size=head_size,
        causal=causal,
    )
    count = -(-tokens // kernel.rows)
    simulation.launch((count, heads, 1), kernel.threads, block, kernel.shared_bytes)
    begins = [x * kernel.rows for x in range(count)]
    works = [float(min(tokens, begin + kernel.rows) if causal else tokens) + 64 for begin in begins]
    launch = Launch(simulation, works, kernel.rows * head_size, heads, alike=not causal)

    def error() -> float:
        errors = []
        for x, head in _some(launch):
            rows = numpy.arange(begins[x], min(begins[x] + kernel.rows, tokens))
            visible = rows + 1 if causal else numpy.full(len(rows), tokens)
            of_head = (query[rows, head], key[:, head], value[:, head])
            errors.append(softmax_error(*(a.astype(float) for a in of_head), visible, out[rows, head].astype(float)))
        return max(errors)

    return launch, error


# --- rows ----------------------------------------------------------------------------------------------------


def prefill_flops(tokens: int, head_size: int, causal: bool, heads: int) -> float:
    """Two products, of the pairs of query and key that are visible."""
    pairs = tokens * (tokens + 1) / 2 if causal else tokens * tokens
    return 4.0 * head_size * pairs * heads


def prefill_row(name: str, made: tuple[Launch, Callable[[], float]], tokens: int, head_size: int, causal: bool) -> Row:
    launch, error = made
    found = whole_launch(launch, BATCH * HEADS)
    tera = prefill_flops(tokens, head_size, causal, BATCH * HEADS) / 1e12
    return {
        "kind": "prefill",
        "kernel": name,
        "head_size": head_size,
        "tokens": tokens,
        "causal": causal,
        "tflops": tera / found.seconds,
        "milliseconds": 1e3 * found.seconds,
        "bound_tflops": tera / found.bound_seconds,
        "bound_unit": found.bound_unit,
        "error": error(),
        "simulated": found.how,
        "registers": launch.simulation.image.registers,
        "ctas_per_sm": launch.simulation.occupancy.ctas,
    }


def decode_row(head_size: int, group: int, page: int, tokens: int, batch: int) -> Row:
    """One new token of each sequence; 32 query heads."""
    kv_heads, mapped_heads = HEADS // group, 2
    variant = volta_kernels.decode(head_size)
    least = volta_kernels.least_parts(kv_heads)
    parts = volta_kernels.decode_parts(tokens, least)
    problem = one_sequence(tokens, group, mapped_heads, head_size, page, True, 1)
    out = torch.full((1, group * mapped_heads, head_size), 7.0, dtype=torch.float16)
    partial_out = numpy.full((mapped_heads, parts, group, head_size), numpy.nan, numpy.float32)
    partial_lse = numpy.full((mapped_heads, parts, group), numpy.nan, numpy.float32)

    def ready(variant: Variant, grid: tuple[int, int, int], threads: int) -> Simulation:
        simulation = Simulation(cubin(variant), variant.kernel)
        argument = volta.parameters(problem, out, None, mapped(simulation))
        where = simulation.map(partial_out), simulation.map(partial_lse)
        whole = Split(argument, *where, Divisor.by(parts), group, least)
        simulation.launch(grid, (threads, 1, 1), bytes(whole), variant.shared_bytes)
        return simulation

    attention = ready(variant, (mapped_heads, parts, 1), variant.threads)
    combine = ready(COMBINE, (group, mapped_heads, 1), head_size)
    seconds = []
    time_of_parts: dict[str, float] = {}
    length = volta_kernels.part_length(tokens, least)
    keys = [max(0.0, min(length, tokens - x * length)) for x in range(parts)]  # 0: there is room for more than it has
    for simulation, works in ((attention, keys), (combine, [1.0] * group)):
        traces: dict[float, list[Trace]] = {work: [] for work in works}
        for head, (x, work) in itertools.product(range(mapped_heads), enumerate(works)):
            traces[work].append(simulation.trace(*((head, x) if simulation is attention else (x, head))))
        for alike in traces.values():  # neighbours have long gone out of step, and read different keys
            random.Random(0).shuffle(alike)
        turns = {work: itertools.cycle(alike) for work, alike in traces.items()}
        all_works = [work for work in works for _ in range(kv_heads)] * batch
        mine = dispatch([work or NOTHING for work in all_works], resident=simulation.occupancy.ctas, sms=V100.sms)[0]
        order = [next(turns[all_works[number]]) for number in mine]
        seconds.append(V100.seconds(simulation.time(order, timing=feed_timing()).cycles))
        if simulation is attention:
            for trace in order:
                for unit, busy in static_bound(simulation, trace).items():
                    slow = default_timing().l2_bytes_per_cycle / feed_timing().l2_bytes_per_cycle if unit == "L2" else 1
                    time_of_parts[unit] = time_of_parts.get(unit, 0.0) + busy * slow / len(order)
    unit = max(time_of_parts, key=lambda name: time_of_parts[name])
    bound = V100.seconds(time_of_parts[unit] * parts * kv_heads * batch / V100.sms)
    giga = 4.0 * head_size * tokens * kv_heads * batch / 1e9
    errors = []
    for head in range(mapped_heads):
        query, found = (
            tensor[0, head * group : (head + 1) * group].double().numpy() for tensor in (problem.query, out)
        )
        errors.append(softmax_error(query, *keys_and_values(problem, head), numpy.full(group, tokens), found))
    return {
        "kind": "decode",
        "kernel": OURS,
        "head_size": head_size,
        "group": group,
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
"""The peer's figures by the simulator's prototype, which this method must give again."""


def method_row(content: Cubin, head_size: int, tokens: int, ctas: int | None, published: float) -> Row:
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


def masks_row(head_size: int, tokens: int, causal: bool) -> Row:
    """What masks and paging (16 tokens a page) cost against the fastest of several kernels from the same source.

    Several, because the order in which the compiler puts instructions is worth as much. Without masks nothing is
    causal: compared are CTAs that pass over as many tiles, those of the last rows, whose last tiles have masks.
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


# --- what was demanded ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Must:
    text: str
    value: str
    met: bool


def musts(rows: list[Row]) -> list[Must]:
    """The project's demands on these kernels, each with the row that is furthest from it."""
    found: list[Must] = []
    prefill = [row for row in rows if row["kind"] == "prefill"]
    ours = [row for row in prefill if row["kernel"] == OURS]

    def least(text: str, chosen: list[Row], key: str, limit: float, unit: str = "") -> None:
        if chosen:
            worst = min(chosen, key=lambda row: row[key])
            found.append(Must(text, f"{worst[key]:.3g}{unit} ({label(worst)})", worst[key] >= limit))

    def most(text: str, chosen: list[Row], key: str, limit: float) -> None:
        if chosen:
            worst = max(chosen, key=lambda row: row[key])
            found.append(Must(text, f"{worst[key]:.2g} ({label(worst)})", worst[key] <= limit))

    for head_size in (64, 128):
        for causal, limit in ((False, 76), (True, 72)):
            mine = [r for r in ours if r["head_size"] == head_size and r["causal"] == causal and r["tokens"] >= 4096]
            least(f"prefill {head_size}, {kind(causal)}, 4K and up: at least {limit} TFLOPS", mine, "tflops", limit)
    for causal in (False, True):
        mine = [r for r in ours if r["head_size"] == 256 and r["causal"] == causal and r["tokens"] >= 4096]
        least(f"prefill 256, {kind(causal)}, 4K and up: at least 55 TFLOPS", mine, "tflops", 55)
    ratios = against_peer(rows)
    if ratios:
        mean = math.exp(sum(math.log(row["ratio"]) for row in ratios) / len(ratios))
        text = f"the peer's speed 1.75 times, geometric mean of {len(ratios)}"
        found.append(Must(text, f"{mean:.3g}", mean >= 1.75))
    least("the peer's speed 1.6 times, every row", ratios, "ratio", 1.6)
    most("masks and paging cost 5 % at most", [row for row in rows if row["kind"] == "masks"], "cost", 0.05)
    decode = [row for row in rows if row["kind"] == "decode"]
    for head_size, limit in ((64, 0.92), (128, 0.92), (256, 0.85)):
        for tokens, _ in CONTEXTS:
            mine = [row for row in decode if (row["head_size"], row["tokens"]) == (head_size, tokens)]
            text = f"decode {head_size}, {tokens // 1024}K: {100 * limit:.0f} % of the feed, sum of the parts included"
            least(text, mine, "part_of_feed", limit)
    most("error against float64 2e-3 at most", ours + decode, "error", 2e-3)
    return found


def against_peer(rows: list[Row]) -> list[Row]:
    """Our rows of prefill that have one of the peer, with ``ratio`` to it."""
    prefill = {
        (row["kernel"], row["head_size"], row["tokens"], row["causal"]): row for row in rows if row["kind"] == "prefill"
    }
    return [
        {**row, "ratio": row["tflops"] / peer["tflops"], "peer": peer}
        for key, row in prefill.items()
        if key[0] == OURS and (peer := prefill.get((PEER, *key[1:]))) is not None
    ]


def kind(causal: bool) -> str:
    return "causal" if causal else "not causal"


def label(row: Row) -> str:
    words = [row["kind"], str(row["head_size"]), f"{row['tokens'] / 1024:g}K"]
    if row["kind"] == "decode":
        words += [f"batch {row['batch']}", f"GQA {row['group']}", f"page {row['page']}"]
    elif "causal" in row:
        words.append(kind(row["causal"]))
    return " ".join(words)


# --- the run -------------------------------------------------------------------------------------------------


def sweep(
    content: Cubin | None, tokens: Sequence[int], head_sizes: Sequence[int], kinds: Sequence[str]
) -> list[Callable[[], Row]]:
    """All rows, those first that say most. Without ``content`` there is no peer."""
    jobs: list[Callable[[], Row]] = []
    if content is not None and "method" in kinds:
        jobs += [functools.partial(method_row, content, *line) for line in PUBLISHED if line[0] in head_sizes]

    def prefill(count: int, head_size: int, causal: bool) -> None:
        shape = (count, head_size, causal)
        jobs.append(lambda: prefill_row(OURS, our_prefill(*shape), *shape))
        if content is not None:
            jobs.append(lambda: prefill_row(PEER, peer_prefill(content, *shape), *shape))

    for number, length in enumerate(tokens):
        for head_size in head_sizes if "prefill" in kinds else ():
            for causal in (False, True):
                prefill(length, head_size, causal)
        if number == 0 and "decode" in kinds:
            for context, batch in CONTEXTS:
                for head_size in head_sizes:
                    for group in (1, 4, 8):
                        for page in (16, 784):
                            jobs.append(functools.partial(decode_row, head_size, group, page, context, batch))
        if number == 0 and "masks" in kinds:
            jobs += [functools.partial(masks_row, h, 4096, causal) for h in head_sizes for causal in (False, True)]
    return jobs


def versions() -> dict[str, str]:
    names = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvdisasm", "numpy", "torch", "fastattention-vllm")
    found = {"python": platform.python_version(), "peer": f"cubin of {volta_peer.WHEEL}, SHA-256 {volta_peer.SHA256}"}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def report_of(rows: list[Row]) -> dict[str, Any]:
    return {
        "hardware": TITLE,
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        **demanded(rows),
    }


def demanded(rows: list[Row]) -> dict[str, Any]:
    return {
        "rows": rows,
        "musts": [{"must": must.text, "found": must.value, "met": must.met} for must in musts(rows)],
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    rows: list[Row] = report["rows"]
    console.print(f"[bold]{TITLE}[/]: every figure below is simulated. {report['date']}")
    ratios = {label(row): row for row in against_peer(rows)}
    table = Table(title=f"Prefill, batch {BATCH} x {HEADS} heads, pages of {PAGE}. {TITLE}")
    for name in ("head", "tokens", "", "ours TFLOPS", "static bound", "peer TFLOPS", "its bound", "ratio",
                 "error", "its error", "simulated"):  # fmt: skip
        table.add_column(name)
    order = sorted(
        (row for row in rows if row["kind"] == "prefill" and row["kernel"] == OURS),
        key=lambda row: (row["head_size"], row["causal"], row["tokens"]),
    )
    for row in order:
        peer = ratios.get(label(row), {}).get("peer")
        table.add_row(
            str(row["head_size"]), f"{row['tokens'] // 1024}K", kind(row["causal"]), f"{row['tflops']:.1f}",
            f"{row['bound_tflops']:.1f} {row['bound_unit']}", *(
                ("", "", "") if peer is None else
                (f"{peer['tflops']:.1f}", f"{peer['bound_tflops']:.1f} {peer['bound_unit']}",
                 f"{row['tflops'] / peer['tflops']:.2f}x")
            ), f"{row['error']:.1e}", "" if peer is None else f"{peer['error']:.1e}", row["simulated"],
        )  # fmt: skip
    console.print(table)
    decode = Table(title=f"Decode, {HEADS} query heads, fed at {FEED:.0f} GB/s. {TITLE}")
    for name in ("head", "tokens", "batch", "GQA", "page", "GB/s", "of the feed", "static bound", "sum of parts",
                 "error"):  # fmt: skip
        decode.add_column(name)
    for row in rows:
        if row["kind"] == "decode":
            decode.add_row(
                str(row["head_size"]), f"{row['tokens'] // 1024}K", str(row["batch"]), str(row["group"]),
                str(row["page"]), f"{row['gbs']:.0f}", f"{100 * row['part_of_feed']:.1f} %",
                f"{row['bound_gbs']:.0f} {row['bound_unit']}",
                f"{100 * row['combine_milliseconds'] / row['milliseconds']:.1f} %", f"{row['error']:.1e}",
            )  # fmt: skip
    console.print(decode)
    masks = Table(
        "head", "", "cost", "against the same source", title=f"Masks and paging against compiled out, 4K. {TITLE}"
    )
    for row in rows:
        if row["kind"] == "masks":
            masks.add_row(str(row["head_size"]), kind(row["causal"]), f"{100 * row['cost']:.1f} %", row["against"])
    console.print(masks)
    method = Table("head", "tokens", "", "TFLOPS", "prototype's", "ratio", title=f"The peer, method check. {TITLE}")
    for row in rows:
        if row["kind"] == "method":
            method.add_row(
                str(row["head_size"]), str(row["tokens"]), row["what"], f"{row['tflops']:.1f}",
                f"{row['prototype']}", f"{row['ratio']:.3f}",
            )  # fmt: skip
    console.print(method)
    demands = Table("demand", "furthest from it", "", title=f"Demands. {TITLE}")
    for must in musts(rows):
        demands.add_row(must.text, must.value, "met" if must.met else "[red]missed[/]")
    console.print(demands)


def draw(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows: list[Row] = report["rows"]
    figure, panels = pyplot.subplots(1, len(HEAD_SIZES) + 1, figsize=(18, 4.6), layout="constrained")
    figure.suptitle(
        f"{TITLE}, nothing here is measured on one. Prefill: batch {BATCH} x {HEADS} heads. {report['date']}"
    )
    for axes, head_size in zip(panels, HEAD_SIZES, strict=False):
        for kernel, colour in ((OURS, "tab:blue"), (PEER, "tab:orange")):
            for causal, style in ((False, "-"), (True, "--")):
                points = sorted(
                    (row["tokens"], row["tflops"])
                    for row in rows
                    if row["kind"] == "prefill"
                    and (row["kernel"], row["head_size"], row["causal"]) == (kernel, head_size, causal)
                )
                if points:
                    axes.plot(*zip(*points, strict=True), style, color=colour, marker="o",
                              label=f"{kernel}, {kind(causal)}")  # fmt: skip
        axes.axhline(113, color="black", linestyle=":", linewidth=1, label="tensor cores' peak")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(TOKENS), [f"{count // 1024}K" for count in sorted(TOKENS)])
        axes.minorticks_off()
        axes.set_ylim(0, 120)
        axes.set_xlabel("tokens")
        axes.set_ylabel("simulated TFLOPS")
        axes.set_title(f"prefill, head size {head_size}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    axes = panels[-1]
    decode = [row for row in rows if row["kind"] == "decode" and row["tokens"] == 16384]
    if decode:
        names = [f"{row['head_size']}, GQA {row['group']}, page {row['page']}" for row in decode]
        axes.barh(names, [row["gbs"] for row in decode], color="tab:blue")
        axes.axvline(FEED, color="black", linestyle=":", label=f"feed, {FEED:.0f} GB/s")
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelsize=7)
        axes.set_xlabel("simulated GB/s, sum of parts included")
        axes.set_title("decode, 16K tokens, batch 16", fontsize=10)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there, after each one")
    parser.add_argument("--plot", type=Path, help="draw a PNG")
    parser.add_argument(
        "--from", dest="sources", type=Path, nargs="+", help="simulate nothing, join these; later rows count"
    )
    parser.add_argument("--libtorch", type=Path, help=f"libtorch_cuda.so of the PyPI wheel {volta_peer.WHEEL}")
    parser.add_argument("--no-peer", action="store_true", help="leave the peer out, and its download")
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS), help="lengths of prefill")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS, help="of rows")
    parser.add_argument("--head-sizes", type=int, nargs="*", default=list(HEAD_SIZES))
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 180)
    if options.sources:
        results = [json.loads(path.read_text()) for path in options.sources]
        joined = {(row["kernel"], label(row), row.get("what")): row for result in results for row in result["rows"]}
        report = {**results[0], **demanded(list(joined.values()))}
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    else:
        content = None if options.no_peer else Cubin(volta_peer.cubin(options.libtorch))
        rows: list[Row] = []
        for job in sweep(content, options.tokens, options.head_sizes, options.kinds):
            start = time.perf_counter()
            rows.append(job())
            what = {key: value for key, value in rows[-1].items() if key in ("tflops", "gbs", "cost", "error", "ratio")}
            words = ", ".join(f"{key} {value:.3g}" for key, value in what.items())
            seconds = time.perf_counter() - start
            console.print(f"simulated: {rows[-1]['kernel']}, {label(rows[-1])}: {words} ({seconds:.0f} s)")
            if options.json is not None:
                options.json.write_text(json.dumps(report_of(rows), indent=1) + "\n")
        report = report_of(rows)
    print_report(report, console)
    if options.plot is not None:
        draw(report, options.plot)


if __name__ == "__main__":
    main()
