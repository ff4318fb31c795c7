"""Gated DeltaNet layers between their projections, token by token in float64, and random problems for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fastattention_vllm.attention.cpu.gated_delta import GatedDeltaLayer


@dataclass(frozen=True)
class Case:
    """``lengths``: the tokens of each request. ``begun``: which of them continue; all, if absent.

    ``verified``: for a request with draft tokens, how many tokens of its last step were accepted; 0 for others.
    """

    lengths: tuple[int, ...]
    key_heads: int = 2
    value_heads: int = 4
    key_size: int = 16
    value_size: int = 24
    width: int = 4
    dtype: torch.dtype = torch.float32
    inputs_dtype: torch.dtype = torch.float32
    states_dtype: torch.dtype = torch.float32
    begun: tuple[bool, ...] | None = None
    verified: tuple[int, ...] | None = None
    bias: bool = False
    activation: str | None = "silu"
    channels_first: bool = False
    seed: int = 0

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size


class Problem:
    """Random tensors of a case. Slots that no request has, and the old content of new slots, are NaN."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        requests, tokens = len(case.lengths), sum(case.lengths)
        columns = max(1, *case.lengths, *case.verified) if case.verified else 1
        slots, channels, heads = requests * columns + 2, case.channels, case.value_heads
        self.case = case
        self.weight = draw(channels, case.width)
        self.bias = draw(channels) if case.bias else None
        self.a_log, self.dt_bias = draw(heads), draw(heads)
        # Views of wider tensors, as vLLM's are.
        self.x = draw(tokens, channels + 8).to(case.dtype)[:, :channels]
        self.b, self.a = draw(tokens, 2 * heads).to(case.dtype).chunk(2, dim=1)
        self.out = torch.full((tokens, heads, case.value_size), torch.nan, dtype=case.dtype)
        chosen = torch.randperm(slots, generator=generator)[: requests * columns].int().reshape(requests, columns)
        self.slots = chosen[:, 0].contiguous()
        self.verified = torch.tensor(case.verified, dtype=torch.int32) if case.verified else None
        self.state_slots = chosen if case.verified else None
        begun = case.begun or (True,) * requests
        self.begun = torch.tensor(begun)
        self.query_start_loc = torch.tensor([0, *case.lengths]).cumsum(0).int()
        self.inputs = torch.full((slots, case.width + columns - 2, channels), torch.nan, dtype=case.inputs_dtype)
        if case.channels_first:
            self.inputs = self.inputs.transpose(1, 2).contiguous().transpose(1, 2)
        self.states = torch.full((slots, heads, case.key_size, case.value_size), torch.nan, dtype=case.states_dtype)
        for slot in self.slots[self.begun].tolist():
            self.inputs[slot] = draw(*self.inputs.shape[1:]).to(case.inputs_dtype)
            self.states[slot] = draw(*self.states.shape[1:]).to(case.states_dtype)
        for request, count in enumerate(case.verified or ()):
            for slot in chosen[request, :count].tolist():
                self.states[slot] = draw(*self.states.shape[1:]).to(case.states_dtype)

    def layer(self) -> GatedDeltaLayer:
        case = self.case
        return GatedDeltaLayer(
            self.weight,
            self.bias,
            self.a_log,
            self.dt_bias,
            key_heads=case.key_heads,
            value_heads=case.value_heads,
            key_size=case.key_size,
            value_size=case.value_size,
            activation=case.activation,
        )

    def run(self, **changes: Any) -> None:
        """``changes`` replace arguments of ``GatedDeltaLayer.run``."""
        names = ("x", "a", "b", "out", "query_start_loc", "slots", "begun", "inputs", "states")
        names += ("verified", "state_slots")
        self.layer().run(**{name: getattr(self, name) for name in names} | changes)


def definition(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, the kept inputs and the states, in float64, each token after the other."""
    case = problem.case
    out = torch.empty(problem.out.shape, dtype=torch.float64)
    inputs, states = problem.inputs.double(), problem.states.double()
    weight, x, a, b = (tensor.double() for tensor in (problem.weight, problem.x, problem.a, problem.b))
    sizes = [case.key_heads * case.key_size] * 2 + [case.value_heads * case.value_size]
    for request, slot in enumerate(problem.slots.tolist()):
        if case.lengths[request] and not problem.begun[request]:
            inputs[slot, : case.width - 1], states[slot] = 0, 0
        first, end = problem.query_start_loc[request : request + 2].tolist()
        kept, drafting = case.width - 1, bool(case.verified and case.verified[request])
        oldest = case.verified[request] - 1 if case.verified and drafting else 0
        history = torch.cat([inputs[slot, oldest : oldest + kept], x[first:end]])
        before = slot
        if problem.state_slots is not None and drafting:
            before = int(problem.state_slots[request, oldest])
        for token in range(first, end):
            window = history[token - first : token - first + case.width]
            after = slot
            if problem.state_slots is not None and drafting:
                after = int(problem.state_slots[request, token - first])
            state = states[before].clone()
            before = after
            y = (window.T * weight).sum(1) + (0 if problem.bias is None else problem.bias.double())
            if case.activation:
                y = y * y.sigmoid()
            query, key, value = (
                part.view(-1, n)
                for part, n in zip(y.split(sizes), (case.key_size, case.key_size, case.value_size), strict=True)
            )
            query = query / (query.square().sum(1, keepdim=True) + 1e-6).sqrt() / case.key_size**0.5
            key = key / (key.square().sum(1, keepdim=True) + 1e-6).sqrt()
            softplus = torch.logaddexp(a[token] + problem.dt_bias.double(), torch.zeros(1, dtype=torch.float64))
            decay, beta = (-problem.a_log.double().exp() * softplus).exp(), b[token].sigmoid()
            for head in range(case.value_heads):
                shared = head // (case.value_heads // case.key_heads)
                matrix = decay[head] * state[head]
                change = beta[head] * (value[head] - matrix.T @ key[shared])
                changed = matrix + torch.outer(key[shared], change)
                out[token, head] = changed.T @ query[shared]
                # The state of a draft token is what the next token begins with.
                states[after, head] = changed.to(case.states_dtype).double() if drafting else changed
        if end > first:
            newest = history[1:] if drafting else history[-kept:]
            inputs[slot, : len(newest)] = newest
    return out, inputs, states
