"""An attention implementation for transformers that can observe and change K and V."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, PreTrainedModel

Edit = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Maps layer index, K and V [batch, KV heads, positions, D] to the K and V that attention uses."""

_NAME = "demo_probe"
_edit: Edit | None = None


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The mask is causal by token order, whatever the position ids are."""
    if _edit is not None:
        key, value = _edit(int(module.layer_idx), key, value)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attend)


@contextmanager
def probed(model: PreTrainedModel, edit: Edit | None = None) -> Iterator[None]:
    """Run the model with the probe, optionally with edited K and V."""
    global _edit
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    _edit = edit
    try:
        yield
    finally:
        _edit = None
        model.set_attn_implementation(before)
