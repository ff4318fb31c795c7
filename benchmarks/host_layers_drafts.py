"""What becomes of the tokens that an engine drafts.

Used by: host_layers_ways.py.
"""

from __future__ import annotations

from typing import Any


class Drafts:
    """Counts what became of drafted tokens."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.before = self._counted()

    def accepted_per_step(self) -> float | None:
        """The mean number of accepted tokens since the beginning, over the requests' steps with drafts."""
        steps, accepted = (now - before for now, before in zip(self._counted(), self.before, strict=True))
        return accepted / steps if steps else None

    def _counted(self) -> list[float]:
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        found = {metric.name: float(metric.value) for metric in self.llm.get_metrics() if metric.name in names}
        return [found.get(name, 0.0) for name in names]
