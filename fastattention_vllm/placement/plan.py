"""Decides which layers' KV caches are in host memory and which on the device. Pure functions over numbers.

The paper (arXiv 2410.16663, section 4.4) keeps the cache of L_GPU layers on the devices, and the cache of the other
L_CPU = L - L_GPU layers in host memory. With n devices of M bytes, weights W, activations A per device and one layer's
cache of B requests, kappa = 2 * B * S * H_kv * d * bytes_per_element:

    L_GPU = min(L, floor((n * (M - A) - W) / kappa))

This module computes it for one rank, from the bytes that weights and activations leave. It counts whole blocks, like
vLLM's block manager, and counts sliding-window layers by the tokens that they hold.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fastattention_vllm.placement.kv_size import KvSize

GIB = 1 << 30
MIN_FULL_BESIDE_STATES = 4
"""Full-attention layers that "auto" keeps on the device in a model with linear-attention layers.

vLLM puts as many linear-attention layers into a block table as there are full-attention layers on the device. With
fewer of these, a step prepares more tables: 12 for 48 layers with 4, 48 with 1."""


MAX_WINDOWS = 2
"""Lengths of sliding windows in one model. With each further one there are some 20 times as many splits."""
MAX_NAMED = 4
"""Lengths that a message names."""


class PlacementError(ValueError):
    """No plan meets the request. The message is one sentence with the numbers and what would work."""


class Kind(NamedTuple):
    """Layers that vLLM may put into the same block table."""

    name: str
    window: int | None
    """None: the block table keeps whole sequences."""
    layers: tuple[int, ...]
    keepers: tuple[int, ...]
    """One of these layers must stay on the device to keep the block table."""


@dataclass(frozen=True)
class Layers:
    """The attention layers of one rank that have a separate KV cache, by index in the model."""

    full: tuple[int, ...]
    windowed: tuple[int, ...] = ()
    fixed: frozenset[int] = frozenset()
    """Layers that must stay on the device, because other layers share their cache in the model."""
    windows: tuple[int, ...] = ()
    """The window of each layer of ``windowed``; empty: all have the same."""
    promoted: frozenset[int] = frozenset()
    """Layers of ``full`` that have a sliding window. vLLM keeps all their tokens, but only as long as a
    layer without a window is on the device, too."""

    def __post_init__(self) -> None:
        assert not set(self.full) & set(self.windowed)
        assert len(self.windows) in (0, len(self.windowed))
        assert self.promoted < set(self.full) or not self.promoted

    def kinds(self) -> list[Kind]:
        """The kinds that have layers: full attention, and one for each length of window."""
        keepers = tuple(index for index in self.full if index not in self.promoted)
        kinds = [Kind("full-attention", None, self.full, keepers)]
        windows = self.windows or (0,) * len(self.windowed)
        lengths = list(dict.fromkeys(windows))
        for length in lengths:
            layers = tuple(index for index, window in zip(self.windowed, windows, strict=True) if window == length)
            name = "sliding-window" if len(lengths) == 1 else f"sliding-window ({length} tokens)"
            kinds.append(Kind(name, length, layers, layers))
        return [kind for kind in kinds if kind.layers]


@dataclass(frozen=True)
class Limits:
    """The memory of one rank, and the requests that must fit."""

    device_bytes: int
    """Device memory for the KV cache, without weights, activations and the staging buffers of host layers."""
    host_bytes: int
    tokens: int
    """Length of one request, prompt and answer."""
    requests: int = 1
    """Number of concurrent requests of that length."""


@dataclass(frozen=True)
class LayerPlacement:
    """The plan of one rank."""

    host: tuple[int, ...]
    """Layer indices, ascending."""
    device: tuple[int, ...]
    device_size: KvSize
    """The layers that vLLM's block manager counts."""
    host_size: KvSize
    bytes_per_block: int
    """K and V of one layer's block on the device."""
    host_bytes_per_block: int
    """The same in host memory, which may store numbers of 8 bits (``stored_rows.py``)."""
    slabs: int
    """Maximum number of host layers per block table. Layers of different tables never use the same block, so they share
    memory."""

    def max_blocks(self, device_bytes: int, host_bytes: int) -> int:
        """Number of blocks for which device and host both have memory. All kinds of layers share vLLM's block pool."""
        blocks = device_bytes // self.device_size.null_block()
        return min(blocks, host_bytes // (self.slabs * self.host_bytes_per_block)) if self.slabs else blocks

    def usable(self, device_bytes: int, host_bytes: int) -> int:
        """``device_bytes`` reduced to whole blocks for which the host has memory, too."""
        return self.max_blocks(device_bytes, host_bytes) * self.device_size.null_block()

    def host_bytes(self, blocks: int) -> int:
        return blocks * self.slabs * self.host_bytes_per_block

    def host_seconds(self, tokens: int, bandwidth: float) -> float:
        """Predicted time of the host layers' attention for one decoded token after ``tokens`` tokens.

        Every byte of K and V in host memory is read once, at ``bandwidth`` bytes per second.
        """
        return _read_bytes(self.host_size, tokens) / bandwidth


def plan(layers: Layers, size: KvSize, wanted: Literal["auto"] | int | Sequence[int], limits: Limits) -> LayerPlacement:
    """Choose the host layers. Ranks with the same numbers get the same result.

    Args:
        layers: all layers to place.
        size: their size, as ``KvSize(full_layers=len(layers.full), windowed_layers=len(layers.windowed), ...)``.
        wanted: "auto": the layers that make ``limits`` fit while the least KV is read from the host; a number: as many
            layers, spread evenly; or the indices of the layers.
        limits: the memory, and the requests that must fit with "auto".

    Raises:
        PlacementError: the model has no such layers, or nothing fits; names what would work.
    """
    if isinstance(wanted, int):
        return _of_count(layers, size, wanted)
    if wanted == "auto":
        return _automatic(layers, size, limits)
    return _of_indices(layers, size, [int(index) for index in wanted])


def blocks_needed(placement: LayerPlacement, limits: Limits) -> int:
    """Number of blocks that the requests need, over all block tables."""
    return -(-_need(placement.device_size, limits) // placement.device_size.null_block())


def longest_request(layers: Layers, size: KvSize, limits: Limits) -> int:
    """The longest request, up to ``limits.tokens``, of which ``limits.requests`` fit with "auto"; 0 if none does."""
    above = dataclasses.replace(limits, tokens=limits.tokens + size.block_size)
    candidates = [c for c in all_splits(layers, size) if _keeps_full_layers(c, size)]
    return min(limits.tokens, _longest_request(candidates, above))


def why_too_long(
    placement: LayerPlacement, others: Sequence[LayerPlacement], tokens: int, device_bytes: int
) -> str | None:
    """Why a request of ``tokens`` tokens does not fit on the device, and what would, without a full stop; or None.

    ``others``: what could be chosen instead of ``placement``. vLLM starts without room for its null block.
    """
    size = placement.device_size
    need = size.of_request(tokens)
    if device_bytes >= need - size.null_block():
        return None
    enough = [len(other.host) for other in others if other.device_size.of_request(tokens) <= device_bytes]
    longest = size.longest_request(device_bytes)
    ways = [f"set host_kv_layers to {min(enough)}"] if enough else []
    ways += [f"pass --max-model-len {longest} or less"] if longest else []
    return (
        f"one request of max_model_len {tokens} needs {need / GIB:.2f} GiB for the KV cache on the device beside "
        f"{len(placement.host)} host layers, where {device_bytes / GIB:.2f} GiB are free; "
        f"{', or '.join(ways) or 'no number of host layers leaves room for one block'}"
    )


def spread(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """``count`` evenly spaced elements of ``layers``, beginning with the first."""
    return tuple(layers[i * len(layers) // count] for i in range(count))


def _of_indices(layers: Layers, size: KvSize, host: Sequence[int]) -> LayerPlacement:
    known = {*layers.full, *layers.windowed}
    for index in host:
        if index not in known:
            raise PlacementError(
                f"host_kv_layers contains layer {index}, which has no separate KV cache; choose from layers "
                f"{indices_text(known)}."
            )
        if index in layers.fixed:
            raise PlacementError(
                f"host_kv_layers contains layer {index}, but other layers share its KV cache; remove it from the list."
            )
    for kind in layers.kinds():
        if set(kind.keepers) <= set(host):
            raise PlacementError(
                f"host_kv_layers leaves no {kind.name} layer on the device, but one of each kind must stay there to "
                f"keep the block table; remove at least one of {indices_text(kind.keepers)} from the list."
            )
    placement = _placement(layers, size, set(host))
    if not _keeps_tables(placement, size):
        raise PlacementError(
            f"host_kv_layers {indices_text(host)} leaves {placement.device_size.full_layers} full-attention and "
            f"{placement.device_size.windowed_layers} sliding-window layers on the device, which would need "
            f"{placement.device_size.groups()} block tables in vLLM instead of {size.groups()}; keep the model's ratio "
            "of the kinds."
        )
    return placement


def _of_count(layers: Layers, size: KvSize, count: int) -> LayerPlacement:
    """Of all splits with ``count`` host layers, the one with the least KV on the device."""
    if count == 0:
        return _placement(layers, size, set())
    candidates = all_splits(layers, size)
    fitting = [candidate for candidate in candidates if len(candidate.host) == count]
    if not fitting:
        possible = sorted({len(candidate.host) for candidate in candidates})
        raise PlacementError(
            f"host_kv_layers {count} is not possible with {len(layers.full) + len(layers.windowed)} layers that have a "
            "KV cache, because one of each kind must stay on the device and the ratio of the kinds must not change; "
            f"possible values: {indices_text(possible)}."
        )
    return min(fitting, key=lambda candidate: _read_bytes(candidate.device_size, 1 << 20))


def _automatic(layers: Layers, size: KvSize, limits: Limits) -> LayerPlacement:
    candidates = [c for c in all_splits(layers, size) if _keeps_full_layers(c, size)]
    on_device = [c for c in candidates if _need(c.device_size, limits) <= limits.device_bytes]
    fitting = [c for c in on_device if c.host_bytes(blocks_needed(c, limits)) <= limits.host_bytes]
    if fitting:
        return min(fitting, key=lambda c: (_read_bytes(c.host_size, limits.tokens), len(c.host)))
    longest = _longest_request(candidates, limits)
    fits = f"; --max-model-len {longest} fits" if longest else ""
    fewest = f", and host_kv_layers {len(layers.full) - 1} leaves the fewest layers on the device"
    more = fewest if size.state_layers and len(layers.full) > 1 else ""
    raise PlacementError(
        f"{limits.requests} request(s) of {limits.tokens} tokens do not fit: the layers that must stay on the device "
        f"need {min(_need(c.device_size, limits) for c in candidates) / GIB:.2f} GiB of its memory, where "
        f"{limits.device_bytes / GIB:.2f} GiB are free; all layers together need {_need(size, limits) / GIB:.2f} GiB, "
        f"and the limit for host memory is {limits.host_bytes / GIB:.2f} GiB{fits} (host_kv_gib raises that limit"
        f"{more})."
    )


def _longest_request(candidates: Sequence[LayerPlacement], limits: Limits) -> int:
    """The maximum length per request, a multiple of the block size, for which one of ``candidates`` fits."""
    block = candidates[0].device_size.block_size

    def fits(blocks: int) -> bool:
        asked = dataclasses.replace(limits, tokens=blocks * block)
        return any(
            _need(c.device_size, asked) <= limits.device_bytes
            and c.host_bytes(blocks_needed(c, asked)) <= limits.host_bytes
            for c in candidates
        )

    low, high = 0, -(-limits.tokens // block)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * block


@functools.lru_cache(maxsize=1)
def all_splits(layers: Layers, size: KvSize) -> Sequence[LayerPlacement]:
    """All splits that keep the block tables, with at least one layer of each kind on the device.

    Raises:
        PlacementError: the model has more lengths of sliding windows than :data:`MAX_WINDOWS`.
    """
    if why := why_too_many_windows(layers):
        raise PlacementError(f"host layers do not support this model: {why}; set host_kv_layers to 0.")
    found, kinds = [], layers.kinds()
    for counts in itertools.product(*(_device_counts(kind, layers.fixed) for kind in kinds)):
        device = [_chosen(kind, count, layers.fixed) for kind, count in zip(kinds, counts, strict=True)]
        placement = _placement(layers, size, {*layers.full, *layers.windowed}.difference(*device))
        if _keeps_tables(placement, size):
            found.append(placement)
    return found


def why_too_many_windows(layers: Layers) -> str | None:
    """Why the splits of these layers are not searched, or None."""
    lengths = sorted(set(layers.windows))
    if len(lengths) <= MAX_WINDOWS:
        return None
    named = ", ".join(map(str, lengths[:MAX_NAMED])) + (", ..." if len(lengths) > MAX_NAMED else "")
    return f"its sliding windows have {len(lengths)} lengths ({named} tokens), and {MAX_WINDOWS} are supported"


def _keeps_tables(placement: LayerPlacement, size: KvSize) -> bool:
    """Whether the layers on the device need no more block tables than all layers; states may need more."""
    return bool(size.state_layers) or placement.device_size.groups() <= size.groups()


def _keeps_full_layers(placement: LayerPlacement, size: KvSize) -> bool:
    least = min(MIN_FULL_BESIDE_STATES, size.full_layers) if size.state_layers else 0
    return placement.device_size.full_layers >= least


def _device_counts(kind: Kind, fixed: frozenset[int]) -> range:
    """How many of a kind may stay on the device."""
    return range(max(len(_staying(kind, fixed)), 1), len(kind.layers) + 1)


def _chosen(kind: Kind, count: int, fixed: frozenset[int]) -> set[int]:
    """``count`` device layers of one kind: those that must stay, and others at even distances."""
    stays = _staying(kind, fixed)
    free = [index for index in kind.layers if index not in stays]
    more = count - len(stays)
    return {*stays, *spread(free, more)} if more else set(stays)


def _staying(kind: Kind, fixed: frozenset[int]) -> frozenset[int]:
    """The layers of a kind that stay on the device in every split: the fixed ones, and one that keeps the table.

    Where any layer keeps the table, none has to be the one.
    """
    stays = fixed.intersection(kind.layers)
    if kind.keepers == kind.layers or stays.intersection(kind.keepers):
        return stays
    return stays | {kind.keepers[0]}


def _placement(layers: Layers, size: KvSize, host: set[int]) -> LayerPlacement:
    device_layers = {*layers.full, *layers.windowed} - host
    host_block = size.bytes_per_block if size.host_bytes_per_block is None else size.host_bytes_per_block
    on_host = dataclasses.replace(
        _part(layers, size, host),
        state_layers=0,
        draft_layers=0,
        draft_bytes=0,
        bytes_per_block=host_block,
    )
    device = _part(layers, size, device_layers)
    if not host:
        slabs = 0
    elif device.groups() == 1 or (not on_host.windowed_layers and device.full_tables() == 1):
        slabs = len(host)
    else:
        # One more than an even distribution: which layers vLLM puts together is its own business.
        slabs = 1 + max(_slabs(kind, host, device) for kind in layers.kinds())
    return LayerPlacement(
        host=tuple(sorted(host)),
        device=tuple(sorted(device_layers)),
        device_size=device,
        host_size=on_host,
        bytes_per_block=size.bytes_per_block,
        host_bytes_per_block=host_block,
        slabs=slabs,
    )


def _part(layers: Layers, size: KvSize, chosen: set[int]) -> KvSize:
    """``size`` with the ``chosen`` ones of its layers."""
    windowed = [index in chosen for index in layers.windowed]
    return dataclasses.replace(
        size,
        full_layers=len(chosen.intersection(layers.full)),
        windowed_layers=sum(windowed),
        windows=tuple(itertools.compress(size.windows, windowed)),
    )


def _slabs(kind: Kind, host: set[int], device: KvSize) -> int:
    """Number of a kind's host layers per block table, evenly distributed."""
    on_host = len(host.intersection(kind.layers))
    on_device = len(kind.layers) - on_host + (device.draft_layers if kind.window is None else 0)
    return -(-on_host // -(-on_device // device.layers_per_group()))


def _need(size: KvSize, limits: Limits) -> int:
    """Bytes that the requests need, including vLLM's null block once."""
    return limits.requests * (size.of_request(limits.tokens) - size.null_block()) + size.null_block()


def _read_bytes(size: KvSize, tokens: int) -> int:
    """KV bytes that one decode step of a request of ``tokens`` tokens reads."""
    per_token = size.bytes_per_block // size.block_size
    seen = sum(count * min(window, tokens) for window, count in size.windowed().items())
    return per_token * (size.full_layers * tokens + seen)


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
