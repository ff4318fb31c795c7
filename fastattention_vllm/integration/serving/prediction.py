"""The planner's predictions for the running server, or the reason why there are none."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict

from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.serving.engine_stats import Finished
from fastattention_vllm.integration.serving.worker_stats import WorkerStats
from fastattention_vllm.placement.plan import PlacementError, plan
from fastattention_vllm.plan import hardware, speed
from fastattention_vllm.plan.errors import PlanError
from fastattention_vllm.plan.hardware import GIB, Machine
from fastattention_vllm.plan.memory import MemoryPlan, Request, plan_memory
from fastattention_vllm.plan.model import shape_of

MEMORY_TOLERANCE = 0.1
"""Two devices with the same name and about as much memory are the same."""


class Prediction(BaseModel):
    """The planner's predictions for this server. If there are none, only ``why_not`` is set."""

    model_config = ConfigDict(frozen=True)

    why_not: str | None
    """The reason why there is no prediction, as the end of a sentence."""
    device: str | None = None
    """The device and the host whose data the prediction uses."""
    host: str | None = None
    measured_rates: bool = False
    """True if this server measured the rates of the host. False if they come from the planner's tables."""
    planned_host_layers: int | None = None
    """The number that the planner would choose for one request of the maximum length."""
    decode_tokens: int | None = None
    """The maximum length. The speeds below are for this length."""
    decode_seconds_per_token: float | None = None
    decode_limited_by: str | None = None
    prefill_seconds: float | None = None
    prefill_limited_by: str | None = None

    @classmethod
    def none(cls, why: str) -> Prediction:
        return cls(why_not=why)


@dataclass(frozen=True)
class Times:
    """Predicted seconds of one request alone."""

    prefill: float | None
    """None if a part of the prompt was cached."""
    decode: float | None
    """Per token; None if there was only one."""


class Predictor:
    """Predicts single requests for the actual placement of the layers."""

    def __init__(self, memory: MemoryPlan | None, prediction: Prediction) -> None:
        self._memory = memory
        self.prediction = prediction
        self._prefill = functools.lru_cache(maxsize=256)(self._prefill_seconds)
        self._decode = functools.lru_cache(maxsize=256)(self._decode_seconds)

    def times(self, finished: Finished) -> Times | None:
        if self._memory is None or not finished.prompt_tokens:
            return None
        middle = finished.prompt_tokens + finished.new_tokens // 2
        return Times(
            None if finished.cached_tokens else self._prefill(self._memory, finished.prompt_tokens),
            self._decode(self._memory, middle) if finished.new_tokens > 1 else None,
        )

    @staticmethod
    def _prefill_seconds(memory: MemoryPlan, tokens: int) -> float:
        return speed.prefill(of_length(memory, tokens)).seconds

    @staticmethod
    def _decode_seconds(memory: MemoryPlan, tokens: int) -> float:
        return speed.decode(of_length(memory, tokens)).seconds


def of_length(memory: MemoryPlan, tokens: int) -> MemoryPlan:
    return replace(memory, request=replace(memory.request, context=tokens, requests=1))


def predictor(vllm_config: Any, workers: Sequence[WorkerStats]) -> Predictor:
    """A predictor for this server, or one that has only the reason why it cannot predict."""
    try:
        machine = machine_of(workers)
        planned = plan_of(vllm_config, machine)
        on_host = [index for group in workers[0].layers if group.place == "host" for index in group.layers]
        placed = plan(planned.layers, planned.size, on_host, planned.limits)
    except (PlanError, PlacementError) as error:
        return Predictor(None, Prediction.none(reason(error)))
    except AttributeError as error:
        return Predictor(None, Prediction.none(f"this vLLM lacks a name that the planner reads: {error}"))
    memory = replace(planned, placement=placed)
    longest = of_length(memory, planned.request.context)
    decode, prefill = speed.decode(longest), speed.prefill(longest)
    return Predictor(
        memory,
        Prediction(
            why_not=None,
            device=f"{machine.ranks} x {machine.device.name}",
            host=machine.host.name,
            measured_rates=rates_of(workers) is not None,
            planned_host_layers=len(planned.placement.host),
            decode_tokens=planned.request.context,
            decode_seconds_per_token=decode.seconds,
            decode_limited_by=decode.limited_by,
            prefill_seconds=prefill.seconds,
            prefill_limited_by=prefill.limited_by,
        ),
    )


def reason(error: Exception) -> str:
    """The planner's sentence without its advice for the command line."""
    return str(error).partition("; ")[0].rstrip(".")


def plan_of(vllm_config: Any, machine: Machine) -> MemoryPlan:
    """The plan with this server's options.

    Raises:
        PlanError: the planner does not support this model or these options.
    """
    parallel, cache, options = vllm_config.parallel_config, vllm_config.cache_config, options_of(vllm_config)
    if parallel.pipeline_parallel_size > 1:
        raise PlanError("the planner does not support pipeline parallelism")
    limit = getattr(cache, "kv_cache_memory_bytes", None)
    model = vllm_config.model_config
    try:
        shape = shape_of(model.hf_config.to_dict(), str(model.model))
    except PlanError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise PlanError(f"the planner does not support this model: {error}") from error
    request = Request(
        context=model.max_model_len,
        requests=options.host_kv_requests,
        kv_dtype="auto" if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        host_kv_dtype=options.host_kv_dtype,
        resident_kv_gib=options.resident_kv_gib,
        batched_tokens=max(256, vllm_config.scheduler_config.max_num_batched_tokens),
        utilization=cache.gpu_memory_utilization,
        kv_cache_gib=limit / GIB if limit else None,
    )
    return plan_memory(shape, machine, request)


def machine_of(workers: Sequence[WorkerStats]) -> Machine:
    """The entry of the planner's tables for these workers' devices, with the rates that the workers have measured.

    Raises:
        PlanError: the tables have no such device.
    """
    worker = workers[0]
    if worker.device_bytes is None:
        raise PlanError("the planner has data for GPUs and NPUs only, and this server computes on CPUs")
    key = device_key(worker.device, worker.device_bytes)
    if key is None:
        raise PlanError(f"the planner has no data for {worker.device} with {worker.device_bytes / GIB:.1f} GiB")
    memory, link = rates_of(workers) or (None, None)
    return hardware.machine(
        key,
        len(workers),
        memory_gib=psutil.virtual_memory().total / GIB,
        read_gb_per_s=memory / 1e9 if memory else None,
        link_gb_per_s=link / 1e9 if link else None,
    )


def rates_of(workers: Sequence[WorkerStats]) -> tuple[float, float] | None:
    """Bytes per second of plain reads by all workers, and of copies to one device; None if a worker lacks them."""
    rates = [worker.host_layers.rates for worker in workers if worker.host_layers]
    if not rates or any(one is None for one in rates):
        return None
    known = [one for one in rates if one]
    return sum(one.memory for one in known), min(one.link for one in known)


def device_key(name: str, size: int) -> str | None:
    """The name in the planner's tables of the device that PyTorch calls ``name``.

    All words of the table's name (``v100-pcie`` of ``v100-pcie-16g``) must be in PyTorch's, and the memory must fit.
    """
    found = re.findall(r"[a-z0-9]+", name.lower())
    words = {"".join(found[i:j]) for i in range(len(found)) for j in range(i + 1, min(i + 3, len(found)) + 1)}
    fitting = []
    for key, device in hardware.tables().devices.items():
        family = key.rpartition("-")[0].split("-")
        if set(family) <= words and abs(size / (device.memory_gib * GIB) - 1) < MEMORY_TOLERANCE:
            fitting.append((len(family), key))
    return max(fitting)[1] if fitting else None
