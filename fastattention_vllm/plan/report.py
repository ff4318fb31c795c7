"""The plan as data: what ``--json`` prints. The schema has a version."""

from __future__ import annotations

import json
import shlex
from typing import Literal

from pydantic import BaseModel, ConfigDict

from fastattention_vllm.plan import speed
from fastattention_vllm.plan.hardware import GIB, Machine, measured
from fastattention_vllm.plan.memory import DeviceMemory, MemoryPlan
from fastattention_vllm.plan.model import ModelShape
from fastattention_vllm.plan.refused import serving_dtype

PAPER = "our reconstruction of the paper's formula (arXiv 2410.16663, section 4.4); the server does not use it"


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(Part):
    folder: str
    architecture: str
    layers: int
    parameters: int
    max_positions: int
    kv_bytes_per_token: int
    """All layers and devices."""


class Hardware(Part):
    device: str
    devices: int
    host: str
    kernels: str
    state: str
    """Whether these kernels have run on this hardware."""
    host_memory_bytes: int
    sources: list[str]


class Asked(Part):
    context: int
    requests: int
    kv_dtype: str
    host_kv_dtype: str
    batched_tokens: int


class Places(Part):
    device_layers: list[int]
    host_layers: list[int]


class Paper(Part):
    label: str = PAPER
    device_layers: int
    """L_GPU."""
    host_layers: int
    """L_CPU."""
    layer_bytes: int
    """kappa: one layer's KV cache on all devices."""
    free_bytes: int
    """n * (M - A) - W."""


class DeviceBytes(Part):
    """Memory of one device. vLLM allocates ``kv`` bytes of KV cache, and the requests need ``kv_needed`` of them."""

    total: int
    weights: int
    driver: int
    activations: int
    workspace: int
    staging: int
    """Staging buffers and copies of host layers."""
    kv: int
    kv_needed: int
    free: int


class HostBytes(Part):
    """Memory of the host. All ranks allocate ``pool`` bytes at start, and the requests need ``kv_needed`` of them."""

    total: int
    pool: int
    kv_needed: int
    limit: int
    """The sum of the ranks' limits."""


class Capacity(Part):
    longest_context: int
    """For the requested number of requests."""
    longest_context_on_device: int
    """For one request, without host layers."""
    largest_batch: int
    """Requests of that context at once, if host_kv_requests asks for them; at most --max-num-seqs."""
    largest_batch_on_device: int
    """The same without host layers."""


class Speed(Part):
    seconds: float
    """One prompt, or one decoding step."""
    tokens_per_second: float
    limited_by: speed.Limit
    parts: dict[speed.Limit, float]
    """Seconds, the longest first."""


class PlanReport(Part):
    schema_version: Literal[1] = 1
    model: Model
    hardware: Hardware
    asked: Asked
    auto: Places
    """Chosen by the function that the server calls with ``host_kv_layers`` "auto"."""
    paper: Paper
    device: DeviceBytes
    host: HostBytes
    capacity: Capacity
    prefill: Speed
    decode: Speed
    serve: list[str]
    """The words of the command."""
    notes: list[str]

    @property
    def serve_command(self) -> str:
        return shlex.join(self.serve)


def report(plan: MemoryPlan, folder: str) -> PlanReport:
    shape, machine, placement, ranks = plan.shape, plan.machine, plan.placement, plan.machine.ranks
    return PlanReport(
        model=Model(
            folder=folder,
            architecture=shape.architecture,
            layers=shape.num_layers,
            parameters=shape.parameters(),
            max_positions=shape.max_positions,
            kv_bytes_per_token=plan.kv_bytes_per_token * shape.kv_layers * ranks,
        ),
        hardware=Hardware(
            device=machine.device.name,
            devices=ranks,
            host=machine.host.name,
            kernels=machine.kernels.name,
            state=machine.kernels.state,
            host_memory_bytes=int(machine.host.memory_gib * (1 << 30)),
            sources=sources(machine),
        ),
        asked=Asked(
            context=plan.request.context,
            requests=plan.request.requests,
            kv_dtype=plan.kv_dtype,
            host_kv_dtype=plan.request.host_kv_dtype,
            batched_tokens=plan.request.batched_tokens,
        ),
        auto=Places(device_layers=list(placement.device), host_layers=list(placement.host)),
        paper=Paper(
            device_layers=plan.paper.device_layers,
            host_layers=plan.paper.host_layers,
            layer_bytes=plan.paper.layer_bytes,
            free_bytes=plan.paper.free_bytes,
        ),
        device=device_bytes(plan, plan.device),
        host=HostBytes(
            total=int(machine.host.memory_gib * (1 << 30)),
            pool=ranks * placement.host_bytes(placement.max_blocks(plan.device.kv, plan.host_budget)),
            kv_needed=ranks * plan.host_kv_needed,
            limit=ranks * plan.host_budget,
        ),
        capacity=Capacity(
            longest_context=plan.longest_context,
            longest_context_on_device=plan.longest_on_device,
            largest_batch=plan.largest_batch,
            largest_batch_on_device=plan.largest_batch_on_device,
        ),
        prefill=as_speed(speed.prefill(plan)),
        decode=as_speed(speed.decode(plan)),
        serve=serve_words(plan, folder),
        notes=notes(shape, machine, plan),
    )


def device_bytes(plan: MemoryPlan, memory: DeviceMemory) -> DeviceBytes:
    placement = plan.placement
    kv = placement.usable(memory.kv, plan.host_budget)
    return DeviceBytes(
        total=memory.total,
        weights=memory.weights,
        driver=memory.driver,
        activations=memory.activations,
        workspace=memory.workspace,
        staging=memory.staging + memory.copies,
        kv=kv,
        kv_needed=plan.device_kv_needed,
        free=memory.unused + memory.kv - kv,
    )


def as_speed(prediction: speed.Prediction) -> Speed:
    return Speed(
        seconds=prediction.seconds,
        tokens_per_second=prediction.tokens_per_second,
        limited_by=prediction.limited_by,
        parts=prediction.parts,
    )


def serve_words(plan: MemoryPlan, folder: str) -> list[str]:
    """`vllm serve` with everything that was decided here."""
    request, shape, machine = plan.request, plan.shape, plan.machine
    words = ["vllm", "serve", folder, "--attention-backend", "fastattention"]
    if machine.ranks > 1:
        words += ["--tensor-parallel-size", str(machine.ranks)]
    words += ["--max-model-len", str(request.context), "--max-num-batched-tokens", str(request.batched_tokens)]
    words += ["--max-num-seqs", str(request.max_num_seqs)]
    words += ["--gpu-memory-utilization", f"{request.utilization:g}"]
    if shape.dtype != (dtype := serving_dtype(shape, machine)):
        words += ["--dtype", dtype]
    if shape.unscaled_positions and request.context > shape.unscaled_positions:
        changed: dict[str, object] = {"max_position_embeddings": shape.max_positions}
        words += ["--hf-overrides", json.dumps({"text_config": changed} if shape.has_images else changed)]
    if shape.serves_text_alone:
        words += ["--limit-mm-per-prompt", json.dumps({"image": 0})]
    if request.kv_dtype != "auto":
        words += ["--kv-cache-dtype", request.kv_dtype]
    if request.kv_cache_gib is not None:
        words += ["--kv-cache-memory-bytes", str(plan.device.kv)]
    options: dict[str, float | str] = {}
    if request.host_kv_dtype != "auto":
        options["host_kv_dtype"] = request.host_kv_dtype
    if plan.device.copies:
        options["resident_kv_gib"] = request.resident_kv_gib
    if request.requests > 1:
        options["host_kv_requests"] = request.requests
    if plan.host_kv_gib is not None and plan.placement.host:
        options["host_kv_gib"] = plan.host_kv_gib
    if options:
        words += ["--additional-config", json.dumps({"fastattention": options})]
    return words


def sources(machine: Machine) -> list[str]:
    entries = (machine.device, machine.host, machine.kernels) + ((machine.peers,) if machine.ranks > 1 else ())
    return [f"{entry.name}: {entry.source}" for entry in entries]


def notes(shape: ModelShape, machine: Machine, plan: MemoryPlan) -> list[str]:
    found = [f"{machine.kernels.name}: {machine.kernels.state}."]
    if plan.placement.host:
        found.append(
            f"The host is {machine.host.name} with {machine.host.read_gb_per_s:g} GB/s of memory bandwidth; "
            "measure yours with `fastattention doctor` and pass it with --host-gb-per-s."
        )
    if plan.placement.host and plan.request.host_kv_dtype != "auto":
        found.append(
            f"Host layers store {plan.request.host_kv_dtype}: {plan.host_bytes_per_token} bytes per token, layer and "
            f"device instead of {plan.kv_bytes_per_token}. The speed counts the bytes, but not that a CPU computes "
            "more for each: on the host of an H100, decoding was slower than predicted (docs/plan.md)."
        )
    if plan.device.copies:
        found.append(
            f"{plan.device.copies / GIB:.2f} GiB of each device hold copies of host layers' first blocks. The speed of "
            "decoding does not count them: shorter requests will be faster."
        )
    if plan.host_kv_gib is not None and plan.request.host_kv_gib is None:
        found.append(
            f"host_kv_gib is set to {plan.host_kv_gib:g} GiB per rank, because the default (half of the free host "
            "memory) is not enough."
        )
    if machine.ranks > 1:
        found.append("The speeds do not include tiling-AllReduce, which hides a part of the all-reduces.")
    if shape.windowed_layers:
        found.append(f"{len(shape.windowed_layers)} layers see {shape.window} tokens and keep only these.")
    if shape.linear:
        states = plan.size.states_of_request() / GIB
        found.append(
            f"{len(shape.linear_layers)} linear-attention layers keep {states:.3f} GiB of states per request on each "
            f"device, in blocks of {plan.size.block_size} tokens. The speeds include their matrices, but not the time "
            "of their own kernels in a prompt."
        )
    if plan.host_layers_refused:
        found.append(f"Host layers are not counted, because {plan.host_layers_refused}.")
    if shape.cache.dtype and plan.kv_dtype == shape.cache.dtype:
        found.append(f"The checkpoint asks vLLM for a KV cache in {shape.cache.dtype} ({shape.cache.key}).")
    if shape.serves_text_alone:
        found.append(
            "The server takes text alone, because the tokens of an image would attend to each other in both directions."
        )
    if shape.has_images:
        found.append("The image encoder's weights are not counted; pass --weights-gib with the size of all weights.")
    if plan.placement.host:
        found.append(_decoding(plan))
    return found


def _decoding(plan: MemoryPlan) -> str:
    """How the engine decodes with host layers, in sentences."""
    way = speed.engines_way(plan)
    if not way.in_graph:
        return (
            "A decoding step of this length runs in pieces. The CPU needs "
            f"{measured().launch_ms.value:g} ms per host layer to launch the device's work. This was measured with an "
            "H200; a slower CPU takes longer."
        )
    if way.shares:
        return (
            "A decoding step of this length is one CUDA graph, in which the device reads "
            f"{way.split.in_graph():.0%} of the host KV over the link."
        )
    return "A decoding step of this length is one CUDA graph, in which the CPU alone reads the host KV."
