"""The interfaces that host layers use: of the device, and of the attention layers that they replace."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.placement.graph_calls import GraphCalls
from fastattention_vllm.placement.host_attention import Device
from fastattention_vllm.placement.link import Link
from fastattention_vllm.placement.pinning import Pinning


class DeviceLayer(Protocol):
    """The interface of the attention layer that a host layer replaces: the device's ``AttentionImpl``."""

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int
    host_window: int | None
    """Number of keys before itself that a token sees; None for all."""

    def problem(self, layer: Any, **parts: Any) -> AttentionProblem:
        """A problem with this layer's scale, window and so on. ``parts`` are the batch's tensors or override fields."""

    def scales(self, layer: Any) -> tuple[float, float]:
        """The scales by which the keys and values of an fp8 cache were divided."""

    def merges(self) -> bool:
        """Whether attention over parts of the keys can be merged into the exact result."""

    def cache_dtype(self, kv_cache: torch.Tensor) -> torch.dtype: ...

    def why_not_on_host(self) -> str | None:
        """The feature of this layer that host layers do not support here, or None."""


class DeviceRuntime(Protocol):
    """One kind of device."""

    host_backend: type[Any]
    """The ``AttentionBackend`` for host layers. Its builder creates :class:`HostMetadata`."""

    beside_states: bool
    """Whether host layers were tested in models with linear-attention layers, whose states stay on the device."""

    keeps_copies: bool
    """Whether the device's kernels can read copies of host layers' blocks (``resident_kv_gib``)."""

    @property
    def pin(self) -> Pinning | None:
        """How host memory is pinned for the device. None if the "device" is the host itself."""

    def cpus(self) -> list[int]:
        """The CPUs of this rank."""

    def settle_block_size(self) -> None:
        """Set the final block size in vLLM's configuration, if it still contains the default."""

    def prepare(self) -> None:
        """Called once, when it is certain that there will be host layers."""

    def kernels(self) -> Device: ...

    def link(self) -> Link: ...

    def graph_calls(self, link: Link) -> GraphCalls | None:
        """What host layers need inside CUDA graphs, or None if the device has none or they are off."""

    def kv_bytes(self) -> int:
        """Device memory available for the KV cache, with only the weights loaded."""


def local_rank() -> int:
    from vllm.distributed.parallel_state import get_world_group

    return int(get_world_group().local_rank)
