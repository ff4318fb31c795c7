"""What host_layers.py counts of drafted tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from host_layers_drafts import Drafts


class Engine:
    def __init__(self) -> None:
        self.drafts, self.accepted = 2, 5

    def get_metrics(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=self.accepted),
            SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self.drafts),
            SimpleNamespace(name="vllm:e2e_request_latency_seconds"),  # a histogram has no value
        ]


def test_accepted_drafts_are_counted_from_the_start_of_a_way() -> None:
    engine = Engine()
    drafts = Drafts(engine)
    assert drafts.accepted_per_step() is None
    engine.drafts, engine.accepted = 12, 35
    assert drafts.accepted_per_step() == pytest.approx(3)
