"""The gated delta rule's problems and its definition in float64, for tests of all its implementations."""

from __future__ import annotations

from itertools import pairwise

import torch

from fastattention_vllm.attention.volta.gated_delta import Schedule, gated_delta_rule

CPU = torch.device("cpu")
SIZES = (2, 4, 32, 24)
"""Key heads, value heads, key size, value size."""


class Problem:
    """``sizes``: like ``SIZES``. ``decay``: logarithms of decays are between 0 and minus this."""

    def __init__(
        self,
        lengths: list[int],
        sizes: tuple[int, int, int, int] = SIZES,
        decay: float = 0.3,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        key_heads, value_heads, key_size, value_size = sizes
        self.starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        tokens, generator = self.starts[-1], torch.Generator().manual_seed(seed)
        self.q, self.k = (torch.randn(tokens, key_heads, key_size, generator=generator).to(dtype) for _ in range(2))
        self.v = torch.randn(tokens, value_heads, value_size, generator=generator).to(dtype)
        self.g = -decay * torch.rand(tokens, value_heads, generator=generator)
        self.beta = torch.rand(tokens, value_heads, generator=generator)
        self.states = torch.randn(len(lengths), value_heads, value_size, key_size, generator=generator)

    def run(self, at_once: int = 1 << 20, normalise: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        schedule = Schedule(self.starts, at_once, CPU)
        return gated_delta_rule(self.q, self.k, self.v, self.g, self.beta, self.states, schedule, normalise=normalise)


def definition(problem: Problem, normalise: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the states. Each token after the other, in float64."""
    return definition_with_changes(problem, normalise)[:2]


def definition_with_changes(
    problem: Problem, normalise: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Also what each token adds to the state for its key, ``[tokens, value_heads, value_size]``."""
    q, k, v, g, beta = (x.double() for x in (problem.q, problem.k, problem.v, problem.g, problem.beta))
    if normalise:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    shared = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(shared, 1) for x in (q * q.shape[2] ** -0.5, k))
    out, changes, states = torch.empty_like(v), torch.empty_like(v), problem.states.double()
    for request, (first, end) in enumerate(pairwise(problem.starts)):
        state = states[request]
        for token in range(first, end):
            state = state * g[token].exp()[:, None, None]
            change = beta[token, :, None] * (v[token] - torch.einsum("hvk,hk->hv", state, k[token]))
            state = state + change[:, :, None] * k[token, :, None, :]
            changes[token] = change
            out[token] = torch.einsum("hvk,hk->hv", state, q[token])
        states[request] = state
    return out, states, changes
