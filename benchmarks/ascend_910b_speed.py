"""Times of the NPU's attention, next to the Triton kernels, the same operator with a whole mask, and torch.

Used by: ascend_910b.py.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from ascend_910b_steps import Step, reported

from fastattention_vllm.attention import ascend
from fastattention_vllm.attention.ascend_triton import kernels as ascend_triton
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.bench.report import Row, compared


def fast_steps() -> list[Step]:
    thousand = 1024
    prefill = [Step(f"prefill {n}K", (n * thousand,), (n * thousand,)) for n in (1, 4, 8, 16, 32)]
    small = [Step(f"prefill {n}K, head size 64", (n * thousand,), (n * thousand,), head_size=64) for n in (4, 16)]
    decode = [
        Step(f"decode {n}K x {batch}", (1,) * batch, (n * thousand,) * batch)
        for n, batch in ((4, 1), (4, 16), (32, 1), (32, 16), (128, 1))
    ]
    int8 = [Step("decode 32K x 16, int8 cache", (1,) * 16, (32 * thousand,) * 16, int8=True)]
    return prefill + small + decode + int8


def speed(step: Step, device: torch.device, repeats: int) -> list[Row]:
    """Times of the operator, of the Triton kernels and, for one long sequence, of a whole mask and of torch."""
    ways: dict[str, Callable[[AttentionProblem], Any]] = {"ours": ascend.run}
    if len(step.new) == 1 and step.new == step.kept:
        ways |= {"whole mask": with_whole_mask, "torch": in_torch}
    if importlib.util.find_spec("triton"):  # a step that it refuses is kept with the reason
        ways["triton"] = ascend_triton.run
    rows: list[Row] = []
    ours: float | None = None
    for name, way in ways.items():
        found: dict[str, Any] = {"way": name}
        with reported(found):
            problem = step.build(device)
            found |= timed(lambda way=way, problem=problem: way(problem), device, repeats)  # type: ignore[misc]
            found |= rates(step, found["seconds"])
        seconds = found.get("seconds")
        ours = seconds if name == "ours" else ours
        peer = {} if name == "ours" else {"peer_name": name, "peer": seconds}
        rows.append(compared(step.name, f"{step.phase} time", "s", ours, better="lower", **peer, **found))
        print(rows[-1].model_dump_json(), flush=True)
    return rows


def timed(call: Callable[[], Any], device: torch.device, repeats: int) -> dict[str, Any]:
    on_npu = device.type == "npu"
    wait: Callable[[], None] = torch.npu.synchronize if on_npu else lambda: None  # type: ignore[attr-defined]
    if on_npu:
        before = torch.npu.memory_allocated(device)  # type: ignore[attr-defined]
        torch.npu.reset_peak_memory_stats(device)  # type: ignore[attr-defined]
    call()
    wait()
    found: dict[str, Any] = {}
    if on_npu:
        found["extra_bytes"] = torch.npu.max_memory_allocated(device) - before  # type: ignore[attr-defined]
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - begin)
    return found | {"seconds": statistics.median(seconds), "samples": seconds}


def rates(step: Step, seconds: float) -> dict[str, float]:
    """Operations for the visible half of the scores, and bytes of keys and values read once."""
    pairs = sum(new * kept - new * (new - 1) / 2 for new, kept in zip(step.new, step.kept, strict=True))
    number = 1 if step.int8 else 2
    read = 2 * sum(step.kept) * step.kv_heads * step.head_size * number
    return {"tflops": 4 * pairs * step.heads * step.head_size / seconds / 1e12, "kv_gbs": read / seconds / 1e9}


def with_whole_mask(problem: AttentionProblem) -> Any:
    tokens = len(problem.query)
    mask = torch.ones(tokens, tokens, dtype=torch.int8, device=problem.query.device).triu_(1)
    key, value = dense(problem)
    return ascend.operator()(
        problem.query[None],
        key[None],
        value[None],
        atten_mask=mask,
        num_heads=problem.num_heads,
        num_key_value_heads=problem.num_kv_heads,
        scale=problem.scale,
        input_layout="BSND",
        sparse_mode=0,
    )


def in_torch(problem: AttentionProblem) -> Any:
    """Textbook attention: all scores at once."""
    key, value = dense(problem)
    group = problem.num_heads // problem.num_kv_heads
    query, key, value = (each.transpose(0, 1) for each in (problem.query, key, value))
    score = query @ key.repeat_interleave(group, 0).transpose(1, 2) * problem.scale
    hidden = torch.ones(score.shape[1:], dtype=torch.bool, device=score.device).triu_(1)
    return score.masked_fill_(hidden, -torch.inf).softmax(-1) @ value.repeat_interleave(group, 0)


def dense(problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
    assert problem.block_table is not None
    pages, tokens = problem.block_table[0].long(), int(problem.seq_lens[0])
    key, value = (cache[pages].flatten(0, 1)[:tokens] for cache in (problem.key, problem.value))
    return key, value
