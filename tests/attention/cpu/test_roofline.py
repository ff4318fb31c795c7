from __future__ import annotations

import numpy
import pytest
import torch

from fastattention_vllm import fast_attn_func
from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.cpu import roofline

METHODS = [roofline.ReadMethod(ahead, streams) for streams in (1, 2, 4) for ahead in (0, 2048)]


def checksum(words: numpy.ndarray) -> int:
    return int(numpy.bitwise_xor.reduce(words))


@pytest.fixture
def words() -> numpy.ndarray:
    return numpy.random.default_rng(0).integers(0, 2**64, 400_000, dtype=numpy.uint64)


@pytest.fixture
def threads(restore_threads: None) -> None:
    cpu.set_num_threads(3)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_every_byte_is_read_once(words: numpy.ndarray, method: roofline.ReadMethod) -> None:
    """Pages of many sizes, from one word to more than a thread's share; the words between them must not be read."""
    rng = numpy.random.default_rng(1)
    sizes = [1, 2, 31, 32, 33, 127, 128, 129, 1000, 8192, 150_000, *rng.integers(1, 900, 200).tolist()]
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += size + int(rng.integers(0, 3))
    assert at < len(words)
    order = rng.permutation(len(sizes))
    address = words.ctypes.data
    reader = roofline.PageReader([address + 8 * starts[i] for i in order], [8 * sizes[i] for i in order])
    expected = 0
    for start, size in zip(starts, sizes, strict=True):
        expected ^= checksum(words[start : start + size])
    assert reader.read(method) == expected


def test_nothing_to_read() -> None:
    assert roofline.PageReader([], []).read(roofline.ReadMethod()) == 0


@pytest.mark.parametrize(
    ("pages", "sizes", "method", "said"),
    [
        ([8], [12], roofline.ReadMethod(), "multiple of 8"),
        ([8], [-8], roofline.ReadMethod(), "multiple of 8"),
        ([0], [8], roofline.ReadMethod(), "null pointer"),
        ([8], [8], roofline.ReadMethod(streams=3), "1, 2 or 4, not 3"),
        ([8], [8], roofline.ReadMethod(prefetch_bytes=-1), "prefetch_bytes"),
    ],
)
def test_invalid_pages_are_refused(pages: list[int], sizes: list[int], method: roofline.ReadMethod, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        roofline.PageReader(pages, sizes).read(method)


def test_pages_without_sizes() -> None:
    with pytest.raises(ValueError, match="1 pages but 2 sizes"):
        roofline.PageReader([8], [8, 8])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", roofline.peak_kinds())
def test_a_peak_counts_its_operations(kind: str) -> None:
    once = roofline.peak(kind, 1)
    assert once > 0
    assert roofline.peak(kind, 1001) == 1001 * once


def test_fp32_fma_is_always_there() -> None:
    assert "fp32_fma" in roofline.peak_kinds()


def test_an_unknown_peak() -> None:
    with pytest.raises(ValueError, match=r"fp64_fma cannot be measured on this machine; choose one of: .*fp32_fma"):
        roofline.peak("fp64_fma", 1)
    with pytest.raises(ValueError, match="iterations"):
        roofline.peak("fp32_fma", 0)


@pytest.mark.parametrize("kind", roofline.peak_kinds())
def test_attention_after_a_peak(kind: str) -> None:
    """The measurement leaves registers as they were, including AMX tiles."""
    query = torch.randn(1, 64, 4, 64, dtype=torch.bfloat16)
    before = fast_attn_func(query, query, query, causal=True)
    roofline.peak(kind, 100)
    assert torch.equal(before, fast_attn_func(query, query, query, causal=True))
