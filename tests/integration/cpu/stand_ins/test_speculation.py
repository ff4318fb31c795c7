"""The stand-in kernels of the rejection sampler: which tokens they accept, and that they keep the distribution."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattention_vllm.integration.cpu.stand_ins import speculation as cpu_speculation

MAX_DRAFT = 4
PLACEHOLDER = -1
tokens = st.integers(0, 3)  # few, so that drafts are often right


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[list[int], list[int], int, bool]]:
    """Per request: draft tokens, the target's choices, the bonus token, and whether it is greedy."""
    batch = []
    for _ in range(draw(st.integers(1, 5))):
        count = draw(st.integers(0, MAX_DRAFT))
        some = st.lists(tokens, min_size=count, max_size=count)
        batch.append((draw(some), draw(some), draw(tokens), draw(st.booleans())))
    return batch


def greedy_by_hand(draft: list[int], target: list[int], bonus: int) -> list[int]:
    output = []
    for proposed, wanted in zip(draft, target, strict=True):
        output.append(wanted)
        if proposed != wanted:
            return output
    return [*output, bonus]


@given(batches(), st.booleans())
def test_greedy_accepts_drafts_up_to_the_first_wrong_one(
    batch: list[tuple[list[int], list[int], int, bool]], all_greedy: bool
) -> None:
    output = torch.full((len(batch), MAX_DRAFT + 1), PLACEHOLDER, dtype=torch.int32)
    cpu_speculation.rejection_greedy_sample(
        output,
        torch.tensor([len(draft) for draft, *_ in batch]).cumsum(0).int(),
        torch.tensor([token for draft, *_ in batch for token in draft], dtype=torch.int32),
        torch.tensor([token for _, target, *_ in batch for token in target], dtype=torch.int64),
        torch.tensor([[bonus] for *_, bonus, _ in batch], dtype=torch.int32),
        None if all_greedy else torch.tensor([greedy for *_, greedy in batch]),
        MAX_DRAFT,
    )
    for row, (draft, target, bonus, greedy) in zip(output.tolist(), batch, strict=True):
        wanted = greedy_by_hand(draft, target, bonus) if all_greedy or greedy else []
        assert row == wanted + [PLACEHOLDER] * (MAX_DRAFT + 1 - len(wanted))


def sampled(target: list[float], draft: list[float] | None, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second token of ``requests`` requests with one draft token each, which is token 1 without ``draft``."""
    torch.manual_seed(0)
    vocab = len(target)
    target_probs = torch.tensor(target).expand(requests, vocab).contiguous()
    draft_probs = None if draft is None else torch.tensor(draft).expand(requests, vocab).contiguous()
    proposed = torch.full((requests,), 1) if draft_probs is None else draft_probs.multinomial(1).flatten()
    ends = torch.arange(1, requests + 1, dtype=torch.int32)
    inv_q = torch.empty(requests, vocab).exponential_().reciprocal()
    recovered = torch.empty(requests, dtype=torch.int32)
    cpu_speculation.sample_recovered_tokens(
        recovered, ends, proposed, draft_probs, target_probs, inv_q, vocab, BLOCK_SIZE=8192, NO_DRAFT_PROBS=True
    )
    output = torch.full((requests, 2), PLACEHOLDER, dtype=torch.int32)
    cpu_speculation.rejection_random_sample(
        output,
        ends,
        proposed,
        draft_probs,
        target_probs,
        torch.full((requests, 1), 3, dtype=torch.int32),
        recovered,
        torch.rand(requests, dtype=torch.float64),
        torch.zeros(requests, dtype=torch.bool),
        1,
        vocab,
    )
    return output[:, 0], output[:, 1]


def check_distribution(target: list[float], draft: list[float] | None) -> None:
    requests = 10_000
    first, second = sampled(target, draft, requests)
    frequencies = torch.bincount(first.long(), minlength=len(target)) / requests
    # Four standard deviations of the largest share.
    torch.testing.assert_close(frequencies, torch.tensor(target), atol=4 * 0.5 / requests**0.5, rtol=0)
    # The bonus token only follows an accepted draft.
    assert set(second.tolist()) == {PLACEHOLDER, 3}


def test_sampling_after_a_certain_draft_keeps_the_distribution() -> None:
    check_distribution([0.1, 0.5, 0.25, 0.15], None)


def test_sampling_after_a_drafted_distribution_keeps_the_targets() -> None:
    check_distribution([0.1, 0.5, 0.25, 0.15], [0.4, 0.1, 0.1, 0.4])


def test_padded_and_greedy_rows() -> None:
    """Token -1 is padding and is rejected. Rows of greedy requests belong to the other kernel."""
    output = torch.full((2, 2), PLACEHOLDER, dtype=torch.int32)
    cpu_speculation.rejection_random_sample(
        output,
        torch.tensor([1, 2], dtype=torch.int32),
        torch.tensor([-1, 2]),
        None,
        torch.full((2, 4), 0.25),
        torch.tensor([[3], [3]]),
        torch.tensor([2, 2]),
        torch.zeros(2, dtype=torch.float64),
        torch.tensor([False, True]),
        1,
        4,
    )
    assert output.tolist() == [[2, PLACEHOLDER], [PLACEHOLDER, PLACEHOLDER]]


def test_expand_repeats_per_draft_token_and_replaces() -> None:
    output = torch.full((6,), 9.0)
    cpu_speculation.expand(output, torch.tensor([0.5, 0.0, 0.7]), torch.tensor([2, 2, 5]), 0.0, 1.0, MAX_NUM_TOKENS=128)
    torch.testing.assert_close(output, torch.tensor([0.5, 0.5, 0.7, 0.7, 0.7, 9.0]))
    cpu_speculation.expand(output, torch.tensor([0.0]), torch.tensor([2]), 0.0, 1.0)
    assert output[:2].tolist() == [1.0, 1.0]
