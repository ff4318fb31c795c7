"""The gated delta rule in chunks and token by token, against its definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fastattention_vllm.integration.cpu.stand_ins import delta_rule

HEADS, KEY, VALUE = 3, 16, 24


def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    query, key = delta_rule.normalise(draw(tokens, HEADS, KEY)), delta_rule.normalise(draw(tokens, HEADS, KEY))
    decay = -draw(tokens, HEADS).exp()  # from almost nothing forgotten to almost everything
    return query, key, draw(tokens, HEADS, VALUE), decay, draw(tokens, HEADS).sigmoid(), draw(HEADS, KEY, VALUE)


def definition(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, decay, beta, state = (argument.double() for argument in arguments)
    out = torch.empty_like(value)
    for token in range(len(query)):
        for head in range(HEADS):
            matrix, k = decay[token, head].exp() * state[head], key[token, head]
            state[head] = matrix + torch.outer(k, beta[token, head] * (value[token, head] - matrix.T @ k))
            out[token, head] = state[head].T @ query[token, head]
    return out, state


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
def test_chunks_equal_the_definition(tokens: int) -> None:
    arguments = inputs(tokens)
    for got, wanted in zip(delta_rule.chunked(*arguments), definition(*arguments), strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=1e-5)


def test_one_token_of_several_requests_equals_the_definition() -> None:
    requests = [inputs(1) for _ in range(4)]
    query, key, value, decay, beta = (torch.stack([one[i][0] for one in requests]) for i in range(5))
    out, states = delta_rule.recurrent(query, key, value, decay, beta, torch.stack([one[5] for one in requests]))
    for request, arguments in enumerate(requests):
        wanted, state = definition(*arguments)
        torch.testing.assert_close(out[request].double(), wanted[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(states[request].double(), state, atol=1e-5, rtol=1e-5)


def test_the_convolution_sees_the_inputs_before() -> None:
    x, weight, bias = torch.randn(1, 9, 5), torch.randn(5, 4), torch.randn(5)
    whole = delta_rule.convolve(x, torch.zeros(1, 5, 3), weight, bias)
    padded = torch.cat([torch.zeros(3, 5), x[0]]).double()
    for token in range(9):
        wanted = (padded[token : token + 4].T * weight.double()).sum(-1) + bias.double()
        torch.testing.assert_close(whole[0, token].double(), wanted, atol=1e-5, rtol=1e-5)
    later = delta_rule.convolve(x[:, 4:], x[:, 1:4].transpose(1, 2), weight, bias)
    torch.testing.assert_close(later, whole[:, 4:])


def test_a_vector_of_zeros_stays_zero() -> None:
    assert not delta_rule.normalise(torch.zeros(2, 3)).any()
    lengths = functional.normalize(torch.randn(5, 8), dim=-1).mul(3).norm(dim=-1)
    torch.testing.assert_close(delta_rule.normalise(torch.randn(5, 8) * 100).norm(dim=-1), lengths / 3)
