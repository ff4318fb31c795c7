"""The answer of ``GET /fastattention/status``. Fields may be added; any other change raises ``schema_version``."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from fastattention_vllm import __version__
from fastattention_vllm.integration.serving.channel import Channel
from fastattention_vllm.integration.serving.engine_stats import EngineStats
from fastattention_vllm.integration.serving.prediction import Prediction, Predictor, predictor
from fastattention_vllm.integration.serving.recent_requests import RecentRequests, Seen
from fastattention_vllm.integration.serving.usage_history import UsagePoint
from fastattention_vllm.integration.serving.worker_stats import WorkerStats


class Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class KvCache(Part):
    """vLLM's KV cache. Host layers use the same blocks as device layers."""

    used_fraction: float | None
    """The fraction of blocks in use after the last step; None before the first step."""
    history: list[UsagePoint]


class RecentRequest(Part):
    """A request to the OpenAI API. Numbers are None where they are not known."""

    response_id: str | None
    path: str
    seconds_ago: float
    """Since it arrived."""
    seconds: float | None
    """Until the end of the answer; None while it is answered."""
    status: int | None
    complete: bool
    """Whether the whole answer was sent. False if the client has left, or the server failed."""
    prompt_tokens: int | None
    cached_tokens: int | None
    """Tokens of the prompt that were in the prefix cache."""
    new_tokens: int | None
    prefill_seconds: float | None
    decode_seconds_per_token: float | None
    predicted_prefill_seconds: float | None
    """The planner's prediction for a request that runs alone."""
    predicted_decode_seconds_per_token: float | None


class Requests(Part):
    statistics: bool
    """Whether vLLM's statistics arrive. Without them, tokens come from the responses alone, and times are not known."""
    why_no_statistics: str | None
    """The reason, as the end of a sentence; None if they arrive."""
    running: int
    waiting: int
    recent: list[RecentRequest]
    """The latest first."""


class Status(Part):
    schema_version: Literal[1] = 1
    version: str
    """Of this package."""
    model: str
    max_model_len: int
    uptime_seconds: float
    age_seconds: float | None
    """Seconds since the workers reported; None if they have not yet."""
    workers: list[WorkerStats]
    workers_error: str | None
    """Why the workers did not report when they were last asked; None if they did, or are still busy."""
    kv_cache: KvCache
    requests: Requests
    prediction: Prediction


class StatusSource:
    """Combines the workers' numbers with the server's own."""

    def __init__(self, channel: Channel, engine: EngineStats, requests: RecentRequests, vllm_config: Any) -> None:
        self._channel = channel
        self._engine = engine
        self._requests = requests
        self._vllm_config = vllm_config
        self._began = time.monotonic()
        self._predictor: Predictor | None = None

    def now(self) -> Status:
        if self._predictor is None and self._channel.workers:
            self._predictor = predictor(self._vllm_config, self._channel.workers)
        model = self._vllm_config.model_config
        return Status(
            version=__version__,
            model=str(getattr(model, "served_model_name", None) or model.model),
            max_model_len=model.max_model_len,
            uptime_seconds=round(time.monotonic() - self._began, 1),
            age_seconds=self._channel.age(),
            workers=list(self._channel.workers),
            workers_error=self._channel.error,
            kv_cache=KvCache(used_fraction=self._engine.history.last, history=self._engine.history.points()),
            requests=Requests(
                statistics=self._engine.enabled,
                why_no_statistics=self._engine.why_not,
                running=self._engine.running,
                waiting=self._engine.waiting,
                recent=list(self._recent(self._requests)),
            ),
            prediction=self._predictor.prediction if self._predictor else Prediction.none("no worker has reported yet"),
        )

    def _recent(self, requests: Iterable[Seen]) -> Iterable[RecentRequest]:
        for seen in requests:
            found = self._engine.of_request(seen.response_id) if seen.response_id else []
            # The times of a request with several prompts overlap, and are not comparable.
            alone = found[0] if len(found) == 1 else None
            prompt = sum(one.prompt_tokens for one in found) if found else seen.prompt_tokens
            new = sum(one.new_tokens for one in found) if found else seen.new_tokens
            predicted = self._predictor.times(alone) if self._predictor and alone else None
            yield RecentRequest(
                response_id=seen.response_id,
                path=seen.path,
                seconds_ago=round(time.monotonic() - seen.began, 1),
                seconds=seen.seconds,
                status=seen.status,
                complete=seen.complete,
                prompt_tokens=prompt,
                cached_tokens=sum(one.cached_tokens for one in found) if found else None,
                new_tokens=new,
                prefill_seconds=alone.prefill_seconds if alone else None,
                decode_seconds_per_token=alone.decode_seconds / (alone.new_tokens - 1)
                if alone and alone.new_tokens > 1
                else None,
                predicted_prefill_seconds=predicted.prefill if predicted else None,
                predicted_decode_seconds_per_token=predicted.decode if predicted else None,
            )
