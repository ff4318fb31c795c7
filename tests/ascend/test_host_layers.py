"""An NPU's host layers against float64: copies, the operator on prefetched KV, and the CPU kernels beside it.

The operator is ours, runs on the CPU and asserts the documented limits. The simulated streams copy as late as they may.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.placement import host_attention, npu, prefetch
from fastattention_vllm.placement.host_attention import HostLayerGroup, StreamSplit
from tests.ascend import operator as ascend_operator
from tests.ascend.streams import npu_streams, stand_in  # noqa: F401  a fixture
from tests.ascend.test_attention import bound  # noqa: F401  a fixture
from tests.attention.oracle import attention
from tests.placement.conftest import exact_weights  # noqa: F401  a fixture
from tests.placement.scenario import Model, Scenario, some_steps

pytestmark = pytest.mark.usefixtures("exact_weights")
NPU = torch.device("cpu")
MODELS = st.builds(
    Model,
    num_heads=st.sampled_from([4, 8]),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    head_size=st.sampled_from([64, 128]),
    page_size=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    window=st.sampled_from([None, None, 1, 5, 30, 200]),
)


def scenario_of(model: Model, share: float, seed: int) -> Scenario:
    return Scenario(model, 3, 600, HostLayerGroup(npu.NpuLink(NPU), npu, stream_split=StreamSplit(share)), seed)


@settings(max_examples=40, deadline=None)
@given(
    model=MODELS,
    share=st.sampled_from([0.0, 0.4, 1.0]),
    blocks_per_part=st.sampled_from([1, 3, 40]),
    seed=st.integers(0, 1000),
)
def test_steps_equal_attention_over_the_whole_history(
    model: Model, share: float, blocks_per_part: int, seed: int
) -> None:
    """Caches hold NaN where nothing was written. The source of a late copy may have been overwritten by then."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        block = 2 * model.page_size * model.num_kv_heads * model.head_size * model.dtype.itemsize
        patch.setattr(prefetch, "STAGING_BYTES", blocks_per_part * block)
        patch.setattr(host_attention, "MIN_STREAMED_BYTES", 1)
        some_steps(scenario_of(model, share, seed), random.Random(seed), rounds=4, chunk=40, firsts=(3, 20, 80))


@pytest.mark.parametrize("window", [-1, 0, 3, 30, 500])
@pytest.mark.parametrize(("new", "tokens"), [(1, 1), (1, 90), (7, 90), (90, 90), (90, 20), (90, 1)])
@pytest.mark.parametrize("head_size", [64, 128])
def test_more_queries_than_prefetched_keys(head_size: int, new: int, tokens: int, window: int) -> None:
    """The last query is at the position of the last key; the first queries may precede all keys."""
    numbers = torch.Generator().manual_seed(0)
    page = 16
    blocks = -(-tokens // page)
    rows = torch.randn(blocks + 2, 2, page, 2 * head_size, generator=numbers).half()
    key, value = rows.transpose(1, 2).chunk(2, dim=-1)
    problem = AttentionProblem(
        query=torch.randn(new, 4, head_size, generator=numbers).half(),
        key=key,
        value=value,
        query_start_loc=torch.tensor([0, new], dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        scale=0.1,
        causal=False,
        block_table=torch.randperm(blocks + 2, generator=numbers).int()[None, :blocks],
        window=(window, -1),
    )
    out, lse = npu.run(problem, return_lse=True)
    expected, expected_lse = attention(problem)
    torch.testing.assert_close(out.double(), expected, rtol=2**-11, atol=1e-6)
    assert lse is not None
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


def test_a_window_takes_one_call_for_rows_that_see_all_keys_and_one_for_the_rest() -> None:
    rows = torch.randn(8, 2, 16, 256).half()
    key, value = rows.transpose(1, 2).chunk(2, dim=-1)
    for window, modes in ((-1, [0]), (1000, [0]), (80, [0, 4]), (10, [4])):
        ascend_operator.calls.clear()
        npu.run(
            AttentionProblem(
                query=torch.randn(60, 4, 128).half(),
                key=key,
                value=value,
                query_start_loc=torch.tensor([0, 60], dtype=torch.int32),
                seq_lens=torch.tensor([100], dtype=torch.int32),
                scale=0.1,
                causal=False,
                block_table=torch.arange(8, dtype=torch.int32)[None],
                window=(window, -1),
            )
        )
        assert [call["sparse_mode"] for call in ascend_operator.calls] == modes


@settings(max_examples=100, deadline=None)
@given(
    page=st.sampled_from([1, 2, 8]),
    begin=st.integers(0, 20),
    count=st.integers(1, 50),
    left_out=st.sets(st.integers(0, 49), max_size=3),
    heads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_rows_are_stored_at_their_places_and_nowhere_else(
    page: int, begin: int, count: int, left_out: set[int], heads: int, seed: int
) -> None:
    numbers = torch.Generator().manual_seed(seed)
    cache = torch.full((80, heads, page, 16), math.nan)
    blocks = torch.randperm(80, generator=numbers)
    if seed % 2:
        blocks = torch.arange(80)
    positions = torch.arange(begin, begin + count)
    slots = blocks[positions // page] * page + positions % page
    slots[[index for index in left_out if index < count]] = -1
    key, value = torch.randn(2, count, heads, 8, generator=numbers)
    expected = cache.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // page, :, slot % page] = torch.cat([key[row], value[row]], -1)
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        link = npu.NpuLink(NPU)
        with link.writing():
            npu.write_kv(key, value, *cache.transpose(1, 2).chunk(2, dim=-1), slots)
            written = link.written()
        assert cache.isnan().all(), "stored by the compute stream"
        link.wait(written)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("npu_streams")
def test_neighbouring_whole_pages_take_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, *given, **named: copies.append(self.nbytes) or copy(self, *given, **named)
    )
    cache = torch.zeros(40, 2, 8, 32)
    blocks = [7, 3, 4, 5, 20, 21, 9]
    slots = torch.tensor(list(itertools.chain(*(range(8 * block, 8 * block + 8) for block in blocks))))[5:-2]
    key, value = torch.randn(2, len(slots), 2, 16)
    npu.write_kv(key, value, *cache.transpose(1, 2).chunk(2, dim=-1), slots)
    row = 32 * 4
    assert copies == [3 * row, 3 * row, 3 * 16 * row, 2 * 16 * row, 6 * row, 6 * row]


def test_caches_that_are_not_halves_of_pages_are_refused() -> None:
    key, value = torch.zeros(2, 4, 8, 2, 16)
    with pytest.raises(AssertionError, match="side by side"):
        npu.write_kv(torch.zeros(1, 2, 16), torch.zeros(1, 2, 16), key, value, torch.tensor([0]))


@pytest.mark.usefixtures("npu_streams")
def test_copies_to_the_host_are_complete_when_they_arrive() -> None:
    """They return to the device in the order of the computation."""
    link: Any = npu.NpuLink(NPU)
    one, other = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    first = link.arrive(link.start_to_host(one, other))
    assert torch.equal(first[0], one)
    assert torch.equal(first[1], other)
    assert link.host_buffer("out", (3, 4), torch.float32).shape == (3, 4)


@pytest.mark.usefixtures("npu_streams")
def test_rows_just_stored_are_fetched() -> None:
    """The copy to the device waits for the copy to the host. The computation waits for neither."""
    link = npu.NpuLink(NPU)
    cache = torch.zeros(4, 2, 8, 32)
    key, value = torch.randn(2, 8, 2, 16)
    with link.writing():
        npu.write_kv(key, value, *cache.transpose(1, 2).chunk(2, dim=-1), torch.arange(16, 24))
        written = link.written()
    target = link.staging(cache[:1].nbytes).view(cache.dtype).view(1, *cache.shape[1:])
    point = link.fetch(cache, torch.tensor([2]), target, [written])
    assert not cache.any()
    link.wait(point)
    assert torch.equal(target[0], torch.cat([key, value], -1).transpose(0, 1))


@pytest.mark.usefixtures("npu_streams")
def test_every_block_is_fetched_whatever_its_neighbours_are() -> None:
    link = npu.NpuLink(NPU)
    cache = torch.randn(300, 2, 4, 8)
    blocks = torch.randperm(300)[:200]
    target = link.staging(250 * cache[:1].nbytes).view(cache.dtype).view(250, *cache.shape[1:])
    point = link.fetch(cache, blocks, target, [link.mark()])
    assert not target.any(), "the copy has started but was not waited for"
    link.wait(point)
    assert torch.equal(target[:200], cache[blocks])
    assert not target[200:].any()
