"""Up to 8 tokens of one request, as in speculation: every key is read once for all of them, by all threads."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.placement.step import MAX_CPU_TOKENS
from tests.attention.cpu.test_attention import check
from tests.attention.oracle import Case

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
COMPILER = shutil.which("g++")
KERNELS = Path(__file__).resolve().parents[3] / "kernels" / "cpu"
SHAPES = [(32, 8, 128), (28, 4, 128), (16, 16, 96), (32, 2, 128), (32, 1, 64)]

Items = list[tuple[int, int, int, int]]
"""First token, tokens, and the first key and the one after the last."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    group, kv_heads = draw(st.sampled_from([(1, 2), (3, 1), (4, 2), (7, 1), (8, 1), (16, 1)]))
    tokens = draw(st.lists(st.integers(1, MAX_CPU_TOKENS), min_size=1, max_size=3))
    # A tile has 32 to 256 keys, and a split at least 256.
    context = st.integers(0, 700) | st.sampled_from([0, 1, 15, 16, 31, 127, 128, 255, 256, 511, 1023])
    kv_dtype = draw(st.sampled_from([None, None, None, E4M3, E5M2]))
    return Case(
        q_lens=tokens,
        kv_lens=[draw(context) + new for new in tokens],
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_size=draw(st.sampled_from([64, 80, 96, 128])),
        page_size=draw(st.sampled_from([16, 17, 128])),
        dtype=draw(st.sampled_from([F32, F16, F16, BF16, BF16])),
        kv_dtype=kv_dtype,
        key_scale=0.7 if kv_dtype else 1.0,
        value_scale=1.5 if kv_dtype else 1.0,
        layout=draw(st.sampled_from(["HND", "NHD"])),
        window=draw(st.sampled_from([(-1, -1), (-1, -1), (0, 0), (5, 0), (200, 0)])),
        softcap=draw(st.sampled_from([0.0, 0.0, 5.0])),
        alibi=draw(st.sampled_from(["", "", "shared"])),
        sinks=draw(st.sampled_from([None, None, 2.0])),
        padding=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 1 << 30)),
    )


@settings(max_examples=120, deadline=None)
@given(case=cases())
def test_each_token_sees_one_key_less_than_the_next(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, None), (F16, None), (F32, None), (BF16, E4M3)], ids=str)
@pytest.mark.parametrize("rows", range(1, 50))
def test_any_number_of_rows(rows: int, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """Kinds and sizes of panels change with the number of rows, which is tokens times query heads per KV head."""
    tokens = next(count for count in range(8, 0, -1) if rows % count == 0)
    check(Case((tokens,), (277,), rows // tokens, 1, head_size=96, dtype=dtype, kv_dtype=kv_dtype, seed=rows))


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_equal_inputs_give_equal_bits(isa: str, dtype: torch.dtype) -> None:
    problem = Case((8, 5), (6001, 3003), 8, 2, dtype=dtype).build()
    results = []
    for threads in (1, 2, 5, 5):
        cpu.set_num_threads(threads)
        results.append(cpu.run(problem, return_lse=True))
    starts = problem.query_start_loc.tolist()
    assert problem.block_table is not None
    alone = replace(
        problem,
        query=problem.query[: starts[1]],
        query_start_loc=problem.query_start_loc[:2],
        seq_lens=problem.seq_lens[:1],
        block_table=problem.block_table[:1],
    )
    first = cpu.run(alone)[0]
    for out, lse in results:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
        assert torch.equal(out[: starts[1]], first)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Items]:
    if COMPILER is None:
        pytest.skip("needs g++")
    runner = tmp_path_factory.mktemp("plan") / "runner"
    includes = [f"-I{KERNELS / folder}" for folder in ("src", "include")]
    sources = [Path(__file__).with_name("plan_runner.cpp"), KERNELS / "src" / "plan.cpp"]
    subprocess.run([COMPILER, "-std=c++17", *includes, *map(str, sources), "-o", str(runner)], check=True)

    def items(*numbers: int) -> Items:
        printed = subprocess.run([str(runner), *map(str, numbers)], capture_output=True, text=True, check=True).stdout
        return [tuple(map(int, line.split())) for line in printed.splitlines()]  # type: ignore[misc]

    return items


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kv_tokens", [300, 16384, 65537])
@pytest.mark.parametrize("window", [-1, 100])
def test_every_key_is_read_once_for_all_tokens(
    plan: Callable[..., Items], shape: tuple[int, int, int], kv_tokens: int, window: int
) -> None:
    for tokens in range(1, MAX_CPU_TOKENS + 1):
        items = sorted(plan(tokens, kv_tokens, *shape, window), key=lambda item: item[2])
        assert {item[:2] for item in items} == {(0, tokens)}, "an item has all tokens of the request"
        first = 0 if window < 0 else kv_tokens - tokens - window
        assert [item[2] for item in items] == [first, *(item[3] for item in items[:-1])], "items share no key"
        assert items[-1][3] == kv_tokens


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_a_long_context_is_divided_among_threads(
    plan: Callable[..., Items], shape: tuple[int, int, int], tokens: int
) -> None:
    """Twice as many items as 32 threads, of which none has more than a 32nd of the keys."""
    items = plan(tokens, 65536, *shape, -1)
    assert len(items) * shape[1] >= 64
    assert max(end - begin for *_, begin, end in items) <= 65536 * shape[1] / 32
