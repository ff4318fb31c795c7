"""If one rank fails, all ranks fail. Otherwise the others would wait for it at their next exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fastattention_vllm.parallel.shared_segment import Exchange


class RankFailed(RuntimeError):
    """Another rank failed; the text is one sentence that says which, and how."""


@contextlib.contextmanager
def agreed(exchange: Exchange, refuse: Callable[[str], Exception] = RankFailed) -> Iterator[Exchange]:
    """Run the body on all ranks to its end, or fail on all of them.

    A rank that fails raises its own error. The others raise what ``refuse`` makes of its text, at their next exchange
    or at the end of the body. The body uses the exchange that this yields, and no other collective of the same group: a
    rank that has failed takes part in one more exchange, wherever the others are.
    """
    agreement = _Agreement(exchange, refuse)
    try:
        yield agreement.exchange
        agreement.exchange(None)
    except Exception as error:
        agreement.fail(error)
        raise


class _Agreement:
    def __init__(self, exchange: Exchange, refuse: Callable[[str], Exception]) -> None:
        self._exchange, self._refuse = exchange, refuse
        self._is_over = False

    def exchange(self, value: Any) -> list[Any]:
        self._is_over = True  # unless it returns: what failed on another rank, or in itself, is not told again
        answers = self._exchange(("", value))
        for rank, (failure, _) in enumerate(answers):
            if failure:
                raise self._refuse(f"rank {rank} cannot go on: {failure}")
        self._is_over = False
        return [found for _, found in answers]

    def fail(self, error: Exception) -> None:
        if not self._is_over:
            self._is_over = True
            with contextlib.suppress(Exception):  # this rank's own error says more
                self._exchange((str(error).split("\n")[0] or type(error).__name__, None))
