"""The thread that answers CUDA graphs. Here the test rings in the place of a device."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastattention_vllm.attention.cpu import kernels
from fastattention_vllm.attention.cpu.graph_calls import GraphThread
from fastattention_vllm.attention.problem import AttentionProblem
from tests.attention import oracle

PAGE, HEADS, KV_HEADS, SIZE = 4, 4, 2, 32


class Device:
    """Rings and waits as a graph does."""

    def __init__(self) -> None:
        self.thread = GraphThread()
        self.rung, self.answered = (
            ctypes.c_uint32.from_address(address) for address in (self.thread.rung, self.thread.answered)
        )

    def ring(self, number: int) -> None:
        self.answered.value = 0
        self.rung.value = number
        deadline = time.monotonic() + 60
        while self.answered.value != number:
            assert time.monotonic() < deadline, f"call {number} was not answered"
            time.sleep(0)


class Cache:
    """The keys and values of two requests with three pages each, and the tensors that a step changes."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.key, self.value = random(8, PAGE, KV_HEADS, SIZE), random(8, PAGE, KV_HEADS, SIZE)
        self.rows = random(2, (HEADS + 2 * KV_HEADS) * SIZE)
        query, key, value = self.rows.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], dim=1)
        self.new_key, self.new_value = key.unflatten(1, (-1, SIZE)), value.unflatten(1, (-1, SIZE))
        self.slots = torch.tensor([3 * PAGE, -1])
        self.lengths = torch.tensor([2 * PAGE + 1, 0], dtype=torch.int32)
        self.problem = AttentionProblem(
            query=query.unflatten(1, (-1, SIZE)),
            key=self.key,
            value=self.value,
            query_start_loc=torch.tensor([0, 1, 1], dtype=torch.int32),
            seq_lens=self.lengths,
            block_table=torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32),
            causal=True,
            scale=SIZE**-0.5,
        )
        self.out = torch.zeros(2, HEADS, SIZE)

    def add_to(self, thread: GraphThread) -> int:
        write = kernels.write_arguments(self.new_key, self.new_value, self.key, self.value, self.slots, 1.0, 1.0)
        attention, *_ = kernels.attention_arguments(self.problem, self.out, None, False)
        return thread.add(write, attention, self)

    def expected(self) -> torch.Tensor:
        key, value = self.key.clone(), self.value.clone()
        for row, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                key[slot // PAGE, slot % PAGE] = self.new_key[row]
                value[slot // PAGE, slot % PAGE] = self.new_value[row]
        return oracle.attention(replace(self.problem, key=key, value=value))[0]


def test_a_ring_stores_the_new_keys_and_attends() -> None:
    device, cache = Device(), Cache()
    number = cache.add_to(device.thread)
    expected = cache.expected()
    device.ring(number)
    torch.testing.assert_close(cache.out[:1].double(), expected[:1], atol=1e-5, rtol=1e-5)
    assert torch.equal(cache.key[3, 0], cache.new_key[0])
    assert not cache.out[1].any(), "a padded request has no query token, so its row is not written"


def test_each_ring_reads_the_present_contents() -> None:
    device, cache = Device(), Cache()
    number = cache.add_to(device.thread)
    for step in range(3):
        cache.rows.normal_()
        cache.slots.copy_(torch.tensor([3 * PAGE + step, 4 * PAGE]))
        cache.problem.query_start_loc[2] = 2
        cache.lengths.copy_(torch.tensor([2 * PAGE + 1 + step, 1]))
        expected = cache.expected()
        device.ring(number)
        torch.testing.assert_close(cache.out.double(), expected, atol=1e-5, rtol=1e-5)


def test_calls_are_told_apart_and_counted() -> None:
    device = Device()
    caches = [Cache(seed) for seed in range(3)]
    numbers = [cache.add_to(device.thread) for cache in caches]
    assert numbers == [1, 2, 3]
    for at in (2, 0, 0, 1):
        expected = caches[at].expected()
        device.ring(numbers[at])
        torch.testing.assert_close(caches[at].out[:1].double(), expected[:1], atol=1e-5, rtol=1e-5)
    counters = device.thread.counters()
    assert counters.calls == 4
    assert counters.kv_bytes == 4 * (2 * PAGE + 1) * KV_HEADS * SIZE * 2 * 4
    assert counters.nanoseconds > 0


@pytest.mark.parametrize("announced", [True, False])
def test_a_sleeping_thread_answers(announced: bool) -> None:
    device, cache = Device(), Cache()
    number = cache.add_to(device.thread)
    time.sleep(1.2)  # longer than it looks for calls often
    if announced:
        device.thread.wake()
    device.ring(number)
    assert cache.out[0].any()


def test_a_closed_thread_is_gone() -> None:
    device = Device()
    before = threads()
    device.thread.close()
    assert threads() == before - 1


def test_a_thread_ends_with_its_object() -> None:
    before = threads()
    device = Device()
    assert threads() == before + 1
    del device
    assert threads() == before


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        ("cache.lengths[0] = 13", "takes? 4 pages"),
        ("cache.slots[0] = 8 * 4", "the cache has only 32 slots"),
        ("number = 9", "a call that does not exist"),
    ],
)
def test_a_call_that_fails_ends_the_process_with_a_sentence(break_it: str, sentence: str) -> None:
    code = f"""
from tests.attention.cpu.test_graph_calls import Cache, Device
device, cache = Device(), Cache()
number = cache.add_to(device.thread)
{break_it}
device.ring(number)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("fastattention: the host attention of a CUDA graph failed: ")
    assert re.search(sentence, line), line


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="CPU 99999 is offline"):
        GraphThread(99999)
    with pytest.raises(ValueError, match="cpu is -2"):
        GraphThread(-2)


def test_a_process_may_end_while_the_thread_waits() -> None:
    code = "from tests.attention.cpu.test_graph_calls import Cache, Device; device = Device(); kept = Cache()"
    subprocess.run([sys.executable, "-c", f"{code}; kept.add_to(device.thread)"], timeout=120, check=True)


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))
