from __future__ import annotations

from typing import Any

import pytest

from fastattention_vllm.bench.cpu_report import CpuReport, CpuRow, cpu_report, summaries


def row(case: str, ratio: float | None, peer: str | None = "torch SDPA", **more: Any) -> CpuRow:
    fields: dict[str, Any] = {
        "case": case,
        "metric": "decode KV read rate",
        "unit": "GB/s",
        "ours": 10.0,
        "peer_name": peer,
        "peer": None if ratio is None else 10.0 / ratio,
        "ratio": ratio,
        "limit": 20.0,
        "fraction_of_limit": 0.5,
        "threads": 2,
        "isa": "avx512",
    }
    return CpuRow(**{**fields, **more})


def test_losing_rows_count_and_are_named() -> None:
    rows = [
        row("decode bf16 (32,8,128) 4K b1", 4.0),
        row("decode bf16 (32,8,128) 8K b1", 0.25),
        row("prefill bf16 (8,1,64) 4K", 3.0),
        row("prefill fp16 (8,1,64) 4K", None),
    ]
    decode, prefill = summaries(rows)
    assert (decode.group, decode.mean, decode.count, decode.losses) == ("decode", pytest.approx(1.0), 2, 1)
    assert decode.worst.case == "decode bf16 (32,8,128) 8K b1"
    assert (prefill.group, prefill.mean, prefill.losses) == ("prefill bf16", pytest.approx(3.0), 0)
    assert cpu_report(rows, 2).rows == rows, "the file must contain every row"


def test_ours_is_compared_with_the_fastest_peer() -> None:
    cases = ["decode bf16 (32,8,128) 4K b1", "decode fp16 (32,8,128) 4K b1"]
    rows = [row(cases[0], 2.0), row(cases[0], 8.0, "vLLM"), row(cases[1], 5.0), row(cases[1], 0.5, "vLLM")]
    means = {summary.peer: summary.mean for summary in summaries(rows)}
    assert means == {
        "torch SDPA": pytest.approx(10**0.5),
        "vLLM": pytest.approx(2.0),
        "the better of them": pytest.approx(1.0),
    }


def test_thread_counts_are_cases_of_their_own() -> None:
    rows = [row("decode bf16 (32,8,128) 4K b1", 2.0, peer, threads=threads) for peer in "ab" for threads in (1, 2)]
    assert [summary.count for summary in summaries(rows)] == [2, 2, 2]


def test_disturbed_rows_stay_in_the_file_and_out_of_the_means() -> None:
    rows = [row("decode bf16 (32,8,128) 4K b1", 2.0), row("decode bf16 (32,8,128) 8K b1", 99.0, reliable=False)]
    (decode,) = summaries(rows)
    assert (decode.mean, decode.count) == (pytest.approx(2.0), 1)


def test_the_file_has_the_keys_of_every_benchmark() -> None:
    found = cpu_report([row("decode bf16 (32,8,128) 4K b1", 2.0)], 2)
    data = found.model_dump()
    assert list(data) == ["hardware", "versions", "date", "rows"]
    assert {"python", "torch"} <= set(data["versions"])
    keys = "case metric unit ours peer_name peer ratio limit fraction_of_limit".split()
    assert list(data["rows"][0])[: len(keys)] == keys
    assert CpuReport.model_validate_json(found.model_dump_json()) == found
