"""Receives vLLM's own statistics of each engine step, as one more of its stat loggers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.serving.usage_history import UsageHistory

logger = init_logger("vllm.fastattention")

KEPT = 500
"""Finished requests. There are more than there are recent ones, because an HTTP request may have many prompts."""
ID_CHARACTERS = 1100
"""The header X-Request-Id gives a request its id. No recent request has a longer one, so it would not be found."""


@dataclass(frozen=True)
class Finished:
    """What the engine measured for one prompt and its output."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float


class EngineStats(StatLoggerBase):
    """The last statistics. Without vLLM's, :attr:`enabled` is False and nothing arrives."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.why_not: str | None = "this backend does not receive them yet"
        """The reason why there are none, as the end of a sentence."""
        self.history = UsageHistory()
        self.finished: deque[Finished] = deque(maxlen=KEPT)
        self._steps: dict[int, Any] = {}

    def listen(self, engine_client: Any) -> None:
        """Receive the statistics from now on."""
        manager = getattr(engine_client, "logger_manager", None)
        loggers = getattr(manager, "stat_loggers", None)
        if manager is None and hasattr(engine_client, "logger_manager"):
            self.why_not = "they are off (--disable-log-stats)"
        elif loggers is None:
            self.why_not = "this vLLM has no AsyncLLM.logger_manager.stat_loggers"
        else:
            loggers.append(self)
            self.why_not = None

    @property
    def enabled(self) -> bool:
        return self.why_not is None

    @property
    def running(self) -> int:
        return sum(step.num_running_reqs for step in self._steps.values())

    @property
    def waiting(self) -> int:
        return sum(compat.waiting_requests(step) for step in self._steps.values())

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0, **more: Any
    ) -> None:
        """vLLM calls this in the loop that reads from the engine, which an exception would end."""
        try:
            self._record(scheduler_stats, iteration_stats, engine_idx)
        except (AttributeError, TypeError) as error:
            self._steps.clear()
            self.why_not = f"this vLLM lacks a name that is read: {error}"
            logger.warning_once("The status page shows no statistics of vLLM's: %s.", self.why_not)

    def _record(self, scheduler_stats: Any, iteration_stats: Any, engine_idx: int) -> None:
        if scheduler_stats is not None:
            self._steps |= {engine_idx: scheduler_stats}
            self.history.add(max(step.kv_cache_usage for step in self._steps.values()))
        for one in iteration_stats.finished_requests if iteration_stats is not None else ():
            # vLLM 0.19.1 does not name the request.
            if 0 < len(getattr(one, "request_id", None) or "") <= ID_CHARACTERS:
                self.finished.append(
                    Finished(
                        one.request_id,
                        one.num_prompt_tokens,
                        one.num_cached_tokens,
                        one.num_generation_tokens,
                        one.prefill_time,
                        one.decode_time,
                    )
                )

    def log_engine_initialized(self) -> None:
        """vLLM demands this method. There is nothing to log."""

    def of_request(self, response_id: str) -> list[Finished]:
        """The finished prompts of a response. For completions, vLLM appends the number of the prompt to the id."""
        return [one for one in self.finished if response_id in (one.request_id, one.request_id.rpartition("-")[0])]
