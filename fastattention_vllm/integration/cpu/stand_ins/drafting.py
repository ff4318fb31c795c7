"""Torch stand-ins for the Triton kernels that prepare the passes of a drafter: a draft model, EAGLE or MTP.

Why: Triton has no CPU target here, and vLLM's own replacements are compiled C++ that a pure-Python vLLM lacks.
Remove when: vLLM publishes CPU wheels. Reference for each kernel's meaning: ``vllm/v1/spec_decode/utils.py``.

A step verifies all draft tokens of a request, and the drafter's first pass computes all rows of that step, rejected
ones included. Its later passes compute one row of each request.
"""

from __future__ import annotations

import torch


def next_tokens(
    sampled: torch.Tensor,
    discarded: torch.Tensor,
    instead: torch.Tensor,
    next_token: torch.Tensor,
    num_valid: torch.Tensor,
    vocab_size: int,
    num_columns: int,
    num_requests: int,
    row_stride: int,
    BLOCK_SIZE_TOKENS: int,
) -> None:
    """Each request's last verified token of ``sampled [num_requests, num_columns]``, and the number of them.

    Rejected tokens are -1. A request without a verified token, such as one whose prompt is not complete, continues with
    the token ``instead``.
    """
    tokens = sampled[:num_requests, :num_columns]
    valid = (tokens >= 0) & (tokens < vocab_size) & ~discarded[:num_requests, None]
    count = valid.sum(dim=1)
    last = torch.where(valid, torch.arange(num_columns), 0).amax(dim=1, keepdim=True)
    found = tokens.gather(1, last)[:, 0].to(next_token.dtype)
    next_token[:num_requests] = torch.where(count > 0, found, instead[:num_requests].to(next_token.dtype))
    num_valid[:num_requests] = count.to(num_valid.dtype)


def rows_to_sample(
    cu_num_draft_tokens: torch.Tensor,
    num_valid: torch.Tensor,
    query_start_loc: torch.Tensor,
    row: torch.Tensor,
    num_rejected: torch.Tensor,
    num_requests: int,
) -> None:
    """Each request's row of its last verified token, and the number of rejected rows that come after it."""
    cumulative = cu_num_draft_tokens[:num_requests]
    drafted = cumulative.diff(prepend=cumulative.new_zeros(1))
    rejected = torch.where(drafted > 0, drafted + 1 - num_valid[:num_requests], 0)
    row[:num_requests] = (query_start_loc[1 : num_requests + 1] - 1 - rejected).to(row.dtype)
    num_rejected[:num_requests] = rejected.to(num_rejected.dtype)


def advance(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    seq_lens: torch.Tensor,
    new_positions: torch.Tensor,
    slots: torch.Tensor,
    block_size: int,
    max_model_len: int,
    num_blocks: int,
    PAD_ID: int,
    num_requests: int,
) -> None:
    """Move each request to its next position, in place: position, slot and length.

    A request that has reached the maximum length gets position 0, no slot and length 1. vLLM ignores its drafts.

    An image has fewer positions than tokens, so slots are counted in tokens. The reference counts them in positions,
    and stores the rows of drafts after an image over earlier ones.
    """
    wanted, token = positions[:num_requests] + 1, seq_lens[:num_requests].long()
    beyond = (wanted >= max_model_len) | (token >= max_model_len)
    columns = (token // block_size).clamp(max=num_blocks - 1)
    blocks = block_table[:num_requests].gather(1, columns[:, None])[:, 0].long()
    new_positions[:num_requests] = wanted.masked_fill(beyond, 0)
    slots[:num_requests] = torch.where(beyond, PAD_ID, blocks * block_size + token % block_size)
    slots[num_requests:] = PAD_ID
    seq_lens[:num_requests] += 1
    seq_lens[:num_requests].masked_fill_(beyond, 1)


def inputs_of_draft_model(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    next_token: torch.Tensor,
    input_ids: torch.Tensor,
    new_positions: torch.Tensor,
    is_rejected: torch.Tensor,
    is_masked: torch.Tensor,
    new_rows: torch.Tensor,
    hidden_state_rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    last_rows: torch.Tensor,
    padding_token: int,
    masked_token: int,
    num_tokens: int,
    new_per_request: int,
    shifted: bool,
    BLOCK_SIZE_TOKENS: int,
) -> None:
    """The rows of a draft model's first pass: each request's tokens, then its next token, then padding.

    ``last_rows [num_requests]`` are the rows of the last verified tokens. What was rejected becomes padding. Other
    drafters have as many rows as the step, or predict several tokens per row, which is refused at start.
    """
    assert new_per_request == 1, "parallel drafting is refused at start"
    assert not shifted, "parallel drafting is refused at start"
    if positions.dim() > 1:  # the model's, if it reads images; those of text are the same in all dimensions
        positions = positions[0]
    starts = query_start_loc.tolist()
    is_masked[: starts[-1] + len(last_rows)] = False
    for request, last in enumerate(last_rows.tolist()):
        start, count = starts[request], last + 1 - starts[request]
        first = start + request  # each request before has got one row more
        new, end = first + count, starts[request + 1] + request + 1
        input_ids[first:new] = tokens[start : last + 1]
        input_ids[new] = next_token[request]
        input_ids[new + 1 : end] = padding_token
        new_positions[first : new + 1] = positions[start] + torch.arange(count + 1)
        new_positions[new + 1 : end] = 0
        is_rejected[first : new + 1] = False
        is_rejected[new + 1 : end] = True
        new_rows[request] = new


_UTILS = "vllm.v1.spec_decode.utils"
KERNELS = {
    f"{_UTILS}.eagle_prepare_next_token_padded_kernel": next_tokens,
    f"{_UTILS}.eagle_prepare_inputs_padded_kernel": rows_to_sample,
    f"{_UTILS}.eagle_step_slot_mapping_metadata_kernel": advance,
    f"{_UTILS}.copy_and_expand_eagle_inputs_kernel": inputs_of_draft_model,
}
