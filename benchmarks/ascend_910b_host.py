"""A layer with keys and values in host memory beside an NPU: correctness of its results, and its read rates.

Used by: ascend_910b.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from ascend_910b_steps import ALLOWED, PAGE, reported, verdict

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.bench.report import Row, compared
from fastattention_vllm.placement import calibrate, host_memory, npu
from fastattention_vllm.placement.host_attention import HostAttention, HostLayerGroup, StreamSplit
from fastattention_vllm.placement.pinning import NpuPinning
from fastattention_vllm.placement.step import Batch, divide

HOST_CACHE = 1 << 30
"""Bytes of the layer in host memory."""


@dataclass(frozen=True)
class HostLayer:
    """One layer of a model with 8 query heads on 2 KV heads of size 128."""

    heads: int = 8
    kv_heads: int = 2
    head_size: int = 128

    def problem(self, **parts: Any) -> AttentionProblem:
        return AttentionProblem(**({"scale": self.head_size**-0.5} | parts))

    def scales(self) -> tuple[float, float]:
        return (1.0, 1.0)

    def merges(self) -> bool:
        return True

    def open(self, device: torch.device, share: float) -> HostAttention:
        """Open the layer with a cache in pinned host memory."""
        memory, _ = host_memory.commit(HOST_CACHE, pin=NpuPinning() if device.type == "npu" else None)
        cache = memory.view(torch.float16).view(-1, self.kv_heads, PAGE, 2 * self.head_size)
        return HostAttention(HostLayerGroup(npu.NpuLink(device), npu, stream_split=StreamSplit(share)), self, cache)


def host_layer(device: torch.device, tokens: int = 6000) -> list[Row]:
    """Prefill of a prompt in two steps and three decode steps, by the CPU alone and with the NPU's share."""
    rows = []
    steps = (tokens, tokens // 3, 1, 1, 1)
    for share in (0.0, 0.5):
        found: dict[str, Any] = {"right": False}
        allowed = 2 * ALLOWED[torch.float16]  # merged parts are rounded as well
        worst = 0.0
        with reported(found):
            layer = HostLayer()
            attention = layer.open(device, share)
            numbers = torch.Generator().manual_seed(0)
            keys = torch.randn(2, sum(steps), layer.kv_heads, layer.head_size, generator=numbers).half()
            blocks = torch.randperm(attention.cache.shape[0], generator=numbers)[: -(-sum(steps) // PAGE)]
            done = 0
            for new in steps:
                query = torch.randn(new, layer.heads, layer.head_size, generator=numbers).half()
                own = slice(done, done + new)
                done += new
                positions = torch.arange(own.start, done)
                slots = blocks[positions // PAGE] * PAGE + positions % PAGE
                lengths = torch.tensor([done], dtype=torch.int32)
                starts = torch.tensor([0, new], dtype=torch.int32)
                batch = Batch(starts, lengths, blocks[None].int(), slots, slots)
                out = torch.empty_like(query, device=device)
                key, value = (each[own].to(device) for each in keys)
                attention.attend(divide(batch, PAGE), query.to(device), key, value, out)
                last = min(new, 32)  # float64 would take too long for the rest
                expected = of_contiguous(layer, query[-last:], keys[:, :done])
                size = expected.abs() + expected.square().mean().sqrt()
                error = ((out[-last:].cpu().double() - expected).abs() / size).max()
                worst = float(torch.maximum(torch.tensor(worst), error.float()))  # keeps NaN
            found["right"] = worst <= allowed
        rows.append(verdict(f"host layer, the NPU's share {share}", "cooperative error", worst, allowed, found))
    return rows


def of_contiguous(layer: HostLayer, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Attention in float64.

    ``query`` is the last tokens of ``keys`` ``[2, tokens, num_kv_heads, head_size]``, K and V.
    """
    new, tokens = len(query), keys.shape[1]
    key, value = keys.double().repeat_interleave(layer.heads // layer.kv_heads, 2)
    score = torch.einsum("qhd,khd->hqk", query.double(), key) * layer.head_size**-0.5
    hidden = torch.arange(tokens) > torch.arange(tokens - new, tokens)[:, None]
    return torch.einsum("hqk,khd->qhd", score.masked_fill(hidden, -torch.inf).softmax(-1), value)


def host_rates(device: torch.device) -> Row:
    """Read rates of keys and values in host memory: a plain read, the CPU's attention, the link, and both together."""
    found: dict[str, Any] = {}
    with reported(found):
        layer = HostLayer()
        found |= asdict(calibrate.measure(layer.open(device, 0.0), layer.heads, torch.float16))
    row = compared(
        f"host memory, {HOST_CACHE >> 20} MiB",
        "cooperative read rate",
        "bytes per second",
        found.get("cpu"),
        better="higher",
        limit=found.get("memory"),
        **found,
    )
    print(row.model_dump_json(), flush=True)
    return row
