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
              auto         pieces or the shared graph, by length, as the start-up measurement chose; where it is a
                           graph, missing n-gram drafts are made up
              drafts as found
                           auto, but no drafts are made up
              split of one token
                           auto, but CPU and GPU share the reading as if requests had no drafts

The limit of a decoding rate is a plain read of all ranks' host pools, by the same threads in the same rounds. With
--speculate one read serves a token and the accepted drafts, which are counted.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import host_layers_ranks
from host_layers_drafts import Drafts
from host_layers_engines import GIB, NEEDLES, SHAPES, close, decode_seconds, engine, read

from fastattention_vllm.bench.report import Row, compared
from fastattention_vllm.placement.counters import Counters


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
    if options.cpu_threads:
        section |= {"cpu_threads": options.cpu_threads}
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
        ranks: list[host_layers_ranks.Rank] = llm.collective_rpc(host_layers_ranks.start)
        ways = [way for way in ranks[0].ways if way in options.ways]
        print(f"one graph for contexts of up to {ranks[0].until / GIB:.3f} GiB a layer", flush=True)
        finds = options.speculate > 0 and options.lookup == 1
        layer_bytes = sum(rank.token_bytes for rank in ranks)
        per_token = layer_bytes * ranks[0].host_layers
        for tokens, batch in zip(options.tokens, options.batch, strict=True):
            seconds, found = read(llm, tokens, batch)
            case = f"fp16 (32,8,128) {tokens} tokens b{batch}, {ranks[0].host_layers} host layers"
            case += f", {len(ranks)} GPUs" if len(ranks) > 1 else ""
            if options.resident_gib:
                case += f", {options.resident_gib:g} GiB of copies, max_model_len {length}"
            case += f", {options.host_kv_dtype} on the host" if options.host_kv_dtype != "auto" else ""
            case += f", drafts of {options.speculate}" if options.speculate else ""
            case += f", n-grams of {options.lookup} and more" if options.speculate and options.lookup > 1 else ""
            rows.append(
                row(case, "cooperative needles", f"of {batch * len(NEEDLES)}", found, limit=batch * len(NEEDLES))
            )
            rows.append(row(case, "cooperative prefill", "tokens/s", tokens * batch / seconds))
            times: dict[str, list[float]] = {}
            rates = []
            cpu_rates: dict[str, list[float]] = {}
            accepted: dict[str, list[float | None]] = {}
            for _ in range(options.rounds):
                rates.append(sum(llm.collective_rpc(host_layers_ranks.plain_read)))
                for way in ways:
                    llm.collective_rpc(host_layers_ranks.follow, args=(ranks, way))
                    before = llm.collective_rpc(host_layers_ranks.counters)
                    drafts = Drafts(llm) if options.speculate else None
                    times.setdefault(way, []).append(decode_seconds(llm, tokens, batch, options))
                    accepted.setdefault(way, []).append(drafts.accepted_per_step() if drafts else None)
                    after = llm.collective_rpc(host_layers_ranks.counters)
                    cpu_rates.setdefault(way, []).append(sum(map(cpu_rate, before, after)))
            first = statistics.median(times[ways[0]])
            limit = statistics.median(rates) / (per_token * tokens)  # of all requests, in tokens per second
            for way in ways:
                step = statistics.median(times[way])
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
                        first_way=(ways[0], batch / first),
                        share=round(ranks[0].share(way, ranks[0].token_bytes * tokens * batch, drafts=finds), 3),
                        # With drafts, milliseconds of a token, of which a step gives several.
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


def cpu_rate(before: Counters, after: Counters) -> float:
    """Bytes per second of a rank's CPU attention."""
    spent = after.cpu_seconds - before.cpu_seconds
    return (after.cpu_bytes - before.cpu_bytes) / spent if spent else 0.0


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
