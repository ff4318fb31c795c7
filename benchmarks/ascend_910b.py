"""For the owner of an Ascend 910B: are the answers right there, and how fast is it? Writes a JSON to send back.

    python benchmarks/ascend_910b.py --json ascend-910b.json

Needs CANN, torch_npu and this package; no vLLM. First every kind of step is compared with float64 (exit status 1 if one
is off), and a layer whose keys and values lie in host memory, too. Then the rates of reading these are measured, and
prefill and decoding are timed next to the same operator with a whole mask and next to attention written in torch, with
the memory that each takes. A case that fails is kept with its message. Not yet run on hardware.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fastattention_vllm.attention import ascend
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.placement import calibrate, host_memory, npu
from fastattention_vllm.placement.host_attention import HostAttention, HostLayerGroup, StreamSplit
from fastattention_vllm.placement.pinning import NpuPinning
from fastattention_vllm.placement.step import Batch, divide

PAGE = 128
HOST_CACHE = 1 << 30
"""Bytes of the layer in host memory."""
ALLOWED = {torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Of an answer's size and the root mean square of all: an operator that rounds its weights, too, to the query's dtype
stays below."""


@dataclass(frozen=True)
class Case:
    name: str
    new: tuple[int, ...]
    """Query tokens of each sequence."""
    kept: tuple[int, ...]
    """Tokens of each sequence, these included."""
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    dtype: torch.dtype = torch.float16
    window: int = -1
    int8: bool = False

    def build(self, device: torch.device) -> AttentionProblem:
        random = torch.Generator().manual_seed(0)
        pages = [-(-tokens // PAGE) for tokens in self.kept]
        starts = [0]
        for count in self.new:
            starts.append(starts[-1] + count)
        shape = (sum(pages), PAGE, self.kv_heads, self.head_size)
        if self.int8:
            key, value = (torch.randint(-127, 128, shape, generator=random, dtype=torch.int8) for _ in range(2))
        else:
            key, value = (torch.randn(shape, generator=random, dtype=torch.float32).to(self.dtype) for _ in range(2))
        table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        order = torch.randperm(sum(pages), generator=random).to(torch.int32)
        for sequence, own in enumerate(order.split(pages)):
            table[sequence, : len(own)] = own
        query = torch.randn(starts[-1], self.heads, self.head_size, generator=random).to(self.dtype)
        return AttentionProblem(
            query=query.to(device),
            key=key.to(device),
            value=value.to(device),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(self.kept, dtype=torch.int32),
            scale=self.head_size**-0.5,
            causal=True,
            block_table=table.to(device),
            window=(self.window, -1),
            key_scale=1 / 32 if self.int8 else 1.0,
            value_scale=1 / 32 if self.int8 else 1.0,
        )


def right_cases() -> list[Case]:
    shapes = {
        "prefill": ((130, 7), (130, 7)),
        "decode": ((1, 1, 1), (1, 129, 700)),
        "chunked prefill": ((200, 64), (700, 64)),
        "mixed": ((1, 1, 300), (300, 5, 500)),
    }
    return [
        Case(f"{name}, head size {size}, {kind}", new, kept, 8, 2, size, dtype, window, int8)
        for name, (new, kept) in shapes.items()
        for size in (64, 128, 192)
        for kind, dtype, window, int8 in (
            ("fp16", torch.float16, -1, False),
            ("bf16", torch.bfloat16, -1, False),
            ("window", torch.bfloat16, 50, False),
            ("int8 cache", torch.bfloat16, -1, True),
        )
    ]


def fast_cases() -> list[Case]:
    thousand = 1024
    prefill = [Case(f"prefill {n}K", (n * thousand,), (n * thousand,)) for n in (1, 4, 8, 16, 32)]
    small = [Case(f"prefill {n}K, head size 64", (n * thousand,), (n * thousand,), head_size=64) for n in (4, 16)]
    decode = [
        Case(f"decode {n}K x {batch}", (1,) * batch, (n * thousand,) * batch)
        for n, batch in ((4, 1), (4, 16), (32, 1), (32, 16), (128, 1))
    ]
    int8 = [Case("decode 32K x 16, int8 cache", (1,) * 16, (32 * thousand,) * 16, int8=True)]
    return prefill + small + decode + int8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="written there")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="npu:0")
    options = parser.parse_args()
    ascend.operator()
    device = torch.device(options.device)
    rows = [check(case, device) for case in right_cases()]
    rows += host_layer(device)
    wrong = [row for row in rows if not row["right"]]
    print(f"{len(rows) - len(wrong)} of {len(rows)} kinds of step are right", flush=True)
    rows.append(host_rates(device))
    for case in fast_cases():
        rows += speed(case, device, options.repeats)
    write(options.json, device, rows)
    print(f"wrote {options.json}; please send it back with an issue.")
    return 1 if wrong else 0


def check(case: Case, device: torch.device) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case.name, "metric": "error", "limit": ALLOWED[case.dtype], "right": False}
    with reported(row):
        problem = case.build(device)
        expected = reference(problem)
        out, _ = ascend.run(problem)
        size = expected.abs() + expected.square().mean().sqrt()
        row["ours"] = float(((out.cpu().double() - expected).abs() / size).max())
        row["right"] = row["ours"] <= row["limit"]  # NaN is wrong
    if not row["right"]:
        print(f"WRONG {case.name}: {row.get('ours', row.get('failed'))}", flush=True)
    return row


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
        """With a cache in pinned host memory."""
        memory, _ = host_memory.commit(HOST_CACHE, pin=NpuPinning() if device.type == "npu" else None)
        cache = memory.view(torch.float16).view(-1, self.kv_heads, PAGE, 2 * self.head_size)
        return HostAttention(HostLayerGroup(npu.NpuLink(device), npu, stream_split=StreamSplit(share)), self, cache)


def host_layer(device: torch.device, tokens: int = 6000) -> list[dict[str, Any]]:
    """Reading a prompt in, in two steps, and three tokens of the answer; by the CPU, and with the NPU's share."""
    rows = []
    steps = (tokens, tokens // 3, 1, 1, 1)
    for share in (0.0, 0.5):
        row: dict[str, Any] = {"case": f"host layer, the NPU's share {share}", "metric": "error", "right": False}
        row["limit"] = 2 * ALLOWED[torch.float16]  # parts that are merged are rounded, too
        rows.append(row)
        with reported(row):
            layer = HostLayer()
            attention = layer.open(device, share)
            numbers = torch.Generator().manual_seed(0)
            keys = torch.randn(2, sum(steps), layer.kv_heads, layer.head_size, generator=numbers).half()
            blocks = torch.randperm(attention.cache.shape[0], generator=numbers)[: -(-sum(steps) // PAGE)]
            row["ours"], done = 0.0, 0
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
                last = min(new, 32)  # the rest would take float64 too long
                expected = of_contiguous(layer, query[-last:], keys[:, :done])
                size = expected.abs() + expected.square().mean().sqrt()
                error = ((out[-last:].cpu().double() - expected).abs() / size).max()
                row["ours"] = float(torch.maximum(torch.tensor(row["ours"]), error.float()))  # NaN stays
            row["right"] = row["ours"] <= row["limit"]
        if not row["right"]:
            print(f"WRONG {row['case']}: {row.get('ours', row.get('failed'))}", flush=True)
    return rows


def of_contiguous(layer: HostLayer, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """In float64: ``query`` are the last tokens of ``keys`` ``[2, tokens, num_kv_heads, head_size]``, K and V."""
    new, tokens = len(query), keys.shape[1]
    key, value = keys.double().repeat_interleave(layer.heads // layer.kv_heads, 2)
    score = torch.einsum("qhd,khd->hqk", query.double(), key) * layer.head_size**-0.5
    hidden = torch.arange(tokens) > torch.arange(tokens - new, tokens)[:, None]
    return torch.einsum("hqk,khd->qhd", score.masked_fill(hidden, -torch.inf).softmax(-1), value)


def host_rates(device: torch.device) -> dict[str, Any]:
    """How fast keys and values in host memory are read: plainly, by the CPU's attention, over the link, and both."""
    row: dict[str, Any] = {"case": f"host memory, {HOST_CACHE >> 20} MiB", "metric": "bytes per second"}
    with reported(row):
        layer = HostLayer()
        row |= asdict(calibrate.measure(layer.open(device, 0.0), layer.heads, torch.float16))
    print(json.dumps(row), flush=True)
    return row


def reference(problem: AttentionProblem) -> torch.Tensor:
    """In float64 on the CPU."""
    outs = []
    assert problem.block_table is not None
    group = problem.num_heads // problem.num_kv_heads
    for sequence, length in enumerate(problem.seq_lens.tolist()):
        begin, end = problem.query_start_loc[sequence : sequence + 2].tolist()
        pages = problem.block_table[sequence].cpu()[: -(-length // PAGE)].long()
        key, value = (
            (cache.cpu()[pages].flatten(0, 1)[:length].double() * factor).repeat_interleave(group, 1)
            for cache, factor in ((problem.key, problem.key_scale), (problem.value, problem.value_scale))
        )
        score = torch.einsum("qhd,khd->hqk", problem.query[begin:end].cpu().double(), key) * problem.scale
        own, position = torch.arange(length - (end - begin), length)[:, None], torch.arange(length)
        hidden = position > own
        if problem.window[0] >= 0:
            hidden |= position < own - problem.window[0]
        outs.append(torch.einsum("hqk,khd->qhd", score.masked_fill(hidden, -torch.inf).softmax(-1), value))
    return torch.cat(outs)


def speed(case: Case, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Ours, and for one long sequence the same operator with a whole mask, and torch."""
    ways: dict[str, Callable[[AttentionProblem], Any]] = {"ours": ascend.run}
    if len(case.new) == 1 and case.new == case.kept:
        ways |= {"whole mask": with_whole_mask, "torch": in_torch}
    found: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        found[name] = row = {"case": case.name, "way": name, "metric": "seconds per call"}
        with reported(row):
            problem = case.build(device)
            row |= timed(lambda way=way, problem=problem: way(problem), device, repeats)  # type: ignore[misc]
            row |= rates(case, row["seconds"])
        print(json.dumps(row), flush=True)
    return list(found.values())


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


def rates(case: Case, seconds: float) -> dict[str, float]:
    """Operations of the visible half of the scores, and bytes of keys and values read once."""
    pairs = sum(new * kept - new * (new - 1) / 2 for new, kept in zip(case.new, case.kept, strict=True))
    number = 1 if case.int8 else 2
    read = 2 * sum(case.kept) * case.kv_heads * case.head_size * number
    return {"tflops": 4 * pairs * case.heads * case.head_size / seconds / 1e12, "kv_gbs": read / seconds / 1e9}


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
    """As the textbook has it: all scores at once."""
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


@contextlib.contextmanager
def reported(row: dict[str, Any]) -> Any:
    """What goes wrong in one case must not cost the others."""
    try:
        yield
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:500]


def write(path: Path, device: torch.device, rows: list[dict[str, Any]]) -> None:
    names = ("torch", "torch-npu", "fastattention-vllm", "vllm", "vllm-ascend")
    versions = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    cann = Path("/usr/local/Ascend/ascend-toolkit/latest/version.cfg")
    if cann.exists():
        versions["cann"] = cann.read_text()[:300]
    hardware = torch.npu.get_device_name(device) if device.type == "npu" else device.type  # type: ignore[attr-defined]
    today = datetime.date.today().isoformat()
    report = {"hardware": hardware, "versions": versions, "date": today, "rows": rows}
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
