"""Timing a layer on a device that is neither CPU nor CUDA GPU: by that device's events, after a head start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastattention_vllm.parallel import layer_timer
from fastattention_vllm.parallel.collective import Collective
from fastattention_vllm.parallel.layer_timer import HEAD_START_MATMULS, LayerTimer

happened: list[str] = []


class Event:
    """Replaces torch.npu.Event."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        happened.append("record")

    def query(self) -> bool:
        happened.append("query")
        return True

    def elapsed_time(self, end: Event) -> float:
        return 250.0


class Device:
    """Replaces torch.npu."""

    Event = Event


class Alone(Collective):
    rank, size = 0, 2

    def start(self, block: torch.Tensor) -> Any:
        happened.append("start")

    def wait(self, started: Any) -> None:
        happened.append("wait")

    def totals(self, numbers: Any, device: torch.device) -> list[float]:
        assert device.type == "meta"
        return [2 * number for number in numbers]


def test_an_npu_is_timed_by_its_events_after_a_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: Device)
    timer = LayerTimer({"hccl": Alone()}, torch.nn.functional.linear, torch.zeros(8, 4, device="meta"), 256)
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, *rest, **named: happened.append(f"mm {len(x)}") or mm(x, *rest, **named))
    monkeypatch.setattr(layer_timer, "_go_on", lambda together: None)  # reads a tensor that has no memory here
    happened.clear()
    assert timer.seconds([lambda: happened.append("work")], rounds=1) == [0.25]
    once = ["mm 256"] * HEAD_START_MATMULS + ["start", "wait", "record", "work", "record", "query"]
    assert happened == 2 * once, "one warm-up round and one measured round"
