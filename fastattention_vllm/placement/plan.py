"""Which layers' KV cache lies in host memory and which on the device: numbers in, a frozen plan out.

The paper (arXiv 2410.16663, section 4.4) keeps the cache of L_GPU layers on the devices and that of the other
L_CPU = L - L_GPU layers in host memory. With n devices of M bytes, weights W, activations A per device and one layer's
cache of B requests, kappa = 2 * B * S * H_kv * d * bytes_per_element:

    L_GPU = min(L, floor((n * (M - A) - W) / kappa))

Here it is computed on one rank, from the bytes that are left beside its weights and activations, in whole blocks as
vLLM's block manager counts them, and with the layers that see a window of tokens counted as what they hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fastattention_vllm.placement.kv_size import KvSize

GIB = 1 << 30


class PlacementError(ValueError):
    """No plan does what was asked; one sentence with the numbers and what would work."""


@dataclass(frozen=True)
class Layers:
    """The attention layers of one rank that have a KV cache of their own, by index in the model."""

    full: tuple[int, ...]
    windowed: tuple[int, ...] = ()
    fixed: frozenset[int] = frozenset()
    """Those that must stay on the device: other layers really share their cache."""

    def __post_init__(self) -> None:
        assert not set(self.full) & set(self.windowed)


@dataclass(frozen=True)
class Limits:
    """What there is on one rank, and what is wanted of it."""

    device_bytes: int
    """For the KV cache: beside the weights, activations and the staging of host layers."""
    host_bytes: int
    tokens: int
    """Of one request, prompt and answer."""
    requests: int = 1
    """Of that length, at the same time."""


@dataclass(frozen=True)
class LayerPlacement:
    """The plan of one rank."""

    host: tuple[int, ...]
    """Layer indices, ascending."""
    device: tuple[int, ...]
    device_size: KvSize
    """What is left for the device's block manager to count."""
    host_size: KvSize
    bytes_per_block: int
    """K and V of one layer's block."""
    slabs: int
    """Most host layers of one block table; layers of different ones never use the same block and share memory."""

    def max_blocks(self, device_bytes: int, host_bytes: int) -> int:
        """Blocks that both sides have memory for. vLLM allots them to all kinds of layers from one pool."""
        blocks = device_bytes // (self.device_size.layers_per_group() * self.bytes_per_block)
        return min(blocks, host_bytes // (self.slabs * self.bytes_per_block)) if self.slabs else blocks

    def usable(self, device_bytes: int, host_bytes: int) -> int:
        """The part of ``device_bytes`` that makes whole blocks for which the host has memory, too."""
        return self.max_blocks(device_bytes, host_bytes) * self.device_size.null_block()

    def host_bytes(self, blocks: int) -> int:
        return blocks * self.slabs * self.bytes_per_block

    def host_seconds(self, tokens: int, bandwidth: float) -> float:
        """Predicted time for the host layers' attention of one token of a request of ``tokens`` tokens.

        Every byte of K and V in host memory is read once, at ``bandwidth`` bytes per second.
        """
        return _read_bytes(self.host_size, tokens) / bandwidth


def plan(layers: Layers, size: KvSize, wanted: Literal["auto"] | int | Sequence[int], limits: Limits) -> LayerPlacement:
    """Choose the host layers. The same on every rank that is given the same numbers.

    Args:
        layers: what there is to place.
        size: of all of them, as ``KvSize(full_layers=len(layers.full), windowed_layers=len(layers.windowed), ...)``.
        wanted: "auto": those that make ``limits`` fit, with the least KV to be read from the host; a number: so many,
            spread evenly; or their indices.
        limits: the memory, and the requests that "auto" is to fit.

    Raises:
        PlacementError: asked for what the model does not have, or nothing fits; names what does.
    """
    if isinstance(wanted, int):
        return _of_count(layers, size, wanted)
    if wanted == "auto":
        return _automatic(layers, size, limits)
    return _of_indices(layers, size, [int(index) for index in wanted])


def spread(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """``count`` of ``layers`` at even distances, the first of them first."""
    return tuple(layers[i * len(layers) // count] for i in range(count))


def _of_indices(layers: Layers, size: KvSize, host: Sequence[int]) -> LayerPlacement:
    known = {*layers.full, *layers.windowed}
    for index in host:
        if index not in known:
            raise PlacementError(
                f"host_kv_layers names layer {index}, but the layers with a KV cache of their own are "
                f"{indices_text(known)}."
            )
        if index in layers.fixed:
            raise PlacementError(
                f"host_kv_layers names layer {index}, whose KV cache other layers share; leave it out."
            )
    for kind, name in ((layers.full, "full-attention"), (layers.windowed, "sliding-window")):
        if kind and set(kind) <= set(host):
            raise PlacementError(
                f"host_kv_layers leaves no {name} layer on the device, which needs at least one of each kind to keep "
                f"the block table; leave out one of {indices_text(kind)}."
            )
    placement = _placement(layers, size, set(host))
    if placement.device_size.groups() > size.groups():
        raise PlacementError(
            f"host_kv_layers {indices_text(host)} leaves {placement.device_size.full_layers} full-attention and "
            f"{placement.device_size.windowed_layers} sliding-window layers on the device, for which vLLM needs "
            f"{placement.device_size.groups()} block tables instead of {size.groups()}; keep the kinds in proportion."
        )
    return placement


def _of_count(layers: Layers, size: KvSize, count: int) -> LayerPlacement:
    """Of the splits with that many host layers, the one that leaves the device least to hold."""
    if count == 0:
        return _placement(layers, size, set())
    candidates = _candidates(layers, size)
    fitting = [candidate for candidate in candidates if len(candidate.host) == count]
    if not fitting:
        possible = sorted({len(candidate.host) for candidate in candidates})
        raise PlacementError(
            f"host_kv_layers {count} is not possible: of {len(layers.full) + len(layers.windowed)} layers with a KV "
            f"cache, one of each kind stays on the device, and the kinds keep their proportion; "
            f"possible: {indices_text(possible)}."
        )
    return min(fitting, key=lambda candidate: _read_bytes(candidate.device_size, 1 << 20))


def _automatic(layers: Layers, size: KvSize, limits: Limits) -> LayerPlacement:
    candidates = _candidates(layers, size)
    on_device = [c for c in candidates if _need(c.device_size, limits) <= limits.device_bytes]
    fitting = [c for c in on_device if c.host_bytes(_blocks(c, limits)) <= limits.host_bytes]
    if fitting:
        return min(fitting, key=lambda c: (_read_bytes(c.host_size, limits.tokens), len(c.host)))
    longest = _longest_request(candidates, limits)
    fits = f"; --max-model-len {longest} fits" if longest else ""
    raise PlacementError(
        f"{limits.requests} request(s) of {limits.tokens} tokens do not fit: the layers that must stay on the device "
        f"need {min(_need(c.device_size, limits) for c in candidates) / GIB:.2f} GiB there and "
        f"{limits.device_bytes / GIB:.2f} are free, all layers together {_need(size, limits) / GIB:.2f} GiB, and "
        f"{limits.host_bytes / GIB:.2f} GiB of host memory may be used{fits} (host_kv_gib raises the host's share)."
    )


def _longest_request(candidates: Sequence[LayerPlacement], limits: Limits) -> int:
    """The most tokens, a multiple of the block size, of so many requests that one of ``candidates`` can hold."""
    block = candidates[0].device_size.block_size

    def fits(blocks: int) -> bool:
        asked = dataclasses.replace(limits, tokens=blocks * block)
        return any(
            _need(c.device_size, asked) <= limits.device_bytes and c.host_bytes(_blocks(c, asked)) <= limits.host_bytes
            for c in candidates
        )

    low, high = 0, -(-limits.tokens // block)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * block


def _candidates(layers: Layers, size: KvSize) -> list[LayerPlacement]:
    """Every split by numbers of each kind that keeps the block tables: at least one layer of each on the device."""
    found = []
    for full in _device_counts(layers.full, layers.fixed):
        for windowed in _device_counts(layers.windowed, layers.fixed):
            device = _chosen(layers.full, full, layers.fixed) | _chosen(layers.windowed, windowed, layers.fixed)
            placement = _placement(layers, size, {*layers.full, *layers.windowed} - device)
            if placement.device_size.groups() <= size.groups():
                found.append(placement)
    return found


def _device_counts(kind: Sequence[int], fixed: frozenset[int]) -> range:
    """How many of a kind may stay on the device."""
    return range(max(len(fixed.intersection(kind)), 1), len(kind) + 1) if kind else range(1)


def _chosen(kind: Sequence[int], count: int, fixed: frozenset[int]) -> set[int]:
    """``count`` device layers of one kind: the fixed ones, and others at even distances."""
    stays = fixed.intersection(kind)
    free = [index for index in kind if index not in stays]
    more = count - len(stays)
    return {*stays, *spread(free, more)} if more else set(stays)


def _placement(layers: Layers, size: KvSize, host: set[int]) -> LayerPlacement:
    full, windowed = (tuple(index for index in kind if index in host) for kind in (layers.full, layers.windowed))
    on_host = dataclasses.replace(size, full_layers=len(full), windowed_layers=len(windowed))
    device = dataclasses.replace(
        size, full_layers=size.full_layers - len(full), windowed_layers=size.windowed_layers - len(windowed)
    )
    if not host:
        slabs = 0
    elif device.groups() == 1:
        slabs = len(host)
    else:
        # One more than an even distribution: which layers vLLM puts together is its own business.
        group = device.layers_per_group()
        kinds = ((full, device.full_layers), (windowed, device.windowed_layers))
        slabs = 1 + max(-(-len(kind) // -(-left // group)) for kind, left in kinds if kind)
    return LayerPlacement(
        host=tuple(sorted(host)),
        device=tuple(sorted({*layers.full, *layers.windowed} - host)),
        device_size=device,
        host_size=on_host,
        bytes_per_block=size.bytes_per_block,
        slabs=slabs,
    )


def _need(size: KvSize, limits: Limits) -> int:
    """Bytes for the requests asked for; vLLM's null block once."""
    return limits.requests * (size.of_request(limits.tokens) - size.null_block()) + size.null_block()


def _blocks(placement: LayerPlacement, limits: Limits) -> int:
    """Blocks, of all block tables together, that the requests asked for take."""
    return -(
        -_need(placement.device_size, limits) // (placement.device_size.layers_per_group() * placement.bytes_per_block)
    )


def _read_bytes(size: KvSize, tokens: int) -> int:
    """KV bytes that one decode step of a request of ``tokens`` tokens reads."""
    per_token = size.bytes_per_block // size.block_size
    return per_token * (size.full_layers * tokens + size.windowed_layers * min(size.window, tokens))


def indices_text(numbers: Sequence[int] | set[int]) -> str:
    """``0-3, 7``."""
    ordered = sorted(set(numbers))
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"
