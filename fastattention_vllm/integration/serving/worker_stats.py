"""What one worker reports to the API server: its kernels, its host layers and its tiled layers.

vLLM's ``collective_rpc`` calls the method in every worker, whatever the executor (one process, several, Ray on other
machines). So no port is opened, and no environment variable has to be set before the start.
"""

from __future__ import annotations

import dataclasses
import socket
from collections import Counter
from typing import Any

from pydantic import BaseModel, ConfigDict

METHOD = "fastattention_stats"


class TilingTrial(BaseModel):
    """What the calibration has chosen for layers with one shape of weight, and steps of one length."""

    model_config = ConfigDict(frozen=True)

    outputs: int
    inputs_per_rank: int
    tokens: int
    blocks: list[int]
    """Tokens of each block. One block: these layers are not split."""
    collective: str
    saved_seconds: float
    """Per layer and step, against the layer that is not split."""


class TilingStats(BaseModel):
    """The tiling-AllReduce of one worker."""

    model_config = ConfigDict(frozen=True)

    layers: int
    cuts: str
    trials: list[TilingTrial]
    """Empty if the user has set the number of blocks."""


class HostLayerStats(BaseModel):
    """The host layers of one worker, and what they have done since the start."""

    model_config = ConfigDict(frozen=True)

    host_layers: int
    device_layers: int
    pool_bytes: int
    """All blocks, used or free."""
    cpu_attention_seconds: float
    cpu_attention_bytes: int
    decode_streamed_bytes: int
    prefill_streamed_bytes: int
    device_wait_seconds: float


class WorkerStats(BaseModel):
    """Everything that one worker reports."""

    model_config = ConfigDict(frozen=True)

    rank: int
    host: str
    kernels: dict[str, int]
    """The number of attention layers that each kind of kernels computes."""
    host_layers: HostLayerStats | None
    tiling: TilingStats | None


def add_method(module: Any) -> None:
    """Give vLLM's base class of all workers the method that ``collective_rpc`` calls."""
    setattr(module.WorkerBase, METHOD, lambda worker: of_worker(worker).model_dump())


def of_worker(worker: Any) -> WorkerStats:
    # Not at the top: these import vLLM's layers, and this module is imported while vLLM starts.
    from fastattention_vllm.integration.host_layers import layers as host_layers
    from fastattention_vllm.integration.tiling import row_parallel

    config = worker.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    found = host_layers.find(config)
    return WorkerStats(
        rank=worker.rank,
        host=socket.gethostname(),
        kernels=dict(Counter(kernels_of(layer.impl) for layer in layers if hasattr(layer, "impl"))),
        host_layers=of_host_layers(found) if found else None,
        tiling=of_tiling(row_parallel.decided) if row_parallel.decided else None,
    )


def kernels_of(impl: Any) -> str:
    """The kernels of one attention layer, by their name in the log; for other backends' layers, the class."""
    return str(getattr(impl, "kernels_name", type(impl).__name__))


def of_host_layers(host_layers: Any) -> HostLayerStats:
    counters = dataclasses.asdict(host_layers.group.counters)
    return HostLayerStats(
        host_layers=len(host_layers.placement.host),
        device_layers=len(host_layers.placement.device),
        pool_bytes=host_layers.pool.memory.nbytes if host_layers.pool else 0,
        cpu_attention_seconds=counters["cpu_seconds"],
        cpu_attention_bytes=counters["cpu_bytes"],
        decode_streamed_bytes=counters["decode_streamed_bytes"],
        prefill_streamed_bytes=counters["prefill_streamed_bytes"],
        device_wait_seconds=counters["device_wait_seconds"],
    )


def of_tiling(decided: Any) -> TilingStats:
    choices = getattr(decided.cuts, "choices", {})
    trials = [
        TilingTrial(
            outputs=shape[0],
            inputs_per_rank=shape[1],
            tokens=trial.rows,
            blocks=list(trial.blocks),
            collective=trial.collective,
            saved_seconds=trial.plain_seconds - trial.seconds,
        )
        for shape, choice in choices.items()
        for trial in choice.trials
    ]
    return TilingStats(layers=decided.layers, cuts=str(decided.cuts), trials=trials)
