"""The constants are those of the recorded results that they name."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from fastattention_vllm.doctor import memory as doctor
from fastattention_vllm.plan.hardware import GIB, MEASURED_FILE, TABLES_FILE, measured, tables
from scripts.plan_table import H100_LINK
from tests.plan.shapes import shape

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NOTES = " ".join((ROOT / "benchmarks" / "notes" / "host_layers.md").read_text().split())


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return found


def row(name: str, case: str) -> dict[str, Any]:
    return next(one for one in rows(name) if one["case"] == case)


def test_the_files_that_are_named_exist() -> None:
    text = (ROOT / "fastattention_vllm" / "plan" / TABLES_FILE).read_text()
    text += (ROOT / "fastattention_vllm" / "plan" / MEASURED_FILE).read_text()
    named = set(re.findall(r"(?:benchmarks|kernels|fastattention_vllm)/[\w./-]+\.\w+", text))
    named |= {f"benchmarks/results/{name}" for name in re.findall(r"\b2026-[\w-]+\.(?:json|txt)", text)}
    assert len(named) > 8
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_fraction_of_the_peak_in_prefill() -> None:
    found = row(
        "2026-11-23-first-token-host-2-h200", "8B layers, 8 of 32, 8192 tokens, 1 ranks, host, eager, tiling off"
    )
    model = shape("llama3-8b")
    linear = 2 * 8 * model.layer_parameters() * 8192
    attention = 4 * 8 * (8192 * 8193 // 2) * model.num_heads * model.head_size
    fraction = (linear + attention) / (found["ours"] * 1e-3) / (1e12 * tables().devices["h200-141g"].tflops)
    assert measured().linear_fraction.value == pytest.approx(fraction, abs=0.01)
    assert tables().kernels["flash"].attention_fraction(128) == pytest.approx(fraction, abs=0.01)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("2026-11-23-volta-simulated", "prefill 64 16K causal"),
        ("2026-11-23-volta-simulated", "prefill 128 16K causal"),
        ("2026-11-25-volta-simulated-prefill-256", "prefill 256 8K causal"),
        ("2026-11-25-volta-simulated-prefill-256", "grouped 256 8K causal GQA 6 page 784"),
    ],
)
def test_fraction_of_the_peak_on_a_v100(name: str, case: str) -> None:
    found = row(name, case)
    fraction = found["ours"] / tables().devices["v100-32g"].tflops
    kernels = tables().kernels["volta"]
    assert name in kernels.source
    assert kernels.attention_fraction(found["head_size"]) == pytest.approx(fraction, abs=0.02)


def test_fraction_of_the_peak_at_head_size_192_on_a_v100() -> None:
    text = (ROOT / "kernels" / "volta" / "README.md").read_text()
    (reached,) = re.findall(r"\b192: ([\d.]+) and ([\d.]+)\.", text)
    fraction = float(reached[1]) / tables().devices["v100-32g"].tflops
    assert tables().kernels["volta"].attention_fraction(192) == pytest.approx(fraction, abs=0.01)


@pytest.mark.parametrize("head_size", [64, 128])
def test_fraction_of_the_peak_on_turing(head_size: int) -> None:
    text = (ROOT / "kernels" / "volta" / "README.md").read_text()
    assert "m16n8k8 reaches about 478 TFLOPS" in text
    (line,) = re.findall(rf"^\| prefill {head_size}, causal .*$", text, re.MULTILINE)
    reached = [float(cell.split()[0]) for cell in line.split("|")[3:] if cell.strip()]
    fraction = statistics.mean(reached) / 478
    assert tables().kernels["turing"].attention_fraction(head_size) == pytest.approx(fraction, abs=0.03)


def test_time_between_the_layers_of_a_decoding_step() -> None:
    text = (RESULTS / "2026-11-22-host-kv-layers-0-h200.txt").read_text()
    milliseconds = float(re.search(r"peer, 1 at a time: ([\d.]+) ms", text)[1])  # type: ignore[index]
    model, rate = shape("llama3-8b"), measured().device_memory_fraction.value * 4.8e12
    tokens = 1024 + 128 // 2
    cache = 2 * 2 * model.num_kv_heads * model.head_size * model.num_layers * tokens
    read = 2 * model.num_layers * model.layer_parameters() + cache
    per_layer = (1e-3 * milliseconds - read / rate) / model.num_layers
    assert measured().layer_us.value == pytest.approx(1e6 * per_layer, abs=3)


@pytest.mark.parametrize(
    ("link", "name", "sweep"),
    [
        ("nvlink4", "2026-11-22-tiling-all-reduce-2-h200-orders-counted", "2026-11-22-tiling-sweep-nvlink-2-h200"),
        ("pcie5", "2026-11-22-tiling-all-reduce-host-2-h200-8b-again", "2026-11-22-tiling-sweep-host-2-h200"),
    ],
)
def test_sums_over_two_devices(link: str, name: str, sweep: str) -> None:
    kind = "nvlink" if link == "nvlink4" else "host"
    short = row(name, f"256 tokens, 8B o_proj, 2 ranks, {kind}, plain")["all-reduce ms"]
    long = row(sweep, f"8192 tokens, 8B o_proj, 2 ranks, {kind}, plain")["all-reduce ms"]
    rate = 2 * 4096 * (8192 - 256) / (long - short) * 1e3
    assert tables().peers[link].gb_per_s == pytest.approx(rate / 1e9, rel=0.02)
    assert measured().all_reduce_us.value == pytest.approx(1e3 * short - 1e6 * 2 * 4096 * 256 / rate, abs=3)


@pytest.mark.parametrize(
    ("case", "mib"),
    [
        ("decode bf16 (32,8,128) 4K b1", 16),
        ("decode bf16 (32,32,128) 4K b1", 64),
        ("decode bf16 (32,8,128) 32K b1", 128),
        ("decode bf16 (32,8,128) 4K b16", 256),
        ("decode bf16 (32,32,128) 4K b16", 1024),
    ],
)
def test_cpu_attention_by_bytes(case: str, mib: int) -> None:
    found = row("2026-11-23-cpu-peers-16-cores-keys-first", case)
    assert measured().cpu_by_mib.at(mib) == pytest.approx(found["fraction_of_limit"], abs=0.01)


def test_one_core() -> None:
    found = row("2026-11-23-cpu-peers-2-of-16-cores-keys-first", "decode bf16 (32,8,128) 32K b1")
    assert measured().core_gb_per_s.value == pytest.approx(found["ours"] / 2, rel=0.01)


def test_what_a_host_layer_costs_in_a_graph() -> None:
    (ring,) = rows("2026-11-25-graph-ring-h100")
    assert measured().ring_us.value == pytest.approx(ring["ours"], abs=0.5)
    on_device, copies = (
        1e6 / one["ours"] for one in rows("2026-11-26-host-layers-h100-resident-16k") if "decode" in one["metric"]
    )
    assert measured().merge_us.value == pytest.approx((copies - on_device) / 31, abs=0.5)


def test_figures_of_the_notes() -> None:
    assert "over PCIe, at 48.7 GB/s if alone; the copy engine gave 51.2" in NOTES
    assert measured().link_in_place.value == pytest.approx(48.7 / 51.2, abs=0.005)
    assert H100_LINK == 51.2
    assert "About 20 ms a token" in NOTES or "about 20 ms a token" in NOTES
    assert "launching of 32 pieces of the model" in NOTES
    assert measured().launch_ms.value == pytest.approx(20 / 32)
    assert "takes 1 ms of Python and driver calls" in NOTES
    assert measured().stream_ms.value == 1
    assert "plain read 146 to 154, link 54;" in NOTES
    assert "103 + link 47" in NOTES
    assert measured().link_beside_cpu.value == pytest.approx(47 / 54, abs=0.005)
    assert tables().hosts["h200-16-cores"].link_gb_per_s == 54
    assert "from 110 to 126 GB/s (4 query heads per KV head, fp16" in NOTES
    assert "1 query head 134 to 143, 8 query heads 93 to 110" in NOTES
    plain = statistics.mean((146, 154))
    reached = [statistics.mean((134, 143)) / plain, 126 / plain, 110 / plain]
    assert [measured().cpu_by_group.at(heads) for heads in (1, 4, 8)] == pytest.approx(reached, abs=0.01)


def test_the_memory_of_the_measured_host() -> None:
    rates = [
        rate for one in rows("2026-11-22-host-layers-h200-head-start") for rate in one.get("plain_read_gb_per_s", [])
    ]
    assert tables().hosts["h200-16-cores"].read_gb_per_s == pytest.approx(statistics.median(rates), abs=0.1)


def test_the_servers_own_memory_is_the_doctors() -> None:
    assert measured().server_gib.value * GIB == doctor.SERVER_NEEDS


def test_links_that_were_not_measured_are_scaled() -> None:
    rate = {name: peers.gb_per_s for name, peers in tables().peers.items()}
    for name, part in (("nvlink2", 150 / 450), ("nvlink3", 300 / 450), ("hccs", 196 / 450)):
        assert rate[name] == pytest.approx(rate["nvlink4"] * part, rel=0.01)
    for name, part in (("pcie3", 12 / 54), ("pcie4", 25 / 54)):
        assert rate[name] == pytest.approx(rate["pcie5"] * part, rel=0.01)
