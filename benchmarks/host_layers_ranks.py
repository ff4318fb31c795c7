"""What host_layers.py does in the processes of all ranks: switch the way to decode, count, and read the host pool.

Used by: host_layers_ways.py, through vLLM's collective_rpc, which gives each function its worker.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fastattention_vllm.attention.cpu.roofline import PageReader, ReadMethod
from fastattention_vllm.placement.counters import Counters
from fastattention_vllm.placement.stream_split import StreamSplit


class Way(NamedTuple):
    """How to decode. Both limits are bytes of the contexts in one layer."""

    split: StreamSplit
    until: float
    """Steps are one graph."""
    filled_until: float = 0.0
    """Missing drafts are made up."""


@dataclass(frozen=True)
class Rank:
    host_layers: int
    token_bytes: int
    """Of one layer in this rank's pool."""
    until: float
    """Bytes of the contexts in one layer for which one graph was chosen."""
    ways: dict[str, Way]

    def share(self, way: str, context: int, *, drafts: bool) -> float:
        """Of ``context`` bytes in one layer, what the GPU reads. ``drafts``: whether steps in pieces have several."""
        found = self.ways[way]
        return found.split.in_graph() if found.until > context else found.split.of(context, drafts=drafts)


def start(worker: Any) -> Rank:
    """What the start measured and chose on this rank."""
    layers = _layers(worker)
    chosen, until = layers.group.stream_split, layers.whole_steps_until
    filled = layers.filled_steps_until
    ways = {"stream all": Way(StreamSplit(1.0), 0.0), "CPU alone": Way(StreamSplit(0.0), 0.0)}
    ways["pieces"] = Way(chosen, 0.0)
    if layers.graph_calls is not None:
        ways["graph"] = Way(StreamSplit(0.0), math.inf)
        if layers.graph_calls.over_link is not None:
            ways["shared graph"] = Way(chosen, math.inf)
        ways["auto"] = Way(chosen, until, filled)
        if filled:
            ways["drafts as found"] = Way(chosen, until)
        if layers.drafts_per_request:
            ways["split of one token"] = Way(replace(chosen, drafting=None), until, filled)
    placement = layers.placement
    token_bytes = placement.host_bytes_per_block // placement.device_size.block_size
    return Rank(len(placement.host), token_bytes, until, ways)


def follow(worker: Any, ranks: list[Rank], way: str) -> None:
    layers, found = _layers(worker), ranks[worker.rank].ways[way]
    layers.set_stream_split(found.split)
    layers.whole_steps_until, layers.filled_steps_until = found.until, found.filled_until


def counters(worker: Any) -> Counters:
    return _layers(worker).counters()


def plain_read(worker: Any) -> float:
    """Bytes per second of a read of this rank's pool, with the method that was fastest at first."""
    pool = _layers(worker).pool
    assert pool is not None
    return _reader(pool.memory.data_ptr(), pool.memory.nbytes)()


@functools.cache
def _reader(start: int, size: int) -> Callable[[], float]:
    page = 1 << 20
    reader = PageReader(list(range(start, start + size - page + 1, page)), [page] * (size // page))

    def rate(method: ReadMethod) -> float:
        started = time.perf_counter()
        reader.read(method)
        return reader.total_bytes / (time.perf_counter() - started)

    best = max((ReadMethod(streams=streams) for streams in (1, 2, 4)), key=rate)
    return lambda: rate(best)


def _layers(worker: Any) -> Any:
    from fastattention_vllm.integration.host_layers import layers as host_layers  # needs vLLM, which a plot does not

    found = host_layers.find(worker.vllm_config)
    assert found is not None
    return found
