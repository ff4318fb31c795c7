"""Torch stand-ins for vLLM's compiled mixture-of-experts kernels, for unquantised experts.

Why, and when to remove: see ``ops.py``, which defines them. They are written for exactness and clarity: a loop over
experts, whose matrices ``linear.py`` multiplies.
Reference: ``vllm/model_executor/layers/fused_moe/experts/cpu_moe.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from fastattention_vllm.integration.cpu.stand_ins.linear import linear

# GPT-OSS's clamped swiglu; vLLM's compiled kernel has the same two numbers built in.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


def prepack_moe_weight(weight: torch.Tensor, packed: torch.Tensor, isa: str) -> None:
    """Copy the weights unchanged. The compiled kernels reorder them for their tiles, but torch's matmul does not."""
    packed.copy_(weight)


def cpu_fused_moe(
    out: torch.Tensor,
    hidden: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    skip_weighted: bool,
    activation: str,
    isa: str,
) -> None:
    """Sum of each token's experts.

    Args:
        out, hidden: ``[num_tokens, hidden_size]``.
        w13: ``[num_experts, 2 * intermediate_size, hidden_size]``; ``w2``: ``[num_experts, hidden_size,
            intermediate_size]``; the biases without the last dimension.
        topk_weights, topk_ids: ``[num_tokens, experts_per_token]``.
        skip_weighted: ``hidden`` already includes the weights.
        activation: a key of ``ACTIVATIONS``.
    """
    activate = ACTIVATIONS[activation]
    total = torch.zeros(hidden.shape, dtype=torch.float32)
    for expert in range(w13.shape[0]):
        tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
        if not tokens.numel():
            continue
        gate_up = linear(hidden[tokens], w13[expert], None if w13_bias is None else w13_bias[expert])
        result = linear(activate(gate_up), w2[expert], None if w2_bias is None else w2_bias[expert]).float()
        if not skip_weighted:
            result *= topk_weights[tokens, choices, None]
        total.index_add_(0, tokens, result)
    out.copy_(total)


def _packed(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """For inputs with all gates first, then all ups."""

    def activate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return function(gate) * up

    return activate


def _swiglu_oai(gate_up: torch.Tensor) -> torch.Tensor:
    """GPT-OSS: gates and ups alternate."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * gate * torch.sigmoid(gate * SWIGLU_ALPHA)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": _packed(functional.silu),
    "gelu": _packed(functional.gelu),
    "gelu_tanh": _packed(lambda gate: functional.gelu(gate, approximate="tanh")),
    "swigluoai": _swiglu_oai,
}
