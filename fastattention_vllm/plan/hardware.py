"""Devices, hosts and links, and the measured constants: the data files of this folder, each line with its source."""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from fastattention_vllm.plan.errors import PlanError

GIB = 1 << 30
TABLES_FILE, MEASURED_FILE = "hardware.json", "measured.json"
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: Annotated[str, Field(min_length=1)]


class Device(Entry):
    """A GPU or an NPU."""

    capability: tuple[int, int] | None
    """The compute capability of an NVIDIA GPU; None for others."""
    memory_gib: Positive
    """The amount that PyTorch reports."""
    tflops: Positive
    """Peak of 16-bit matrix products with fp32 sums, without sparsity."""
    gb_per_s: Positive
    """Peak memory bandwidth."""
    kernels: str
    host: str
    """The host that is assumed if the user names none."""
    peers: str


class Host(Entry):
    devices: Annotated[int, Field(ge=1)]
    """Maximum number of devices."""
    cores: Annotated[int, Field(ge=1)]
    memory_gib: Positive
    read_gb_per_s: Positive
    """Plain reads by all cores."""
    link_gb_per_s: Positive
    """Copies from host to one device alone."""
    links_gb_per_s: Positive
    """Copies to all devices at once."""

    def link_bytes(self, ranks: int) -> float:
        """Bytes per second to each of ``ranks`` devices at once."""
        return 1e9 * min(self.link_gb_per_s, self.links_gb_per_s / ranks)


class Peers(Entry):
    """A link between devices."""

    gb_per_s: Positive
    """The bus bandwidth of an all-reduce."""


class Kernels(Entry):
    dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    kv_8_bits_from: tuple[int, int] | None
    """The smallest compute capability for an fp8 KV cache; None without one."""
    head_sizes: tuple[int, ...] | Annotated[int, Field(ge=8)]
    """The head sizes, or a number of which they are multiples."""
    soft_caps: bool
    """Whether attention logits may have a soft cap."""
    own: bool
    """Whether these are this package's kernels. They need memory for parts in decoding, and read fp8 KV with one scale
    for K and one for V in each layer."""
    obeys_cache_schemes: bool
    """Whether the vLLM there stores fp8 KV for a checkpoint with ``kv_cache_scheme`` whatever --kv-cache-dtype says, as
    0.19 does. Assumed of vllm-ascend's."""
    text_of_two_way_images: bool
    """Whether the vLLM there serves text with a model whose images are attended to in both directions: 0.32 and newer.
    """
    attention_fractions: tuple[tuple[int, Fraction], ...]
    """Up to this head size: the fraction of peak FLOPs that attention over a prompt reaches."""
    state: str
    """Whether these kernels have run on this hardware."""
    enlarges_blocks_by: Annotated[int, Field(ge=16)]
    """Tokens. The blocks of a model with linear-attention layers are a multiple of this, so that one holds a state:
    HOST_BLOCK, but 16 in vLLM 0.19, the last version with kernels for the V100."""
    host_layers_beside_states: bool
    """Whether the engine accepts host layers in such a model."""
    host_layers_of_8_bits: bool
    """Whether host layers may store 8 bits where device layers store 16 (``host_kv_dtype``)."""
    copies_of_host_layers: bool
    """Whether blocks of host layers may have copies on the device (``resident_kv_gib``)."""
    quantised_weights: bool
    """Whether this package loads quantised weights there, because vLLM's kernels for them need newer GPUs."""
    graphs_with_host_layers: Literal["none", "CPU alone", "shared"]
    """Whether a decoding step can be one graph, and whether the device can read its share of host KV there."""

    def attention_fraction(self, head_size: int) -> float:
        for largest, fraction in self.attention_fractions:
            if head_size <= largest:
                return fraction
        raise PlanError(
            f"heads of size {head_size} are larger than {self.name} supports "
            f"(up to {self.attention_fractions[-1][0]}); plan another model."
        )


class Tables(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    devices: dict[str, Device]
    hosts: dict[str, Host]
    peers: dict[str, Peers]
    kernels: dict[str, Kernels]


class Constant(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    value: Positive
    what: str
    source: Annotated[str, Field(min_length=1)]


class Curve(BaseModel):
    """Fractions by a number, with straight lines over its logarithm in between."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    points: Annotated[tuple[tuple[Positive, Fraction], ...], Field(min_length=2)]
    what: str
    source: Annotated[str, Field(min_length=1)]

    def at(self, number: float) -> float:
        numbers = [point[0] for point in self.points]
        index = bisect.bisect_right(numbers, number)
        if index == 0 or index == len(numbers):
            return self.points[max(index - 1, 0)][1]
        (low, first), (high, second) = self.points[index - 1], self.points[index]
        return first + (second - first) * math.log(number / low) / math.log(high / low)


class Measured(BaseModel):
    """Constants of this project's code, apart from its kernels'."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    linear_fraction: Constant
    device_memory_fraction: Constant
    layer_us: Constant
    all_reduce_us: Constant
    launch_ms: Constant
    stream_ms: Constant
    link_beside_cpu: Constant
    link_in_place: Constant
    ring_us: Constant
    merge_us: Constant
    core_gb_per_s: Constant
    driver_gib: Constant
    server_gib: Constant
    cpu_by_mib: Curve
    cpu_by_group: Curve


@dataclass(frozen=True)
class Machine:
    """One kind of device, ``ranks`` of them in one host."""

    device_key: str
    device: Device
    host_key: str
    host: Host
    peers: Peers
    kernels: Kernels
    ranks: int

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        """The dtypes of KV caches on this device."""
        needed, capability = self.kernels.kv_8_bits_from, self.device.capability
        has_8_bits = needed is not None and capability is not None and capability >= needed
        return tuple(name for name in self.kernels.kv_dtypes if has_8_bits or not name.startswith("fp8"))

    @property
    def device_bytes(self) -> int:
        return int(self.device.memory_gib * GIB)

    @property
    def free_host_bytes(self) -> int:
        """Host memory of one rank beside vLLM's processes."""
        return max(0, int(self.host.memory_gib * GIB) // self.ranks - int(measured().server_gib.value * GIB))


AnyModel = TypeVar("AnyModel", bound=BaseModel)


def _load(name: str, model: type[AnyModel]) -> AnyModel:
    return model.model_validate_json((resources.files(__package__) / name).read_text(encoding="utf-8"))


@functools.cache
def tables() -> Tables:
    return _load(TABLES_FILE, Tables)


@functools.cache
def measured() -> Measured:
    return _load(MEASURED_FILE, Measured)


def machine(gpu: str, ranks: int, host: str | None = None, **changes: float | None) -> Machine:
    """The machine of these names.

    Args:
        gpu: a name in ``hardware.json``.
        ranks: number of devices.
        host: a name in ``hardware.json``; None for the device's usual host.
        changes: fields of the host to replace, as the user knows them; None leaves one as it is.

    Raises:
        PlanError: an unknown name, or more ranks than the host has devices.
    """
    known = tables()
    if gpu not in known.devices:
        raise PlanError(f"--gpu {gpu} is not known; known names: {', '.join(known.devices)}.")
    device = known.devices[gpu]
    host_key = host or device.host
    if host_key not in known.hosts:
        raise PlanError(f"--host {host_key} is not known; known names: {', '.join(known.hosts)}.")
    asked = {name: value for name, value in changes.items() if value is not None}
    found = known.hosts[host_key]
    if "link_gb_per_s" in asked:
        asked["links_gb_per_s"] = asked["link_gb_per_s"] * found.links_gb_per_s / found.link_gb_per_s
    found = found.model_copy(update=asked)
    if ranks > found.devices:
        fitting = [name for name, other in known.hosts.items() if other.devices >= ranks]
        fix = f"--host {' or '.join(fitting)}" if fitting else f"--tp {found.devices} or less"
        raise PlanError(f"--tp {ranks} needs more devices than host {host_key} has ({found.devices}); use {fix}.")
    return Machine(
        device_key=gpu,
        device=device,
        host_key=host_key,
        host=found,
        peers=known.peers[device.peers],
        kernels=known.kernels[device.kernels],
        ranks=ranks,
    )
