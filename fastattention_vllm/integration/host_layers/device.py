"""What host layers ask of the device beside the host, and of the attention layers that they were."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.placement.host_attention import Device
from fastattention_vllm.placement.link import Link
from fastattention_vllm.placement.pinning import Pinning


class DeviceLayer(Protocol):
    """What a host layer asks of the attention layer that it was: our ``AttentionImpl`` of the device."""

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int
    host_window: int | None
    """Keys that a token sees before itself; None if all."""

    def problem(self, layer: Any, **parts: Any) -> AttentionProblem:
        """One with this layer's scale, window and so on, unless ``parts`` say otherwise."""

    def scales(self, layer: Any) -> tuple[float, float]:
        """What an fp8 cache's keys and values were divided by."""

    def merges(self) -> bool:
        """Whether attention over parts of the keys can be merged to attention over all."""

    def cache_dtype(self, kv_cache: torch.Tensor) -> torch.dtype: ...

    def why_not_on_host(self) -> str | None:
        """What such a layer asks for that host layers cannot do here, or None."""


class DeviceRuntime(Protocol):
    """One kind of device beside the host."""

    host_backend: type[Any]
    """The ``AttentionBackend`` of host layers, whose builder makes :class:`HostMetadata`."""

    @property
    def pin(self) -> Pinning | None:
        """None if the "device" is the host itself."""

    def cpus(self) -> list[int]:
        """Of this rank."""

    def settle_block_size(self) -> None:
        """Let vLLM's configuration say how many tokens a block will have, where so far it only says the default."""

    def prepare(self) -> None:
        """Called once it is sure that there will be host layers."""

    def kernels(self) -> Device: ...

    def link(self) -> Link: ...

    def kv_bytes(self) -> int:
        """Device memory that the KV cache may take, weights loaded and nothing else."""


def local_rank() -> int:
    from vllm.distributed.parallel_state import get_world_group

    return int(get_world_group().local_rank)
