"""Blocks of host layers that also lie on the device: the bookkeeping against a plain model, and steps against float64.

Blocks are freed and used again by others, prefixes are shared, and drafted tokens are rejected and written again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.placement import host_attention, prefetch
from fastattention_vllm.placement import step as steps
from fastattention_vllm.placement.host_attention import HostAttention
from fastattention_vllm.placement.resident import NONE, ResidentBlocks
from fastattention_vllm.placement.step import Batch
from tests.placement.scenario import Model, Request, Scenario, Work
from tests.placement.test_host_attention import BF16, F32, LINKS, scenario_of

pytestmark = pytest.mark.usefixtures("exact_weights")
PAGE = 4


class Plain:
    """What :class:`ResidentBlocks` promises, with dictionaries: block -> row, and row -> (last batch, place)."""

    def __init__(self, num_rows: int) -> None:
        self.rows: dict[int, int] = {}
        self.last = dict.fromkeys(range(num_rows), (0, 0))
        self.now = 0

    def run(self, blocks: Sequence[int]) -> int:
        return next((place for place, block in enumerate(blocks) if block not in self.rows), len(blocks))

    def admit(self, requests: Sequence[tuple[list[int], int, int]]) -> list[int]:
        """``requests``: blocks, context and new tokens of each."""
        self.now += 1
        used = [blocks[: -(-(context + new) // PAGE)] for blocks, context, new in requests]
        first_begun = [-(-context // PAGE) for _, context, _ in requests]
        for blocks, first in zip(used, first_begun, strict=True):
            for block in blocks[first:]:
                if block in self.rows:
                    self.last[self.rows.pop(block)] = (0, 0)
        for blocks in used:
            for block in blocks[: self.run(blocks)]:
                self.last[self.rows[block]] = (self.now, self.last[self.rows[block]][1])
        for blocks, first in zip(used, first_begun, strict=True):
            for place in range(first, len(blocks)):
                free = [row for row, (when, _) in self.last.items() if when < self.now]
                if self.run(blocks) < place or not free:
                    break
                row = min(free, key=lambda row: (self.last[row][0], -self.last[row][1], row))
                self.rows = {block: other for block, other in self.rows.items() if other != row}
                self.rows[blocks[place]] = row
                self.last[row] = (self.now, place)
        return [self.run(blocks) for blocks in used]


def batch_of(requests: Sequence[tuple[list[int], int, int]]) -> Batch:
    width = 1 + max(len(blocks) for blocks, _, _ in requests)
    table = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks, _, _ in requests], dtype=torch.int32)
    slots = [
        blocks[place // PAGE] * PAGE + place % PAGE
        for blocks, context, new in requests
        for place in range(context, context + new)
    ]
    mapping = torch.tensor(slots, dtype=torch.int64)
    starts = torch.tensor([0, *(new for *_, new in requests)]).cumsum(0).int()
    lengths = torch.tensor([context + new for _, context, new in requests], dtype=torch.int32)
    return Batch(starts, lengths, table, mapping, mapping)


@settings(max_examples=150)
@given(data=st.data(), num_rows=st.integers(1, 12))
def test_rows_are_given_and_taken_as_the_plain_model_says(data: st.DataObject, num_rows: int) -> None:
    num_blocks = 24
    blocks, plain = ResidentBlocks(num_blocks, num_rows), Plain(num_rows)
    free, running = list(range(num_blocks)), []
    for _ in range(data.draw(st.integers(1, 8))):
        for request in [one for one in running if data.draw(st.booleans())]:  # these have ended, or were preempted
            running.remove(request)
            freed = [block for block in request[0] if not any(block in other[0] for other in running)]
            free = freed + free  # these are used again first
        if free:
            like = data.draw(st.sampled_from(running)) if running and data.draw(st.booleans()) else ([], 0)
            shared = data.draw(st.integers(0, like[1] // PAGE))
            running.append((like[0][:shared], shared * PAGE))
        works: list[tuple[list[int], int, int]] = []
        for place, (own, done) in enumerate(running):
            most = (len(own) + len(free)) * PAGE - done
            new = min(most, data.draw(st.integers(0, 10)))
            needed = -(-(done + new) // PAGE) - len(own)
            own = own + [free.pop(0) for _ in range(needed)]
            works.append((own, done, new))
            running[place] = own, done + new
        if not works:
            continue
        found = blocks.admit(batch_of(works), PAGE)
        assert list(found.counts) == plain.admit(works)
        kept = {block: int(row) for block, row in enumerate(blocks.row_of) if row != NONE}
        assert kept == plain.rows
        assert {row: block for block, row in kept.items()} == {
            row: int(block) for row, block in enumerate(blocks.block_of) if block != NONE
        }
        for (own, _, _), count, rows in zip(works, found.counts, found.rows, strict=True):
            assert rows.tolist()[:count] == [kept[block] for block in own[:count]]
        slots = batch_of(works).slot_mapping.tolist()
        assert found.slots.tolist() == [
            kept[slot // PAGE] * PAGE + slot % PAGE if slot // PAGE in kept else NONE for slot in slots
        ]


def test_tokens_without_a_slot_begin_no_block() -> None:
    blocks = ResidentBlocks(9, 4)
    batch = batch_of([([3, 5], 0, 8)])
    batch.slot_mapping[4:] = -1
    found = blocks.admit(batch, PAGE)
    assert found.counts == (1,)
    assert found.slots.tolist() == [0, 1, 2, 3, -1, -1, -1, -1]


def test_only_the_blocks_before_a_gap_are_found() -> None:
    blocks = ResidentBlocks(9, 4)
    blocks.admit(batch_of([([3, 5, 7], 0, 12)]), PAGE)
    blocks.row_of[5] = NONE
    assert blocks.admit(batch_of([([3, 5, 7, 8], 12, 1)]), PAGE).counts == (1,)


FITTING = st.builds(
    Model,
    num_heads=st.sampled_from([2, 6]),
    num_kv_heads=st.sampled_from([1, 2]),
    head_size=st.sampled_from([8, 32]),
    page_size=st.sampled_from([1, 3, 4, 16]),
    dtype=st.sampled_from([F32, BF16]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    has_sinks=st.booleans(),
)
NEW_TOKENS = st.one_of(st.integers(1, 8), st.integers(9, 40))


def reject(scenario: Scenario, request: Request, tokens: int) -> None:
    """The last ``tokens`` were drafts; others will be written in their place."""
    request.done -= tokens
    for rows in (*request.keys, *request.values):
        rows[request.done :] = scenario.rows(len(rows) - request.done, rows.shape[1])


@settings(max_examples=100)
@given(
    data=st.data(),
    model=FITTING,
    rows=st.sampled_from([1, 3, 10, 100]),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    max_cpu_tokens=st.sampled_from([1, 3, 8]),
    kind=st.sampled_from(LINKS),
)
def test_steps_equal_attention_over_the_whole_history(
    data: st.DataObject, model: Model, rows: int, share: float, max_cpu_tokens: int, kind: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        block = 2 * model.page_size * model.num_kv_heads * model.head_size * model.dtype.itemsize
        patch.setattr(prefetch, "STAGING_BYTES", data.draw(st.sampled_from([1, 2, 5])) * block)
        patch.setattr(host_attention, "MIN_STREAMED_BYTES", data.draw(st.sampled_from([1, 3 * block])))
        patch.setattr(steps, "MAX_CPU_TOKENS", max_cpu_tokens)
        seed = data.draw(st.integers(0, 9))
        scenario = scenario_of(model, data.draw(st.integers(1, 2)), 400, share, seed, kind, resident_rows=rows)
        requests: list[Request] = []
        for _ in range(data.draw(st.integers(1, 5))):
            for request in list(requests):
                alone = not any(set(request.blocks) & set(other.blocks) for other in requests if other is not request)
                if alone and data.draw(st.sampled_from([True, False, False])):
                    requests.remove(request)
                    scenario.free += request.blocks  # the next request gets them
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
            for work in works:
                alone = not any(
                    set(work.request.blocks) & set(other.blocks) for other in requests if other is not work.request
                )
                if alone and work.new > 1 and data.draw(st.booleans()):
                    reject(scenario, work.request, data.draw(st.integers(1, work.new - 1)))


def prompts(scenario: Scenario, *lengths: int) -> list[Request]:
    """Requests whose prompts are computed, with room for 20 more tokens."""
    requests = [scenario.request(length + 20) for length in lengths]
    scenario.attend([scenario.work(request, length) for request, length in zip(requests, lengths, strict=True)])
    return requests


@pytest.fixture
def cpu_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The keys of each problem of a beside device's CPU."""
    found: list[int] = []
    start = cpu.start

    def counted(problem: Any, *more: Any) -> Any:
        found.append(int(problem.seq_lens.sum()))
        return start(problem, *more)

    monkeypatch.setattr(cpu, "start", counted)
    return found


def refuse(monkeypatch: pytest.MonkeyPatch, scenario: Scenario) -> None:
    """Let nothing be handed to the host."""

    def fail(*_: Any) -> None:
        raise AssertionError("the step waited for the host")

    monkeypatch.setattr(HostAttention, "_attend_together", fail)
    monkeypatch.setattr(HostAttention, "_store", fail)
    monkeypatch.setattr(type(scenario.group.link), "arrive", fail)
    monkeypatch.setattr(type(scenario.group.link), "wait_on_host", fail)


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_step_that_lies_on_the_device_does_not_wait_for_the_host(
    new: int, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it wrote is in the host pool, too: without the copies, the CPU goes on from there."""
    scenario = scenario_of(Model(has_sinks=sinks), 2, 100, 0.0, 0, "beside", resident_rows=60)
    one, other = prompts(scenario, 50, 31)
    with monkeypatch.context() as patch:
        refuse(patch, scenario)
        before = scenario.group.counters.cpu_bytes
        scenario.attend([scenario.work(one, new), scenario.work(other, 1)])
        scenario.attend([scenario.work(one, new)])
        assert scenario.group.counters.cpu_bytes == before
    for layer in scenario.layers:
        layer.copies = None
    scenario.attend([scenario.work(one, 1), scenario.work(other, 2)])


def test_the_cpu_attends_to_what_has_no_room(cpu_calls: list[int]) -> None:
    scenario = scenario_of(Model(), 1, 100, 0.0, 0, "beside", resident_rows=10)
    one, other = prompts(scenario, 30, 30)
    before = dataclasses.replace(scenario.group.counters)
    scenario.attend([scenario.work(one, 1), scenario.work(other, 1)])
    assert cpu_calls == [31 - 8 * 4 + 1 + 31 - 2 * 4]  # eight blocks of the first, and two of the other
    token = scenario.layers[0].cache[:1].nbytes // scenario.model.page_size
    counters = scenario.group.counters
    assert counters.resident_bytes - before.resident_bytes == (31 + 2 * 4) * token
    assert counters.cpu_bytes - before.cpu_bytes == (31 - 2 * 4) * token


def test_a_prompts_context_is_not_fetched_where_it_lies_on_the_device() -> None:
    scenario = scenario_of(Model(), 1, 100, 0.0, 0, "beside", resident_rows=5)
    request = scenario.request(60)
    scenario.attend([scenario.work(request, 30)])
    scenario.attend([scenario.work(request, 30)])
    token = scenario.layers[0].cache[:1].nbytes // scenario.model.page_size
    assert scenario.group.counters.prefill_streamed_bytes == (32 - 5 * 4) * token
    assert scenario.group.counters.resident_bytes == 5 * 4 * token


def test_the_link_shares_what_the_device_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_attention, "MIN_STREAMED_BYTES", 1)
    scenario = scenario_of(Model(), 1, 100, 0.5, 0, "beside", resident_rows=5)
    (request,) = prompts(scenario, 60)
    before = dataclasses.replace(scenario.group.counters)
    scenario.attend([scenario.work(request, 1)])
    token = scenario.layers[0].cache[:1].nbytes // scenario.model.page_size
    counters = scenario.group.counters
    assert counters.decode_streamed_bytes - before.decode_streamed_bytes == 20 * token
    assert counters.resident_bytes - before.resident_bytes == 20 * token
    assert counters.cpu_bytes - before.cpu_bytes == 21 * token


def test_without_a_causal_mask_the_cpu_attends_to_everything(cpu_calls: list[int]) -> None:
    """Copies are written nevertheless, for steps that have a mask."""
    scenario = scenario_of(Model(), 1, 100, 0.0, 0, "beside", resident_rows=20)
    request = scenario.request(30)
    batch = dataclasses.replace(scenario.batch([scenario.work(request, 5)]), causal=False)
    step = steps.divide(batch, scenario.model.page_size)
    assert scenario.group.resident_step(step, scenario.model.page_size).cpu_blocks == (0,)
    assert not scenario.group.resident_step(step, scenario.model.page_size).whole
    request.done = 0
    scenario.attend([scenario.work(request, 5)])
    assert cpu_calls == [], "the next step does not ask the CPU"


def test_rows_of_ended_requests_are_taken_before_any_other() -> None:
    scenario = scenario_of(Model(), 1, 100, 0.0, 0, resident_rows=20)
    ended, running = prompts(scenario, 30, 30)  # 8 blocks each
    scenario.attend([scenario.work(running, 1)])
    new = scenario.request(31)
    scenario.attend([scenario.work(running, 1), scenario.work(new, 31)])
    blocks = scenario.group.resident
    assert blocks is not None
    rows = [[int(blocks.row_of[block]) for block in request.blocks[:8]] for request in (ended, running, new)]
    assert NONE not in rows[1] + rows[2]
    assert [row != NONE for row in rows[0]] == [True] * 4 + [False] * 4, "the last blocks of a context go first"


def test_a_request_that_shares_a_prefix_continues_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = scenario_of(Model(), 2, 100, 0.0, 0, "beside", resident_rows=40)
    (one,) = prompts(scenario, 33)
    other = scenario.request(60, one, 8)
    scenario.attend([scenario.work(other, 20)])
    refuse(monkeypatch, scenario)
    scenario.attend([scenario.work(other, 1), scenario.work(one, 1)])


@pytest.mark.parametrize("model", [Model(window=5), Model(stored=torch.int8)], ids=["a window", "8 bits"])
def test_layers_that_cannot_have_copies_are_not_given_any(model: Model) -> None:
    with pytest.raises(AssertionError):
        scenario_of(model, 1, 20, 0.0, 0, resident_rows=4)


def test_a_step_whose_blocks_are_shared_while_written_waits() -> None:
    """One request reads blocks that the other writes in this step, all of them on the device."""
    scenario = scenario_of(Model(), 2, 100, 0.0, 0, "late", resident_rows=40)
    one = scenario.request(8)
    other = scenario.request(11, one, 2)
    one.done, other.done = 0, 8
    step = scenario.attend([Work(other, 8, 3), Work(one, 0, 8)])
    assert not step.independent
