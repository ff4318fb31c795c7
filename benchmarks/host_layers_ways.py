"""The variants that host_layers.py compares, with a prompt in the cache, on the same pages.

Used by: host_layers.py.

    stock     vLLM's own backend, at the contexts that fit into the limited memory
    device    this backend with all of the GPU's memory and no host layers
    host      host layers, and these ways to decode:
              stream all   in pieces, and the GPU reads all host KV over the link
              CPU alone    in pieces, and the CPU attends to all of it
              pieces       in pieces, and the GPU reads the share that the start-up measurement chose
              graph        each step is one CUDA graph, in which the CPU attends to everything
              shared graph the same, and the GPU reads in place the share that the start-up measurement chose
              auto         pieces or the shared graph, by length, as the start-up measurement chose

The limit of a decoding rate is a plain read of the host pool, by the same threads in the same rounds. With --speculate
one read serves a token and the accepted drafts, which are counted.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from host_layers_drafts import Drafts
from host_layers_engines import GIB, NEEDLES, SHAPES, close, decode_seconds, engine, read

from fastattention_vllm.attention.cpu.roofline import PageReader, ReadMethod
from fastattention_vllm.bench.report import Row, compared


def stock(path: Path, options: argparse.Namespace) -> list[Row]:
    """Whether vLLM's own backend starts for that length, and its speed at the longest context that fits."""
    rows = []
    longest = max(options.tokens) + 64
    try:
        close(engine(path, options, "FLASH_ATTN", longest, options.device_gib))
        refused = False
    except (ValueError, RuntimeError) as error:
        refused = True
        print(f"vLLM's own backend at {longest} tokens: {str(error)[:300]}", flush=True)
    rows.append(row(f"{longest} tokens, vLLM alone", "cooperative starts", "1 = yes", int(not refused)))
    per_token = 2 * 2 * SHAPES[options.shape]["num_layers"] * SHAPES[options.shape]["num_kv_heads"]
    per_token *= SHAPES[options.shape]["head_size"]
    fits = int(options.device_gib * GIB * 0.98) // per_token // 1024 * 1024
    contexts = [*sorted(tokens for tokens in set(options.tokens) if tokens < fits), fits]
    return rows + measure(path, options, "FLASH_ATTN", contexts, options.device_gib, "vLLM alone, KV on the device")


def all_on_device(path: Path, options: argparse.Namespace) -> list[Row]:
    """The same backend with all of the GPU's memory, as on a card that needs no host layers."""
    extra = {"additional_config": {"fastattention": {"host_kv_layers": 0}}}
    return measure(path, options, "fastattention", options.tokens[:1], None, "uncapped, KV on the device", **extra)


def measure(
    path: Path,
    options: argparse.Namespace,
    backend: str,
    contexts: list[int],
    gib: float | None,
    what: str,
    **more: Any,
) -> list[Row]:
    llm = engine(path, options, backend, max(contexts) + 64, gib, **more)
    rows = []
    try:
        for tokens in contexts:
            seconds, found = read(llm, tokens, 1)
            case = f"fp16 (32,8,128) {tokens} tokens b1, {what}"
            rows += [
                row(case, "cooperative needles", f"of {len(NEEDLES)}", found, limit=len(NEEDLES)),
                row(case, "cooperative prefill", "tokens/s", tokens / seconds),
                row(case, "cooperative decode", "tokens/s", 1 / decode_seconds(llm, tokens, 1, options)),
            ]
    finally:
        close(llm)
    return rows


def with_host_layers(path: Path, options: argparse.Namespace) -> list[Row]:
    from fastattention_vllm.integration.host_layers import layers as host_layers
    from fastattention_vllm.placement.stream_split import StreamSplit

    length = max(tokens * batch for tokens, batch in zip(options.tokens, options.batch, strict=True)) + 64 * max(
        options.batch
    )
    length = max(length, options.max_model_len)
    section = {"host_kv_layers": options.host_layers or "auto"} | (
        {"host_kv_gib": options.host_gib} if options.host_gib else {}
    )
    if options.resident_gib:
        section |= {"resident_kv_gib": options.resident_gib}
    if options.host_kv_dtype != "auto":
        section |= {"host_kv_dtype": options.host_kv_dtype}
    llm = engine(
        path,
        options,
        "fastattention",
        length,
        options.device_gib,
        additional_config={"fastattention": section},
    )
    rows = []
    try:
        layers = host_layers.find(llm.llm_engine.vllm_config)
        assert layers is not None
        chosen = layers.group.stream_split
        until = layers.whole_steps_until
        all_ways = {
            "stream all": (StreamSplit(1.0), 0.0),
            "CPU alone": (StreamSplit(0.0), 0.0),
            "pieces": (chosen, 0.0),
            "graph": (StreamSplit(0.0), math.inf),
            "shared graph": (chosen, math.inf),
            "auto": (chosen, until),
        }
        if layers.graph_calls is None:
            del all_ways["graph"], all_ways["shared graph"], all_ways["auto"]
        elif layers.graph_calls.over_link is None:
            del all_ways["shared graph"]
        ways = {name: way for name, way in all_ways.items() if name in options.ways}
        print(f"one graph for contexts of up to {until / GIB:.3f} GiB a layer", flush=True)
        placement = layers.placement
        per_layer = placement.host_bytes_per_block // placement.device_size.block_size
        per_token = per_layer * len(placement.host)
        assert layers.pool is not None
        plain = plain_read(layers.pool.memory)
        for tokens, batch in zip(options.tokens, options.batch, strict=True):
            seconds, found = read(llm, tokens, batch)
            case = f"fp16 (32,8,128) {tokens} tokens b{batch}, {len(placement.host)} host layers"
            if options.resident_gib:
                case += f", {options.resident_gib:g} GiB of copies, max_model_len {length}"
            case += f", {options.host_kv_dtype} on the host" if options.host_kv_dtype != "auto" else ""
            case += f", drafts of {options.speculate}" if options.speculate else ""
            rows.append(
                row(case, "cooperative needles", f"of {batch * len(NEEDLES)}", found, limit=batch * len(NEEDLES))
            )
            rows.append(row(case, "cooperative prefill", "tokens/s", tokens * batch / seconds))
            times: dict[str, list[float]] = {}
            rates = []
            cpu_rates: dict[str, list[float]] = {}
            accepted: dict[str, list[float | None]] = {}
            for _ in range(options.rounds):
                rates.append(plain())
                for way, (split, whole_until) in ways.items():
                    layers.set_stream_split(split)
                    layers.whole_steps_until = whole_until
                    before = layers.counters()
                    drafts = Drafts(llm) if options.speculate else None
                    times.setdefault(way, []).append(decode_seconds(llm, tokens, batch, options))
                    accepted.setdefault(way, []).append(drafts.accepted_per_step() if drafts else None)
                    spent = layers.counters().cpu_seconds - before.cpu_seconds
                    read_bytes = layers.counters().cpu_bytes - before.cpu_bytes
                    cpu_rates.setdefault(way, []).append(read_bytes / spent if spent else 0.0)
            streamed = statistics.median(times[next(iter(ways))])
            limit = statistics.median(rates) / (per_token * tokens)  # of all requests, in tokens per second
            for way, (split, whole_until) in ways.items():
                step = statistics.median(times[way])
                read_bytes = per_layer * tokens * batch
                drafted = [count for count in accepted[way] if count is not None]
                tokens_per_read = 1 + (statistics.mean(drafted) if drafted else 0)
                rows.append(
                    row(
                        f"{case}, {way}",
                        "cooperative decode",
                        "tokens/s",
                        batch / step,
                        # The copies are read on the GPU, and have no part in that limit.
                        limit=None if options.resident_gib else limit * tokens_per_read,
                        first_way=(next(iter(ways)), batch / streamed),
                        share=round(split.in_graph() if whole_until > read_bytes else split.of(read_bytes), 3),
                        step_ms=[round(1000 * value, 2) for value in times[way]],
                        host_gb_per_s=round(per_token * tokens * batch / step / 1e9, 1),
                        cpu_gb_per_s=[round(rate / 1e9, 1) for rate in cpu_rates[way]],
                        plain_read_gb_per_s=[round(rate / 1e9, 1) for rate in rates],
                        accepted_drafts_per_step=[round(count, 2) for count in drafted],
                    )
                )
    finally:
        close(llm)
    return rows


def plain_read(memory: torch.Tensor) -> Callable[[], float]:
    """Read the whole pool and return bytes per second, with the method that was fastest at first."""
    page = 1 << 20
    reader = PageReader(
        [memory.data_ptr() + offset for offset in range(0, memory.nbytes - page + 1, page)],
        [page] * (memory.nbytes // page),
    )

    def rate(method: ReadMethod) -> float:
        started = time.perf_counter()
        reader.read(method)
        return reader.total_bytes / (time.perf_counter() - started)

    best = max((ReadMethod(streams=streams) for streams in (1, 2, 4)), key=rate)
    return lambda: rate(best)


def row(
    case: str,
    metric: str,
    unit: str,
    ours: float,
    *,
    limit: float | None = None,
    first_way: tuple[str, float] = ("", 0.0),
    **more: Any,
) -> Row:
    """A row for a rate or count, where more is better."""
    peer_name, peer = first_way
    return compared(
        case, metric, unit, ours, better="higher", peer_name=peer_name or None, peer=peer or None, limit=limit, **more
    )
