"""Results of volta_sim.py in the common form, and the goals that the kernels miss.

Used by: volta_sim.py and volta_sim_tables.py.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
from dataclasses import dataclass
from typing import Any

import volta_peer

from fastattention_vllm.bench.report import Report, Row, compared, report

TITLE = "Simulated V100 (80 SMs at 1.38 GHz)"


HEAD_SIZES = (64, 128, 256)


TOKENS = (4096, 2048, 1024, 8192, 16384)
"""The most useful rows first, because a run that is stopped keeps its rows."""


CONTEXTS = ((4096, 32), (16384, 16), (65536, 8))
"""Tokens and sequences of the decode rows."""


SPECULATIVE = (65536, 6, 4)
"""Keys, query heads per KV head and KV heads of the rows with up to five new tokens per sequence."""


RAGGED = (3000, 32, 48)
"""Keys, sequences and page size of the rows with 6 and 7 query heads per KV head. The last part is not full."""


GROUPED = (6, 4)
"""Query heads per KV head, and KV heads, of the rows of prefill with grouped heads."""


GROUPED_TOKENS = (4096, 5000, 7000, 8192, 16384)
"""Their lengths."""


FEED = 817.0
"""GB/s from DRAM."""


GROUPS = (1, 4, 8)
"""Query heads per KV head of the decode rows."""


OURS, PEER = "ours", "PyTorch mem-efficient"


Measured = dict[str, Any]
"""A row before it is described: the simulated numbers by name."""


@dataclass(frozen=True)
class Must:
    text: str
    value: str
    met: bool


def musts(rows: list[Measured]) -> list[Must]:
    """The project's goals for these kernels, each with the row that is furthest from it."""
    found: list[Must] = []
    prefill = [row for row in rows if row["kind"] == "prefill"]
    ours = [row for row in prefill if row["kernel"] == OURS]

    def at_least(text: str, chosen: list[Measured], key: str, limit: float, unit: str = "") -> None:
        if chosen:
            worst = min(chosen, key=lambda row: row[key])
            found.append(Must(text, f"{worst[key]:.3g}{unit} ({label(worst)})", worst[key] >= limit))

    def at_most(text: str, chosen: list[Measured], key: str, limit: float) -> None:
        if chosen:
            worst = max(chosen, key=lambda row: row[key])
            found.append(Must(text, f"{worst[key]:.3g} ({label(worst)})", worst[key] <= limit))

    for head_size in (64, 128):
        for causal, limit in ((False, 76), (True, 72)):
            mine = [r for r in ours if r["head_size"] == head_size and r["causal"] == causal and r["tokens"] >= 4096]
            at_least(f"prefill {head_size}, {kind(causal)}, 4K and up: at least {limit} TFLOPS", mine, "tflops", limit)
    grouped = [row for row in rows if row["kind"] == "grouped"]
    for causal, limit in ((False, 74), (True, 71)):
        mine = [r for r in ours + grouped if (r["head_size"], r["causal"]) == (256, causal) and r["tokens"] >= 4096]
        at_least(f"prefill 256, {kind(causal)}, 4K and up: at least {limit} TFLOPS", mine, "tflops", limit)
    ratios = against_peer(rows)
    if ratios:
        mean = math.exp(sum(math.log(row["ratio"]) for row in ratios) / len(ratios))
        text = f"the peer's speed 1.75 times, geometric mean of {len(ratios)}"
        found.append(Must(text, f"{mean:.3g}", mean >= 1.75))
    at_least("the peer's speed 1.6 times, every row", ratios, "ratio", 1.6)
    at_most("masks and paging cost 5 % at most", [row for row in rows if row["kind"] == "masks"], "cost", 0.05)
    decode = [row for row in rows if row["kind"] == "decode"]
    for head_size, limit in ((64, 0.92), (128, 0.92), (256, 0.85)):
        for tokens, _ in CONTEXTS:
            mine = [row for row in decode if (row["head_size"], row["tokens"]) == (head_size, tokens)]
            mine = [row for row in mine if row["group"] in GROUPS]
            text = f"decode {head_size}, {tokens // 1024}K: {100 * limit:.0f} % of the feed, sum of the parts included"
            at_least(text, mine, "part_of_feed", limit)
    ragged = [row for row in decode if row["tokens"] == RAGGED[0]]
    at_least("decode 3000 keys, 6 and 7 query heads per KV head: 92 % of the feed", ragged, "part_of_feed", 0.92)
    times = against_one_token(decode)
    of_four = [row for row in times if row["queries"] == 4]
    at_most("decode 64K: 4 tokens take at most 1.25 times as long as one", of_four, "times", 1.25)
    at_most("error against float64 2e-3 at most", ours + grouped + decode, "error", 2e-3)
    return found


def against_peer(rows: list[Measured]) -> list[Measured]:
    """Our prefill rows that have a row of the peer, with the ``ratio`` to it."""
    prefill = {
        (row["kernel"], row["head_size"], row["tokens"], row["causal"]): row for row in rows if row["kind"] == "prefill"
    }
    return [
        {**row, "ratio": row["tflops"] / peer["tflops"], "peer": peer}
        for key, row in prefill.items()
        if key[0] == OURS and (peer := prefill.get((PEER, *key[1:]))) is not None
    ]


def against_one_token(decode: list[Measured]) -> list[Measured]:
    """The rows with several new tokens per sequence that have a row with one, with the ``times`` it takes."""

    def key(row: Measured) -> tuple[int, ...]:
        return tuple(row[name] for name in ("head_size", "tokens", "batch", "group", "page"))

    one = {key(row): row for row in decode if row.get("queries", 1) == 1}
    return [
        {**row, "times": row["milliseconds"] / one[key(row)]["milliseconds"]}
        for row in decode
        if row.get("queries", 1) > 1 and key(row) in one
    ]


def described(row: Measured, rows: list[Measured]) -> Row:
    """A result in the common form. Comparisons use our rows; the peer's rows have no ``ours``."""
    unit, ours, peer_name, peer, limit = "TFLOPS", None, None, None, None
    case, metric, better = label(row), "prefill rate", "higher"
    if row["kind"] == "decode":
        metric, unit, ours, limit = "decode KV read rate", "GB/s", row["gbs"], FEED
    elif row["kind"] == "masks":
        metric, unit, ours = "prefill time with masks and paging", "of the time without", 1 + row["cost"]
        peer_name, peer, better = row["against"], 1.0, "lower"
    elif row["kind"] == "method":
        case, metric = f"{case} {row['what']}", "prefill rate of the peer"
        ours, peer_name, peer = row["tflops"], "simulator's prototype", row["prototype"]
    elif row["kernel"] == PEER:
        peer_name, peer = PEER, row["tflops"]
    else:
        ours, limit = row["tflops"], row["bound_tflops"]
        for both in against_peer([row, *rows]):
            if label(both) == case:
                peer_name, peer = PEER, both["peer"]["tflops"]
    own = {key: value for key, value in row.items() if key not in Row.model_fields}
    return compared(case, metric, unit, ours, better=better, peer_name=peer_name, peer=peer, limit=limit, **own)


def kind(causal: bool) -> str:
    return "causal" if causal else "not causal"


def length(tokens: int) -> str:
    return str(tokens) if tokens % 1024 else f"{tokens // 1024}K"


def label(row: Measured) -> str:
    words = [row["kind"], str(row["head_size"]), length(row["tokens"])]
    if row["kind"] == "decode":
        words += [f"batch {row['batch']}", f"GQA {row['group']}", f"page {row['page']}"]
        if row.get("queries", 1) > 1:
            words.append(f"{row['queries']} tokens")
    elif "causal" in row:
        words.append(kind(row["causal"]))
    if row["kind"] == "grouped":
        words += [f"GQA {row['group']}", f"page {row['page']}"]
    return " ".join(words)


def versions() -> dict[str, str]:
    names = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvdisasm", "numpy", "torch", "fastattention-vllm")
    found = {"python": platform.python_version(), "peer": f"cubin of {volta_peer.WHEEL}, SHA-256 {volta_peer.SHA256}"}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def report_of(rows: list[Measured]) -> Report[Row]:
    return report([described(row, rows) for row in rows], TITLE, versions(), musts=demanded(rows))


def demanded(rows: list[Measured]) -> list[dict[str, Any]]:
    return [{"must": must.text, "found": must.value, "met": must.met} for must in musts(rows)]
