"""The gated delta rule (arXiv 2412.06464) over prompts, by torch's own operators, in fp32.

For NVIDIA V100: Triton compiles its kernels for this without the tensor cores and with kilobytes of registers spilled
for each thread. cuBLAS has products for V100, so this consists of them, and of few other operators.

A token adds ``beta * (v - S k)`` for its key to the state ``S``, which decays by ``exp(g)`` before. A chunk of 64
tokens has the same effect as three products (the paper's WY form), so only its effect on the state waits for the chunk
before it:

- ``T [w | u] = [beta exp(c) k | beta v]``, with ``c`` the sum of ``g`` up to a token and the triangular
  ``T = I + beta (k k^T) exp(c_i - c_j)`` below the diagonal. This is for all chunks at once.
- ``v' = u - w S``, and ``S`` becomes ``exp(c_last) S + (exp(c_last - c) k)^T v'``, for one chunk after the other.
- ``out = exp(c) q S + (q k^T exp(c_i - c_j)) v'``, with the state before the chunk.

All requests take a step at the same time, the longest first, so those that still have a chunk are always the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

CHUNK = 64
"""Tokens."""
BLOCK = 16
"""Tokens of a block on the diagonal of ``T``, which is inverted. The rest of ``T`` is substituted by products.
Requests of so few tokens, as in decoding, have chunks of this size."""
WORKSPACE_BYTES = 256 << 20
"""Bytes of temporary memory of a segment."""
EPSILON = 1e-6
"""Of the norm of queries and keys."""


@dataclass(frozen=True)
class Segment:
    """Some steps of some requests, which are computed together. A row is a chunk of a request.

    ``chunk``: tokens of a row.
    ``first``: the first of its requests.
    ``alive``: the number of requests that have a chunk in each step, in falling order.
    ``tokens``: int64 ``[rows * chunk]``, where the rows' tokens are. Behind a request's end it is the number of all
    tokens.
    """

    chunk: int
    first: int
    alive: tuple[int, ...]
    tokens: torch.Tensor


class Schedule:
    """Which tokens of a batch are computed together.

    Args:
        starts: the first token of each request, and the end of the last.
        at_once: tokens of a segment, at most, but at least one chunk.
        device: where ``Segment.tokens`` are to be.
    """

    def __init__(self, starts: Sequence[int], at_once: int, device: torch.device) -> None:
        lengths = [end - first for first, end in pairwise(starts)]
        self.order = sorted(range(len(lengths)), key=lambda request: -lengths[request])
        """The requests, longest first."""
        self.total = starts[-1]
        self.segments: list[Segment] = []
        long = sum(length > BLOCK for length in lengths)
        present = sum(length > 0 for length in lengths)
        places = torch.tensor([(starts[request], starts[request + 1]) for request in self.order])
        for chunk, first, end in ((CHUNK, 0, long), (BLOCK, long, present)):
            rows = max(1, at_once // chunk)
            for group in range(first, end, rows):
                counts = [-(-lengths[one] // chunk) for one in self.order[group : min(group + rows, end)]]
                for step, alive in _segments(counts, rows):
                    tokens = self._tokens(places[group:], chunk, step, alive).to(device)
                    self.segments.append(Segment(chunk, group, alive, tokens))

    def _tokens(self, places: torch.Tensor, chunk: int, step: int, alive: tuple[int, ...]) -> torch.Tensor:
        found = []
        for index, count in enumerate(alive):
            tokens = places[:count, :1] + torch.arange(chunk) + chunk * (step + index)
            found.append(tokens.where(tokens < places[:count, 1:], self.total).flatten())
        return torch.cat(found)


def _segments(counts: list[int], rows: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The first step and ``Segment.alive`` of each segment of up to ``rows``.

    ``counts``: the chunks of each request, in falling order; there are up to ``rows`` requests.
    """
    first, alive = 0, list[int]()
    for step in range(counts[0]):
        now = sum(count > step for count in counts)
        if sum(alive) + now > rows:
            yield first, tuple(alive)
            first, alive = step, []
        alive.append(now)
    yield first, tuple(alive)


def tokens_at_once(value_heads: int, key_size: int, value_size: int) -> int:
    """Tokens whose temporary tensors have ``WORKSPACE_BYTES``."""
    # Of a token and head, in fp32: q, k, w, u, their scaled copies, v', and rows of three matrices of 64 x 64.
    floats = 7 * key_size + 5 * value_size + 3 * CHUNK
    return max(1, WORKSPACE_BYTES // (4 * floats * value_heads))


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    schedule: Schedule,
    *,
    normalise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts, or parts of them, of several requests. The sums are fp32, in a fixed order.

    Args:
        q, k: ``[tokens, key_heads, key_size]``, any floating type.
        v: ``[tokens, value_heads, value_size]``. Value head ``i`` has the key head ``i // (value_heads / key_heads)``.
        g: ``[tokens, value_heads]``, the logarithms of the decays, not above 0.
        beta: ``[tokens, value_heads]``.
        states: before the first tokens, ``[requests, value_heads, value_size, key_size]``. It is not changed.
        schedule: of the requests' tokens.
        normalise: whether queries and keys are to be divided by their length.

    Returns:
        The output ``[tokens, value_heads, value_size]`` in q's dtype, and the states after the last tokens in fp32.
        Queries are multiplied by ``key_size ** -0.5``.

    Raises:
        ValueError: a shape does not fit.
    """
    refuse_wrong_shapes(q, k, v, g, beta, states, len(schedule.order), schedule.total)
    tokens, value_heads, value_size = v.shape
    order = torch.tensor(schedule.order, device=q.device)
    current = states.index_select(0, order).float()
    # The last row takes the output of rows behind a request's end.
    out = q.new_empty(tokens + 1, value_heads, value_size)
    for segment in schedule.segments:
        _Chunks(q, k, v, g, beta, segment, normalise).run(current, out)
    after = torch.empty_like(current)
    after.index_copy_(0, order, current)
    return out[:tokens], after


def refuse_wrong_shapes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    requests: int,
    total: int,
) -> None:
    """Raises ``ValueError`` if tensors do not fit each other, or a schedule of ``requests`` with ``total`` tokens."""
    tokens, key_heads, key_size = q.shape
    value_heads, value_size = v.shape[1:]
    expected = {
        "k": (k, (tokens, key_heads, key_size)),
        "v": (v, (tokens, value_heads, value_size)),
        "g": (g, (tokens, value_heads)),
        "beta": (beta, (tokens, value_heads)),
        "states": (states, (requests, value_heads, value_size, key_size)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, but must have {list(shape)}.")
    if tokens != total or value_heads % key_heads:
        raise ValueError(
            f"{tokens} tokens with {key_heads} key heads and {value_heads} value heads do not fit {total} "
            "scheduled tokens, or value heads are not a multiple of key heads."
        )


class _Chunks:
    """The chunks of a segment. Tensors are ``[rows, heads, chunk, size]`` in fp32."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        segment: Segment,
        normalise: bool,
    ) -> None:
        self.segment, size = segment, segment.chunk
        within = segment.tokens < len(q)
        places = segment.tokens.clamp(max=len(q) - 1)

        def chunks(tensor: torch.Tensor) -> torch.Tensor:
            found = tensor.index_select(0, places).float()
            return found.view(-1, size, *tensor.shape[1:]).transpose(1, 2)

        # Without an addition (beta 0) and a decay (g 0), a token behind the end has no effect.
        beta, g = (chunks(tensor) * within.view(-1, 1, size) for tensor in (beta, g))
        queries, keys, values = chunks(q), chunks(k), chunks(v)
        if normalise:
            queries, keys = (x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() for x in (queries, keys))
        queries = queries * q.shape[2] ** -0.5
        shared = v.shape[1] // k.shape[1]
        # A sum over a chunk can be large, and the difference of two of them small.
        decay = g.double().cumsum(-1)
        # exp(c_i - c_j), and 0 above the diagonal, where it could overflow.
        later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
        decays = (decay[..., :, None] - decay[..., None, :]).float().masked_fill_(later, -torch.inf).exp_()

        def per_value_head(product: torch.Tensor) -> torch.Tensor:
            return product.repeat_interleave(shared, 1) if shared > 1 else product

        self.scores = per_value_head(queries @ keys.transpose(-1, -2)).mul_(decays)
        # solve_triangular ignores the diagonal and what is above it.
        lower = per_value_head(keys @ keys.transpose(-1, -2)).mul_(decays).mul_(beta[..., None])
        grown, keys, queries = decay.exp().float()[..., None], per_value_head(keys), per_value_head(queries)
        sides = torch.cat([keys * (beta[..., None] * -grown), values * beta[..., None]], -1)
        solved = _solve(lower, sides)
        towards_keys, towards_values = solved.split([k.shape[2], v.shape[2]], -1)
        self.rows_by_state = torch.cat([towards_keys, queries * grown], -2)
        """-w above exp(c) q."""
        self.sums = torch.cat([towards_values, torch.zeros_like(towards_values)], -2)
        """u, which becomes v', above what the state before the chunk adds to the output."""
        self.keys = keys * (decay[..., -1:] - decay).exp().float()[..., None]
        self.decay = decay[..., -1].exp().float()[..., None, None]

    def run(self, states: torch.Tensor, out: torch.Tensor) -> None:
        """Update ``states`` and write the chunks' rows of ``out``."""
        first, size = self.segment.first, self.segment.chunk
        for rows, alive in _steps(self.segment.alive):
            state = states[first : first + alive].flatten(0, 1)
            sums = self.sums[rows].flatten(0, 1)
            sums.baddbmm_(self.rows_by_state[rows].flatten(0, 1), state.transpose(1, 2))
            state.mul_(self.decay[rows].flatten(0, 1))
            state.baddbmm_(sums[:, :size].transpose(1, 2), self.keys[rows].flatten(0, 1))
        changes, earlier = self.sums.flatten(0, 1).split(size, 1)
        result = torch.baddbmm(earlier, self.scores.flatten(0, 1), changes)
        result = result.view(*self.scores.shape[:3], -1).transpose(1, 2).flatten(0, 1)
        out.index_copy_(0, self.segment.tokens, result.to(out.dtype))


def _steps(alive: tuple[int, ...]) -> Iterator[tuple[slice, int]]:
    """The rows of each step, and the number of requests in it."""
    first = 0
    for count in alive:
        yield slice(first, first + count), count
        first += count


def _solve(lower: torch.Tensor, sides: torch.Tensor) -> torch.Tensor:
    """``x`` with ``(I + lower) x = sides``. Only what is below the diagonal of ``lower`` counts."""
    lower, right = lower.flatten(0, -3), sides.flatten(0, -3)
    blocks = [slice(first, first + BLOCK) for first in range(0, lower.shape[1], BLOCK)]
    diagonal = torch.stack([lower[:, rows, rows] for rows in blocks], 1)
    identity = torch.eye(BLOCK, device=lower.device).expand_as(diagonal)
    inverses = torch.linalg.solve_triangular(diagonal, identity, upper=False, unitriangular=True)
    found = torch.empty_like(right)
    for index, rows in enumerate(blocks):
        part = right[:, rows]
        if index:
            before = slice(0, rows.start)
            part = torch.baddbmm(part, lower[:, rows, before], found[:, before], alpha=-1)
        torch.bmm(inverses[:, index], part, out=found[:, rows])
    return found.view(sides.shape)
