"""The kernels for V100 and Turing on a real GPU: as machine code there, elsewhere as PTX that the driver compiles.

A newer GPU runs both: the V100's kernels, whose products are emulated there, and Turing's, whose products are native.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.attention.volta import kernels as volta
from fastattention_vllm.attention.volta import launch as volta_kernels
from fastattention_vllm.attention.volta.launch import HEAD_SIZES
from kernels.volta import variants
from tests.attention import oracle
from tests.attention.oracle import Case
from tests.kernels.volta.attention import LSE_TOLERANCE, TOLERANCE
from tests.kernels.volta.test_attention_kernels import FEATURES
from tests.kernels.volta.test_cache import DTYPES, EVERYTHING, SCALES, assert_same, cast
from tests.kernels.volta.test_cache import case as eight_bits
from tests.kernels.volta.test_emulator import SLID_OUT, slid_out

FP16 = torch.float16
FIELDS = ("query", "key", "value", "query_start_loc", "seq_lens", "block_table")


@pytest.fixture(scope="module", autouse=True, params=["auto", "ptx-sm_75"])
def gpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """Replaces the fixture of other GPU tests: all tests run with each set of kernels, from the V100 on."""
    least = (7, 5) if request.param == "ptx-sm_75" else (7, 0)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < least:
        pytest.skip(f"needs an NVIDIA GPU of compute capability {least[0]}.{least[1]} or newer")
    volta.choose(request.param)
    yield request.param
    volta.choose("auto")


def on_gpu(problem: AttentionProblem) -> AttentionProblem:
    """Move the problem to the GPU. Keys and values stay views of one tensor."""
    key, value = problem.key, problem.value
    if key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
        whole = torch.empty(0, dtype=key.dtype).set_(key.untyped_storage()).cuda()
        key, value = (
            torch.as_strided(whole, view.shape, view.stride(), view.storage_offset()) for view in (key, value)
        )
    else:
        key, value = key.cuda(), value.cuda()
    moved = {
        name: tensor.cuda()
        for name in ("block_table", "kv_start_loc")
        if (tensor := getattr(problem, name)) is not None
    }
    wide = torch.empty(0, dtype=FP16).set_(problem.query.untyped_storage()).cuda()
    query = torch.as_strided(wide, problem.query.shape, problem.query.stride(), problem.query.storage_offset())
    return replace(problem, query=query, key=key, value=value, **moved)


def check(problem: AttentionProblem, there: AttentionProblem | None = None) -> None:
    """``there`` is the problem on the GPU, for cases where that is more than a copy."""
    expected, expected_lse = oracle.attention(problem)
    out, lse = volta.run(there or on_gpu(problem), return_lse=True)
    real = int(problem.query_start_loc[-1])
    assert lse is not None
    assert float((out[:real].cpu().double() - expected[:real]).abs().max()) < TOLERANCE
    torch.testing.assert_close(lse[:real].cpu().double(), expected_lse[:real], rtol=0, atol=LSE_TOLERANCE)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("changes", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("kind", ["prefill", "decode", "decode_wide"])
def test_every_feature_at_every_head_size(kind: str, changes: dict[str, Any], head_size: int) -> None:
    if kind == "prefill":
        case = Case((170, 40, 3, 1), (170, 900, 33, 1), 6, 2, head_size, dtype=FP16, **changes)
    elif kind == "decode":
        case = Case((2, 1, 1), (3000, 1, 129), 8, 2, head_size, dtype=FP16, **changes)
    else:
        case = Case((5, 1, 3, 4), (3000, 129, 1, 4), 12, 2, head_size, dtype=FP16, **changes)
    assert volta_kernels.kind_of(max(case.q_lens) * case.num_heads // case.num_kv_heads) == kind
    check(case.build())


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("kind", SLID_OUT)
def test_pages_that_left_the_window_are_ignored(kind: str, page_size: int, head_size: int) -> None:
    """Other requests have written infinities there since. The case includes a prompt that is split into parts."""
    case = replace(SLID_OUT[kind], head_size=head_size, page_size=page_size)
    check(slid_out(case))


@pytest.mark.parametrize("lengths", [(2, 1), (20, 12)])
def test_rows_that_see_no_key_with_sinks_of_minus_infinity(lengths: tuple[int, int]) -> None:
    check(Case(lengths[:1], lengths[1:], 4, 2, dtype=FP16, sinks=-math.inf).build())


def test_values_with_different_strides() -> None:
    """Compiled models pass such values."""
    problem = Case((33, 5), (33, 5), 8, 2, 64, 0, FP16).build()
    wide = torch.empty(len(problem.value), 4, 64, dtype=FP16, device="cuda")
    wide[:, 1:3] = problem.value.cuda()
    check(problem, replace(on_gpu(problem), value=wide[:, 1:3]))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("changes", [{}, EVERYTHING], ids=["causal", "all of it"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["prefill", "decode", "decode_wide"])
def test_caches_of_8_bits_at_every_head_size(
    kind: str, dtype: torch.dtype, changes: dict[str, Any], head_size: int
) -> None:
    check(eight_bits(dtype, kind, head_size, **changes).build())


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("changes", FEATURES.values(), ids=FEATURES)
def test_keys_of_a_chunk_after_a_long_context_are_split(changes: dict[str, Any], head_size: int) -> None:
    """Few CTAs, so that the keys are split into parts."""
    case = Case((100, 40), (3000, 40), 6, 2, head_size, dtype=FP16, **changes)
    variant = variants.prefill(head_size)
    assert volta_kernels.prefill_parts(variant, volta_kernels.prefill_grid(variant, 300, 2, 2), 3000) > 1
    check(case.build())


@pytest.mark.parametrize("dtype", [FP16, *DTYPES], ids=str)
def test_every_fp16_number_is_cast_as_torch_does(dtype: torch.dtype) -> None:
    """All fp16 numbers, written into pages of 16 tokens in reverse order."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(FP16).view(-1, 2, 64)
    slots = torch.arange(len(numbers)).flip(0)
    scales = (1.0, 1.0) if dtype == FP16 else (1.0, 0.3)
    caches = torch.zeros(2, len(numbers) // 16, 16, 2, 64).to(dtype).cuda()
    volta.write_kv(numbers.cuda(), numbers.cuda(), *caches, slots.cuda(), *scales)
    for written, scale in zip(caches.cpu(), scales, strict=True):
        expected = numbers if dtype == FP16 else cast(numbers, dtype, scale)
        assert_same(written.view(-1, 2, 64)[slots], expected)


def test_a_replayed_graph_keeps_its_workspace() -> None:
    """Captured with the largest extent, replayed with other keys and lengths; all parts share one workspace."""
    problem = on_gpu(Case((3, 2), (500, 900), 32, 2, 64, dtype=FP16).build())
    problem = volta._on(problem.query.device, problem)
    workspace = torch.empty(volta.partial_floats(64, 16, 2, 2, 4096), device="cuda")
    out = torch.zeros_like(problem.query, memory_format=torch.contiguous_format)
    extent = volta.Extent(3, 4096)
    volta.load(64, adjusted=False)
    volta.attend(problem, extent, out, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        volta.attend(problem, extent, out, workspace=workspace)
    problem.seq_lens.copy_(torch.tensor([37, 640], dtype=torch.int32))
    workspace.fill_(float("nan"))
    graph.replay()
    expected, _ = oracle.attention(
        replace(problem, **{name: tensor.cpu() for name in FIELDS if (tensor := getattr(problem, name)) is not None})
    )
    assert float((out.cpu().double() - expected).abs().max()) < TOLERANCE


@settings(max_examples=100)
@given(st.data())
def test_drawn_problems(data: st.DataObject) -> None:
    kv_heads = data.draw(st.sampled_from([1, 2, 3]))
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2000)), min_size=1, max_size=4))
    case = Case(
        tuple(new for new, _ in lengths),
        tuple(new + before for new, before in lengths),
        kv_heads * data.draw(st.sampled_from([1, 2, 4, 7])),
        kv_heads,
        data.draw(st.sampled_from(HEAD_SIZES)),
        data.draw(st.sampled_from([0, 16, 32, 784])),
        FP16,
        causal=data.draw(st.booleans()),
        window=(data.draw(st.sampled_from([-1, 0, 5, 100])), -1),
        softcap=data.draw(st.sampled_from([0.0, 3.0])),
        kv_dtype=(kv_dtype := data.draw(st.sampled_from([None, *DTYPES]))),
        **dict(zip(("key_scale", "value_scale"), SCALES.get(kv_dtype, (1.0, 1.0)), strict=True)),
        seed=data.draw(st.integers(0, 100)),
    )
    check(case.build())
