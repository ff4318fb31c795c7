"""vLLM's own statistics: how full the cache was, and which requests have finished."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats

from fastattention_vllm.integration.serving.engine_stats import EngineStats
from fastattention_vllm.integration.serving.usage_history import INTERVAL_S, KEPT_S, UsageHistory
from scripts import vllm_surface


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_one_point_per_interval_with_its_highest_and_last_fraction() -> None:
    clock = Clock()
    history = UsageHistory(clock)
    assert history.last is None
    for fraction in (0.2, 0.8, 0.5):
        history.add(fraction)
        clock.now += INTERVAL_S / 4
    clock.now += 3 * INTERVAL_S
    history.add(0.1)
    first, second = history.points()
    assert (first.highest, first.last) == (0.8, 0.5)
    assert (second.highest, second.last) == (0.1, 0.1)
    assert first.seconds_ago - second.seconds_ago == 3 * INTERVAL_S
    assert history.last == 0.1


def test_one_older_point_tells_what_the_hour_began_with() -> None:
    clock = Clock()
    history = UsageHistory(clock)
    for fraction in (0.1, 0.3):
        history.add(fraction)
        clock.now += INTERVAL_S
    clock.now += KEPT_S
    history.add(0.5)
    assert [point.last for point in history.points()] == [0.3, 0.5]


def test_the_history_does_not_grow() -> None:
    clock = Clock()
    history = UsageHistory(clock)
    for _ in range(int(3 * KEPT_S / INTERVAL_S)):
        history.add(0.5)
        clock.now += INTERVAL_S
    assert len(history.points()) <= KEPT_S / INTERVAL_S


def step(*finished: FinishedRequestStats, **scheduler: Any) -> tuple[SchedulerStats, IterationStats]:
    iteration = IterationStats()
    iteration.finished_requests = list(finished)
    return SchedulerStats(**scheduler), iteration


def finished(request_id: str | None, prompt: int) -> Any:
    return SimpleNamespace(
        request_id=request_id,
        num_prompt_tokens=prompt,
        num_cached_tokens=0,
        num_generation_tokens=4,
        prefill_time=0.5,
        decode_time=0.3,
    )


def test_vllms_statistics_arrive_through_its_own_list_of_loggers() -> None:
    engine = EngineStats()
    assert isinstance(engine, StatLoggerBase)
    client = SimpleNamespace(logger_manager=SimpleNamespace(stat_loggers=[]))
    engine.listen(client)
    (logger,) = client.logger_manager.stat_loggers
    assert engine.enabled
    logger.record(*step(num_running_reqs=2, num_waiting_reqs=3, kv_cache_usage=0.5), None, 0)
    logger.record(*step(num_running_reqs=1, kv_cache_usage=0.25), mm_cache_stats=None, engine_idx=1)
    logger.record(None, None)
    assert (engine.running, engine.waiting, engine.history.last) == (3, 3, 0.5)


@pytest.mark.parametrize("client", [SimpleNamespace(logger_manager=None), SimpleNamespace()])
def test_without_statistics_nothing_arrives(client: Any) -> None:
    engine = EngineStats()
    engine.listen(client)
    assert not engine.enabled
    assert engine.why_not
    assert ("--disable-log-stats" in engine.why_not) == hasattr(client, "logger_manager")


@pytest.mark.parametrize("lacking", [SimpleNamespace(num_running_reqs=1), SimpleNamespace(kv_cache_usage=None)])
def test_a_vllm_with_other_statistics_goes_on_without_them(lacking: Any) -> None:
    """An exception here would end vLLM's loop that reads from the engine, and with it all requests."""
    engine = EngineStats()
    client = SimpleNamespace(logger_manager=SimpleNamespace(stat_loggers=[]))
    engine.listen(client)
    engine.record(*step(num_running_reqs=2, kv_cache_usage=0.5))
    engine.record(lacking, None)
    assert engine.why_not is not None
    assert "this vLLM lacks a name" in engine.why_not
    assert (engine.running, engine.waiting) == (0, 0)


@pytest.mark.parametrize("version", vllm_surface.versions())
def test_the_statistics_of_supported_vllms_have_the_fields(version: str) -> None:
    recorded = vllm_surface.recorded(version)
    assert recorded is not None
    # vLLM 0.19.1 neither names the request nor has a queue of skipped ones.
    missing = {"request_id"} if version == "0.19.1" else set()
    assert set(vars(finished("a", 1))) - set(recorded["finished_request_stats"]) == missing
    assert {"num_running_reqs", "num_waiting_reqs", "kv_cache_usage"} <= set(recorded["scheduler_stats"])
    assert ("num_skipped_waiting_reqs" in recorded["scheduler_stats"]) == (version != "0.19.1")


def test_requests_that_the_scheduler_has_skipped_wait_too() -> None:
    engine = EngineStats()
    engine.record(*step(num_waiting_reqs=3, num_skipped_waiting_reqs=2))
    assert engine.waiting == 5
    engine.record(SimpleNamespace(num_running_reqs=0, num_waiting_reqs=3, kv_cache_usage=0.0), None)
    assert engine.waiting == 3, "vLLM 0.19.1 has one queue"


def test_finished_requests_are_found_by_the_id_of_the_response() -> None:
    engine = EngineStats()
    engine.record(*step(finished("chatcmpl-1", 5), finished("cmpl-2-0", 6), finished("cmpl-2-1", 7)))
    engine.record(*step(finished(None, 8)))
    assert [one.prompt_tokens for one in engine.of_request("chatcmpl-1")] == [5]
    assert [one.prompt_tokens for one in engine.of_request("cmpl-2")] == [6, 7]
    assert engine.of_request("cmpl-3") == []


def test_ids_of_any_length_are_not_kept() -> None:
    """Clients choose them, by the header X-Request-Id."""
    engine = EngineStats()
    engine.record(*step(finished("cmpl-" + "a" * 1000 + "-0", 5), finished("cmpl-" + "b" * 60_000, 6)))
    assert [one.prompt_tokens for one in engine.finished] == [5]
    assert [one.prompt_tokens for one in engine.of_request("cmpl-" + "a" * 1000)] == [5]


def test_the_fields_are_vllms() -> None:
    fields = set(FinishedRequestStats.__dataclass_fields__)
    assert set(vars(finished("a", 1))) <= fields
    assert {"num_running_reqs", "num_waiting_reqs", "kv_cache_usage"} <= set(SchedulerStats.__dataclass_fields__)
