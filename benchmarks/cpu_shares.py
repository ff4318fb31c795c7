"""How evenly the items of one decode step keep many threads busy: a simulation for machines that are not available.

    python benchmarks/cpu_shares.py --json FILE

Run by: contributors who change how decoding is divided among threads (kernels/cpu/src/plan.cpp).
Needs: this package. It uses one core, and measures nothing.

Threads with slightly different speeds take items of slightly different cost, one after the other. The result is the
share of their time in which threads are idle before the last one ends, compared with splits of equal size.
``splits`` mirrors ``split_begin`` and ``make_plan`` of kernels/cpu/src/plan.cpp for one row block.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import platform
import random
import statistics
import sys
from pathlib import Path

from fastattention_vllm.bench.report import Row, compared, report

ITEMS_PER_SEQUENCE, SPLIT_TOKENS, FEW_ITEMS, MIN_TOKENS, TILE = 512, 1024, 64, 256, 128
THREAD_SPREAD, ITEM_SPREAD, RUNS = 0.03, 0.05, 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    rows = [
        row(tokens, kv_heads, threads)
        for kv_heads in (8, 2)
        for tokens in (32768, 33000, 65536, 262144)
        for threads in (16, 48, 64)
    ]
    if options.json:
        report(rows, "none: a simulation", {"python": platform.python_version()}).write(options.json)
    return 0


def row(tokens: int, kv_heads: int, threads: int) -> Row:
    ours, peer = (idle(cut(tokens, kv_heads), kv_heads, threads) * 100 for cut in (splits, equal_splits))
    case = f"{tokens} tokens {kv_heads} KV heads {threads} threads"
    print(f"{case:<40} {ours:5.1f} % idle, with equal splits {peer:5.1f} %")
    metric = "decode idle share of threads, simulated"
    return compared(case, metric, "%", ours, better="lower", peer_name="equal splits", peer=peer)


def splits(tokens: int, kv_heads: int) -> list[int]:
    split_tokens = min(max(tokens // -(-FEW_ITEMS // kv_heads), MIN_TOKENS), SPLIT_TOKENS)
    count = max(1, min(-(-ITEMS_PER_SEQUENCE // kv_heads), tokens // split_tokens))
    tiles = -(-tokens // TILE)
    bounds = [
        min(tokens, TILE * min(tiles * (2 * count - i) * i // count**2, tiles - (count - i))) for i in range(count + 1)
    ]
    return [end - begin for begin, end in itertools.pairwise(bounds)]


def equal_splits(tokens: int, kv_heads: int) -> list[int]:
    length = max(MIN_TOKENS, -(-tokens // -(-ITEMS_PER_SEQUENCE // kv_heads)))
    length = -(-length // TILE) * TILE
    return [min(length, tokens - begin) for begin in range(0, tokens, length)]


def idle(lengths: list[int], kv_heads: int, threads: int) -> float:
    """Idle share of the threads' time before the end of the call; mean of several runs."""
    shares = []
    for seed in range(RUNS):
        rng = random.Random(seed)
        speeds = [1 + rng.gauss(0, THREAD_SPREAD) for _ in range(threads)]
        free = [(0.0, thread) for thread in range(threads)]
        for length in sorted(lengths, reverse=True):
            for _ in range(kv_heads):
                time, thread = heapq.heappop(free)
                cost = length * (1 + abs(rng.gauss(0, ITEM_SPREAD))) / speeds[thread]
                heapq.heappush(free, (time + cost, thread))
        ends = [time for time, _ in free]
        shares.append(1 - statistics.mean(ends) / max(ends))
    return statistics.mean(shares)


if __name__ == "__main__":
    sys.exit(main())
