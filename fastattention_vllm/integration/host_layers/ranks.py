"""What the ranks of a model tell each other while host layers are set up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.parallel.agreement import agreed
from fastattention_vllm.parallel.shared_segment import Exchange

_agreed: Exchange | None = None
"""The exchange of the body of :func:`together` that is running."""


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Run the body on all ranks, or refuse the start on all of them; also a decorator.

    A rank that cannot go on raises its own error, and the others a Refusal that names the rank and its reason. Without
    this they would wait for it, up to gloo's 30 minutes. What runs inside another body belongs to that body.
    """
    global _agreed
    if _agreed is not None:
        yield
        return
    with agreed(_in_world, Refusal) as exchange:
        _agreed = exchange
        try:
            yield
        finally:
            _agreed = None


def wait_for_ranks() -> None:
    """All ranks call this, and go on together."""
    _exchange(None)


def smallest(*numbers: float) -> list[float]:
    """For each number, the smallest one that any rank gives. All ranks call this."""
    return [float(min(given)) for given in zip(*_exchange(numbers), strict=True)]


def _exchange(value: Any) -> list[Any]:
    return (_agreed or _in_world)(value)


def _in_world(value: Any) -> list[Any]:
    """The values of all ranks, which all call this."""
    if not dist.is_initialized():
        return [value]
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [value]
    found: list[Any] = [None] * group.world_size
    dist.all_gather_object(found, value, group=group.cpu_group)
    return found
