"""Host layers: attention layers whose KV cache is in host memory, under vLLM's own block ids.

vLLM supports layers that share the cache of another layer. A host layer looks like one of these to vLLM: it takes no
memory on the device and is left out when vLLM computes the block count and the longest request. It still has block
tables, slots, prefix caching and preemption, because these belong to the layer that it points to. Its keys and values
are in a host pool, under the same block ids.

Host layers are set up once per worker: after the weights are loaded, and before vLLM creates the layers' caches or
traces a graph.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionImpl

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.integration import compat, drafter, support
from fastattention_vllm.integration.claims import ImplClaims
from fastattention_vllm.integration.host_layers.device import DeviceLayer, DeviceRuntime
from fastattention_vllm.integration.host_layers.metadata import NO_LIMIT, HostMetadata
from fastattention_vllm.integration.host_layers.plan import (
    check,
    host_budget,
    length_is_automatic,
    plan_layers,
    size_of,
)
from fastattention_vllm.integration.host_layers.ranks import smallest as smallest
from fastattention_vllm.integration.host_layers.ranks import together, wait_for_ranks
from fastattention_vllm.integration.kv_size import as_grouped, rows_of, whole_spec, window_of
from fastattention_vllm.integration.options import Options, decide_host_layers, options_of
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.support import FP8_CACHES, LINEAR_MODELS
from fastattention_vllm.placement import calibrate, host_pool
from fastattention_vllm.placement import cpus as topology
from fastattention_vllm.placement.counters import Counters
from fastattention_vllm.placement.graph_calls import GraphCalls
from fastattention_vllm.placement.graph_copies import GraphCopies
from fastattention_vllm.placement.host_attention import HostAttention, HostLayerGroup
from fastattention_vllm.placement.host_memory import GIB
from fastattention_vllm.placement.host_pool import HostPool, PageShape
from fastattention_vllm.placement.plan import (
    LayerPlacement,
    Layers,
    Limits,
    all_splits,
    indices_text,
    why_too_long,
    why_too_many_windows,
)
from fastattention_vllm.placement.prefetch import Visit
from fastattention_vllm.placement.resident import ResidentBlocks
from fastattention_vllm.placement.step import MAX_CPU_TOKENS, Step
from fastattention_vllm.placement.stored_rows import TORCH_DTYPES, has_factors
from fastattention_vllm.placement.stored_rows import page_shape as page_of
from fastattention_vllm.placement.stream_split import (
    Rates,
    StreamSplit,
    filled_steps_until,
    stream_split,
    whole_steps_until,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.fastattention")


@dataclass
class HostLayers:
    """The host layers of one worker."""

    runtime: DeviceRuntime
    group: HostLayerGroup
    placement: LayerPlacement
    targets: dict[str, str]
    """For each host layer, in the model's order, the name of the device layer that it points to."""
    budget: int
    max_model_len: int
    nodes: Sequence[int]
    stream_fraction: float | str
    dtype: torch.dtype
    """Of the model."""
    stored_dtype: torch.dtype | None = None
    """The 8-bit dtype of the pool; None if it has the dtype of the device layers' caches."""
    length_is_fitted: bool = False
    """Whether vLLM fits the maximum length to the memory that :meth:`clamp` leaves."""
    pool: HostPool | None = None
    drafts_per_request: int = 0
    """In a step, at most."""
    rates: Rates | None = None
    """With one token of a request. None if they were not measured."""
    draft_rates: Rates | None = None
    """With all drafts; the same without drafts."""
    plain_read_rate: float | None = None
    """Bytes per second of plain reads of the pool; None before it is allocated."""
    others: Sequence[LayerPlacement] = ()
    """What could be chosen instead of ``placement``. Empty if vLLM chooses the maximum length."""
    graph_calls: GraphCalls | None = None
    """What host layers need inside CUDA graphs; None if there they are between graphs."""
    whole_steps_until: float = math.inf
    """Bytes of the contexts in one layer. Longer decode steps run in pieces, in which the link helps the CPU."""
    max_filled_tokens: int = 0
    """Tokens of the largest step in which missing drafts are made up, those of all requests; 0: in none."""
    filled_steps_until: float = 0.0
    """Bytes of the contexts in one layer. In shorter steps, missing drafts are made up (:meth:`fills_drafts`)."""
    rehearsed: int = 0
    """Tokens of the longest step that vLLM's profiling has measured so far."""
    copies: torch.Tensor | None = None
    """uint8, on the device: memory for copies of host layers' blocks (``resident_kv_gib``)."""
    specs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The KV cache spec of each host layer, as if it had a cache of its own."""

    together = staticmethod(together)

    def clamp(self, available: int) -> int:
        """Device memory for vLLM's KV cache, limited to the number of blocks that the host pool can hold.

        Raises:
            Refusal: no request of the maximum length fits, on the device or with this limit, and vLLM does not choose
                that length itself.
        """
        self.check_length(available)
        size = self.placement.device_size
        page = size.null_block()
        clamped = self.placement.usable(available, self.budget)
        blocks = clamped // page
        need = size.of_request(self.max_model_len)
        if clamped < need <= available and not self.length_is_fitted:
            wanted = self.placement.host_bytes(-(-need // page)) / GIB
            raise Refusal(
                f"one request of max_model_len {self.max_model_len} needs {wanted:.2f} GiB of host memory for the "
                f"{len(self.placement.host)} host layers, but the limit is {self.budget / GIB:.2f} GiB; pass "
                f"--max-model-len {size.longest_request(clamped)} or less, or raise host_kv_gib."
            )
        if blocks < available // page:  # less than a block is lost without a limit, too
            logger.info(
                "KV cache: %d blocks instead of %d, to keep the host layers' share within %.2f GiB.",
                blocks,
                available // page,
                self.budget / GIB,
            )
        return clamped

    def check_length(self, available: int) -> None:
        """Refuse a maximum length that ``available`` bytes on the device cannot hold. vLLM would not name host layers.

        Raises:
            Refusal: they cannot, and vLLM does not choose that length itself.
        """
        why = why_too_long(self.placement, self.others, self.max_model_len, available) if self.others else None
        if why:
            raise Refusal(f"{why}.")

    @together()
    def allocate(self, forward_context: dict[str, Any], kv_cache_config: Any) -> None:
        """Create the pool. Called on all ranks when vLLM has allocated its own cache.

        Raises:
            Refusal: there is not enough memory, on this rank or on another one.
        """
        check_tables(self.targets, self.specs, kv_cache_config.kv_cache_groups)
        tables = [
            [name for name, target in self.targets.items() if target in group.layer_names]
            for group in kv_cache_config.kv_cache_groups
        ]
        shapes = {
            name: page_shape(forward_context[name], forward_context[target], self.stored_dtype)
            for name, target in self.targets.items()
        }

        def say(line: str) -> None:
            logger.info("KV cache of host layers: %s.", line)

        try:
            self.pool = host_pool.create(
                shapes, host_pool.assign_slabs(tables), self.budget, self.nodes, pin=self.runtime.pin, say=say
            )
        except MemoryError as error:
            raise Refusal(f"{error}.") from error
        copies = self._divide_copies(forward_context, shapes, tables)
        for name in self.targets:
            forward_context[name].impl.open(self.pool.caches[name], copies.get(name))
        self._divide_reading(forward_context)
        self.plain_read_rate = self.rates.memory if self.rates else calibrate.plain_read_rate(self.pool.memory)
        for line in describe(self, kv_cache_config.num_blocks):
            logger.info("%s", line)

    def _divide_copies(
        self, forward_context: dict[str, Any], shapes: dict[str, PageShape], tables: Sequence[Sequence[str]]
    ) -> dict[str, torch.Tensor]:
        """Divide the memory for copies among the host layers without a window, as caches like theirs.

        Raises:
            Refusal: it is too small, or these layers get their batches in different ways.
        """
        if self.copies is None:
            return {}
        names = [name for name in self.targets if forward_context[name].impl.inner.host_window is None]
        if not names:
            logger.warning("resident_kv_gib has no effect, because all host layers have a sliding window.")
            return {}
        in_tables = sum(any(name in names for name in table) for table in tables)
        if in_tables > 1 or len({forward_context[name].impl.num_heads for name in names}) > 1:
            raise Refusal(
                f"resident_kv_gib is not supported with this model: its {len(names)} host layers without a window have "
                "several block tables or different numbers of heads; set resident_kv_gib to 0."
            )
        shape = shapes[names[0]]
        block = shape.nbytes // shape.num_blocks
        rows = self.copies.nbytes // (len(names) * block)
        if rows == 0:
            raise Refusal(
                f"resident_kv_gib {self.copies.nbytes / GIB:.3g} holds no block of {shape.block_size} tokens of all "
                f"{len(names)} host layers without a window; raise it to {len(names) * block / GIB:.3g} or more, or "
                "set it to 0."
            )
        page = page_of(rows, shape.num_kv_heads, shape.block_size, shape.head_size, shape.dtype)
        self.group.resident = ResidentBlocks(shape.num_blocks, min(rows, shape.num_blocks))
        if self.graph_calls:
            self.graph_calls.copies = GraphCopies(self.group.link, self.group.resident, shape.block_size)
        parts = self.copies[: len(names) * rows * block].view(shape.dtype).view(len(names), *page)
        return dict(zip(names, parts, strict=True))

    def _divide_reading(self, forward_context: dict[str, Any]) -> None:
        """Decide which fraction of a decoding request's host KV the device reads itself."""
        if self.stream_fraction != "auto":
            split = StreamSplit(float(self.stream_fraction))
        elif self.runtime.pin:
            layer = forward_context[next(iter(self.targets))].impl
            self.rates = self.draft_rates = self._measure(layer, 1)
            split = stream_split(self.rates)
            if self.drafts_per_request:
                self.draft_rates = self._measure(layer, min(1 + self.drafts_per_request, MAX_CPU_TOKENS))
                split = stream_split(self.rates, self.draft_rates)
        else:
            return
        calls = self.graph_calls
        if calls and calls.share_over_link(split.in_graph()):
            logger.info(
                "One graph for a decode step: the device reads %.0f %% of the host KV in place%s.",
                100 * split.in_graph(),
                f", {self.draft_rates.in_place / 1e9:.1f} GB/s if alone" if self.draft_rates else "",
            )
        self.set_stream_split(split)

    def _measure(self, layer: HostLayerImpl, tokens: int) -> Rates:
        """How fast host KV is read in a decode step with ``tokens`` of each request."""
        assert layer.attention is not None
        measured = calibrate.measure(layer.attention, layer.num_heads, self.dtype, tokens, together=wait_for_ranks)
        # A step takes as long as the slowest rank, so all take the same share.
        rates = Rates(*smallest(*dataclasses.astuple(measured)))
        split = stream_split(rates)
        logger.info(
            "Host memory%s: plain reads %.1f GB/s, CPU attention %.1f GB/s, copies to the device %.1f GB/s (CPU and "
            "copies at the same time: %.1f and %.1f GB/s). When decoding in pieces, the device reads %.0f %% of "
            "the host KV and the first %d MiB of each layer.",
            f", with {tokens} tokens of a request" if tokens > 1 else "",
            *(rate / 1e9 for rate in dataclasses.astuple(rates)[:5]),
            100 * split.fraction,
            split.head_start >> 20,
        )
        return rates

    def set_stream_split(self, split: StreamSplit) -> None:
        """Set how much of the decoding requests' host KV the device reads over the link.

        Where it reads anything, decode steps run in pieces, if these are faster than one graph. All ranks decide alike,
        because vLLM's own sums depend on it.
        """
        self.group.stream_split = split
        if self.graph_calls:
            over_link = self.graph_calls.over_link
            if over_link:
                over_link.set_fraction(split.in_graph())
            sharing = sum(layer.window is None for layer in self.group.layers) / len(self.group.layers)
            in_graph = over_link is not None
            self.whole_steps_until, self.filled_steps_until = smallest(
                whole_steps_until(split, self.draft_rates, sharing, in_graph),
                filled_steps_until(self.rates, self.draft_rates, sharing, in_graph) if self.max_filled_tokens else 0.0,
            )

    def is_first(self, attention: HostAttention, metadata: HostMetadata) -> bool:
        """Whether no earlier host layer of this forward pass has the same metadata."""
        every: Any = get_forward_context().attn_metadata
        return attention is next(layer for layer in self.group.layers if every.get(layer_name(layer)) is metadata)

    def place_copies(self, metadata: HostMetadata) -> None:
        """Before a step that may be one graph: give room to blocks that it begins, and let the graph know.

        This waits for the step's slots. Pieces do the same by themselves.
        """
        resident, calls = self.group.resident, self.graph_calls
        if resident is None or calls is None or calls.copies is None:
            return
        block_size = calls.copies.block_size
        if not metadata.stores_nothing(block_size):
            resident.admit(metadata.whole(), block_size)
            calls.copies.bring_up()

    def allows_whole_step(self, contexts: int) -> bool:
        """Whether a decode step with ``contexts`` tokens in the cache, all requests together, is best one graph."""
        return self._bytes_in_a_layer(contexts) < self.whole_steps_until

    def fills_drafts(self, contexts: int, tokens: int) -> bool:
        """Whether such a step is faster with drafts made up where none were found, because it is one graph then.

        ``tokens``: those that it computes then, drafts included.
        """
        until = min(self.filled_steps_until, self.whole_steps_until)
        return tokens <= self.max_filled_tokens and self._bytes_in_a_layer(contexts) < until

    def _bytes_in_a_layer(self, contexts: int) -> int:
        return contexts * self.placement.host_bytes_per_block // self.placement.device_size.block_size

    def counters(self) -> Counters:
        """What the host layers have done since the start, inside and outside of graphs."""
        return self.group.total() + (self.graph_calls.counters() if self.graph_calls else Counters())

    def visits(self, first: HostAttention, step: Step) -> Iterator[Visit]:
        """The visits of the host layers in this forward pass, from ``first`` on, each with its step from vLLM.

        Layers with another block table, or another number of query heads, have separate metadata.
        """
        metadata = get_forward_context().attn_metadata
        for attention in self.group.layers[self.group.layers.index(first) :]:
            if attention is first:
                yield Visit(first, step)
                continue
            layer: Any = attention.layer
            found = metadata.get(layer_name(attention)) if isinstance(metadata, dict) else None
            if not isinstance(found, HostMetadata):
                return  # vLLM does not provide it yet; it will when that layer runs
            yield Visit(attention, layer.step(found, attention))


def layer_name(attention: HostAttention) -> str:
    """vLLM's name of a host layer."""
    layer: Any = attention.layer
    name: str = layer.layer.layer_name
    return name


class HostLayerImpl(ImplClaims, AttentionImpl[Any]):
    """Replaces a layer's impl, which still defines what the layer computes."""

    def __init__(self, layer: Any, inner: DeviceLayer, host_layers: HostLayers) -> None:
        self.layer = layer
        self.inner = inner
        self.host_layers = host_layers
        self.num_heads, self.num_kv_heads = inner.num_heads, inner.num_kv_heads
        self.head_size, self.scale = inner.head_size, inner.scale
        self.attention: HostAttention | None = None

    @property
    def kernels_name(self) -> str:
        return f"host layer: {getattr(self.inner, 'kernels_name', type(self.inner).__name__)}"

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        process: Any = self.inner
        process.process_weights_after_loading(act_dtype)

    def open(self, cache: torch.Tensor, copies: torch.Tensor | None = None) -> None:
        """Store keys and values in ``cache`` from now on, and some blocks in ``copies``, too."""
        self.attention = HostAttention(self.host_layers.group, self, cache, self.inner.host_window, copies)
        if self.host_layers.graph_calls:
            self.host_layers.graph_calls.prepare(self.attention)

    def problem(self, **parts: Any) -> AttentionProblem:
        return self.inner.problem(self.layer, **parts)

    def scales(self) -> tuple[float, float]:
        stored: Any = self.host_layers.stored_dtype
        if stored is None:
            return self.inner.scales(self.layer)
        # What vLLM has loaded, which is 1 unless the cache of the device layers is fp8, too.
        return (1.0, 1.0) if has_factors(stored) else (self.layer._k_scale_float, self.layer._v_scale_float)

    def merges(self) -> bool:
        return self.inner.merges()

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: HostMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The forward pass of an attention layer. ``kv_cache`` belongs to the layer that this one points to; unused.

        Raises:
            RuntimeError: there is a batch to compute, but the worker has not created the host layers' pool.
        """
        if attn_metadata is None:  # vLLM's profiling and warm-up runs
            if len(query) > self.host_layers.rehearsed and self.host_layers.runtime.pin:
                self.host_layers.rehearsed = len(query)
                rehearse(self, query, key, value, output)
            return output.fill_(0)
        attention, calls = self.attention, self.host_layers.graph_calls
        if calls and calls.bell.capturing():
            if attention is None:  # vLLM measures the memory of graphs, before there is a cache
                return output.fill_(0)
            assert attn_metadata.graph_batch is not None, "vLLM has not said that this step's metadata is for a graph"
            if self.host_layers.is_first(attention, attn_metadata):
                calls.bring_down(attn_metadata.graph_batch)
            calls.attend(attention, attn_metadata.graph_batch, query, key, value, output)
            return output
        if attention is None:
            if attn_metadata.stores_nothing(self.host_layers.placement.device_size.block_size):
                return output.fill_(0)
            raise RuntimeError(
                f"layer {self.layer.layer_name} keeps its KV cache in host memory, which this worker has not "
                "allocated; remove --worker-cls, or set host_kv_layers to 0."
            )
        step = self.step(attn_metadata, attention)
        attention.attend(step, query, key, value, output, lambda: self.host_layers.visits(attention, step))
        return output

    def step(self, metadata: HostMetadata, attention: HostAttention) -> Step:
        return metadata.divided(attention.block_size, MAX_CPU_TOKENS if self.merges() else NO_LIMIT)


def rehearse(
    layer: HostLayerImpl, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
) -> None:
    """Let vLLM's profiling measure the device memory of a step of this length. There is no pool yet."""
    host_layers = layer.host_layers
    block_size = host_layers.placement.device_size.block_size
    dtype = host_layers.stored_dtype or query.dtype
    page = torch.zeros(page_of(1, layer.num_kv_heads, block_size, layer.head_size, dtype), dtype=dtype)
    group = replace(host_layers.group, layers=[])
    group.prefetcher = host_layers.group.prefetcher
    HostAttention(group, layer, page, layer.inner.host_window).rehearse(query, key, value, output)


def set_up(vllm_config: VllmConfig, runtime: DeviceRuntime) -> None:
    """Choose the host layers and set them up. Every attention layer calls this; only the first call has an effect.

    Raises:
        Refusal: the options cannot be met.
    """
    context = vllm_config.compilation_config.static_forward_context
    if getattr(vllm_config.compilation_config, DONE, False):
        return
    setattr(vllm_config.compilation_config, DONE, True)
    options = options_of(vllm_config)
    if options.host_kv_layers in (0, []):
        _say_without_effect(options)
        return
    _set_up(vllm_config, runtime, options, context)


@together()
def _set_up(vllm_config: VllmConfig, runtime: DeviceRuntime, options: Options, context: dict[str, Any]) -> None:
    names, layers, special = attention_layers(context, runtime.host_backend, vllm_config, runtime.beside_states)
    if special:
        _without_host_layers(vllm_config, special)
        return
    runtime.settle_block_size()
    local_ranks = vllm_config.parallel_config.local_world_size
    limits = Limits(
        device_bytes=runtime.kv_bytes(),
        host_bytes=host_budget(options.host_kv_gib, local_ranks, 0 if runtime.pin else runtime.kv_bytes()),
        tokens=vllm_config.model_config.max_model_len,
        requests=options.host_kv_requests,
    )
    limits = _smallest_of_all_ranks(limits)
    placement = plan_layers(layers, vllm_config, options.host_kv_layers, limits)
    copies = int(options.resident_kv_gib * GIB) if placement.host else 0
    if copies and vllm_config.cache_config.kv_cache_memory_bytes is None:
        limits = without_copies(limits, copies)
        try:
            placement = plan_layers(layers, vllm_config, options.host_kv_layers, limits)
        except Refusal as error:
            raise Refusal(f"with resident_kv_gib {options.resident_kv_gib:g}, {error}") from error
    decide_host_layers(vllm_config, list(placement.host))
    if not placement.host:
        _say_without_effect(options)
        return
    check(vllm_config)
    targets = {names[host]: names[target] for host, target in sorted(_targets(layers, placement).items())}
    specs = {name: context[name].get_kv_cache_spec(vllm_config) for name in targets}
    nodes = topology.numa_nodes(runtime.cpus())
    for name in targets:
        check_layer(context[name].impl, vllm_config)
    if copies:
        check_copies(vllm_config, runtime, [context[name].impl for name in targets])
    runtime.prepare()
    group = HostLayerGroup(runtime.link(), runtime.kernels())
    # Allocate now, so that vLLM counts it before it uses the rest of the device's memory for its own cache.
    group.prefetcher.reserve(torch.empty(1, placement.host_bytes_per_block, dtype=torch.uint8))
    host_layers = HostLayers(
        runtime,
        group,
        placement,
        targets,
        limits.host_bytes,
        limits.tokens,
        nodes,
        options.stream_fraction,
        vllm_config.model_config.dtype,
        TORCH_DTYPES.get(options.host_kv_dtype),
        length_is_automatic(vllm_config) and compat.fits_length_beside_null_block(),
        others=() if length_is_automatic(vllm_config) else all_splits(layers, size_of(layers, vllm_config)),
        graph_calls=runtime.graph_calls(group.link),
        copies=allocate_copies(group, copies) if copies else None,
        max_filled_tokens=max_filled_tokens(vllm_config),
        drafts_per_request=drafter.drafts_per_request(vllm_config),
        specs=specs,
    )
    if given := vllm_config.cache_config.kv_cache_memory_bytes:
        host_layers.check_length(given)  # before the model is compiled and measured
    for name, target in targets.items():
        layer = context[name]
        layer.kv_sharing_target_layer_name = target
        layer.attn_backend = runtime.host_backend
        layer.impl = HostLayerImpl(layer, layer.impl, host_layers)


def check_layer(impl: DeviceLayer, vllm_config: VllmConfig) -> None:
    """
    Raises:
        Refusal: the layer has a feature that host layers on this device lack.
    """
    why_not = impl.why_not_on_host()
    if why_not is None:
        return
    if why_not.startswith("--kv-cache-dtype"):  # which the user may not have passed
        why_not = support.name_of_cache(why_not.split()[1], vllm_config)
    raise Refusal(f"host layers on this device do not support {why_not}; set host_kv_layers to 0.")


def max_filled_tokens(vllm_config: VllmConfig) -> int:
    """Tokens of the largest step in which missing n-gram drafts are made up.

    None with experts: several tokens read the weights of more experts than one.
    """
    if not drafter.finds_drafts(vllm_config) or vllm_config.model_config.is_moe:
        return 0
    return min(MAX_FILLED_TOKENS, vllm_config.compilation_config.max_cudagraph_capture_size or 0)


def without_copies(limits: Limits, copies: int) -> Limits:
    """What ``copies`` bytes of copies leave.

    Raises:
        Refusal: nothing.
    """
    if copies >= limits.device_bytes:
        raise Refusal(
            f"resident_kv_gib {copies / GIB:.3g} takes all of the {limits.device_bytes / GIB:.2f} GiB that the device "
            "has left for its KV cache; lower it."
        )
    return replace(limits, device_bytes=limits.device_bytes - copies)


def check_copies(vllm_config: VllmConfig, runtime: DeviceRuntime, impls: Sequence[Any]) -> None:
    """Refuse copies of host layers' blocks where the device cannot attend to them.

    Raises:
        Refusal: names what does not go together.
    """
    stored, dtype = options_of(vllm_config).host_kv_dtype, support.kv_cache_dtype(vllm_config)
    reasons = {
        "on this device": not runtime.keeps_copies,
        f"with host_kv_dtype {stored}": stored != "auto",
        f"with {support.name_of_cache(dtype, vllm_config)}": dtype in FP8_CACHES,
        "with ALiBi": not all(impl.merges() for impl in impls),
    }
    for why, found in reasons.items():
        if found:
            raise Refusal(f"resident_kv_gib is not supported {why}; set it to 0.")


def allocate_copies(group: HostLayerGroup, size: int) -> torch.Tensor:
    """Device memory for copies of blocks, taken before vLLM uses the rest for its own cache.

    Raises:
        Refusal: there is not enough.
    """
    try:
        return group.link.staging(size)
    except (MemoryError, RuntimeError) as error:
        raise Refusal(f"the device has no {size / GIB:.3g} GiB for resident_kv_gib; lower it.") from error


def _say_without_effect(options: Options) -> None:
    if options.resident_kv_gib:
        logger.warning_once("resident_kv_gib has no effect, because no layer keeps its KV cache in host memory.")
    if options.host_kv_dtype != "auto":
        logger.warning_once(
            "host_kv_dtype %s has no effect, because no layer keeps its KV cache in host memory.",
            options.host_kv_dtype,
        )


DONE = "fastattention_host_layers_set_up"
MAX_FILLED_TOKENS = 64
"""A GPU takes about as long for these as for one token, because it reads all weights: a V100, by its data sheet (125
TFLOPS, 900 GB/s), for up to 139."""


def find(vllm_config: VllmConfig) -> HostLayers | None:
    """The host layers that :func:`set_up` created in this process, or None."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        if isinstance(getattr(layer, "impl", None), HostLayerImpl):
            host_layers: HostLayers = layer.impl.host_layers
            return host_layers
    return None


def page_shape(host: Any, target: Any, stored: torch.dtype | None = None) -> PageShape:
    """The shape of a host layer's pages, which equals that of the layer it points to.

    ``stored``: their dtype, if it is another one.
    """
    caches = compat.kv_caches_of(target)
    blocks = compat.num_blocks_of(caches[0])
    elements = sum(cache.numel() for cache in caches)
    return PageShape(
        num_blocks=blocks,
        block_size=elements // (blocks * target.impl.num_kv_heads * 2 * target.impl.head_size),
        num_kv_heads=host.impl.num_kv_heads,
        head_size=host.impl.head_size,
        dtype=stored or host.impl.inner.cache_dtype(caches[0]),
    )


def describe(host_layers: HostLayers, blocks: int) -> list[str]:
    """The decision as a table, for the log."""
    placement = host_layers.placement
    assert host_layers.pool is not None
    device_bytes = blocks * placement.device_size.null_block()
    huge = sum(part.huge_bytes or 0 for part in host_layers.pool.placements)
    longest = placement.device_size.longest_request(device_bytes)
    lines = ["KV placement:", f"  {'layers':<40} {'KV cache in':<12} {'GiB/layer':>11} {'GiB total':>10}"]
    rows = (
        (placement.device, "device", placement.bytes_per_block, device_bytes),
        (placement.host, "host", placement.host_bytes_per_block, host_layers.pool.memory.nbytes),
    )
    lines += [
        f"  {indices_text(layers):<40} {where:<12} {blocks * block / GIB:>11.3f} {total / GIB:>10.3f}"
        for layers, where, block, total in rows
    ]
    if host_layers.stored_dtype:
        lines.append(f"  {stored_text(host_layers.stored_dtype)}")
    copied = [layer for layer in host_layers.group.layers if layer.copies is not None]
    if copied and host_layers.group.resident and host_layers.copies is not None:
        tokens = len(host_layers.group.resident.block_of) * copied[0].block_size
        gib = host_layers.copies.nbytes / GIB
        lines.append(
            f"  copies on the device: {tokens} tokens of {len(copied)} host layers in {gib:.3f} GiB, because "
            "resident_kv_gib asks for them."
        )
    pinned = "pinned, " if host_layers.pool.pinned else ""
    tokens = min(longest, host_layers.max_model_len)
    if placement.device_size.state_layers:
        size = placement.device_size
        states = size.states_of_request() / GIB
        lines.append(
            f"  {size.state_layers} linear-attention layers keep {states:.3f} GiB of states per request on the device, "
            "in its KV cache."
        )
    lines.append(
        f"  {blocks} blocks of {placement.device_size.block_size} tokens; the longest request may have {tokens} "
        f"tokens; host memory: {pinned}{100 * huge / host_layers.pool.memory.nbytes:.0f} % in huge pages."
    )
    if host_layers.filled_steps_until:
        most = int(host_layers.filled_steps_until * placement.device_size.block_size / placement.host_bytes_per_block)
        lines.append(
            "  Drafts that n-gram drafting does not find are made up, because a step with all drafts is one CUDA "
            f"graph: in steps of up to {host_layers.max_filled_tokens} tokens whose contexts have fewer than "
            f"{min(most, blocks * placement.device_size.block_size)} tokens in total, without seeds and grammars."
        )
    if host_layers.draft_rates:
        rate = decode_rate(host_layers, host_layers.draft_rates, tokens)
        milliseconds = 1e3 * placement.host_seconds(tokens, rate)
        what = "step with all drafts" if host_layers.drafts_per_request else "token"
        lines.append(
            f"  Prediction: after {tokens} tokens the host layers add {milliseconds:.3g} ms to each {what} "
            f"(one read of their KV at {rate / 1e9:.3g} GB/s)."
        )
    return lines


def stored_text(dtype: torch.dtype) -> str:
    """What an 8-bit pool contains, for people."""
    name = next(name for name, known in TORCH_DTYPES.items() if known == dtype)
    factors = "with a factor for each token and KV head" if has_factors(dtype) else "with one scale for each layer"
    return f"Host layers store keys and values as {name}, {factors}, because host_kv_dtype is {name}."


def decode_rate(host_layers: HostLayers, rates: Rates, tokens: int) -> float:
    """Bytes per second of host KV in a decode step after ``tokens``: by CPU and link together where both read it."""
    calls = host_layers.graph_calls
    if calls and host_layers.allows_whole_step(tokens):
        return rates.in_whole_step(shares=calls.over_link is not None)
    return rates.in_pieces() if stream_split(rates).fraction > 0 else rates.cpu


def attention_layers(
    context: dict[str, Any], host_backend: type[Any], vllm_config: VllmConfig, beside_states: bool = False
) -> tuple[dict[int, str], Layers, str]:
    """The layers with a separate KV cache: names by index, and kinds.

    The last element is empty if all of them can become host layers. Otherwise it names one that cannot, with the
    reason: its class or metadata does more than plain attention, which a host layer does not, and the plan does not
    know the size of its cache.

    Args:
        context: vLLM's layers by name.
        host_backend: the backend of host layers on this device.
        beside_states: whether host layers were tested on this device beside Gated DeltaNet layers. These keep a state
            instead of keys and values, and are left out.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    shared = {target for layer in context.values() if (target := getattr(layer, "kv_sharing_target_layer_name", None))}
    names: dict[int, str] = {}
    specs: dict[int, Any] = {}
    fixed: set[int] = set()
    if reason := _why_special_model(vllm_config):
        return {}, Layers(()), reason
    for name, layer in context.items():
        if not hasattr(layer, "get_kv_cache_spec") or getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        if getattr(layer, "attn_type", "decoder").startswith("encoder"):
            if layer.attn_type == "encoder_decoder":
                return {}, Layers(()), f"layer {name} attends to an encoder"
            continue  # has no cache
        if compat.is_state_layer(layer):
            kind = vllm_config.model_config.hf_text_config.model_type
            if not (beside_states and kind in LINEAR_MODELS):
                return {}, Layers(()), f"layer {name} keeps a state, and host layers beside it are untested"
            continue  # its state stays on the device
        reason = _why_special(layer, host_backend)
        if reason:
            return {}, Layers(()), f"layer {name} {reason}"
        index = extract_layer_index(name)
        if index in names:
            return {}, Layers(()), f"{names[index]} and {name} are in one decoder layer"
        names[index], specs[index] = name, layer.get_kv_cache_spec(vllm_config)
        if name in shared:
            fixed.add(index)
    windows: dict[int, int | None] = {}
    for index, spec in specs.items():
        try:
            windows[index] = window_of(spec)
        except ValueError as error:
            return {}, Layers(()), f"layer {names[index]} {error}"
    if len({rows_of(spec) for spec in specs.values()}) > 1:
        return {}, Layers(()), "its layers have different numbers of KV heads, head sizes or KV cache dtypes"
    if len({whole_spec(spec) for spec in specs.values()}) > len(set(windows.values())):
        return {}, Layers(()), "vLLM keeps separate block tables for layers with the same window"
    layers = as_grouped(windows, fixed, vllm_config)
    reason = why_too_many_windows(layers) or ""
    return (names, layers, "") if not reason else ({}, Layers(()), reason)


def _why_special_model(vllm_config: VllmConfig) -> str | None:
    """What of a model's attention comes with a step's metadata, in layers that look plain, or None."""
    model: Any = vllm_config.model_config
    if getattr(model, "is_mm_prefix_lm", False):
        return "the tokens of an image attend to each other in both directions"
    if getattr(model, "rswa_window", None) is not None:
        return "its layers attend to the prompt and to a window of recent tokens (R-SWA)"
    return None


def _why_special(layer: Any, host_backend: type[Any]) -> str | None:
    """Why this layer is not plain attention over a separate KV cache, or None."""
    from vllm.model_executor.layers.attention import Attention

    if type(layer) is not Attention:
        return f"is an instance of {type(layer).__name__}"
    # A host layer's backend derives from the device's backend. A backend that vLLM wraps is a subclass of it.
    if not issubclass(host_backend, layer.attn_backend):
        return f"uses the backend {layer.attn_backend.__name__}"
    if not hasattr(layer.impl, "host_window"):
        return f"uses the implementation {type(layer.impl).__name__}"
    return None


def _without_host_layers(vllm_config: VllmConfig, why: str) -> None:
    """Continue without host layers.

    Raises:
        Refusal: the user requested host layers.
    """
    asked = options_of(vllm_config).host_kv_layers
    if asked != "auto":
        raise Refusal(f"host_kv_layers {asked} is not supported with this model: {why}; set host_kv_layers to 0.")
    logger.warning("All KV caches stay on the device, because host layers do not support this model: %s.", why)
    decide_host_layers(vllm_config, [])


def _targets(layers: Layers, placement: LayerPlacement) -> dict[int, int]:
    """For each host layer, the device layer of the same kind that it points to.

    vLLM distributes the device layers of a kind over its block tables in turn. Host layers are distributed likewise, so
    that every block table gets its share.
    """
    targets = {}
    size = placement.device_size
    for kind in layers.kinds():
        drafts = size.draft_layers if kind.window is None else 0
        device = [index for index in kind.layers if index in placement.device]
        host = [index for index in kind.layers if index in placement.host]
        # A drafter's layers come last, so a table of its layers alone has none to point to.
        tables = min(len(device), -(-(len(device) + drafts) // size.layers_per_group()))
        for number, index in enumerate(host):
            targets[index] = device[number % tables]
    return targets


def check_tables(targets: dict[str, str], specs: dict[str, Any], groups: Sequence[Any]) -> None:
    """Check what vLLM has decided: the block table of each target keeps all blocks that the host layer needs.

    ``specs``: of the host layers; ``groups``: vLLM's block tables.

    Raises:
        Refusal: one does not. The plan has foreseen another grouping.
    """
    for name, target in targets.items():
        group = next((group for group in groups if target in group.layer_names), None)
        if group is None:
            raise Refusal(f"vLLM has no block table for layer {target}; set host_kv_layers to 0.")
        table = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(target, group.kv_cache_spec)
        try:
            kept, needed = window_of(table), window_of(specs[name])
        except ValueError as error:
            raise Refusal(
                f"layer {target} {error}, which host layers do not support; set host_kv_layers to 0."
            ) from error
        if kept not in (None, needed):
            raise Refusal(
                f"vLLM keeps {kept} tokens of each request in the block table of layer {target}, but host layer {name} "
                f"shares that table and sees {'all' if needed is None else needed} tokens; set host_kv_layers to 0."
            )
        if rows_of(table) != rows_of(specs[name]):
            raise Refusal(
                f"layer {target} has another number of KV heads, head size or KV cache dtype than host layer {name}, "
                "which shares its block table; set host_kv_layers to 0."
            )


def _smallest_of_all_ranks(limits: Limits) -> Limits:
    """The smallest limits of all ranks, because every rank must make the same decision."""
    device_bytes, host_bytes = smallest(limits.device_bytes, limits.host_bytes)
    return replace(limits, device_bytes=int(device_bytes), host_bytes=int(host_bytes))
