from __future__ import annotations

import pytest

from fastattention_vllm.bench.cases import Case, parse_case
from fastattention_vllm.bench.suites import SUITES, cases_of


@pytest.mark.parametrize(
    "text",
    [
        "decode bf16 (32,8,128) 32K b1",
        "decode bf16/fp8 (32,8,128) 32K b16 page16",
        "decode fp32 (8,1,64) 1000 b3",
        "prefill fp16 (8,1,64) 4K",
        "prefill bf16 (32,8,128) 512 on 8K",
        "prefill bf16 (32,32,128) 100 on 28 b2",
    ],
)
def test_a_parsed_case_prints_as_it_was_written(text: str) -> None:
    assert str(parse_case(text)) == text
    assert parse_case(str(parse_case(text))) == parse_case(text)


def test_meaning_of_a_case() -> None:
    assert parse_case("prefill bf16 (32,8,128) 512 on 8K") == Case(
        kind="prefill",
        dtype="bf16",
        kv_dtype="bf16",
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        kv_len=8704,
        q_len=512,
    )
    assert parse_case("decode fp16/fp8 (8,2,64) 3K", page=16).page == 16
    assert parse_case("decode fp16/fp8 (8,2,64) 3K page32", page=16).page == 32


def test_bytes_and_flops() -> None:
    decode = parse_case("decode bf16/fp8 (32,8,128) 1000 b2 page16")
    assert decode.kv_bytes == 2 * 2 * 1000 * 8 * 128
    assert decode.layer_bytes == 2 * 2 * 1008 * 8 * 128, "cases read whole pages"
    assert decode.flops == 4 * 128 * 32 * 1000 * 2
    prefill = parse_case("prefill fp16 (4,4,64) 3 on 5")
    assert prefill.flops == 4 * 64 * 4 * (6 + 7 + 8), "each row sees one position more"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("decode", "not understood"),
        ("decode fp64 (8,1,64) 4K", "not understood"),
        ("decode fp8 (8,1,64) 4K", "not understood"),
        ("decode bf16 (8,1,64) 512 on 4K", "leave out"),
        ("decode bf16 (8,3,64) 4K", "multiple of 3"),
        ("decode bf16 (8,0,64) 4K", "at least 1"),
    ],
)
def test_invalid_cases_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        parse_case(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_is_spelled_right(suite: str) -> None:
    cases = cases_of(suite)
    assert len(set(cases)) == len(cases) > 0


def test_the_suites_contain_the_cases_of_the_means() -> None:
    peers = {str(case) for case in cases_of("peers")}
    for heads in ("(32,8,128)", "(32,32,128)", "(8,1,64)"):
        assert {f"decode bf16 {heads} 4K b1", f"decode fp16 {heads} 128K b16", f"prefill bf16 {heads} 8K"} <= peers
    for dtype in ("bf16", "fp16"):
        for batch in (1, 16):
            some = [
                case
                for case in cases_of("roofline")
                if (case.kv_dtype, case.batch, case.kv_len) == (dtype, batch, 32768)
            ]
            groups = {(case.group, case.head_size) for case in some}
            assert groups == {(group, size) for group in (1, 4, 8) for size in (64, 128)}


def test_an_unknown_suite() -> None:
    with pytest.raises(ValueError, match="choose from quick, peers, roofline, cores"):
        cases_of("all")
