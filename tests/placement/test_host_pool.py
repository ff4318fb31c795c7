from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.placement import host_memory, host_pool
from fastattention_vllm.placement.host_pool import PageShape, assign_slabs

MIB = 1 << 20
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]

SHAPES = st.builds(
    PageShape,
    num_blocks=st.integers(1, 6),
    block_size=st.sampled_from([1, 16]),
    num_kv_heads=st.integers(1, 3),
    head_size=st.sampled_from([8, 24]),
    dtype=st.sampled_from(DTYPES),
)


@given(st.lists(st.lists(SHAPES, max_size=4), max_size=4).filter(any))
def test_layers_of_one_block_table_do_not_share_pages(
    tables: list[list[PageShape]],
) -> None:
    names = [[f"{table}.{layer}" for layer in range(len(shapes))] for table, shapes in enumerate(tables)]
    shapes = {name: shape for row, of in zip(names, tables, strict=True) for name, shape in zip(row, of, strict=True)}
    slabs = assign_slabs(names)
    budget = sum(max(of[slab].nbytes for of in tables if len(of) > slab) for slab in range(max(map(len, tables))))
    pool = host_pool.create(shapes, slabs, budget, pin=None)
    assert pool.memory.nbytes == budget, "the pool must consist of slabs of the size of their largest layer"
    ranges = {}
    for name, shape in shapes.items():
        cache = pool.caches[name]
        factors = 8 if shape.dtype == torch.int8 else 0
        assert cache.shape == (shape.num_blocks, shape.num_kv_heads, shape.block_size, 2 * shape.head_size + factors)
        assert cache.dtype == shape.dtype
        assert cache.is_contiguous()
        assert cache.nbytes == shape.nbytes
        assert not cache.view(torch.uint8).any()
        begin = cache.data_ptr() - pool.memory.data_ptr()
        assert 0 <= begin <= begin + cache.nbytes <= budget
        ranges[name] = (begin, begin + cache.nbytes)
    for name, (begin, end) in ranges.items():
        for other, (other_begin, other_end) in ranges.items():
            overlap = begin < other_end and other_begin < end
            assert overlap == (slabs[name] == slabs[other])
            assert name == other or not (overlap and name.split(".")[0] == other.split(".")[0])


def shape(num_blocks: int) -> PageShape:
    return PageShape(num_blocks, block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)


def test_the_first_layers_of_all_tables_share_the_first_slab() -> None:
    assert assign_slabs([["a", "b"], [], ["c"], ["d", "e", "f"]]) == {"a": 0, "b": 1, "c": 0, "d": 0, "e": 1, "f": 2}


def test_more_than_the_budget_is_refused_before_any_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(host_memory, "commit", lambda *arguments, **named: taken.append(arguments))
    shapes = {"a": shape(1000), "b": shape(1000)}
    budget = 2 * shapes["a"].nbytes - 1
    with pytest.raises(MemoryError, match="raise host_kv_gib, or lower the number of blocks") as caught:
        host_pool.create(shapes, {"a": 0, "b": 1}, budget, pin=None)
    text = str(caught.value)
    assert "needs 0.03 GiB (1000 blocks, 2 slabs), but the limit for host memory is 0.03 GiB;" in text
    assert "\n" not in text
    assert not taken


def test_missing_memory_of_the_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PATIENCE", 0.0)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 0)
    with pytest.raises(MemoryError, match=r"^the host layers' KV cache needs 0\.02 GiB, but only 0\.00 of 0\.02 GiB"):
        host_pool.create({"a": shape(1000)}, {"a": 0}, 1 << 40, pin=None)


def test_the_memory_lives_as_long_as_a_cache_is_used() -> None:
    pool = host_pool.create({"a": shape(1000), "b": shape(1000)}, {"a": 0, "b": 1}, 1 << 40, pin=None)
    cache = pool.caches["b"]
    del pool
    gc.collect()
    cache.fill_(1.0)
    assert float(cache.sum()) == cache.numel()
