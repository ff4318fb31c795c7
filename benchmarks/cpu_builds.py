"""Two builds of the CPU kernels in turn, beside the plain read: what a change to the kernels gives in decoding.

    python benchmarks/cpu_builds.py --before old/libfastattention_cpu.so --after new/libfastattention_cpu.so --json FILE

Run by: contributors who change the CPU kernels.
Needs: a CPU, two builds of the library, and memory for two sets of keys and values: each build has 512 MiB, or twice
the last-level cache if that is more.

Each build has a process of its own, and the processes take turns. Each call reads the next of several layers, as in a
model, so that no cache helps. With one thread, times are the thread's CPU time, because it depends little on what else
runs on the machine; with more threads they are wall time. Ratios are medians over the rounds of what was measured in
the same round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.cpu import roofline
from fastattention_vllm.attention.cpu.memory import place_memory
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.bench import machine
from fastattention_vllm.bench.cases import DTYPES
from fastattention_vllm.bench.limits import READ_METHODS
from fastattention_vllm.bench.report import Row, compared, report

HEADS = ["32,8,128", "32,32,128", "8,1,64", "16,16,96", "64,8,128", "28,4,128"]
PIECE = 256 * 1024
"""Bytes that the plain read takes at a time."""
MIN_BYTES = 512 * 2**20


class Layers:
    """A model's caches: pages in shuffled order, a page's keys before its values, as vLLM's CPU backend has them."""

    def __init__(self, case: dict[str, Any]) -> None:
        heads, kv_heads, size = case["heads"]
        page, dtype = case["page"], DTYPES[case["dtype"]]
        pages = -(-case["context"] // page)
        one = torch.randn(1, kv_heads, 2, page, size).to(dtype)
        layer_bytes = one.nbytes * pages
        count = max(2, -(-max(MIN_BYTES, 2 * machine.last_level_cache()) // layer_bytes))
        whole = torch.empty(count, pages, kv_heads, 2, page, size, dtype=dtype)
        place_memory(whole.data_ptr(), whole.nbytes)  # huge pages, where Linux gives them
        whole[:] = one
        self.layers = whole.unbind(0)
        table = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).to(torch.int32)[None]
        query = torch.randn(1, heads, size).to(dtype)
        self.problems = [
            AttentionProblem(
                query=query,
                key=layer[:, :, 0].transpose(1, 2),
                value=layer[:, :, 1].transpose(1, 2),
                query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
                seq_lens=torch.tensor([case["context"]], dtype=torch.int32),
                scale=size**-0.5,
                causal=True,
                block_table=table,
            )
            for layer in self.layers
        ]
        self.out = torch.empty_like(query)
        self.readers = [self._reader(layer) for layer in self.layers]
        self.turn = itertools.count()
        self.clock = time.thread_time if case["threads"] == 1 else time.perf_counter
        self.bytes = self.layers[0].nbytes

    @staticmethod
    def _reader(layer: torch.Tensor) -> roofline.PageReader:
        begins = range(0, layer.nbytes, PIECE)
        sizes = [min(PIECE, layer.nbytes - begin) for begin in begins]
        return roofline.PageReader([layer.data_ptr() + begin for begin in begins], sizes)

    def attend(self) -> float:
        """GB/s."""
        problem = self.problems[next(self.turn) % len(self.problems)]
        began: float = self.clock()
        cpu.run(problem, out=self.out)
        return self.bytes * 1e-9 / float(self.clock() - began)

    def read(self) -> float:
        """GB/s, with the method that is fastest just now."""
        rates = []
        for method in READ_METHODS:
            reader = self.readers[next(self.turn) % len(self.readers)]
            began: float = self.clock()
            reader.read(method)
            rates.append(self.bytes * 1e-9 / float(self.clock() - began))
        return max(rates)


def serve(case: dict[str, Any]) -> int:
    """The child: a word on stdin asks for a measurement, whose rate goes to stdout."""
    torch.manual_seed(0)
    cpu.set_num_threads(case["threads"], case["cpus"])
    if case["threads"] > 1:
        os.sched_setaffinity(0, case["cpus"][:1])  # the pool leaves its first CPU to the caller
    layers = Layers(case)
    layers.attend(), layers.attend()
    print(cpu.isa(), flush=True)
    for line in sys.stdin:
        print(layers.read() if line.strip() == "read" else layers.attend(), flush=True)
    return 0


class Build:
    """A child with one build of the library."""

    def __init__(self, library: Path, case: dict[str, Any]) -> None:
        environment = os.environ | {"FASTATTENTION_CPU_LIBRARY": str(library.resolve())}
        self.child = subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps(case)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.isa = self._answer()

    def _answer(self) -> str:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            sys.exit("cpu_builds: a child has ended; its message is above.")
        return line.strip()

    def measure(self, what: str) -> float:
        assert self.child.stdin is not None
        print(what, file=self.child.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait()


def measure(case: dict[str, Any], options: argparse.Namespace) -> Row:
    builds = [Build(library, case) for library in (options.before, options.after)]
    before, after, read = [], [], []
    for turn in range(options.rounds):
        order = builds if turn % 2 == 0 else builds[::-1]
        read.append(builds[1].measure("read"))
        rates = {build: build.measure("attend") for build in order}
        before.append(rates[builds[0]])
        after.append(rates[builds[1]])
    for build in builds:
        build.close()
    middle = statistics.median(after)
    gain = statistics.median(new / old for new, old in zip(after, before, strict=True))
    fraction = statistics.median(new / limit for new, limit in zip(after, read, strict=True))
    quartiles = statistics.quantiles((new / old for new, old in zip(after, before, strict=True)), n=4)
    heads = ",".join(map(str, case["heads"]))
    return compared(
        f"decode {case['dtype']} ({heads}) {case['context'] // 1024}K b1 page{case['page']}",
        "decode KV read rate",
        "GB/s",
        middle,
        better="higher",
        peer_name="the build before",
        peer=middle / gain,
        limit=middle / fraction,
        threads=case["threads"],
        isa=builds[1].isa,
        ratio_quartiles=[quartiles[0], quartiles[2]],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path, help="a build of the library")
    parser.add_argument("--after", type=Path, help="the build that is compared with it")
    parser.add_argument("--heads", nargs="+", default=HEADS, help="query heads, KV heads, head size")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp16"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768])
    parser.add_argument("--pages", type=int, nargs="+", default=[16, 128], help="tokens of a page")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.serve:
        return serve(json.loads(options.serve))
    if options.before is None or options.after is None:
        parser.error("--before and --after are needed")
    rows = []
    cpus = sorted(os.sched_getaffinity(0))
    for threads, dtype, heads, page, context in itertools.product(
        options.threads, options.dtypes, options.heads, options.pages, options.contexts
    ):
        case = {"heads": [int(part) for part in heads.split(",")], "dtype": dtype, "page": page, "context": context}
        rows.append(measure(case | {"threads": threads, "cpus": cpus[:threads]}, options))
        print(rows[-1].model_dump_json(), flush=True)
    if options.json:
        report(rows, machine.hardware(max(options.threads))).write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
