"""NaN in logits is counted on a GPU without waiting for it, also inside a CUDA graph."""

from __future__ import annotations

import torch

from fastattention_vllm.integration.serving.nan_logits import NanCount


def logits(*rows: int) -> torch.Tensor:
    found = torch.randn(8, 32000, device="cuda", dtype=torch.float16)
    for row in rows:
        found[row, row] = float("nan")
    return found


def test_a_step_does_not_wait() -> None:
    count = NanCount()
    broken, whole = logits(0, 7), logits()
    count.add(whole)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            count.add(broken)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert count.total == 6


def test_a_graph_counts_what_it_computes() -> None:
    count = NanCount()
    given = logits()
    count.add(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        count.add(given)
    for rows in ((), (1,), (2, 3, 4)):
        given.copy_(logits(*rows))
        graph.replay()
    torch.cuda.synchronize()
    assert count.total == 1 + 3
