from __future__ import annotations

import numpy
import pytest
import torch

from fastattention_vllm.attention.cpu import roofline
from fastattention_vllm.bench import limits
from fastattention_vllm.bench.cases import parse_case
from fastattention_vllm.bench.contender import block_table
from fastattention_vllm.bench.limits import Roofline


@pytest.mark.parametrize("text", ["decode bf16 (4,2,64) 50 b3 page16", "decode fp32 (4,1,8) 64 b2 page16"])
def test_the_plain_read_covers_the_bytes_that_attention_reads(text: str) -> None:
    """The read covers everything up to the last token of each sequence, and nothing after it."""
    case = parse_case(text)
    layer = torch.randint(0, 256, (case.layer_bytes,), dtype=torch.uint8)
    table = block_table(case)
    blocks = layer.view(table.numel(), case.num_kv_heads, 2, case.page, -1)
    expected = 0
    for pages in table.tolist():
        for number, page in enumerate(pages):
            tokens = min(case.page, case.kv_len - number * case.page)
            words = blocks[page, :, :, :tokens].contiguous().view(-1).numpy().view(numpy.uint64)
            expected ^= int(numpy.bitwise_xor.reduce(words))
    (reader,) = limits.page_readers(case, [layer])
    assert reader.read(roofline.ReadMethod()) == expected
    assert reader.total_bytes == case.kv_bytes


def test_the_roofline_is_the_longer_side() -> None:
    assert Roofline(read=2.0, arithmetic=1.0).seconds == 2.0
    assert Roofline(read=2.0, arithmetic=1.0).longer == "read"
    assert Roofline(read=1.0, arithmetic=3.0).seconds == 3.0
    assert Roofline(read=1.0, arithmetic=3.0).longer == "flops"


def test_units_that_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "peak_kinds", lambda: ["bf16_amx", "bf16_dot", "fp32_fma"])
    assert limits.usable_kinds("bf16") == {"bf16_amx": 1, "bf16_dot": 1, "fp32_fma": 1}
    assert limits.usable_kinds("fp16") == {"bf16_amx": 4, "fp32_fma": 1}
    assert limits.usable_kinds("fp32") == {"fp32_fma": 1}


def test_a_unit_that_needs_four_products_has_a_quarter_of_the_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "peak", lambda kind, iterations: 400.0)
    monkeypatch.setattr(limits.Peak, "_seconds", lambda self: self() or 1.0)
    peak = limits.Peak("bf16_amx", 4)
    assert peak.rate() == 100.0
    assert peak.kind == "bf16_amx / 4"


def test_the_fastest_unit_is_the_limit_even_if_it_is_not_the_widest(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"bf16_dot": 1.0, "fp32_fma": 2.0}
    monkeypatch.setattr(roofline, "peak_kinds", lambda: list(rates))
    monkeypatch.setattr(roofline, "peak", lambda kind, iterations: 1.0)  # this machine may lack the unit
    monkeypatch.setattr(limits.Peak, "_seconds", lambda self: self() or 1.0)
    monkeypatch.setattr(limits.Peak, "rate", lambda self: rates[self.kind.split()[0]])
    assert limits.fastest_peak("bf16").kind == "fp32_fma"
