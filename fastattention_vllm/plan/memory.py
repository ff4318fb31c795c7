"""Which layers' KV caches are where, and the bytes of everything. The decisions are those of ``placement``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fastattention_vllm.placement.budget import (
    HOST_BLOCK,
    NUM_BUFFERS,
    STAGING_BYTES,
    WIDENED_BYTES,
    WORKSPACE,
    activation_bytes,
    decoding_bytes,
    device_kv_bytes,
    host_kv_bytes,
)
from fastattention_vllm.placement.kv_size import HOST_DTYPES, KvSize, host_token_bytes
from fastattention_vllm.placement.plan import (
    LayerPlacement,
    Layers,
    Limits,
    PlacementError,
    blocks_needed,
    longest_request,
    plan,
)
from fastattention_vllm.plan.errors import DoesNotFitError, PlanError
from fastattention_vllm.plan.hardware import GIB, Machine, measured
from fastattention_vllm.plan.model import ModelShape
from fastattention_vllm.plan.refused import serving_dtype

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
SAME_AS_FP8 = ("fp8", "fp8_e4m3")
STATES = 2
"""States that a request keeps in each linear-attention layer with prefix caching: the current one, and that at the
end of a block."""
MAX_NUM_SEQS = 256
"""vLLM's default of requests at once. It reserves memory for the logits of so many."""


@dataclass(frozen=True)
class Request:
    """The requests that must fit, and the server's options."""

    context: int
    """Tokens of one request, prompt and answer."""
    requests: int = 1
    kv_dtype: str = "auto"
    host_kv_dtype: str = "auto"
    """The dtype of host layers; "auto": that of all others."""
    resident_kv_gib: float = 0
    """Memory of each device for copies of host layers' blocks, if there are host layers."""
    batched_tokens: int = 8192
    """--max-num-batched-tokens."""
    utilization: float = 0.9
    """--gpu-memory-utilization."""
    weights_gib: float | None = None
    """Weights of all devices together; None: calculated from the model's config.json."""
    kv_cache_gib: float | None = None
    """Limit of the KV memory per device; None: what is left."""
    host_kv_gib: float | None = None
    """Limit of host memory for host layers per rank; None: chosen here."""

    @property
    def max_num_seqs(self) -> int:
        return max(MAX_NUM_SEQS, self.requests)


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device."""

    total: int
    weights: int
    driver: int
    activations: int
    workspace: int
    staging: int
    unused: int
    """Memory that --gpu-memory-utilization leaves to other programs."""
    kv: int
    """Memory that is left for the KV cache."""
    copies: int = 0
    """Copies of host layers' blocks."""


@dataclass(frozen=True)
class PaperPlacement:
    """Our reconstruction of the paper's formula (arXiv 2410.16663, section 4.4), over all devices together."""

    device_layers: int
    """L_GPU."""
    host_layers: int
    """L_CPU."""
    layer_bytes: int
    """kappa: one layer's KV cache."""
    free_bytes: int
    """n * (M - A) - W."""


@dataclass(frozen=True)
class MemoryPlan:
    shape: ModelShape
    machine: Machine
    request: Request
    kv_dtype: str
    device: DeviceMemory
    layers: Layers
    size: KvSize
    placement: LayerPlacement
    host_budget: int
    """Limit of one rank's host layers."""
    host_kv_gib: float | None
    """The value of that option; None if the default is enough."""
    host_layers_refused: str
    """Why the engine refuses host layers, as the end of a sentence; empty if it does not."""
    paper: PaperPlacement
    longest_context: int
    """For ``request.requests`` requests, with host layers."""
    longest_on_device: int
    """For one request, without host layers."""
    largest_batch: int
    """Number of requests of ``request.context`` tokens, if ``host_kv_requests`` asks for them; at most
    ``request.max_num_seqs``."""
    largest_batch_on_device: int
    """The same without host layers."""

    @property
    def limits(self) -> Limits:
        return Limits(self.device.kv, self.host_budget, self.request.context, self.request.requests)

    @property
    def device_kv_needed(self) -> int:
        blocks = blocks_needed(self.placement, self.limits)
        return blocks * self.placement.device_size.null_block()

    @property
    def host_kv_needed(self) -> int:
        """Bytes of one rank."""
        return self.placement.host_bytes(blocks_needed(self.placement, self.limits))

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one device layer on one rank."""
        return self.size.bytes_per_block // self.size.block_size

    @property
    def host_bytes_per_token(self) -> int:
        """K and V of one host layer on one rank."""
        return self.placement.host_bytes_per_block // self.size.block_size


def weight_bytes(shape: ModelShape, request: Request, ranks: int) -> int:
    """Bytes on one device."""
    if request.weights_gib is not None:
        return int(request.weights_gib * GIB) // ranks
    found = shape.weight_bytes(ranks)
    if found is None:
        raise PlanError(
            f"the weights are quantised ({shape.quantisation}) in a way that the planner does not know, so it cannot "
            "calculate their size; pass --weights-gib with the size of the weight files."
        )
    return found


def resolve_kv_dtype(shape: ModelShape, machine: Machine, asked: str) -> str:
    """The dtype of device layers' KV caches.

    Raises:
        PlanError: the device does not support it, or vLLM stores another one.
    """
    kernels, scheme, plain = machine.kernels, shape.cache, serving_dtype(shape, machine)
    served = [name for name in machine.kv_dtypes if ELEMENT_BYTES[name] == 1 or name == plain]
    found = asked if asked != "auto" else scheme.dtype or plain
    on_device = f"{kernels.name} on {machine.device.name}"
    if asked == "auto" and found not in served:
        fix = "plan a checkpoint without it" if kernels.obeys_cache_schemes else f"use --kv-dtype {plain}"
        raise PlanError(
            f"the checkpoint's {scheme.key} asks for a KV cache in {found}, which {on_device} does not support; {fix}."
        )
    if found not in served:
        raise PlanError(f"--kv-dtype {asked} is not supported by {on_device}; use one of auto, {', '.join(served)}.")
    if scheme.dtype and kernels.obeys_cache_schemes and found not in SAME_AS_FP8:
        raise PlanError(
            f"--kv-dtype {asked} has no effect: vLLM on {machine.device.name} stores {scheme.dtype}, as the "
            f"checkpoint's {scheme.key} asks; use --kv-dtype auto, or plan a checkpoint without {scheme.key}."
        )
    if scheme.per_head and kernels.own and ELEMENT_BYTES[found] == 1:
        raise PlanError(
            f"the checkpoint's {scheme.key} has scales for each KV head (attn_head), but {on_device} reads one for "
            f"K and one for V in each layer; plan a checkpoint without {scheme.key}."
        )
    return found


def decoding_parts(shape: ModelShape, machine: Machine, request: Request, longest: int) -> int:
    """Bytes on one device for the parts of decoding requests of up to ``longest`` tokens."""
    if not machine.kernels.own:
        return 0
    return decoding_bytes(
        head_size=shape.head_size,
        group=shape.heads_per_kv_head,
        kv_heads=shape.kv_heads_per_rank(machine.ranks),
        sequences=request.max_num_seqs,
        longest=longest,
    )


def device_memory(shape: ModelShape, machine: Machine, request: Request) -> DeviceMemory:
    ranks, constants = machine.ranks, measured()
    weights, driver = weight_bytes(shape, request, ranks), int(constants.driver_gib.value * GIB)
    activations = activation_bytes(
        tokens=request.batched_tokens,
        sequences=request.max_num_seqs,
        hidden=shape.hidden_size,
        intermediate=shape.intermediate_size,
        vocabulary=shape.vocab_size,
        heads=shape.num_heads // ranks,
        head_size=shape.head_size,
        ranks=ranks,
    )
    if request.host_kv_dtype != "auto":
        activations += WIDENED_BYTES
    total, parts = machine.device_bytes, decoding_parts(shape, machine, request, request.context)
    workspace = WORKSPACE + parts
    kv = device_kv_bytes(total, weights + driver + parts, activations, request.utilization)
    staging = NUM_BUFFERS * STAGING_BYTES
    if not kv:
        need = (weights + driver + activations + workspace + staging) / request.utilization
        raise DoesNotFitError(
            f"the weights take {weights / GIB:.1f} GiB per device, and with all buffers they need {need / GIB:.1f} "
            f"GiB, but {machine.device.name} has only {total / GIB:.1f} GiB; use a larger --tp, a larger device, or "
            "a smaller --batched-tokens."
        )
    if request.kv_cache_gib is not None:
        if request.kv_cache_gib * GIB > kv:
            raise PlanError(
                f"--kv-cache-gib {request.kv_cache_gib:g} is more than the {kv / GIB:.2f} GiB that each device has "
                "left for its KV cache; lower it."
            )
        kv = int(request.kv_cache_gib * GIB)
    unused = total - weights - driver - activations - workspace - staging - kv
    return DeviceMemory(total, weights, driver, activations, workspace, staging, unused, kv)


def plan_memory(shape: ModelShape, machine: Machine, request: Request) -> MemoryPlan:
    """Choose the layers, as the engine does with ``host_kv_layers`` "auto".

    Raises:
        PlanError: the input is bad, or the plan does not fit. The message says what would fit.
    """
    if request.context > shape.max_positions:
        raise PlanError(
            f"--context {request.context} is longer than the model's {shape.max_positions} positions; lower it, or use "
            "a config.json with RoPE scaling."
        )
    if request.batched_tokens < request.max_num_seqs:
        raise PlanError(
            f"--batched-tokens {request.batched_tokens} is less than the {request.max_num_seqs} requests that vLLM "
            f"computes in one step (--max-num-seqs); use {request.max_num_seqs} or more."
        )
    shape.check_ranks(machine.ranks)
    machine.kernels.attention_fraction(shape.head_size)
    kv_dtype = resolve_kv_dtype(shape, machine, request.kv_dtype)
    device = device_memory(shape, machine, request)
    per_token = 2 * shape.kv_heads_per_rank(machine.ranks) * shape.head_size * ELEMENT_BYTES[kv_dtype]
    layers = Layers(shape.full_layers, shape.windowed_layers)
    block = block_size(shape, machine, per_token)
    size = KvSize(
        block_size=block,
        bytes_per_block=block * per_token,
        full_layers=len(layers.full),
        windowed_layers=len(layers.windowed),
        window=shape.window,
        tokens_per_step=request.batched_tokens,
        state_layers=len(shape.linear_layers),
        state_blocks=STATES if shape.linear else 0,
        host_bytes_per_block=host_block_bytes(shape, machine, request, block),
    )
    placement, budget, asked = _place(layers, size, device.kv, machine, request)
    kv_without_host_layers = device.kv
    if placement.host and request.resident_kv_gib:
        device = _with_copies(device, machine, request, kv_dtype)
        placement, budget, asked = _place(layers, size, device.kv, machine, request)
    refusal = _why_no_host_layers(shape, machine, request, kv_dtype)
    if placement.host and refusal:
        why, fixes = refusal
        if longest := longest_request(layers, size, Limits(device.kv, 0, request.context, request.requests)):
            fixes = [*fixes, f"lower --context to {longest}"]
        raise PlanError(
            f"{why}, but {request.requests} request(s) of {request.context} tokens need them; "
            f"{' or '.join(fixes) or 'plan a larger device'}."
        )
    most_on_host = 0 if refusal else _largest_budget(machine, request)
    more = _more_for_longer(shape, machine, request)
    bound = Limits(max(0, device.kv - more), most_on_host, shape.max_positions, request.requests)
    without_host_layers = size.longest_request(max(0, kv_without_host_layers - more))
    return MemoryPlan(
        shape=shape,
        machine=machine,
        request=request,
        kv_dtype=kv_dtype,
        device=device,
        layers=layers,
        size=size,
        placement=placement,
        host_budget=budget,
        host_kv_gib=asked,
        host_layers_refused=refusal[0] if refusal else "",
        paper=paper_placement(shape, machine.ranks, request, device, per_token),
        longest_context=max(request.context, longest_request(layers, size, bound)),
        longest_on_device=min(shape.max_positions, without_host_layers),
        largest_batch=_largest_batch(
            layers, size, replace(bound, device_bytes=device.kv, tokens=request.context), request.max_num_seqs
        ),
        largest_batch_on_device=min(
            request.max_num_seqs, _batch_on_device(size, kv_without_host_layers, request.context)
        ),
    )


def _why_no_host_layers(
    shape: ModelShape, machine: Machine, request: Request, kv_dtype: str
) -> tuple[str, list[str]] | None:
    """Why the engine refuses host layers, and what to do about it beside a shorter context."""
    kernels = machine.kernels
    if ELEMENT_BYTES[kv_dtype] == 1:
        why = f"{_named(shape, request)} is not supported with host layers"
        if shape.cache.dtype and kernels.obeys_cache_schemes:
            return why, [f"plan a checkpoint without {shape.cache.key}"]
        return why, [f"use --kv-dtype {serving_dtype(shape, machine) if shape.cache.dtype else 'auto'}"]
    if shape.linear and not kernels.host_layers_beside_states:
        return f"host layers beside linear-attention layers are untested with {kernels.name} and refused there", []
    return None


def _named(shape: ModelShape, request: Request) -> str:
    """What asks for a KV cache of 8 bits."""
    if request.kv_dtype == "auto":
        return f"the checkpoint's KV cache in {shape.cache.dtype} ({shape.cache.key})"
    return f"--kv-dtype {request.kv_dtype}"


def _more_for_longer(shape: ModelShape, machine: Machine, request: Request) -> int:
    """Bytes by which the KV cache is smaller if requests may have all positions of the model."""
    if request.kv_cache_gib is not None:
        return 0  # its size is given
    longest, planned = (
        decoding_parts(shape, machine, request, tokens) for tokens in (shape.max_positions, request.context)
    )
    return longest - planned


def _with_copies(device: DeviceMemory, machine: Machine, request: Request, kv_dtype: str) -> DeviceMemory:
    """The device's memory with copies of host layers' blocks, which ``--kv-cache-gib`` does not include."""
    asked, copies = f"--resident-kv-gib {request.resident_kv_gib:g}", int(request.resident_kv_gib * GIB)
    if not machine.kernels.copies_of_host_layers:
        raise PlanError(f"{asked} is not supported with {machine.kernels.name}; leave it out.")
    if request.host_kv_dtype != "auto" or ELEMENT_BYTES[kv_dtype] == 1:
        raise PlanError(f"{asked} is not supported with host layers of 8 bits; remove one of the two.")
    room = device.kv - 1 if request.kv_cache_gib is None else device.unused
    if copies > room:
        raise PlanError(f"{asked} is more than the {max(0, room) / GIB:.2f} GiB that each device has for it; lower it.")
    if request.kv_cache_gib is None:
        return replace(device, kv=device.kv - copies, copies=copies)
    return replace(device, unused=device.unused - copies, copies=copies)


def host_block_bytes(shape: ModelShape, machine: Machine, request: Request, block: int) -> int | None:
    """K and V of a host layer's block, if host layers have a dtype of their own."""
    asked = request.host_kv_dtype
    if asked == "auto":
        return None
    if asked not in HOST_DTYPES:
        raise PlanError(f"--host-kv-dtype {asked} is not supported; use one of auto, {', '.join(HOST_DTYPES)}.")
    if not machine.kernels.host_layers_of_8_bits:
        raise PlanError(
            f"--host-kv-dtype {asked} is not supported with {machine.kernels.name}; use --host-kv-dtype auto."
        )
    if ELEMENT_BYTES[resolve_kv_dtype(shape, machine, request.kv_dtype)] == 1:
        raise PlanError(
            f"--host-kv-dtype is {asked}, but {_named(shape, request)} already stores all layers in 8 bits; remove one "
            "of the two."
        )
    return block * shape.kv_heads_per_rank(machine.ranks) * host_token_bytes(shape.head_size, asked)


def block_size(shape: ModelShape, machine: Machine, per_token: int) -> int:
    """Tokens per block. vLLM enlarges blocks until one holds a linear-attention layer's state."""
    if shape.linear is None:
        return HOST_BLOCK
    step = machine.kernels.enlarges_blocks_by
    return step * -(-shape.linear.state_bytes(machine.ranks) // (step * per_token))


def _largest_budget(machine: Machine, request: Request) -> int:
    """The most host memory that the user may give to one rank's host layers."""
    if request.host_kv_gib is None:
        return machine.free_host_bytes
    return int(request.host_kv_gib * GIB)


def _place(
    layers: Layers, size: KvSize, device_bytes: int, machine: Machine, request: Request
) -> tuple[LayerPlacement, int, float | None]:
    """The placement, the limit of host memory, and the option ``host_kv_gib`` if it must be set for that."""
    limits = Limits(device_bytes, host_kv_bytes(machine.free_host_bytes), request.context, request.requests)
    largest = replace(limits, host_bytes=_largest_budget(machine, request))
    if request.host_kv_gib is not None:
        if largest.host_bytes > machine.free_host_bytes:
            raise PlanError(
                f"--host-kv-gib {request.host_kv_gib:g} per rank is more than the {machine.free_host_bytes / GIB:.1f} "
                f"GiB that host {machine.host_key} has for each of {machine.ranks} rank(s); lower it."
            )
        limits = largest
    try:
        return plan(layers, size, "auto", limits), limits.host_bytes, request.host_kv_gib
    except PlacementError:
        pass
    try:
        placement = plan(layers, size, "auto", largest)
    except PlacementError as error:
        raise DoesNotFitError(_why_not(layers, size, machine, largest)) from error
    # A tenth of a GiB more than needed, because the option has so many digits.
    asked = math.ceil(10 * placement.host_bytes(blocks_needed(placement, largest)) / GIB) / 10
    asked = min(asked, largest.host_bytes / GIB)
    return placement, int(asked * GIB), asked


def _why_not(layers: Layers, size: KvSize, machine: Machine, limits: Limits) -> str:
    need = machine.ranks * limits.requests * size.of_request(limits.tokens)
    device, host = machine.ranks * limits.device_bytes, machine.ranks * limits.host_bytes
    longest = longest_request(layers, size, limits)
    less = [f"--context {longest}"] if longest else []
    less += ["fewer --requests"] if limits.requests > 1 else []
    return (
        f"{limits.requests} request(s) of {limits.tokens} tokens need {need / GIB:.1f} GiB of KV cache, but "
        f"{machine.ranks} x {machine.device.name} have {device / GIB:.1f} GiB left for it, host layers may use "
        f"{host / GIB:.1f} GiB, and the KV cache of a layer cannot be split; use "
        f"{', '.join([*less, 'a larger --tp'])}, or a host with more memory (--host, --host-gib, --host-kv-gib)."
    )


def _batch_on_device(size: KvSize, device_bytes: int, tokens: int) -> int:
    """Every request needs its blocks, and all share vLLM's null block."""
    null = size.null_block()
    return max(0, device_bytes - null) // (size.of_request(tokens) - null)


def _largest_batch(layers: Layers, size: KvSize, limits: Limits, most: int) -> int:
    def fits(requests: int) -> bool:
        return longest_request(layers, size, replace(limits, requests=requests)) >= limits.tokens

    low, high = 1, most + 1  # low fits, high is not asked
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def paper_placement(
    shape: ModelShape, ranks: int, request: Request, device: DeviceMemory, per_token: int
) -> PaperPlacement:
    """L_GPU = min(L, floor((n * (M - A) - W) / kappa)).

    M is a device's memory as far as vLLM may use it, and A is everything in it that is neither weights nor KV cache.
    """
    free = ranks * device.kv  # M - A is the weights and the KV cache of a device
    layer_bytes = request.requests * request.context * per_token * ranks
    on_device = max(0, min(shape.kv_layers, free // layer_bytes))
    return PaperPlacement(on_device, shape.kv_layers - on_device, layer_bytes, free)
