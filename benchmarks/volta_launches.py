"""Launches on the simulated V100 and their times: our prefill's and the peer's, as volta_sim_rows.py describes.

Used by: volta_sim.py, its rows and tables, and ablation_v100.py.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy
import torch
import volta_peer

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.attention.volta import kernels as volta
from fastattention_vllm.attention.volta import launch as volta_kernels
from fastattention_vllm.attention.volta.launch import Divisor, Split
from kernels.volta import variants
from kernels.volta.manifest import SOURCES
from kernels.volta.nvrtc import compile_cuda
from kernels.volta.sim import V100, Cubin, Simulation, Timing, Trace, default_timing, static_bound
from kernels.volta.sim.dispatch import dispatch
from kernels.volta.variants import Variant

BATCH, HEADS = 8, 32
MAX_SIMULATED = 20 * 128 * 4096 * 64
"""Limit of query rows times keys times head size for the simulated CTAs of a launch: 15 seconds of one core."""
MIN_UNALIKE = 16
"""Minimum number of simulated CTAs of a causal launch: 19 of 56 gave the total time within 0.4 %, 7 within 4 %."""
PAGE = 16

# --- launches ------------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """A kernel ready to run on a few heads, which stand for many."""

    simulation: Simulation
    works: list[float]
    """For each CTA of one head: the keys that it visits, plus a number of keys for its begin and end."""
    cost: float
    """Cost of a unit of work in the simulator: query rows times head size."""
    heads: int
    """Heads in the simulated memory."""
    alike: bool = False
    """All CTAs of a head do the same work, so one of them stands for all."""
    together: int = 1
    """Heads whose CTAs begin together: first the first CTA of each, then the second, and so on.

    With several heads ``blockIdx.x`` is the head, otherwise ``blockIdx.y``.
    """
    traces: dict[tuple[int, int], Trace] = field(default_factory=dict)

    def trace(self, x: int, head: int) -> Trace:
        key = (0 if self.alike else x, head % self.heads)
        if key not in self.traces:
            self.traces[key] = self.simulation.trace(*(key if self.together == 1 else key[::-1]))
        return self.traces[key]

    def order(self, heads: int) -> list[int]:
        """The order in which CTAs of a launch begin: for each, its number among those of its head."""
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
    """Places of the CTAs to simulate, in order: all if the limit allows it; and about half of those."""
    count, patience = len(works), MAX_SIMULATED / cost
    if sum(works) <= patience:
        return range(count), ()
    if not alike:
        step = max(1, min(math.ceil(sum(works) / max(patience, 1)), count // MIN_UNALIKE))
        return range((count - 1) % step, count, step), range((count - 1) % (2 * step), count, 2 * step)
    # The last wave is as full as that of all CTAs. There are at least two waves, because the first is the start-up.
    some = _congruent(max(int(patience / sum(works) * count), 2 * resident), count, resident)
    return range(min(some, count)), range(_congruent(max(some // 2 - resident, 1), count, resident))


def _congruent(number: int, to: int, modulus: int) -> int:
    return number + (to - number) % modulus


# --- ours ----------------------------------------------------------------------------------------------------


def everything(source: str) -> str:
    return source


# Fragments of the source that are compiled out for comparison, and their replacements.
MASKS = (
    ("for (; number < masked; ++number) step(number + 1 < num_tiles, tile_begin(number), tile_begin(number + 2), "
     "Masked());", ""),
    ("for (; number < unseen; ++number) {", "for (; number < 0; ++number) {"),
)  # fmt: skip
RAGGED_ENDS = (("const int key = min(tile_begin + first, last);", "const int key = tile_begin + first;"),)
PAGES = (("if (tables == nullptr) return {0, key};", "return {0, key};"),)


def compiled_out(replacements: Sequence[tuple[str, str]], source: str) -> str:
    """Prefill without some features. It is right for whole tiles of contiguous keys that all rows see."""
    for old, new in replacements:
        if source.count(old) != 1:
            raise RuntimeError(
                f"prefill.cu has no single {old!r} any more; volta_launches.py must learn what to take out."
            )
        source = source.replace(old, new)
    return source


@functools.cache
def cubin(variant: Variant, edit: Callable[[str], str] = everything) -> Cubin:
    compiled = compile_cuda(
        edit((SOURCES / variant.source).read_text()),
        name=variant.source,
        defines=variant.defines,
        include=[SOURCES],
        options=variants.COMPILER_OPTIONS,
    )
    return Cubin(compiled.binary)


@functools.cache
def numbers(count: int) -> torch.Tensor:
    """fp16 numbers of unit variance, repeated after four million."""
    seed = torch.Generator().manual_seed(0)
    some = torch.randn(min(count, 4_000_037), generator=seed).half()
    return some.repeat(-(-count // len(some)))[:count]


def mapped(simulation: Simulation) -> Callable[[torch.Tensor], int]:
    """The address of a tensor in ``simulation``. Views of one storage stay views."""
    known: dict[int, int] = {}

    def address_of(tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known[storage.data_ptr()] = simulation.map(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
        return known[storage.data_ptr()] + tensor.storage_offset() * tensor.element_size()

    return address_of


def paged(tokens: int, heads: int, head_size: int, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values (views of one cache as in vLLM: [blocks, heads, page, K | V]) and a shuffled block table."""
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
    """Largest difference from float64. ``visible``: number of keys that each row sees, from the first on."""
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
    group: int = 1,
    kv_heads: int = HEADS,
    edit: Callable[[str], str] = everything,
    variant: Variant | None = None,
) -> tuple[Launch, Callable[[], float]]:
    """The launch, and a function for the error of its traced CTAs.

    ``group``: query heads for each of ``kv_heads``, which begin together. ``variant`` replaces the shipped one.
    """
    variant = variant or variants.prefill(head_size)
    simulation = Simulation(cubin(variant, edit), variant.kernel)
    heads = 2 * variant.ctas_per_sm + 1
    problem = one_sequence(tokens, group, heads, head_size, page, causal, tokens)
    out = torch.full((tokens, group * heads, head_size), 7.0, dtype=torch.float16)
    all_rows = tokens * group
    grid = volta_kernels.prefill_grid(variant, all_rows, heads, 1)
    argument = Split(volta.parameters(problem, out, None, mapped(simulation)), parts=Divisor.by(1), rows=all_rows)
    simulation.launch(grid, (variant.threads, 1, 1), bytes(argument), variant.shared_bytes)
    begins = [(grid[1] - 1 - x) * variant.rows for x in range(grid[1])]
    ends = [-(-min(all_rows, begin + variant.rows) // group) for begin in begins]
    works = [float(end if causal else tokens) + variant.tile for end in ends]
    launch = Launch(simulation, works, variant.rows * head_size, heads, alike=not causal, together=kv_heads)

    def error() -> float:
        errors = []
        for x, head in _some(launch):
            rows = numpy.arange(begins[x], min(begins[x] + variant.rows, all_rows))
            token, heads_of_rows = rows // group, head * group + rows % group
            visible = token + 1 if causal else numpy.full(len(rows), tokens)
            query, found = (tensor[token, heads_of_rows].double().numpy() for tensor in (problem.query, out))
            errors.append(softmax_error(query, *keys_and_values(problem, head), visible, found))
        return max(errors)

    return launch, error


def _some(launch: Launch) -> list[tuple[int, int]]:
    """Of the CTAs that have run: those with the most and the least work, and the last one."""
    run = list(launch.traces)
    by_work = sorted(run, key=lambda key: launch.works[key[0]])
    return list(dict.fromkeys((by_work[0], by_work[-1], run[-1])))


# --- the peer ------------------------------------------------------------------------------------------------


def peer_prefill(content: Cubin, tokens: int, head_size: int, causal: bool) -> tuple[Launch, Callable[[], float]]:
    """As :func:`our_prefill`, on contiguous keys, because the peer does not support pages."""
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
