"""Small tensor-parallel sums, as in decoding: by push, and by NCCL, in CUDA graphs.

    python benchmarks/push_all_reduce.py --ranks 2 4 --links nvlink host --json FILE

Run by: contributors who change push_all_reduce, and owners of GPUs without NVLink.
Needs: as many NVIDIA GPUs of one machine as ranks, and the kernels of `make volta`.

"host" sets NCCL_P2P_DISABLE=1: boards are in host memory, and NCCL's bytes pass through it. A row is a size and a
dtype. Times are per sum, medians of rounds in which both ways alternate, of 20 sums in a graph, by events; the slowest
rank counts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiling_ranks import LINKS, hardware, join, why_not

from fastattention_vllm.bench import ranks
from fastattention_vllm.bench.report import Row, compared, report
from fastattention_vllm.parallel import push_sums
from fastattention_vllm.parallel.named_collectives import reaches_all
from fastattention_vllm.parallel.push_sums import NAMES, PushSums


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--links", nargs="+", choices=["nvlink", "host"], default=["nvlink", "host"])
    parser.add_argument("--dtypes", nargs="+", choices=list(NAMES.values()), default=["fp16"])
    parser.add_argument("--limit", type=float, default=120, help="seconds for each number of ranks and link")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if problem := why_not(options.links, max(options.ranks)):
        print(f"push_all_reduce: {problem}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    complete = True

    def see(told: dict[str, Any]) -> None:
        if "note" in told:
            print(told["note"], flush=True)
            return
        case = f"{told['dtype']} {told['bytes'] >> 10} KiB, {told['ranks']} ranks, {told['link']}"
        case += f", boards in {told['boards']}"
        taken, peer = (told[name] * 1e6 for name in ("seconds", "peer_seconds"))
        rows.append(compared(case, "decode sum", "us", taken, better="lower", peer_name="NCCL", peer=peer))
        print(f"{case}: {taken:.1f} us, NCCL {peer:.1f} us, {peer / taken:.2f}x", flush=True)

    for size in options.ranks:
        for link in options.links:
            said = (size, link, options.dtypes)
            complete &= ranks.run(work, size, said, LINKS[link], options.limit, see)
            if options.json:
                report(rows, hardware(link), complete=complete).write(options.json)
    return 0 if complete else 1


def work(rank: int, folder: str, said: tuple[int, str, list[str]]) -> None:
    size, link, dtypes = said
    context = join(rank, folder, link, [], size)
    peer_to_peer = all(context.exchange(reaches_all(context.exchange(torch.cuda.current_device()))))
    sums = PushSums(rank, size, context.exchange, peer_to_peer)
    about = {"ranks": size, "link": link, "boards": "GPU memory" if peer_to_peer else "host memory"}

    def nccl(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)  # in place: no copy is timed
        return x

    for dtype, name in NAMES.items():
        if name not in dtypes:
            continue
        if not sums.works(dtype, context.exchange):
            context.tell({"note": f"{name}, {size} ranks, {link}: sums by push are wrong, or do not end"})
            continue
        for one in push_sums.measure(sums, nccl, dtype, context.exchange):
            told = {"bytes": one.bytes, "seconds": one.seconds, "peer_seconds": one.peer_seconds}
            context.tell(told | about | {"dtype": name})
    ranks.leave(context)


if __name__ == "__main__":
    sys.exit(main())
