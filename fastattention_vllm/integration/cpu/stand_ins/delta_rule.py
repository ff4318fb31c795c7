"""The gated delta rule and the causal convolution before it, in torch: what a Gated DeltaNet layer computes.

For each head, with decay ``g <= 0``, rate ``beta`` and the state ``S [K, V]``, every token does

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   out = S^T q

``chunked`` computes the same for up to ``CHUNK`` tokens at a time with matrix products. Everything is fp32.
Reference: arXiv 2412.06464, sections 3.2 and 3.3; tests compare with the rule above in float64.
"""

from __future__ import annotations

import torch
from torch.nn import functional

CHUNK = 64
NORM_EPSILON = 1e-6


def convolve(x: torch.Tensor, before: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The causal convolution of each channel with its own filter.

    Args:
        x: ``[requests, tokens, channels]``.
        before: the ``width - 1`` inputs before ``x``, ``[requests, channels, width - 1]``.
        weight: ``[channels, width]``; ``bias``: ``[channels]``.

    Returns:
        ``[requests, tokens, channels]`` in fp32.
    """
    inputs = torch.cat([before.float(), x.float().transpose(1, 2)], dim=-1)
    bias = None if bias is None else bias.float()
    return functional.conv1d(inputs, weight.float()[:, None], bias, groups=len(weight)).transpose(1, 2)


def normalise(x: torch.Tensor) -> torch.Tensor:
    """Divide each vector by its length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)


def recurrent(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each request.

    Args:
        query, key: ``[requests, heads, K]``; ``value``: ``[requests, heads, V]``.
        decay, beta: ``[requests, heads]``.
        state: ``[requests, heads, K, V]``.

    Returns:
        The output ``[requests, heads, V]`` and the new state.
    """
    state = state * decay.exp()[..., None, None]
    known = (state * key[..., None]).sum(-2)
    state = state + key[..., None] * ((value - known) * beta[..., None])[..., None, :]
    return (state * query[..., None]).sum(-2), state


def chunked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of one request.

    Args:
        query, key: ``[tokens, heads, K]``; ``value``: ``[tokens, heads, V]``.
        decay, beta: ``[tokens, heads]``.
        state: ``[heads, K, V]``.

    Returns:
        The output ``[tokens, heads, V]`` and the new state.
    """
    out = torch.empty_like(value)
    for first in range(0, len(query), CHUNK):
        rows = slice(first, first + CHUNK)
        q, k, v = (part[rows].transpose(0, 1) for part in (query, key, value))
        rate, since = beta[rows].T[..., None], decay[rows].T.cumsum(-1)
        later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
        between = (since[:, :, None] - since[:, None, :]).masked_fill(later, -torch.inf).exp()
        # Each token changes what the later ones of the chunk find in the state: a triangular system of equations.
        system = (k * rate) @ k.mT * between
        right = torch.cat([v * rate, k * rate * since.exp()[..., None]], dim=-1)
        added, seen = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
            [v.shape[-1], k.shape[-1]], dim=-1
        )
        added = added - seen @ state
        out[rows] = ((q * since.exp()[..., None]) @ state + (q @ k.mT * between) @ added).transpose(0, 1)
        last = since[:, -1:]
        state = state * last.exp()[..., None] + (k * (last - since).exp()[..., None]).mT @ added
    return out, state
