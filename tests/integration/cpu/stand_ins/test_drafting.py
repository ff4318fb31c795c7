"""The stand-in kernels of drafters, each against the same step written token by token."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.integration.cpu.stand_ins import drafting

VOCAB, PAD, UNTOUCHED = 50, -1, -7
DRAFTS = 3


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int, bool]]:
    """Per request: its rows in the step, how many of them are rejected, and whether its prompt is incomplete."""
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        count = draw(st.integers(1, 6))
        rows.append((count, draw(st.integers(0, count - 1)), draw(st.booleans())))
    return rows


def starts(step: list[tuple[int, int, bool]]) -> torch.Tensor:
    return torch.tensor([0, *(count for count, *_ in step)]).cumsum(0).int()


@given(st.lists(st.tuples(st.integers(0, DRAFTS + 1), st.booleans()), min_size=1, max_size=5), st.integers(0, 9))
def test_the_next_token_is_the_last_one_that_was_verified(requests: list[tuple[int, bool]], seed: int) -> None:
    torch.manual_seed(seed)
    count = len(requests)
    sampled = torch.full((count + 1, DRAFTS + 1), -1, dtype=torch.int32)
    for row, (valid, _) in enumerate(requests):
        sampled[row, :valid] = torch.randint(VOCAB, (valid,))
    discarded = torch.tensor([one for _, one in requests] + [False])
    instead = torch.arange(100, 101 + count).int()
    token, valid = (torch.full((count + 1,), UNTOUCHED, dtype=torch.int32) for _ in range(2))
    drafting.next_tokens(
        sampled, discarded, instead, token, valid, VOCAB, DRAFTS + 1, count, DRAFTS + 1, BLOCK_SIZE_TOKENS=4
    )
    for row, (number, dropped) in enumerate(requests):
        number = 0 if dropped else number
        assert valid[row] == number
        assert token[row] == (sampled[row, number - 1] if number else instead[row])
    assert token[count] == valid[count] == UNTOUCHED


@given(st.lists(st.tuples(st.integers(0, DRAFTS), st.integers(0, DRAFTS), st.integers(1, 9)), min_size=1, max_size=5))
def test_the_row_to_sample_is_before_the_rejected_ones(requests: list[tuple[int, int, int]]) -> None:
    """Per request: draft tokens, how many of them are accepted at most, and rows of a request without drafts."""
    drafted = [one for one, *_ in requests]
    accepted = [min(one, most) for one, most, _ in requests]
    lengths = [one + 1 if one else rows for one, _, rows in requests]
    begin = torch.tensor([0, *lengths]).cumsum(0).int()
    row, rejected = (torch.empty(len(requests), dtype=torch.int32) for _ in range(2))
    drafting.rows_to_sample(
        torch.tensor(drafted).cumsum(0).int(),
        torch.tensor([one + 1 for one in accepted]).int(),
        begin,
        row,
        rejected,
        len(requests),
    )
    for number, (one, two, length) in enumerate(zip(drafted, accepted, lengths, strict=True)):
        assert rejected[number] == one - two
        assert row[number] == begin[number] + length - 1 - (one - two)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 9), st.integers(0, 2))
def test_each_request_advances_by_one(positions: list[int], block_size: int, padding: int) -> None:
    longest, count = 40, len(positions)
    columns = -(-longest // block_size)
    table = torch.randperm(count * columns).int().reshape(count, columns)
    before, lengths = torch.tensor(positions), torch.tensor(positions).int() + 1
    after, slots = torch.full((count,), UNTOUCHED), torch.full((count + padding,), UNTOUCHED)
    drafting.advance(
        before, table, columns, lengths, after, slots, block_size, longest, columns, PAD_ID=PAD, num_requests=count
    )
    for request, position in enumerate(positions):
        new = position + 1
        if new >= longest:
            assert (after[request], slots[request], lengths[request]) == (0, PAD, 1)
            continue
        slot = table[request, new // block_size] * block_size + new % block_size
        assert (after[request], slots[request], lengths[request]) == (new, slot, new + 1)
    assert (slots[count:] == PAD).all()


def test_slots_count_the_tokens_of_an_image_and_not_its_positions() -> None:
    """25 tokens before, of which an image's have few positions; blocks of 8."""
    positions, lengths, slots = torch.tensor([9]), torch.tensor([25]).int(), torch.empty(1, dtype=torch.long)
    table = torch.tensor([[50, 51, 52, 53, 54]]).int()
    drafting.advance(positions, table, 5, lengths, positions, slots, 8, 40, 5, PAD_ID=PAD, num_requests=1)
    assert (positions.item(), slots.item(), lengths.item()) == (10, 53 * 8 + 1, 26)


@given(steps(), st.booleans())
def test_a_draft_model_gets_one_row_more_per_request(step: list[tuple[int, int, bool]], of_images: bool) -> None:
    """``of_images``: the model has positions in three dimensions."""
    begin = starts(step)
    total, requests = int(begin[-1]), len(step)
    tokens, positions = torch.arange(total).int() + 100, torch.arange(total) + 7
    if of_images:
        positions = torch.stack([positions] * 3)
    following = torch.arange(requests).int() + 1000
    rejected = torch.tensor([count for _, count, _ in step]).int()
    ids, places = torch.full((total + requests,), UNTOUCHED).int(), torch.full((total + requests,), UNTOUCHED)
    is_rejected, is_masked = torch.ones(total + requests).bool(), torch.ones(total + requests).bool()
    rows, unused = torch.empty(requests).int(), torch.full((total,), UNTOUCHED).int()
    drafting.inputs_of_draft_model(
        tokens,
        positions,
        following,
        ids,
        places,
        is_rejected,
        is_masked,
        rows,
        unused,
        begin,
        begin[1:] - 1 - rejected,
        0,
        -3,
        total,
        1,
        False,
        BLOCK_SIZE_TOKENS=8,
    )
    wanted_ids, wanted_places, wanted_rejected, wanted_rows = [], [], [], []
    for request, (count, dropped, _) in enumerate(step):
        first, kept = int(begin[request]), count - dropped
        wanted_ids += [*tokens[first : first + kept].tolist(), 1000 + request, *[0] * dropped]
        wanted_places += [*range(first + 7, first + 7 + kept + 1), *[0] * dropped]
        wanted_rejected += [*[False] * (kept + 1), *[True] * dropped]
        wanted_rows.append(first + request + kept)
    assert ids.tolist() == wanted_ids
    assert places.tolist() == wanted_places
    assert is_rejected.tolist() == wanted_rejected
    assert not is_masked.any()
    assert rows.tolist() == wanted_rows


def test_the_names_are_vllms() -> None:
    """vLLM finds a kernel by its name, which must exist, and passes constants by theirs."""
    import importlib
    import inspect

    from fastattention_vllm.integration.cpu.stand_ins import state_copies

    for name, function in (drafting.KERNELS | state_copies.KERNELS).items():
        module, _, kernel = name.rpartition(".")
        theirs = getattr(importlib.import_module(module), kernel)
        assert theirs is not None
        ours = inspect.signature(function).parameters
        arguments = getattr(theirs, "arg_names", None) or tuple(
            inspect.signature(getattr(theirs, "func", theirs)).parameters
        )
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in ours.values()):
            assert len(ours) == len(arguments), name
