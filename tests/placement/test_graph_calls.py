"""Host layers in a graph. The test's device runs at once what a GPU captures; a replay runs the same work again."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.placement.graph_calls import GraphBatch, GraphCalls
from fastattention_vllm.placement.graph_copies import GraphCopies
from fastattention_vllm.placement.host_attention import HostAttention, HostLayerGroup
from fastattention_vllm.placement.link import LocalLink
from fastattention_vllm.placement.resident import ResidentBlocks
from fastattention_vllm.placement.step import Batch
from tests.attention import oracle
from tests.placement.scenario import Model, Pins

PAGE = 4


class Doorbell:
    """Rings as a stream does, and waits. It keeps what it was told, so that a step can be repeated."""

    def __init__(self) -> None:
        self.rung: list[int] = []
        self.captures = False
        self.settled: bool

    def capturing(self) -> bool:
        return self.captures

    def settle(self) -> None:
        self.settled = True

    def ring(self, rung: int, answered: int, call: int, unless: int = 0) -> None:
        if unless and ctypes.c_uint32.from_address(unless).value:
            return
        self.rung.append(call)
        bell, answer = (ctypes.c_uint32.from_address(address) for address in (rung, answered))
        answer.value = 0
        bell.value = call

    def wait(self, answered: int, call: int, unless: int = 0) -> None:
        if unless and ctypes.c_uint32.from_address(unless).value:
            return
        answer = ctypes.c_uint32.from_address(answered)
        while answer.value != call:
            time.sleep(0)


class GraphKernels:
    """The device's kernels; their answers to sequences without keys are nothing to rely on."""

    write_kv = staticmethod(cpu.write_kv)

    def can_run(self, problem: AttentionProblem) -> str | None:
        return None

    def run_in_graph(
        self, problem: AttentionProblem, max_seq_len: int, max_query_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new = problem.query_start_loc.diff()
        assert int(problem.seq_lens.max()) <= max_seq_len
        assert int(new.max()) <= max_query_len
        out, lse = cpu.run(problem, return_lse=True)
        assert lse is not None
        padding = torch.full((len(out) - int(new.sum()),), 0)
        nothing = torch.cat([problem.seq_lens.repeat_interleave(new), padding]) == 0
        return out.masked_fill_(nothing[:, None, None], math.nan), lse.nan_to_num_(neginf=math.inf)


class Engine:
    """Host layers and the buffers in which vLLM keeps a step."""

    def __init__(
        self,
        model: Model,
        layers: int,
        requests: int,
        query_len: int,
        width: int = 6,
        copies: int = 0,
        over_link: float = 0.0,
        pinning: Pins | None = None,
    ) -> None:
        self.model = model
        self.random = torch.Generator().manual_seed(1)
        self.bell = Doorbell()
        self.calls = GraphCalls(LocalLink(), pinning, self.bell, device=GraphKernels())
        group = HostLayerGroup(LocalLink(), None)  # type: ignore[arg-type]
        blocks = 1 + requests * width
        self.layers = []
        for _ in range(layers):
            cache = self.normal(blocks, model.num_kv_heads, PAGE, 2 * model.head_size).to(model.dtype)
            there = torch.full((copies, *cache.shape[1:]), math.nan, dtype=model.dtype) if copies else None
            self.layers.append(HostAttention(group, model, cache, model.window, there))
            self.calls.prepare(self.layers[-1])
        self.tokens = requests * query_len
        self.batch = GraphBatch(
            "0",
            torch.zeros(requests + 1, dtype=torch.int32),
            torch.zeros(requests, dtype=torch.int32),
            torch.arange(1, blocks, dtype=torch.int32).view(requests, width),
            torch.full((self.tokens,), -1),
        )
        self.query_len = query_len
        self.resident = ResidentBlocks(blocks, copies)
        if copies:
            self.calls.copies = GraphCopies(LocalLink(), self.resident, PAGE)
            self.calls.copies.table = self.batch.table
        assert self.calls.share_over_link(over_link) == (over_link > 0 and model.window is None and not copies)

    def admit(self) -> tuple[int, ...]:
        """What the host does before a step is launched: how many first blocks have copies."""
        parts = (self.batch.query_start_loc, self.batch.seq_lens, self.batch.block_table, self.batch.slot_mapping)
        found = self.resident.admit(Batch(*parts, self.batch.slot_mapping), PAGE)
        assert self.calls.copies
        self.calls.copies.bring_up()
        return found.counts

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random)

    def set_lengths(self, lengths: list[int]) -> None:
        """The lengths with this step's tokens; the rest of the batch is padding."""
        batch, new = self.batch, self.query_len
        batch.slot_mapping.fill_(-1)
        batch.seq_lens.zero_()
        for number, length in enumerate(lengths):
            batch.seq_lens[number] = length
            for token in range(new):
                block, row = divmod(length - new + token, PAGE)
                batch.slot_mapping[number * new + token] = int(batch.block_table[number, block]) * PAGE + row
        starts = torch.arange(len(batch.query_start_loc), dtype=torch.int32) * new
        batch.query_start_loc.copy_(starts.clamp(max=len(lengths) * new))

    def rows(self, heads: int) -> torch.Tensor:
        return self.normal(self.tokens, heads, self.model.head_size).to(self.model.dtype)

    def step(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The output of each layer, and what is right for the tokens that are not padding."""
        model, outputs, expected = self.model, [], []
        self.bell.captures = False
        self.calls.reserve(self.batch, model.dtype)
        self.bell.captures = True
        self.calls.bring_down(self.batch)
        for layer in self.layers:
            query, key, value = self.rows(model.num_heads), self.rows(model.num_kv_heads), self.rows(model.num_kv_heads)
            output = torch.zeros_like(query)
            cache = layer.cache.clone()
            self.calls.attend(layer, self.batch, query, key, value, output)
            for token, slot in enumerate(self.batch.slot_mapping.tolist()):
                if slot >= 0:
                    cache[slot // PAGE, :, slot % PAGE] = torch.cat([key[token], value[token]], dim=-1)
            assert torch.equal(layer.cache, cache), "keys and values must be stored, and nothing else"
            keys, values = cache.transpose(1, 2).chunk(2, dim=-1)
            problem = model.problem(
                query=query,
                key=keys,
                value=values,
                query_start_loc=self.batch.query_start_loc,
                seq_lens=self.batch.seq_lens,
                block_table=self.batch.block_table,
                causal=True,
            )
            outputs.append(output)
            expected.append(oracle.attention(problem)[0])
        return outputs, expected

    def check(self, lengths: list[int]) -> None:
        self.set_lengths(lengths)
        real = len(lengths) * self.query_len
        for output, expected in zip(*self.step(), strict=True):
            torch.testing.assert_close(output[:real].double(), expected[:real], atol=2e-5, rtol=2e-5)


@settings(max_examples=8, deadline=None)
@given(
    data=st.data(),
    query_len=st.sampled_from([1, 2, 5]),
    sinks=st.booleans(),
    copies=st.sampled_from([1, 4, 9, 30]),
)
def test_steps_with_copies_equal_attention_over_everything(data: Any, query_len: int, sinks: bool, copies: int) -> None:
    """Requests grow from their first token; some end, and others begin in their blocks."""
    engine = Engine(Model(has_sinks=sinks), layers=2, requests=3, query_len=query_len, copies=copies)
    lengths = [query_len] * data.draw(st.integers(1, 3))
    for _ in range(data.draw(st.integers(4, 12))):
        engine.set_lengths(lengths)
        counts = engine.admit()
        fits = all(count * PAGE >= length for count, length in zip(counts, lengths, strict=False))
        rung = len(engine.bell.rung)
        engine.check(lengths)
        assert len(engine.bell.rung) - rung == (0 if fits else 2)
        if data.draw(st.sampled_from([True, False, False])):
            lengths[data.draw(st.integers(0, len(lengths) - 1))] = 0
        lengths = [length + query_len if length + query_len <= 6 * PAGE else query_len for length in lengths]


@settings(max_examples=20, deadline=None)
@given(
    data=st.data(),
    query_len=st.sampled_from([1, 2, 5]),
    sinks=st.booleans(),
    first=st.sampled_from([0.3, 1.0]),
)
def test_steps_shared_with_the_link_equal_attention_over_everything(
    data: Any, query_len: int, sinks: bool, first: float
) -> None:
    """The fraction changes between steps; the CPU keeps at least the tokens that it stores."""
    engine = Engine(Model(has_sinks=sinks), layers=2, requests=3, query_len=query_len, over_link=first)
    link, token = engine.calls.over_link, 2 * 2 * 32 * 4
    assert link
    for fraction in (first, data.draw(st.floats(0, 1)), 0.0):
        link.set_fraction(fraction)
        before = engine.calls.counters()
        lengths = data.draw(st.lists(st.integers(query_len, 6 * PAGE), min_size=1, max_size=3))
        engine.check(lengths)
        counters = engine.calls.counters()
        # The device multiplies in fp32.
        whole = [(length - query_len) // PAGE for length in lengths]
        shared = PAGE * sum(
            min(int(torch.tensor(fraction, dtype=torch.float32) * blocks), max(0, blocks - 1)) for blocks in whole
        )
        assert counters.decode_streamed_bytes - before.decode_streamed_bytes == 2 * shared * token
        assert counters.cpu_bytes - before.cpu_bytes == 2 * (sum(lengths) - shared) * token


@pytest.mark.parametrize("how", [{"copies": 30}, {"over_link": 0.5}, {}], ids=["copies", "over the link", "CPU alone"])
@pytest.mark.parametrize("sinks", [False, True])
def test_padding_is_finite(how: dict[str, Any], sinks: bool) -> None:
    """Whoever takes a maximum over all rows, as dynamic scales of fp8 do, would make every request NaN."""
    engine = Engine(Model(has_sinks=sinks), layers=1, requests=3, query_len=1, **how)
    for length in (1, PAGE + 1):
        engine.set_lengths([length, length])
        if "copies" in how:
            engine.admit()
        (output,), _ = engine.step()
        assert torch.equal(output[2:], torch.zeros_like(output[2:]))


class LateBell(Doorbell):
    """The CPU begins when the device waits for it, so the device is always first."""

    def ring(self, rung: int, answered: int, call: int, unless: int = 0) -> None:
        pass

    def wait(self, answered: int, call: int, unless: int = 0) -> None:
        thread = self.thread
        super().ring(thread.rung, answered, call, unless)
        super().wait(answered, call, unless)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_block_that_another_request_completes_in_the_same_step_is_the_cpus(fraction: float) -> None:
    """vLLM lets the second request begin with the first one's blocks before the last of them is computed."""
    engine = Engine(Model(), layers=2, requests=2, query_len=1, over_link=fraction)
    engine.bell = engine.calls.bell = bell = LateBell()
    bell.thread = engine.calls.thread
    engine.batch.block_table[1, :3] = engine.batch.block_table[0, :3]
    engine.check([3 * PAGE, 3 * PAGE + 1])
    assert engine.calls.counters().decode_streamed_bytes


def test_two_block_tables_one_of_layers_with_windows() -> None:
    engine = Engine(Model(), layers=1, requests=2, query_len=1, over_link=0.6)
    calls, model = engine.calls, Model(window=3)
    windowed = HostAttention(engine.layers[0].group, model, engine.layers[0].cache.clone(), model.window)
    calls.prepare(windowed)
    other = replace(engine.batch, table="1", block_table=engine.batch.block_table.flip(1))
    for lengths in ([20, 7], [21, 8]):
        engine.set_lengths(lengths)
        for number, length in enumerate(lengths):
            block, row = divmod(length - 1, PAGE)
            other.slot_mapping[number] = int(other.block_table[number, block]) * PAGE + row
        query, key, value = engine.rows(model.num_heads), *(engine.rows(model.num_kv_heads) for _ in range(2))
        output = torch.zeros_like(query)
        engine.bell.captures = False
        calls.reserve(other, model.dtype)
        calls.bring_down(other)
        calls.attend(windowed, other, query, key, value, output)
        keys, values = windowed.cache.transpose(1, 2).chunk(2, dim=-1)
        problem = model.problem(
            query=query,
            key=keys,
            value=values,
            query_start_loc=other.query_start_loc,
            seq_lens=other.seq_lens,
            block_table=other.block_table,
            causal=True,
        )
        torch.testing.assert_close(output.double(), oracle.attention(problem)[0], atol=2e-5, rtol=2e-5)
        engine.check(lengths)


@pytest.mark.parametrize("over_link", [0.0, 0.5])
def test_a_graph_keeps_the_memory_that_it_copies_to(over_link: float) -> None:
    """Also what only the graph writes: the CPU reads lengths and blocks without the device's share."""
    pins = Pins()
    engine = Engine(Model(), layers=1, requests=2, query_len=1, over_link=over_link, pinning=pins)
    engine.check([20, 7])
    engine.bell.captures = False
    lengths = torch.zeros(64, dtype=torch.int32)
    larger = GraphBatch("0", torch.zeros(65, dtype=torch.int32), lengths, lengths[:, None].repeat(1, 9), lengths.long())
    engine.calls.reserve(larger, engine.model.dtype)
    engine.calls.bring_down(larger)
    assert not pins.released


def test_windows_and_copies_leave_the_link_alone() -> None:
    for model, copies in ((Model(window=3), 0), (Model(), 4)):
        engine = Engine(model, layers=1, requests=1, query_len=1, over_link=0.5, copies=copies)
        assert engine.calls.over_link is None


@settings(max_examples=8, deadline=None)
@given(
    data=st.data(), query_len=st.sampled_from([1, 2, 3, 5, 8]), window=st.sampled_from([None, 3]), sinks=st.booleans()
)
def test_steps_equal_attention_over_everything(data: Any, query_len: int, window: int | None, sinks: bool) -> None:
    engine = Engine(Model(window=window, has_sinks=sinks), layers=2, requests=3, query_len=query_len)
    for _ in range(2):
        engine.check(data.draw(st.lists(st.integers(query_len, 6 * PAGE), min_size=1, max_size=3)))


def test_a_graph_rings_only_for_what_the_copies_do_not_hold() -> None:
    """Two requests outgrow 5 copies of 4 tokens. Without the copies, the host pool has everything."""
    engine = Engine(Model(has_sinks=True), layers=2, requests=2, query_len=1, copies=5)
    for length in range(1, 13):
        engine.set_lengths([length, length])
        engine.admit()
        engine.check([length, length])
    assert len(engine.bell.rung) == 2 * (12 - 8), "the first has 3 copies from the ninth token on, the other 2"
    assert engine.calls.counters().cpu_bytes == 2 * (1 + 2 + 3 + 4) * 2 * 2 * 32 * 4
    for layer in engine.layers:
        layer.copies = None
    engine.check([12, 12])


def test_layers_with_copies_need_them_in_every_graph() -> None:
    engine = Engine(Model(), layers=1, requests=1, query_len=1, copies=4)
    assert engine.calls.copies
    engine.calls.copies.table = "another"
    engine.set_lengths([3])
    with pytest.raises(AssertionError, match="would not get this step's keys and values"):
        engine.step()


def test_every_layer_and_capture_has_a_call_of_its_own(exact_weights: None) -> None:
    engine = Engine(Model(), layers=3, requests=2, query_len=1)
    engine.check([5, 9])
    engine.check([6])
    assert engine.bell.rung == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_caches(dtype: torch.dtype, exact_weights: None) -> None:
    engine = Engine(Model(dtype=dtype), layers=1, requests=2, query_len=1)
    engine.set_lengths([20, 7])
    (output,), (expected,) = engine.step()
    torch.testing.assert_close(output.double(), expected, atol=0, rtol=2 ** -(7 if dtype is torch.bfloat16 else 10))


def test_a_batch_that_was_not_copied_down_is_not_used() -> None:
    engine = Engine(Model(), layers=1, requests=1, query_len=1)
    engine.check([3])
    other = replace(engine.batch)
    row = engine.rows(4)
    with pytest.raises(AssertionError, match="copied down for another batch"):
        engine.calls.attend(engine.layers[0], other, row, row[:, :2], row[:, :2], row)


def test_each_step_reads_the_sinks_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are weights, which may be loaded again, and graphs copy them down."""
    engine = Engine(Model(has_sinks=True), layers=1, requests=1, query_len=1)
    engine.check([3])
    before: Callable[..., Any] = Model.problem
    monkeypatch.setattr(Model, "problem", lambda self, **parts: replace(before(self, **parts), sinks=torch.ones(4)))
    engine.check([4])


def test_the_device_is_done_before_the_thread_ends() -> None:
    engine = Engine(Model(), layers=1, requests=1, query_len=1)
    bell, thread = engine.bell, engine.calls.thread
    assert not hasattr(bell, "settled")
    thread.close()
    assert bell.settled
    with pytest.raises(AssertionError, match="the thread is closed"):
        thread.wake()


def test_nothing_is_allocated_during_a_capture() -> None:
    engine = Engine(Model(), layers=1, requests=2, query_len=1)
    engine.bell.captures = True
    with pytest.raises(AssertionError, match="0 query_start_loc of 12 bytes was not reserved before the capture"):
        engine.calls.bring_down(engine.batch)


def test_counters_say_what_the_cpu_read() -> None:
    engine = Engine(Model(), layers=2, requests=1, query_len=1)
    engine.check([9])
    counters = engine.calls.counters()
    assert counters.cpu_bytes == 2 * 9 * 2 * 2 * 32 * 4
    assert counters.cpu_seconds > 0


@pytest.mark.parametrize("query_len", [2, 5, 8])
def test_several_tokens_of_each_request_are_one_call(query_len: int) -> None:
    """As in speculation, with a padded request. The keys are read once for all tokens."""
    engine = Engine(Model(), layers=2, requests=3, query_len=query_len)
    engine.check([20, 11])
    assert engine.bell.rung == [1, 2]
    assert engine.calls.thread.counters().calls == 2
    assert engine.calls.counters().cpu_bytes == 2 * (20 + 11) * 2 * 2 * 32 * 4
