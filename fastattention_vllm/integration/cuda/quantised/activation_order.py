"""Activation order: the groups of a matrix are made of inputs that do not follow each other."""

from __future__ import annotations

import torch

from fastattention_vllm.integration.refusal import Refusal


def order_of(groups: torch.Tensor, group_size: int, layer: str) -> torch.Tensor | None:
    """The order of inputs, int64 ``[k]``, in which groups follow each other; None if they already do.

    Args:
        groups: ``[k]``, the group of each input.
        layer: its name.

    Raises:
        Refusal: a group has not ``group_size`` inputs.
    """
    wanted = torch.arange(len(groups), device=groups.device) // group_size
    # A rank's part of a row-parallel layer begins with another group than the first.
    if torch.equal(groups - groups[0], wanted.to(groups.dtype)):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], wanted.to(groups.dtype)):
        raise Refusal(
            f"{layer}: the groups in g_idx do not have {group_size} inputs each; use --tensor-parallel-size 1, or a "
            "checkpoint without activation order (desc_act: false)."
        )
    return order
