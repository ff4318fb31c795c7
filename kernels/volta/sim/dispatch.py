"""Predicts which SM gets which CTA of a launch whose CTAs take different times."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def dispatch(work: Sequence[float], *, resident: int, sms: int) -> list[list[int]]:
    """CTAs of each SM in the order in which they begin there. The SM that ends last comes first; idle SMs are left out.

    Hardware starts CTAs by their number, each where one has ended. Every SM has ``resident`` places, which progress
    equally and do not disturb each other. This predicts which SM gets which CTA, but not how long it takes.

    Args:
        work: the amount of work of each CTA, by its number, in any unit.
    """
    ends = [(0.0, place, sm) for place in range(resident) for sm in range(sms)]
    taken: list[list[int]] = [[] for _ in range(sms)]
    end_of: list[float] = [0.0] * sms
    for number, amount in enumerate(work):
        end, place, sm = heapq.heappop(ends)
        taken[sm].append(number)
        end_of[sm] = max(end_of[sm], end + amount)
        heapq.heappush(ends, (end + amount, place, sm))
    order = sorted(range(sms), key=lambda sm: (-end_of[sm], -sum(work[number] for number in taken[sm])))
    return [taken[sm] for sm in order if taken[sm]]
