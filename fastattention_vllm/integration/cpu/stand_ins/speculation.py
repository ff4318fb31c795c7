"""Torch stand-ins for the Triton kernels of vLLM's rejection sampler, which verifies speculated tokens.

Why: Triton has no CPU target here, and vLLM's own replacements are compiled C++ that a pure-Python vLLM lacks.
Remove when: vLLM publishes CPU wheels. Reference for each kernel's meaning: ``vllm/v1/sample/rejection_sampler.py``.

``cu_num_draft_tokens [num_reqs]`` is the cumulative number of draft tokens, including each request's own.
"""

from __future__ import annotations

from typing import Any

import torch


def rejection_greedy_sample(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_argmax: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    is_greedy: torch.Tensor | None,
    *_: Any,
    **__: Any,
) -> None:
    """Accept draft tokens while they equal the target's choice, then add the target's choice, or the bonus token."""
    draft, target, bonus = draft_token_ids.tolist(), target_argmax.tolist(), bonus_token_ids.flatten().tolist()
    for request, (first, last) in enumerate(_draft_ranges(cu_num_draft_tokens)):
        if is_greedy is not None and not is_greedy[request]:
            continue
        accepted = first
        while accepted < last and draft[accepted] == target[accepted]:
            accepted += 1
        tokens = target[first : accepted + 1] if accepted < last else [*target[first:last], bonus[request]]
        output_token_ids[request, : len(tokens)] = torch.tensor(tokens, dtype=output_token_ids.dtype)


def rejection_random_sample(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    recovered_token_ids: torch.Tensor,
    uniform_probs: torch.Tensor,
    is_greedy: torch.Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Accept draft tokens with probability ``target / draft``. A recovered token replaces the first rejected one."""
    rows = torch.arange(draft_token_ids.numel())
    proposed = draft_token_ids.long()
    known = proposed.clamp(min=0)  # -1 is padding, which is rejected below
    target = target_probs[rows, known].double()
    # Without draft probabilities (n-gram), the draft's probability is 1.
    draft = torch.ones_like(target) if draft_probs is None else draft_probs[rows, known].double()
    accept = ((proposed >= 0) & (draft > 0) & (target >= uniform_probs * draft)).tolist()
    drafted, recovered = proposed.tolist(), recovered_token_ids.tolist()
    bonus = bonus_token_ids.flatten().tolist()
    for request, (first, last) in enumerate(_draft_ranges(cu_num_draft_tokens)):
        if is_greedy[request]:
            continue
        tokens = []
        for position in range(first, last):
            tokens.append(drafted[position] if accept[position] else recovered[position])
            if not accept[position]:
                break
        else:
            tokens.append(bonus[request])
        output_token_ids[request, : len(tokens)] = torch.tensor(tokens, dtype=output_token_ids.dtype)


def expand(
    output: torch.Tensor,
    input: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    *_: Any,
    **__: Any,
) -> None:
    """Repeat each request's value once per draft token, with one value replaced by another."""
    counts = torch.tensor([last - first for first, last in _draft_ranges(cu_num_tokens)])
    values = torch.where(input == replace_from, torch.full_like(input, replace_to), input)
    expanded = values.repeat_interleave(counts)
    output[: expanded.numel()] = expanded


def sample_recovered_tokens(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    inv_q: torch.Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Sample from ``max(target - draft, 0)`` by exponential noise ``inv_q [num_reqs, vocab]``, for every position."""
    for request, (first, last) in enumerate(_draft_ranges(cu_num_draft_tokens)):
        for position in range(first, last):
            if draft_probs is None:
                left = target_probs[position].clone()
                if draft_token_ids[position] >= 0:
                    left[draft_token_ids[position]] = 0
            else:
                left = (target_probs[position] - draft_probs[position]).clamp(min=0)
            output_token_ids[position] = (left * inv_q[request]).argmax()


def _draft_ranges(cumulative: torch.Tensor) -> list[tuple[int, int]]:
    ends = cumulative.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


_SAMPLER = "vllm.v1.sample.rejection_sampler"
KERNELS = {
    f"{_SAMPLER}.rejection_greedy_sample_kernel": rejection_greedy_sample,
    f"{_SAMPLER}.rejection_random_sample_kernel": rejection_random_sample,
    f"{_SAMPLER}.expand_kernel": expand,
    f"{_SAMPLER}.sample_recovered_tokens_kernel": sample_recovered_tokens,
}
