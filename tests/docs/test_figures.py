"""The headline figures of README.md and docs/ equal the recorded results."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, ROOT

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PERFORMANCE = DOCS / "performance.md"


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return found


def row(name: str, case: str, metric: str) -> dict[str, Any]:
    (found,) = (one for one in rows(name) if one["case"] == case and one["metric"] == metric)
    return found


LONG = "fp16 (32,8,128) 524288 tokens b1, 31 host layers"
HOST = "2026-11-22-host-layers-h200-head-start"


def test_the_request_of_512k_tokens() -> None:
    text = " ".join(README.read_text().split())
    needles = row(HOST, LONG, "cooperative needles")
    decode = row(HOST, f"{LONG}, auto", "cooperative decode")
    assert f"found all {needles['ours']} hidden numbers" in text
    assert needles["ours"] == needles["limit"]
    assert f"{decode['ours']:.2f} tokens per second: {decode['ratio']:.2f}x as fast" in text
    assert f"{decode['fraction_of_limit']:.0%}".replace("%", " %") in text
    assert "capped to 4 GiB" in text
    assert "KV memory capped to 4.0 GiB" in json.loads((RESULTS / f"{HOST}.json").read_text())["hardware"]
    alone = row(HOST, "fp16 (32,8,128) 31744 tokens b1, vLLM alone, KV on the device", "cooperative decode")
    assert f"{alone['ours']:.0f} tokens per second at 31,744 tokens" in text
    assert row(HOST, "524352 tokens, vLLM alone", "cooperative starts")["ours"] == 0


@pytest.mark.parametrize(
    "cell",
    [one["case"] for one in rows(HOST) if one["metric"] == "cooperative decode" and one["case"].endswith("auto")],
)
def test_every_row_of_host_layers_is_in_the_table(cell: str) -> None:
    """Tokens, decoding speed and ratio of each row are on one line of the table."""
    found = row(HOST, cell, "cooperative decode")
    tokens = int(cell.split()[2])
    requests = cell.split(" b")[1].split(",")[0]
    wanted = (f"| {tokens:,} x {requests} |", f"| {found['ours']:.3g} |", f"{found['ratio']:.2f}x")
    assert any(all(part in line for part in wanted) for line in PERFORMANCE.read_text().splitlines()), wanted


CPU = {
    ("2026-11-23-cpu-peers-decode-2-cores", "decode bf16"),
    ("2026-11-23-cpu-peers-decode-2-cores", "decode fp16"),
    ("2026-11-27-cpu-peers-decode-zen4", "decode bf16"),
    ("2026-11-27-cpu-peers-decode-zen4", "decode fp16"),
    ("2026-11-22-cpu-peers-avx512-1-thread", "prefill bf16"),
    ("2026-11-22-cpu-peers-avx512-1-thread", "prefill fp16"),
    ("2026-11-23-cpu-peers-2-of-16-cores-keys-first", "decode bf16"),
    ("2026-11-23-cpu-peers-2-of-16-cores-keys-first", "prefill bf16"),
    ("2026-11-23-cpu-peers-2-of-16-cores-keys-first", "prefill fp16"),
    ("2026-11-23-cpu-peers-16-cores-keys-first", "decode bf16"),
    ("2026-11-23-cpu-peers-16-cores", "decode bf16"),
    ("2026-11-23-cpu-peers-16-cores", "decode fp16"),
    ("2026-11-23-cpu-peers-16-cores", "prefill bf16"),
}


def cpu_ratios(name: str, kind: str) -> list[float]:
    return [one["ratio"] for one in rows(name) if one["case"].startswith(kind) and one["ratio"] and one["reliable"]]


@pytest.mark.parametrize(("name", "kind"), sorted(CPU))
def test_cpu_attention(name: str, kind: str) -> None:
    ratios = cpu_ratios(name, kind)
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    cell = f"({min(ratios):.2f}x, {sum(ratio < 1 for ratio in ratios)} of {len(ratios)})"
    line = next(line for line in PERFORMANCE.read_text().splitlines() if name.removeprefix("2026-11-") + "`" in line)
    assert f"{mean:.2f}x {cell}" in line.replace("**", "")


SERVERS = ("2026-11-22-cpu-serve-2-cores", "2026-11-28-cpu-serve-0.6b-avx2-2-cores")


def server_rows(name: str, metric: str) -> list[dict[str, Any]]:
    return [one for one in rows(name) if one["metric"] == f"serve {metric}"]


def test_the_range_of_cpu_decoding_in_the_readme() -> None:
    """Of servers, every row, and the worst case of attention."""
    ratios = [one["ratio"] for name in SERVERS for one in server_rows(name, "inter-token latency")]
    text = " ".join(README.read_text().split())
    assert f"decodes {min(ratios):.2f}x to {max(ratios):.2f}x as fast as vLLM's own CPU build" in text
    assert f"one request at temperature 1 loses at {min(ratios):.2f}x" in text
    worst = cpu_ratios("2026-11-23-cpu-peers-16-cores-keys-first", "decode bf16")
    assert f"{sum(ratio < 1 for ratio in worst)} of {len(worst)} cases lose, the worst at {min(worst):.2f}x" in text


def test_the_table_of_a_server_on_avx2() -> None:
    (first,) = server_rows(SERVERS[1], "time to first token")
    decoding = server_rows(SERVERS[1], "inter-token latency")
    expected = [[f"{first['ours'] / 1e3:.1f} s", f"{first['peer'] / 1e3:.1f} s", f"{first['ratio']:.2f}x", ""]]
    for one in decoding:
        times = [f"{one['ours']:.0f} ms", f"{one['peer']:.0f} ms", f"{one['ratio']:.2f}x"]
        expected.append([*times, f"{one['cpu_ms']:.0f} and {one['peer_cpu_ms']:.0f} ms"])
    heading = "| | ours | vLLM's CPU build | ratio | CPU time of all processes, ours and vLLM's |"
    found = table_rows(PERFORMANCE, heading)
    assert [[cell.replace("**", "") for cell in cells[1:]] for cells in found] == expected
    assert ["disturbed" in cells[0] for cells in found] == [not one["reliable"] for one in [first, *decoding]]


NUMBERS = {1: "one", 2: "two", 4: "four"}
LINKS = {"host": "host memory", "nvlink": "NVLink"}


def table_rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the table under this line of column names. An empty first cell repeats the one above."""
    lines = page.read_text().splitlines()
    found: list[list[str]] = []
    for line in lines[lines.index(heading) + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found.append([cells[0] or found[-1][0], *cells[1:]])
    return found


@pytest.mark.parametrize(
    ("name", "link", "gpu", "ranks"),
    [
        ("2026-11-23-first-token-host-2-h200", "host", "H200", 2),
        ("2026-11-22-first-token-nvlink-2-h200", "nvlink", "H200", 2),
        ("2026-11-27-first-token-host-4-h100-others-paused", "host", "H100", 2),
        ("2026-11-27-first-token-host-4-h100-others-paused", "host", "H100", 4),
        ("2026-11-26-first-token-nvlink-4-h100", "nvlink", "H100", 2),
        ("2026-11-26-first-token-nvlink-4-h100", "nvlink", "H100", 4),
    ],
)
def test_first_token(name: str, link: str, gpu: str, ranks: int) -> None:
    measured = [one for one in rows(name) if "predicted" not in one["case"]]
    one, off, auto, full = (
        next(row for row in measured if f" {count} ranks" in row["case"] and row["case"].endswith(f"tiling {way}"))
        for count, way in ((1, "off"), (ranks, "off"), (ranks, "auto"), (ranks, "full"))
    )
    cells = [LINKS[link], f"{NUMBERS[ranks]} {gpu}", f"{one['ours']:.1f} ms", f"{off['ours']:.1f} ms"]
    cells += [f"{row['ours']:.1f} ms, {row['ratio']:.2f}x" for row in (auto, full)]
    table = table_rows(PERFORMANCE, '| link | GPUs | one GPU | off | `"auto"` | full form |')
    assert cells in table


@pytest.mark.parametrize(
    ("name", "models", "links"),
    [
        ("2026-11-22-tiling-layer-host-2-h200", ["8B", "70B"], ["host"]),
        ("2026-11-22-tiling-layer-nvlink-2-h200", ["8B", "70B"], ["nvlink"]),
        ("2026-11-26-tiling-layer-4-h100", ["70B"], LINKS),
        ("2026-11-27-tiling-layer-4-h100", ["8B"], LINKS),
    ],
)
def test_tiled_layers(name: str, models: list[str], links: list[str]) -> None:
    ranks, gpu = int(name.split("-")[-2]), name.split("-")[-1].upper()
    table = table_rows(PERFORMANCE, "| link | GPUs | model | plain | row-parallel layers tiled | full form |")
    for link, model in itertools.product(links, models):
        case = f"{model} layer, 8192 tokens, {ranks} ranks, {link}"
        plain, *tiled = (row(name, f"{case}, {way}", "overlap layer") for way in ("plain", "linear", "full"))
        cells = [LINKS[link], f"{NUMBERS[ranks]} {gpu}", f"{model} shape", f"{plain['ours']:.2f} ms"]
        assert [*cells, *(f"{one['ours']:.2f} ms, {one['ratio']:.2f}x" for one in tiled)] in table


def test_small_sums_by_push() -> None:
    heading = "| sums of | 2 GPUs, NVLink | 4 GPUs, NVLink | 2 GPUs, host memory | 4 GPUs, host memory |"
    table = table_rows(DOCS / "tiling-allreduce.md", heading)
    assert len(table) == 4
    for size, *cells in table:
        for (link, place, ranks), cell in zip(
            [("nvlink", "GPU", 2), ("nvlink", "GPU", 4), ("host", "host", 2), ("host", "host", 4)], cells, strict=True
        ):
            case = f"fp16 {size}, {ranks} ranks, {link}, boards in {place} memory"
            one = row("2026-11-26-push-all-reduce-4-h100", case, "decode sum")
            assert cell == f"{one['ours']:.1f}, {one['peer']:.1f} us ({one['ratio']:.2f}x)"


PREFILL_256 = "2026-11-25-volta-simulated-prefill-256"


@pytest.mark.parametrize("head_size", ["64", "128", "256"])
@pytest.mark.parametrize("mask", ["causal", "not causal"])
def test_simulated_prefill(head_size: str, mask: str) -> None:
    found = [
        one
        for one in rows(PREFILL_256 if head_size == "256" else "2026-11-23-volta-simulated")
        if one["case"].startswith(f"prefill {head_size} ")
        and one["case"].split(" ", 3)[3:] == [mask]
        and one["unit"] == "TFLOPS"
        and one["ours"] is not None
    ]
    speeds = [one["ours"] for one in found]
    ratios = [one["ratio"] for one in found if one["ratio"]]
    line = f"| head size {head_size}, {mask} | {min(speeds):.1f} to {max(speeds):.1f} |"
    assert f"{line} {min(ratios):.2f}x to {max(ratios):.2f}x |" in PERFORMANCE.read_text()


def test_simulated_prefill_with_grouped_heads() -> None:
    found = {
        (one["tokens"], one["causal"], one["page"]): f"{one['tflops']:.1f}"
        for one in rows(PREFILL_256)
        if one["kind"] == "grouped"
    }
    lengths = {tokens for tokens, *_ in found}
    assert {4096, 5000, 7000, 8192} <= lengths
    for tokens in lengths:
        cells = [found.get((tokens, causal, page), "") for causal in (False, True) for page in (16, 784)]
        assert f"| {tokens} | {' | '.join(cells)} |" in PERFORMANCE.read_text().splitlines()


DECODE = "2026-11-25-volta-simulated-decode"


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_simulated_decoding_of_several_tokens(head_size: int, batch: int) -> None:
    times = {
        one["queries"]: one["milliseconds"]
        for one in rows(DECODE)
        if (one["head_size"], one["batch"], one["tokens"]) == (head_size, batch, 65536)
    }
    assert {1, 4} <= times.keys()
    cells = [f"{times[new] / times[1]:.2f}x" if new in times else "" for new in range(2, 6)]
    name = "one sequence" if batch == 1 else f"{batch} sequences"
    line = f"| head size {head_size}, {name} | {times[1]:.3f} ms | {' | '.join(cells)} |"
    assert line in PERFORMANCE.read_text().splitlines()


@pytest.mark.parametrize("group", [6, 7])
def test_simulated_decoding_of_odd_groups(group: int) -> None:
    found = [one for one in rows(DECODE) if (one["tokens"], one["group"]) == (3000, group)]
    found.sort(key=lambda one: one["head_size"])
    cells = [f"{one['part_of_feed']:.1%}".replace("%", " %") for one in found]
    line = f"| {group} | {' | '.join(cells)} |"
    assert len(found) == 7
    assert line in PERFORMANCE.read_text().splitlines()
