"""What one worker reports to the API server: its kernels, its host layers and its tiled layers.

vLLM's ``collective_rpc`` calls the method in every worker, whatever the executor (one process, several, Ray on other
machines). So no port is opened, and no environment variable has to be set before the start.
"""

from __future__ import annotations

import dataclasses
import socket
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

METHOD = "fastattention_stats"


class TilingTrial(BaseModel):
    """The calibration's choice for one shape of weight and one number of tokens per step."""

    model_config = ConfigDict(frozen=True)

    outputs: int
    inputs_per_rank: int
    tokens: int
    blocks: list[int]
    """Tokens of each block. If there is only one block, these layers are not split."""
    collective: str
    saved_seconds: float
    """Per layer and step, compared with the same layer without a split."""


class TilingStats(BaseModel):
    """The tiling-AllReduce of one worker."""

    model_config = ConfigDict(frozen=True)

    layers: int
    cuts: str
    trials: list[TilingTrial]
    """Empty if the user has set the number of blocks."""


class HostRates(BaseModel):
    """Bytes per second that the worker measured at start."""

    model_config = ConfigDict(frozen=True)

    memory: float
    """Plain reads of the pool by the attention threads."""
    cpu: float
    """Attention on the CPU."""
    link: float
    """Copies to the device."""
    cpu_beside_link: float
    link_beside_cpu: float


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
    saturated_numbers: int
    """Numbers that an fp8 pool has stored as the largest fp8 number."""
    resident_bytes: int
    """Bytes of keys and values that the device read from its copies, outside of graphs."""
    plain_read_rate: float | None
    """Bytes per second of plain reads of the pool, measured at start: the limit of attention on the CPU."""
    rates: HostRates | None
    """None if the share of the device is not "auto", or the device is the CPU itself."""


class LayerGroup(BaseModel):
    """Attention layers with the same kernels, and with their KV cache in the same place."""

    model_config = ConfigDict(frozen=True)

    place: Literal["host", "device"]
    kernels: str
    layers: list[int]
    """Their numbers in the model."""


class WorkerStats(BaseModel):
    """Everything that one worker reports."""

    model_config = ConfigDict(frozen=True)

    rank: int
    host: str
    device: str
    """Its name as PyTorch reports it; "CPU" for CPUs."""
    device_bytes: int | None
    """Its memory; None for CPUs."""
    kernels: dict[str, int]
    """The number of attention layers that each kind of kernels computes."""
    layers: list[LayerGroup]
    nan_logits: int
    """Tokens whose logits contained NaN."""
    host_layers: HostLayerStats | None
    tiling: TilingStats | None


def add_method(module: Any) -> None:
    """Give vLLM's base class of all workers the method that ``collective_rpc`` calls. Without it, the page says why."""
    if hasattr(module, "WorkerBase"):
        setattr(module.WorkerBase, METHOD, lambda worker: of_worker(worker).model_dump())


def of_worker(worker: Any) -> WorkerStats:
    # Not at the top: these import vLLM's layers, and this module is imported while vLLM starts.
    from fastattention_vllm.integration.host_layers import layers as host_layers
    from fastattention_vllm.integration.serving import nan_logits
    from fastattention_vllm.integration.tiling import row_parallel

    config = worker.vllm_config
    layers = {
        name: layer
        for name, layer in config.compilation_config.static_forward_context.items()
        if hasattr(layer, "impl")
    }
    device, device_bytes = device_of(worker.device)
    found = host_layers.find(config)
    return WorkerStats(
        rank=worker.rank,
        host=socket.gethostname(),
        device=device,
        device_bytes=device_bytes,
        kernels=dict(Counter(kernels_of(layer.impl) for layer in layers.values())),
        layers=groups_of(layers),
        nan_logits=nan_logits.count.total,
        host_layers=of_host_layers(found) if found else None,
        tiling=of_tiling(row_parallel.decided) if row_parallel.decided else None,
    )


def device_of(device: torch.device) -> tuple[str, int | None]:
    """Name and memory of a worker's device."""
    if device.type == "cpu":
        return "CPU", None
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    return str(properties.name), int(properties.total_memory)


def groups_of(layers: Mapping[str, Any]) -> list[LayerGroup]:
    groups: dict[tuple[Literal["host", "device"], str], list[int]] = {}
    for name, layer in layers.items():
        impl: Any = layer.impl
        place: Literal["host", "device"] = "host" if hasattr(impl, "host_layers") else "device"
        groups.setdefault((place, kernels_of(getattr(impl, "inner", impl))), []).append(number_of(name))
    return [LayerGroup(place=place, kernels=kernels, layers=found) for (place, kernels), found in groups.items()]


def number_of(name: str) -> int:
    """The layer's number in the model: the first one in its name, as in ``model.layers.7.self_attn.attn``."""
    return next((int(part) for part in name.split(".") if part.isdigit()), 0)


def kernels_of(impl: Any) -> str:
    """The kernels of one attention layer, by their name in the log; for other backends' layers, the class."""
    return str(getattr(impl, "kernels_name", type(impl).__name__))


def of_host_layers(host_layers: Any) -> HostLayerStats:
    counters = dataclasses.asdict(host_layers.counters())
    return HostLayerStats(
        host_layers=len(host_layers.placement.host),
        device_layers=len(host_layers.placement.device),
        pool_bytes=host_layers.pool.memory.nbytes if host_layers.pool else 0,
        cpu_attention_seconds=counters["cpu_seconds"],
        cpu_attention_bytes=counters["cpu_bytes"],
        decode_streamed_bytes=counters["decode_streamed_bytes"],
        prefill_streamed_bytes=counters["prefill_streamed_bytes"],
        device_wait_seconds=counters["device_wait_seconds"],
        saturated_numbers=counters["saturated_numbers"],
        resident_bytes=counters["resident_bytes"],
        plain_read_rate=host_layers.plain_read_rate,
        rates=HostRates(**dataclasses.asdict(host_layers.rates)) if host_layers.rates else None,
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
