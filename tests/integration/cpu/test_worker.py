"""The KV cache of a real engine is in huge pages, and one log line says where it is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from fastattention_vllm.attention.cpu.memory import MemoryPlacement
from fastattention_vllm.integration.cpu import worker as cpu_worker
from fastattention_vllm.placement.host_memory import GIB
from tests.attention.cpu.test_memory import HUGE, huge_bytes, needs_huge_pages, whole_pages
from tests.integration.engine import engine
from tests.reference_models import llama, save_random


@needs_huge_pages
def test_the_kv_cache_of_an_engine_is_in_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []  # not collected by a handler, because vLLM reconfigures logging when it starts
    monkeypatch.setattr(cpu_worker.logger, "info", lambda text, *values, **named: lines.append(text % values))
    with engine(save_random(llama(4, 2, 64), tmp_path / "model"), kv_cache_memory_bytes=64 << 20) as llm:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        caches = dict(cpu_worker._buffers(worker.model_runner.kv_caches))
        assert sum(caches.values()) > 60 << 20
        for address, size in caches.items():
            assert huge_bytes(address, size) >= whole_pages(address, size) > 0
    (line,) = [line for line in lines if line.startswith("KV cache: 0") and "huge" in line]
    assert line.startswith("KV cache: 0.06 GiB, 9")
    assert line.endswith(" % of it in huge pages.")


def test_every_buffer_is_placed_once_and_is_zero() -> None:
    """Layers share a buffer from 0.29 on, and a Mamba layer has several tensors."""
    shared, own = torch.full((4 * HUGE,), 5, dtype=torch.uint8), torch.full((HUGE,), 5, dtype=torch.uint8)
    cpu_worker.place_tensors(
        "KV cache", [shared[:HUGE], shared[HUGE:], [own[:10], own[10:]], torch.empty(0)], [0], discard=True
    )
    assert not shared.any()
    assert not own.any()
    assert len(dict(cpu_worker._buffers([shared[1:], [own], {"layer": own}]))) == 2
    cpu_worker.place_tensors("KV cache", [], [0], discard=True)


def test_weights_keep_their_contents() -> None:
    large, small = torch.arange(4 * HUGE, dtype=torch.int32), torch.arange(9)
    cpu_worker.place_tensors("weights", [large[5:], small], [0], discard=False)
    assert torch.equal(large, torch.arange(4 * HUGE, dtype=torch.int32))
    assert torch.equal(small, torch.arange(9))


def test_small_weights_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is about all weights, of which a small model has most in tensors that are not moved."""
    lines: list[str] = []
    monkeypatch.setattr(cpu_worker.logger, "info", lambda text, *values: lines.append(text % values))
    large, small = torch.zeros(8 << 20, dtype=torch.uint8), [torch.zeros(3 << 20, dtype=torch.uint8) for _ in range(56)]
    placed = MemoryPlacement(8 << 20, 0, "")
    monkeypatch.setattr("fastattention_vllm.attention.cpu.memory.place_memory", lambda *arguments, **named: placed)
    cpu_worker.place_tensors("weights", [large, *small], [0], discard=False)
    (line,) = lines
    assert line.startswith("weights: 0.17 GiB, 5 % of it in huge pages")
    assert line.endswith(" Tensors below 4 MiB are not moved.")


@pytest.mark.parametrize(
    ("nodes", "placements", "line"),
    [
        ([], [MemoryPlacement(2 * GIB, 0, "")] * 2, "KV cache: 4.00 GiB, 100 % of it in huge pages."),
        (
            [0, 1],
            [MemoryPlacement(GIB, 2, "")] * 2,
            "KV cache: 4.00 GiB, 50 % of it in huge pages, interleaved over NUMA nodes 0, 1.",
        ),
        ([1], [MemoryPlacement(4 * GIB, 1, "")], "KV cache: 4.00 GiB, 100 % of it in huge pages, on NUMA node 1."),
        (
            [0, 1],
            [MemoryPlacement(0, 0, "Why. Why not."), MemoryPlacement(0, 2, "Why. Why not.")],
            "KV cache: 4.00 GiB, 0 % of it in huge pages, requested NUMA nodes 0, 1. Why. Why not.",
        ),
        ([], [MemoryPlacement(None, 0, "Why.")], "KV cache: 4.00 GiB, an unknown part of it in huge pages. Why."),
    ],
)
def test_the_log_line(nodes: list[int], placements: list[MemoryPlacement], line: str) -> None:
    assert cpu_worker.describe("KV cache", 4 * GIB, nodes, placements) == line


@pytest.mark.parametrize(
    ("tokens", "images", "linears_of", "threads"),
    [
        (1, False, "kernels", 1),
        (cpu_worker.FEW_TOKENS, False, "kernels", 1),
        (cpu_worker.FEW_TOKENS + 1, False, "kernels", 3),
        (1, True, "kernels", 3),
        (1, False, "torch", 3),
        (1, False, "oneDNN", 3),
        (1, False, "vLLM", 3),
    ],
)
def test_torch_has_one_thread_in_steps_of_few_tokens(
    tokens: int, images: bool, linears_of: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def execute_model(self: Any, scheduler_output: Any) -> None:
        seen.append(torch.get_num_threads())
        raise RuntimeError("in a step")

    monkeypatch.setattr(cpu_worker.CPUWorker, "execute_model", execute_model)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # as vLLM does
    monkeypatch.setattr(cpu_worker.cpu_linear, "tokens_on_rows", lambda dtype: 16 if linears_of == "torch" else None)
    monkeypatch.setattr(cpu_worker.cpu_linear, "packed_weights", lambda: [torch.ones(1)] * (linears_of == "oneDNN"))
    monkeypatch.setattr(cpu_worker.compat, "has_compiled_cpu_ops", lambda: linears_of == "vLLM")
    step = SchedulerOutput.make_empty()
    step.total_num_scheduled_tokens = tokens
    step.scheduled_encoder_inputs = {"request": [0]} if images else {}
    worker: Any = object.__new__(cpu_worker.FastAttentionCpuWorker)
    worker.model_config = SimpleNamespace(dtype=torch.bfloat16)
    before = torch.get_num_threads()
    torch._C.set_num_threads(3)
    try:
        with pytest.raises(RuntimeError, match="in a step"):
            worker.execute_model(step)
        assert seen == [threads]
        assert torch.get_num_threads() == 3
        assert worker._kernels_compute_linears() == (linears_of == "kernels")
    finally:
        torch._C.set_num_threads(before)
