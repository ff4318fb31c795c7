"""A host layer's step against float64 attention over everything written so far; the "device" is the host.

Batches are random: prompts in chunks, decode steps, a few tokens at once, prefixes that other requests computed earlier
or compute in the same step, and pages from a shuffled pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.placement import host_attention, prefetch
from fastattention_vllm.placement import step as steps
from fastattention_vllm.placement.host_attention import HostLayerGroup, merge
from fastattention_vllm.placement.link import LocalLink
from fastattention_vllm.placement.step import Batch, divide
from fastattention_vllm.placement.stored_rows import token_bytes
from fastattention_vllm.placement.stream_split import StreamSplit
from tests.attention import oracle
from tests.placement.scenario import Model, Request, Scenario, Work

pytestmark = pytest.mark.usefixtures("exact_weights")
F32, BF16 = torch.float32, torch.bfloat16


class LateLink(LocalLink):
    """Copies and writes happen only when something waits for them; :class:`LocalLink` does them at once."""

    is_writing = False

    def __init__(self) -> None:
        self.todo: dict[int, list[Callable[[], None]]] = {}
        self.writes: list[Callable[[], None]] = []
        self.points = iter(range(1, 10**6))

    def later(self, actions: list[Callable[[], None]]) -> int:
        point = next(self.points)
        self.todo[point] = actions
        return point

    def mark(self) -> Any:
        return self.later([])

    def fetch(self, cache: torch.Tensor, blocks: torch.Tensor, target: torch.Tensor, after: Sequence[Any]) -> Any:
        fetch = super().fetch
        waits = [functools.partial(self.wait, point) for point in after]
        return self.later([*waits, lambda: fetch(cache, blocks, target, ())])

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        self.is_writing = True
        yield
        self.is_writing = False

    def written(self) -> Any:
        writes, self.writes = self.writes, []
        return self.later(writes)

    def wait(self, point: Any) -> None:
        for action in self.todo.pop(point, []):
            action()

    wait_on_host = wait


@dataclass
class LateDevice:
    """The CPU kernels, but writes beside the computation happen when the link executes them."""

    link: LateLink

    def run(self, problem: AttentionProblem, **arguments: Any) -> Any:
        return cpu.run(problem, **arguments)

    def write_kv(self, *arguments: Any) -> None:
        if self.link.is_writing:
            self.link.writes.append(lambda: cpu.write_kv(*arguments))
        else:
            cpu.write_kv(*arguments)


class BesideLink(LateLink):
    """A late link to a device that computes separately from the CPU."""

    beside = True


@dataclass
class BesideDevice(LateDevice):
    """A device that must not be called while the CPU kernels compute."""

    def run(self, problem: AttentionProblem, *, return_lse: bool = False) -> Any:
        out, lse = oracle.attention(problem)
        return out.to(problem.query.dtype), lse.float()


LINKS = ("local", "late", "beside")


def scenario_of(
    model: Model, num_layers: int, num_blocks: int, share: float, seed: int, kind: str = "local", **more: Any
) -> Scenario:
    """``kind`` is a key of :data:`LINKS`."""
    if kind == "local":
        group = HostLayerGroup(LocalLink(), cpu, stream_split=StreamSplit(share))
    else:
        link, device = (LateLink(), LateDevice) if kind == "late" else (BesideLink(), BesideDevice)
        group = HostLayerGroup(link, device(link), stream_split=StreamSplit(share))
    return Scenario(model, num_layers, num_blocks, group, seed, **more)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[Model, int], None]:
    def set_sizes(model: Model, blocks: int) -> None:
        block = model.page_size * model.num_kv_heads * token_bytes(model.head_size, model.cache_dtype)
        monkeypatch.setattr(prefetch, "STAGING_BYTES", blocks * block + block // 2)
        monkeypatch.setattr(host_attention, "MIN_STREAMED_BYTES", 1)

    return set_sizes


MODELS = st.builds(
    Model,
    num_heads=st.sampled_from([2, 4, 6]),
    num_kv_heads=st.sampled_from([1, 2]),
    head_size=st.sampled_from([8, 32]),
    page_size=st.sampled_from([1, 3, 4, 16]),
    dtype=st.sampled_from([F32, BF16]),
    window=st.sampled_from([None, None, None, None, 0, 1, 5, 30]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    has_sinks=st.booleans(),
    has_alibi=st.sampled_from([False, False, False, True]),
)
EIGHT_BITS = st.builds(
    Model,
    num_heads=st.sampled_from([2, 6]),
    num_kv_heads=st.sampled_from([1, 2]),
    head_size=st.sampled_from([8, 32]),
    page_size=st.sampled_from([1, 3, 16]),
    window=st.sampled_from([None, None, 5, 30]),
    has_sinks=st.booleans(),
    has_alibi=st.sampled_from([False, False, True]),
    stored=st.sampled_from([torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]),
)


@settings(max_examples=400)
@given(
    data=st.data(),
    model=MODELS,
    share=st.sampled_from([0.0, 0.3, 1.0]),
    blocks_per_part=st.sampled_from([1, 2, 5]),
    max_cpu_tokens=st.sampled_from([1, 3, 8]),
    kind=st.sampled_from(LINKS),
)
def test_steps_equal_attention_over_the_whole_history(
    data: st.DataObject, model: Model, share: float, blocks_per_part: int, max_cpu_tokens: int, kind: str
) -> None:
    """Several steps and layers; requests arrive, share prefixes that others computed or compute now, and continue."""
    take_steps(data, model, share, blocks_per_part, max_cpu_tokens, kind)


@settings(max_examples=200)
@given(
    data=st.data(),
    model=EIGHT_BITS,
    share=st.sampled_from([0.0, 0.3, 1.0]),
    blocks_per_part=st.sampled_from([1, 2, 5]),
    max_cpu_tokens=st.sampled_from([0, 1, 8]),
    kind=st.sampled_from(LINKS),
)
def test_steps_equal_attention_over_what_an_8_bit_cache_holds(
    data: st.DataObject, model: Model, share: float, blocks_per_part: int, max_cpu_tokens: int, kind: str
) -> None:
    """The CPU rounds rows itself, and the device with torch; both read what either has written."""
    take_steps(data, model, share, blocks_per_part, max_cpu_tokens, kind)


def take_steps(
    data: st.DataObject, model: Model, share: float, blocks_per_part: int, max_cpu_tokens: int, kind: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        block = model.page_size * model.num_kv_heads * token_bytes(model.head_size, model.cache_dtype)
        patch.setattr(prefetch, "STAGING_BYTES", blocks_per_part * block + block // 2)
        patch.setattr(host_attention, "MIN_STREAMED_BYTES", data.draw(st.sampled_from([1, 3 * block])))
        patch.setattr(steps, "MAX_CPU_TOKENS", max_cpu_tokens)
        scenario = scenario_of(model, data.draw(st.integers(1, 3)), 400, share, data.draw(st.integers(0, 9)), kind)
        requests: list[Request] = []
        for _ in range(data.draw(st.integers(1, 4))):
            works = []
            for request in requests:
                left = request.tokens - request.done
                if left:
                    works.append(scenario.work(request, min(left, data.draw(NEW_TOKENS))))
            for _ in range(data.draw(st.integers(0 if works else 1, 3 - min(2, len(works))))):
                like = data.draw(st.sampled_from(requests)) if requests and data.draw(st.booleans()) else None
                shared = like.done // model.page_size if like else 0
                request = scenario.request(shared * model.page_size + data.draw(st.integers(1, 60)), like, shared)
                requests.append(request)
                works.append(scenario.work(request, min(request.tokens - request.done, data.draw(NEW_TOKENS))))
            scenario.attend(data.draw(st.permutations(works)))


NEW_TOKENS = st.one_of(st.integers(1, 8), st.integers(9, 40))


WINDOWS = [None, 1, 7, 20]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", LINKS)
def test_a_prefix_that_is_computed_in_the_same_step(
    kind: str, share: float, window: int | None, small_parts: Callable[[Model, int], None]
) -> None:
    """The prefix is computed by the CPU or the device, for a request on either, in both orders.

    Caches start with NaN.
    """
    model = Model(window=window)
    small_parts(model, 2)
    for first, second in ((40, 3), (8, 40), (40, 40), (8, 3)):
        scenario = scenario_of(model, 2, 100, share, 0, kind)
        one = scenario.request(first)
        other = scenario.request(first + second, one, first // model.page_size)
        for order in (1, -1):
            one.done, other.done = 0, first
            works = [scenario.work(one, first), scenario.work(other, second)]
            step = scenario.attend(works[::order])
            assert not step.independent
            for layer in scenario.layers:
                layer.cache.fill_(math.nan)


def test_steps_without_such_a_prefix_are_recognised() -> None:
    """Whole shared blocks are only read. A request's last block belongs to it alone, although it is written."""
    scenario = scenario_of(Model(), 1, 100, 0.0, seed=0)
    one = scenario.request(31)
    other = scenario.request(60, one, 3)
    one.done, other.done = 0, 12
    assert scenario.attend([scenario.work(one, 12)]).independent
    assert scenario.attend([scenario.work(other, 10), scenario.work(one, 3)]).independent
    assert scenario.attend([scenario.work(other, 1), scenario.work(one, 1)]).independent
    third = scenario.request(40, one, 4)
    assert scenario.attend([scenario.work(third, 4), scenario.work(one, 15)]).independent


def test_a_failure_in_the_middle_leaves_the_buffers_in_order(
    small_parts: Callable[[Model, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers may be free, being copied or in use when it happens."""
    model = Model()
    small_parts(model, 2)
    scenario = scenario_of(model, 2, 200, 0.5, seed=0)
    one, other = scenario.request(120), scenario.request(90)
    scenario.attend([scenario.work(one, 60), scenario.work(other, 70)])
    run = cpu.run
    for calls_before in range(5):
        calls = iter(range(calls_before))

        def failing(*arguments: Any, calls: Iterator[int] = calls, **named: Any) -> Any:
            if next(calls, None) is None:
                raise RuntimeError("on purpose")
            return run(*arguments, **named)

        monkeypatch.setattr(cpu, "run", failing)
        with pytest.raises(RuntimeError, match="on purpose"):
            scenario.attend([Work(one, 60, 40), Work(other, 70, 2)])
    monkeypatch.setattr(cpu, "run", run)
    scenario.attend([scenario.work(one, 40), scenario.work(other, 2)])


def test_the_device_gets_the_configured_share(
    small_parts: Callable[[Model, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole blocks; none with a window, none where parts cannot be merged, and nothing if streaming is not worth it."""
    asked: list[int] = []
    fetch = LocalLink.fetch

    def counting(self: LocalLink, cache: torch.Tensor, blocks: torch.Tensor, *more: Any) -> Any:
        asked.append(len(blocks))
        return fetch(self, cache, blocks, *more)

    monkeypatch.setattr(LocalLink, "fetch", counting)
    for changes, expected in (
        ({}, 80 // 2 // 4 + 20 // 2 // 4),
        ({"window": 30}, 0),
        ({"has_alibi": True}, 0),
        ({"has_sinks": True}, 12),
    ):
        model = Model(**changes)
        small_parts(model, 3)
        scenario = scenario_of(model, 1, 100, 0.5, seed=0)
        one, other = scenario.request(90), scenario.request(30)
        for request, done in ((one, 80), (other, 20)):
            for begin in range(0, done, 4):
                scenario.attend([Work(request, begin, 4)])
            request.done = done
        asked.clear()
        scenario.attend([scenario.work(one, 2), scenario.work(other, 1)])
        assert sum(asked) == expected
        assert max(asked, default=0) <= 3
        block = scenario.layers[0].cache[:1].nbytes
        monkeypatch.setattr(host_attention, "MIN_STREAMED_BYTES", 6 * block)
        asked.clear()
        scenario.attend([scenario.work(one, 2), scenario.work(other, 1)])
        assert sum(asked) == (expected and 80 // 2 // 4)


@pytest.mark.parametrize(("window", "share", "on_cpu", "streamed"), [(None, 0.5, 42 + 13, 12), (30, 0.5, 32 + 21, 0)])
@pytest.mark.parametrize("kind", LINKS)
def test_what_a_step_reads_and_copies_is_counted(
    small_parts: Callable[[Model, int], None],
    window: int | None,
    share: float,
    on_cpu: int,
    streamed: int,
    kind: str,
) -> None:
    """``on_cpu`` in tokens, ``streamed`` in blocks of 4: of contexts of 80 and 20 tokens, with 2 and 1 new ones."""
    model = Model(window=window)
    small_parts(model, 3)
    scenario = scenario_of(model, 2, 100, share, 0, kind)
    one, other = scenario.request(90), scenario.request(30)
    for request, done in ((one, 80), (other, 20)):
        for begin in range(0, done, 4):
            scenario.attend([Work(request, begin, 4)])
        request.done = done
    before = dataclasses.replace(scenario.group.counters)
    scenario.attend([scenario.work(one, 2), scenario.work(other, 1)])
    after = scenario.group.counters
    token = scenario.layers[0].cache[:1].nbytes // model.page_size
    assert after.cpu_bytes - before.cpu_bytes == 2 * on_cpu * token
    assert after.decode_streamed_bytes - before.decode_streamed_bytes == 2 * streamed * 4 * token
    assert after.prefill_streamed_bytes == before.prefill_streamed_bytes == 0
    assert 0 < after.cpu_seconds - before.cpu_seconds <= after.device_wait_seconds - before.device_wait_seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "MAX_CPU_TOKENS", 1)
        one.done = 80
        scenario.attend([scenario.work(one, 9)])
    visible = 80 if window is None else 32  # in whole blocks
    assert after.prefill_streamed_bytes == 2 * visible * token


def test_steps_with_drafts_have_a_split_of_their_own(small_parts: Callable[[Model, int], None]) -> None:
    """A quarter with one token of a request, three quarters with several."""
    model = Model()
    small_parts(model, 3)
    scenario = scenario_of(model, 1, 100, 0.0, 0)
    scenario.group.stream_split = StreamSplit(0.25, drafting=StreamSplit(0.75))
    one, other = scenario.request(90), scenario.request(90)
    for request in (one, other):
        for begin in range(0, 80, 4):
            scenario.attend([Work(request, begin, 4)])
        request.done = 80
    for tokens, blocks in ((1, 5 + 5), (2, 15 + 15)):
        before = scenario.group.counters.decode_streamed_bytes
        scenario.attend([scenario.work(one, tokens), scenario.work(other, 1)])
        found = scenario.group.counters.decode_streamed_bytes - before
        assert found == blocks * scenario.layers[0].cache[:1].nbytes


@pytest.mark.parametrize("new", range(1, steps.MAX_CPU_TOKENS + 2))
def test_the_tokens_of_a_speculating_request_are_one_call_of_the_cpu(new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 8 tokens of each request: the CPU gets all of them at once, and so reads the keys once."""
    scenario = scenario_of(Model(), 2, 100, 0.0, 0)
    requests = [scenario.request(60), scenario.request(60)]
    for begin in range(0, 40, 8):
        scenario.attend([Work(request, begin, 8) for request in requests])
    calls: list[list[int]] = []
    run = cpu.run

    def counted(problem: AttentionProblem, **arguments: Any) -> Any:
        calls.append(problem.query_start_loc.tolist())
        return run(problem, **arguments)

    monkeypatch.setattr(cpu, "run", counted)
    before = dataclasses.replace(scenario.group.counters)
    step = scenario.attend([Work(request, 40, new) for request in requests])
    if new > steps.MAX_CPU_TOKENS:
        assert step.cpu_requests is None
        return
    assert calls == [[0, new, 2 * new]] * 2
    token = scenario.layers[0].cache[:1].nbytes // scenario.model.page_size
    assert scenario.group.counters.cpu_bytes - before.cpu_bytes == 2 * 2 * (40 + new) * token


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=8),
    st.integers(0, 9),
    st.sampled_from([1, 4, 16]),
    st.booleans(),
    st.data(),
)
def test_every_token_is_assigned_to_one_side_once(
    counts: list[int], max_cpu_tokens: int, page_size: int, causal: bool, data: st.DataObject
) -> None:
    contexts = [data.draw(st.integers(0, 50)) for _ in counts]
    width = max(-(-(a + b) // page_size) for a, b in zip(counts, contexts, strict=True)) + 1
    table = torch.arange(len(counts) * width, dtype=torch.int32).view(len(counts), width)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    slots = torch.cat(
        [
            torch.arange(count) + int(row[0]) * page_size + context
            for count, context, row in zip(counts, contexts, table, strict=True)
        ]
    )
    lengths = torch.tensor([a + b for a, b in zip(counts, contexts, strict=True)], dtype=torch.int32)
    step = divide(Batch(starts, lengths, table, slots, slots, causal), page_size, max_cpu_tokens)

    rows: list[int] = []
    long = [index for index, count in enumerate(counts) if count > max_cpu_tokens]
    for index, request in zip(long, step.device_requests, strict=True):
        rows += range(request.rows.start, request.rows.stop)
        assert request.rows == slice(int(starts[index]), int(starts[index + 1]))
        assert request.context == contexts[index]
        assert request.blocks.tolist() == table[index, : -(-contexts[index] // page_size)].tolist()
        assert request.blocks.dtype == torch.int64
    short = [index for index, count in enumerate(counts) if 0 < count <= max_cpu_tokens]
    assert (step.cpu_requests is not None) == bool(short)
    if step.cpu_requests:
        own = torch.arange(sum(counts))[step.cpu_requests.rows].tolist()
        rows += own
        assert step.cpu_requests.query_start_loc.tolist() == [
            0,
            *torch.tensor([counts[i] for i in short]).cumsum(0).tolist(),
        ]
        assert step.cpu_requests.query_start_loc.dtype == torch.int32
        assert own == [row for i in short for row in range(int(starts[i]), int(starts[i + 1]))]
        assert step.cpu_requests.seq_lens.tolist() == lengths[short].tolist()
        assert step.cpu_requests.contexts == tuple(contexts[i] for i in short)
        assert step.cpu_requests.block_table.tolist() == table[short].tolist()
        assert step.cpu_requests.slot_mapping.tolist() == slots[own].tolist()
        assert step.cpu_requests.causal == causal
    assert sorted(rows) == list(range(sum(counts)))
    assert step.independent  # no request shares blocks


def test_neighbouring_requests_are_a_slice() -> None:
    """So no part of the batch is copied on the device. Requests without tokens in between do not matter."""

    def rows(*counts: int) -> Any:
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        table = torch.arange(len(counts), dtype=torch.int32)[:, None] + 1
        slots = torch.arange(sum(counts))
        lengths = torch.tensor(counts, dtype=torch.int32)
        short = divide(Batch(starts, lengths, table, slots, slots), 64).cpu_requests
        assert short is not None
        return short.rows

    assert rows(9, 1, 0, 8, 12) == slice(9, 18)
    assert rows(1, 9, 2).tolist() == [0, 10, 11]


@given(
    st.integers(1, 6),
    st.lists(st.one_of(st.just(-math.inf), st.floats(-60, 60)), min_size=4, max_size=4),
    st.lists(st.one_of(st.just(-math.inf), st.floats(-60, 60)), min_size=4, max_size=4),
    st.sampled_from([F32, BF16]),
)
def test_merging_equals_float64(tokens: int, lses: list[float], part_lses: list[float], dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(tokens)
    total, part = (torch.randn(tokens, 4, 8, generator=random) for _ in range(2))
    lse, part_lse = (torch.tensor(numbers).expand(tokens, 4).clone() for numbers in (lses, part_lses))
    total = total.masked_fill(lse[..., None] == -math.inf, 0.0)
    part = part.to(dtype).masked_fill(part_lse[..., None] == -math.inf, 0.0)
    weights = [numbers.double().exp()[..., None] for numbers in (lse, part_lse)]
    weight = (weights[0] + weights[1]).clamp(min=1e-300)  # rows without keys in both parts are 0
    expected = (weights[0] * total.double() + weights[1] * part.double()) / weight
    expected_lse = torch.logaddexp(lse.double(), part_lse.double())
    none = part_lse == -math.inf
    before, lse_before = total.clone(), lse.clone()
    merge(total, lse, part, part_lse)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)
    assert torch.equal(total[none], before[none])
    assert torch.equal(lse[none], lse_before[none])


@pytest.mark.parametrize("lse", [-math.inf, 0.0])
@pytest.mark.parametrize("nan", ["lse", "part_lse", "total", "part"])
def test_merging_keeps_nan(lse: float, nan: str) -> None:
    given = {
        "total": torch.zeros(1, 1, 2),
        "lse": torch.full((1, 1), lse),
        "part": torch.zeros(1, 1, 2),
        "part_lse": torch.zeros(1, 1),
    }
    given[nan].fill_(math.nan)
    merge(*given.values())
    assert given["total"].isnan().all()
