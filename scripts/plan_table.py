"""The generated part of docs/plan.md: predictions beside what benchmarks/results measured, and the data files' lines.

Used by: docs.py, and the tests of the planner.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastattention_vllm.placement.plan import plan as place
from fastattention_vllm.placement.stream_split import StreamSplit
from fastattention_vllm.plan import hardware, speed
from fastattention_vllm.plan.memory import MemoryPlan, Request, plan_memory
from fastattention_vllm.plan.model import ModelShape, read, shape_of
from fastattention_vllm.plan.speed import Way

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SHAPES = ROOT / "tests" / "plan" / "shapes"
EXAMPLES = (
    ("pangu-38b", "v100-32g", 8, None, 262144),
    ("pangu-71b", "v100-32g", 8, "xeon-pcie3", 262144),
    ("llama2-7b", "v100-32g", 1, None, 4096),
    ("llama2-70b", "v100-32g", 8, None, 4096),
    ("llama3-8b", "t4-16g", 2, None, 8192),
    ("qwen3-32b", "v100-16g", 8, None, 40960),
    ("qwen3-32b", "a100-80g", 1, None, 40960),
)
"""Model, device, number of devices, host (None: the usual one) and context."""
CLOSE = 0.25
CASE = re.compile(r"fp16 \(32,8,128\) (?P<tokens>\d+) tokens b(?P<requests>\d+), (?P<what>.*)")
GRAPH_CASE = re.compile(
    r"fp16 \(32,8,128\) (?P<tokens>\d+) tokens b1, (?P<layers>\d+) host layers,"
    r"( (?P<dtype>\w+) on the host,)? (?P<way>[\w ]+)"
)
WAYS = ("stream all", "CPU alone", "auto")
GRAPH_WAYS = ("pieces", "graph", "shared graph", "auto")
CHOSEN = ("shared graph", "auto")
"""The columns of :data:`GRAPH_WAYS` that the engine chooses with 16 bits; ``auto`` is its own choice by length."""
NEEDLE_MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 24170,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "float16",
}
"""The model of benchmarks/host_layers.py: the shape of an 8B Llama with the vocabulary of the demo model."""
FIRST_PROMPT = "this was the first prompt of the process, and includes warm-up"
OLDER = "the code was older, and plain reads of the memory were not measured"
EXPLAINED = {
    ("2026-11-22-host-layers-h200-head-start", "vLLM alone", "prefill"): FIRST_PROMPT,
    ("2026-11-22-host-layers-h200", "vLLM alone", "prefill"): FIRST_PROMPT,
    ("2026-11-22-host-layers-h200-by-context", "host layers", "CPU alone"): OLDER,
    ("2026-11-22-host-layers-h200-by-context", "host layers", "auto"): OLDER,
    ("2026-11-22-host-layers-h200", "host layers", "CPU alone"): OLDER,
    ("2026-11-22-host-layers-h200", "host layers", "auto"): OLDER,
}
SLOWER_CPU = "CPU attention was slower than the constants say, which are from other machines of this kind"
"""Why a prediction of this file, placement and column may miss."""
FILES = (
    "2026-11-22-host-layers-h200-head-start",
    "2026-11-22-host-layers-h200-12-gib",
    "2026-11-22-host-layers-h200-by-context",
    "2026-11-22-host-layers-h200",
)
"""All in pieces, before graphs. The newest code first, then two older states of it."""
GRAPH_FILES = (
    "2026-11-26-host-layers-h100-shared-graph-31",
    "2026-11-26-host-layers-h100-shared-graph-256k",
    "2026-11-26-host-layers-h100-auto-256k-beside-int8",
    "2026-11-26-host-layers-h100-int8-256k",
    "2026-11-26-host-layers-h100-fp8-256k",
    "2026-11-25-host-layers-h100-graph-31",
    "2026-11-25-host-layers-h100-graph-17",
)
SHARED_SINCE = "2026-11-26"
"""Files of this day and later have a graph with the kernels of a share, also for a share of 0."""
H100_LINK = 51.2
"""GB/s: benchmarks/notes/host_layers.md, fifth round."""


@dataclass(frozen=True)
class Compared:
    """One measured speed, in tokens per second of all requests."""

    file: str
    tokens: int
    requests: int
    placement: str
    column: str
    """``prefill``, a way of ``WAYS``, or ``decode`` without host layers."""
    measured: float
    predicted: float
    limited_by: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def close(self) -> bool:
        return abs(self.error) <= CLOSE

    @property
    def reason(self) -> str:
        """Why this one may miss; empty if it must not."""
        if self.file in GRAPH_FILES:
            return "" if self.column in CHOSEN else SLOWER_CPU
        kind = "vLLM alone" if "vLLM alone" in self.placement else "host layers"
        return EXPLAINED.get((self.file, kind, self.column), "")


def needle_shape() -> ModelShape:
    return shape_of(NEEDLE_MODEL, "the needle model")


def host_layer_rows() -> list[Compared]:
    return [row for file in FILES for row in rows_of(file)]


def rows_of(file: str) -> Iterator[Compared]:
    content = json.loads((RESULTS / f"{file}.json").read_text())
    found = [(match, row) for row in content["rows"] if (match := CASE.fullmatch(row["case"]))]
    cap = float(content["hardware"].split("capped to ")[1].split()[0])
    served = [(int(m["tokens"]), int(m["requests"])) for m, _ in found if "host layers" in m["what"]]
    # host_layers.py starts the server with a length that is enough for the requests of all cases.
    longest = max(tokens * requests for tokens, requests in served) + 64 * max(requests for _, requests in served)
    capped = plan(longest, cap)
    for match, row in found:
        if "needles" in row["metric"]:
            continue
        tokens, requests = int(match["tokens"]), int(match["requests"])
        placement, _, way = (
            match["what"].partition("layers, ") if "layers" in match["what"] else (match["what"], "", "")
        )
        if "host" in match["what"]:
            assert match["what"].startswith(f"{len(capped.placement.host)} host layers"), (file, match["what"])
            chosen = dataclasses.replace(capped, request=dataclasses.replace(capped.request, context=tokens))
            chosen = dataclasses.replace(chosen, request=dataclasses.replace(chosen.request, requests=requests))
            placement = f"{len(capped.placement.host)} host layers"
        else:
            chosen = plan(tokens, None)
        column = "prefill" if "prefill" in row["metric"] else way or "decode"
        predicted = speed.prefill(chosen) if column == "prefill" else speed.decode(chosen, in_pieces(column, chosen))
        yield Compared(
            file,
            tokens,
            requests,
            placement,
            column,
            float(row["ours"]),
            predicted.tokens_per_second,
            predicted.limited_by,
        )


def in_pieces(column: str, plan: MemoryPlan) -> Way:
    splits = {"stream all": StreamSplit(1.0), "CPU alone": StreamSplit(0.0)}
    return Way(splits.get(column, speed.engines_way(plan).split), in_graph=False)


def graph_rows() -> list[Compared]:
    """Decoding on H100s whose plain reads were measured in the same rounds, which the planner is told."""
    return [
        compared_with_graph(file, match, row)
        for file in GRAPH_FILES
        for row in json.loads((RESULTS / f"{file}.json").read_text())["rows"]
        if "decode" in row["metric"] and (match := GRAPH_CASE.fullmatch(row["case"]))
    ]


def compared_with_graph(file: str, match: re.Match[str], row: dict[str, Any]) -> Compared:
    tokens, layers, dtype, way = int(match["tokens"]), int(match["layers"]), match["dtype"] or "auto", match["way"]
    rate = statistics.median(row["plain_read_gb_per_s"])
    machine = hardware.machine("h100-80g", 1, "h200-16-cores", read_gb_per_s=rate, link_gb_per_s=H100_LINK)
    # The measured server had that many host layers, for a length of its own.
    found = plan_memory(needle_shape(), machine, Request(1 << 18, kv_cache_gib=4, host_kv_dtype=dtype))
    placement = place(found.layers, found.size, layers, dataclasses.replace(found.limits, tokens=tokens))
    request = dataclasses.replace(found.request, context=tokens)
    found = dataclasses.replace(found, placement=placement, request=request)
    chosen = speed.engines_way(found)
    ways = {
        "pieces": Way(chosen.split, in_graph=False),
        "graph": Way(StreamSplit(0.0), in_graph=True, shares=chosen.shares and file >= SHARED_SINCE),
        "shared graph": Way(chosen.split, in_graph=True, shares=True),
        "auto": chosen,
    }
    predicted = speed.decode(found, ways[way])
    kept = f"{layers} host layers" + (f", {dtype}" if match["dtype"] else "")
    return Compared(file, tokens, 1, kept, way, row["ours"], predicted.tokens_per_second, predicted.limited_by)


def plan(tokens: int, cap_gib: float | None) -> MemoryPlan:
    machine = hardware.machine("h200-141g", 1, "h200-16-cores")
    return plan_memory(needle_shape(), machine, Request(tokens, kv_cache_gib=cap_gib))


def first_token_rows() -> list[tuple[str, float, float]]:
    """Links, and seconds to the first token of two H200: measured and predicted. 8 of the 32 layers, tiling off."""
    shape = shape_of({**NEEDLE_MODEL, "num_hidden_layers": 8, "vocab_size": 128256}, "8 layers")
    found = []
    for file, link, peers in (
        ("2026-11-22-first-token-nvlink-2-h200", "NVLink", "nvlink4"),
        ("2026-11-23-first-token-host-2-h200", "host memory", "pcie5"),
    ):
        machine = dataclasses.replace(hardware.machine("h200-141g", 2), peers=hardware.tables().peers[peers])
        predicted = speed.prefill(plan_memory(shape, machine, Request(8192))).seconds
        (measured,) = (
            row["ours"]
            for row in json.loads((RESULTS / f"{file}.json").read_text())["rows"]
            if re.search(r" 2 ranks, .* tiling off$", row["case"])
        )
        found.append((link, measured / 1e3, predicted))
    return found


def lines() -> Iterator[str]:
    """The generated part of docs/plan.md."""
    yield from comparison()
    yield from graph_comparison()
    yield from examples()
    yield from ("", "## Devices and hosts", "")
    yield "| `--gpu` | memory, GiB | TFLOPS | GB/s | usual host | kernels | source |"
    yield "|---|---|---|---|---|---|---|"
    tables = hardware.tables()
    for key, one in tables.devices.items():
        sizes = f"{one.memory_gib:g} | {one.tflops:g} | {one.gb_per_s:g}"
        kernels = tables.kernels[one.kernels]
        yield f"| `{key}` | {sizes} | `{one.host}` | {kernels.name}: {kernels.state} | {one.source} |"
    yield from ("", "| `--host` | devices | cores | memory, GiB | read, GB/s | to a device, GB/s | to all | source |")
    yield "|---|---|---|---|---|---|---|---|"
    for key, host in tables.hosts.items():
        sizes = f"{host.devices} | {host.cores} | {host.memory_gib:g} | {host.read_gb_per_s:g}"
        yield f"| `{key}` | {sizes} | {host.link_gb_per_s:g} | {host.links_gb_per_s:g} | {host.source} |"
    yield from ("", "| link between devices | all-reduce, GB/s | source |", "|---|---|---|")
    yield from (f"| {peers.name} | {peers.gb_per_s:g} | {peers.source} |" for peers in tables.peers.values())
    yield from ("", "## Constants", "", "| constant | value | source |", "|---|---|---|")
    for kernels in tables.kernels.values():
        fractions = ", ".join(f"{fraction:g} (heads up to {size})" for size, fraction in kernels.attention_fractions)
        yield f"| attention over a prompt, fraction of peak FLOPs: {kernels.name} | {fractions} | {kernels.source} |"
    for _, found in hardware.measured():
        if isinstance(found, hardware.Curve):
            value = ", ".join(f"{at:g}: {fraction:g}" for at, fraction in found.points)
        else:
            value = f"{found.value:g}"
        yield f"| {found.what} | {value} | {found.source} |"


def examples() -> Iterator[str]:
    yield from ("", "## Examples", "")
    yield "Each row is one request of the given length. The shapes of the models are in `tests/plan/shapes`. The shapes"
    yield "of the two PanGu models are inferred, because only their numbers of parameters are published. L_GPU is our"
    yield "reconstruction of the paper's formula."
    yield ""
    yield "| model | machine | context | host layers | L_GPU | host KV, GiB | prefill, tokens/s | decode, tokens/s |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, gpu, ranks, host, context in EXAMPLES:
        machine = hardware.machine(gpu, ranks, host)
        found = plan_memory(read(str(SHAPES / name)), machine, Request(context))
        prefill, decode = speed.prefill(found), speed.decode(found)
        places = f"{len(found.placement.host)} of {found.shape.num_layers} | {found.paper.device_layers}"
        speeds = " | ".join(f"{number(one.tokens_per_second)} ({one.limited_by})" for one in (prefill, decode))
        where = f"{ranks} x `{gpu}` in `{machine.host_key}`"
        pool = ranks * found.host_kv_needed / hardware.GIB
        yield f"| {name} | {where} | {context:,} | {places} | {pool:.0f} | {speeds} |"


def comparison() -> Iterator[str]:
    """Measured and predicted speeds."""
    rows = host_layer_rows()
    for file in FILES:
        of_file = [row for row in rows if row.file == file]
        yield from ("", f"`{file}.json`:", "")
        yield "| tokens x requests | KV cache | prefill | decode | link alone | CPU alone | automatic |"
        yield "|---|---|---|---|---|---|---|"
        for key in dict.fromkeys((row.tokens, row.requests, row.placement) for row in of_file):
            cells = {row.column: cell(row) for row in of_file if (row.tokens, row.requests, row.placement) == key}
            columns = " | ".join(cells.get(column, "") for column in ("prefill", "decode", *WAYS))
            yield f"| {key[0]:,} x {key[1]} | {key[2]} | {columns} |"
        missed = {row.reason for row in of_file if not row.close}
        for reason in (FIRST_PROMPT, OLDER):
            if reason in missed:
                more = (
                    f". From 128K tokens on, the CPU alone read {cpu_rates(file)} of host KV" if reason == OLDER else ""
                )
                yield from ("", f"Reason for bold cells: {reason}{more}.")
    newest = [row for row in rows if row.file in FILES[:2]]
    yield from ("", within((newest, "in the first two files"), (rows, "in all")), "")
    yield "| time to first token, two H200, 8 layers, 8192 tokens | measured | predicted |"
    yield "|---|---|---|"
    for link, measured, predicted in first_token_rows():
        error = signed(predicted / measured - 1)
        yield f"| over {link} | {1e3 * measured:.1f} ms | {1e3 * predicted:.1f} ms ({error}) |"


def graph_comparison() -> Iterator[str]:
    """Measured and predicted speeds of decoding in one graph, and of the ways beside it."""
    rows = graph_rows()
    yield from ("", "### One graph for a decode step", "")
    yield "| file | tokens | KV cache | pieces | one graph, CPU alone | one graph, shared | automatic |"
    yield "|---|---|---|---|---|---|---|"
    for key in dict.fromkeys((row.file, row.tokens, row.placement) for row in rows):
        cells = {row.column: cell(row) for row in rows if (row.file, row.tokens, row.placement) == key}
        columns = " | ".join(cells.get(column, "") for column in GRAPH_WAYS)
        yield f"| `{key[0]}.json` | {key[1]:,} | {key[2]} | {columns} |"
    chosen = [row for row in rows if row.column in CHOSEN]
    yield from ("", within((chosen, "in the last two columns"), (rows, "in all")))
    yield f"The largest error is {largest(chosen)} in the last two columns and {largest(rows)} in all."
    yield from ("", f"Reason for bold cells: {SLOWER_CPU}. {cpu_fractions()}")


def within(*some: tuple[list[Compared], str]) -> str:
    counts = " and ".join(f"{sum(row.close for row in rows)} of {len(rows)} {name}" for rows, name in some)
    return f"Predictions within {100 * CLOSE:.0f} % of the measurement: {counts}."


def largest(rows: list[Compared]) -> str:
    return signed(max((row.error for row in rows), key=abs))


def cpu_fractions() -> str:
    """What CPU attention reached of a plain read where it read everything."""
    found: dict[str, list[float]] = {"16 bits": [], "8 bits": []}
    for file in GRAPH_FILES:
        for row in json.loads((RESULTS / f"{file}.json").read_text())["rows"]:
            if row["case"].endswith(", graph") and "cpu_gb_per_s" in row:
                rate = statistics.median(row["cpu_gb_per_s"]) / statistics.median(row["plain_read_gb_per_s"])
                found["8 bits" if "on the host" in row["case"] else "16 bits"].append(rate)
    reached = " and ".join(f"{min(some):.2f} to {max(some):.2f} with {name}" for name, some in found.items())
    return (
        f"In one graph, the CPU alone read {reached} of the plain read. With the CPU's rate of the same rounds in "
        "place of the constants, these predictions are within 10 %, and those of pieces within 17 %. Two reasons are "
        "not known: fp8_e4m3 in pieces is then still 26 % off, and with 17 host layers that rate was not recorded."
    )


def cpu_rates(file: str) -> str:
    rates = [
        row["host_gb_per_s"]
        for row in json.loads((RESULTS / f"{file}.json").read_text())["rows"]
        if row["case"].endswith("CPU alone") and int(row["case"].split()[2]) >= 1 << 17
    ]
    return f"{min(rates):.0f} to {max(rates):.0f} GB/s"


def cell(row: Compared) -> str:
    error = signed(row.error) if row.close else f"**{signed(row.error)}**"
    return f"{number(row.measured)}, {number(row.predicted)} ({error})"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def signed(error: float) -> str:
    return f"{percent:+} %" if (percent := round(100 * error)) else "0 %"
