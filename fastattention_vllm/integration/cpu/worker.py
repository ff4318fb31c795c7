"""vLLM's CPU worker, with weights and KV cache in huge pages on the NUMA nodes that read them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker

from fastattention_vllm.attention.cpu import kernels as cpu_kernels
from fastattention_vllm.attention.cpu import memory as cpu_memory
from fastattention_vllm.integration import binding, compat
from fastattention_vllm.integration.checkpoint.reload import checked
from fastattention_vllm.integration.cpu.stand_ins import block_copies, linear_attention
from fastattention_vllm.integration.cpu.stand_ins import linear as cpu_linear
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.tiling import row_parallel
from fastattention_vllm.placement import cpus as topology
from fastattention_vllm.placement.host_memory import GIB

logger = init_logger("vllm.fastattention")

HUGE_PAGE = 2 << 20
SPIN_SECONDS = 0.001
"""How long the kernels' threads wait for the next layer before they sleep. Each one has a CPU of its own, and waking it
costs more than the arithmetic between two layers, above all on virtual machines. Only where no other pool of threads
computes linear layers on these CPUs."""
FEW_TOKENS = 64
"""Up to this many tokens, one thread computes what is not in the kernels (norms, activations) faster than it shares it
with others: about a hundred times per step it would wait until they are awake, however busy their CPUs are."""


class FastAttentionCpuWorker(CPUWorker):
    """Places the weights after they are loaded, and the KV cache after it is allocated.

    All vLLM versions take the class from ``parallel_config.worker_cls``.

    vLLM fills the cache with zeros when it allocates it, with torch's threads and in small pages. It contains nothing
    else yet, so its pages can be released and touched again on the right NUMA nodes. (torch's THP_MEM_ALLOC_ENABLE
    would have to be set before the process first allocates memory, affects every tensor, and ignores NUMA nodes.)
    """

    def init_device(self) -> None:
        current_platform.prepare_worker(self.vllm_config)
        super().init_device()
        current_platform.free_queue_names(self.vllm_config)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        row_parallel.install(self.vllm_config)
        if self.vllm_config.model_config.is_hybrid:
            linear_attention.replace_operator()
            block_copies.copy_whole_blocks()
        super().load_model(*args, **kwargs)
        row_parallel.enable_tiling(self.vllm_config, self.model_runner.model)
        weights = [*self.model_runner.model.parameters(), *cpu_linear.packed_weights()]
        draft = getattr(getattr(self.model_runner, "drafter", None), "model", None)
        if isinstance(draft, torch.nn.Module):
            weights += draft.parameters()
        place_tensors("weights", weights, self._cpus(), discard=False)
        if self._kernels_compute_linears():
            cpu_kernels.set_spin(SPIN_SECONDS)

    def execute_model(self, scheduler_output: Any) -> Any:
        with self._torch_threads(scheduler_output):
            return super().execute_model(scheduler_output)

    @contextlib.contextmanager
    def _torch_threads(self, scheduler_output: Any) -> Iterator[None]:
        """torch's threads for a step: one for few tokens, unless torch or vLLM computes linear layers."""
        few = scheduler_output.total_num_scheduled_tokens <= FEW_TOKENS
        ours = self._kernels_compute_linears() and not scheduler_output.scheduled_encoder_inputs
        threads = torch.get_num_threads()
        if not few or not ours or threads == 1:
            yield
            return
        # vLLM replaces torch.set_num_threads with a function that does nothing.
        torch._C.set_num_threads(1)
        try:
            yield
        finally:
            torch._C.set_num_threads(threads)

    def _kernels_compute_linears(self) -> bool:
        """Whether all linear layers run on the kernels' threads. Otherwise OpenMP's threads need the same CPUs."""
        if compat.has_compiled_cpu_ops() or cpu_linear.packed_weights():
            return False
        return cpu_linear.tokens_on_rows(self.model_config.dtype) is None

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """
        Raises:
            Refusal: vLLM would load only a part of the weights, or the new checkpoint is not complete.
        """
        checked(super().reload_weights, self, *args, **kwargs)

    def determine_available_memory(self) -> int:
        available = super().determine_available_memory()
        layers = host_layers.find(self.vllm_config)
        return layers.clamp(available) if layers else available

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        layers = host_layers.find(self.vllm_config)
        if layers is None:
            self._allocate_cache(kv_cache_config)
            return
        with layers.together():
            self._allocate_cache(kv_cache_config)
            layers.allocate(self.vllm_config.compilation_config.static_forward_context, kv_cache_config)

    def _allocate_cache(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        place_tensors("KV cache", self.model_runner.kv_caches, self._cpus(), discard=True)

    def _cpus(self) -> list[int]:
        return binding.cpus_in_reach(self.local_rank)


def place_tensors(what: str, tensors: Any, cpus: Iterable[int], *, discard: bool) -> None:
    """Place the buffers of ``tensors`` (which may be nested lists) for threads on ``cpus``, and log the result.

    With ``discard``, the buffers are zero afterwards. Without it, they keep their contents, and buffers smaller than
    two huge pages are not moved.
    """
    every = dict(_buffers(tensors))
    buffers = {address: size for address, size in every.items() if size >= _min_bytes(discard)}
    if not buffers:
        return
    nodes = topology.numa_nodes(cpus)
    placements = [cpu_memory.place_memory(address, size, nodes, discard=discard) for address, size in buffers.items()]
    not_moved = "" if len(buffers) == len(every) else f" Tensors below {_min_bytes(discard) >> 20} MiB are not moved."
    logger.info("%s%s", describe(what, sum(every.values()), nodes, placements), not_moved)


def _min_bytes(discard: bool) -> int:
    return 1 if discard else 2 * HUGE_PAGE  # of which one lies inside, wherever the buffer begins


def describe(what: str, size: int, nodes: Sequence[int], placements: Sequence[cpu_memory.MemoryPlacement]) -> str:
    """One line for the log: ``size`` bytes of ``what``, the requested NUMA ``nodes``, and the result per buffer."""
    known = [placement.huge_bytes for placement in placements if placement.huge_bytes is not None]
    huge = f"{100 * sum(known) / size:.0f} % of it" if known else "an unknown part of it"
    parts = [f"{what}: {size / GIB:.2f} GiB, {huge} in huge pages"]
    if nodes and all(placement.num_nodes == len(nodes) for placement in placements):
        how = "interleaved over NUMA nodes" if len(nodes) > 1 else "on NUMA node"
        parts.append(f"{how} {', '.join(map(str, nodes))}")
    elif nodes:
        parts.append(f"requested NUMA nodes {', '.join(map(str, nodes))}")
    reasons = dict.fromkeys(placement.reason for placement in placements if placement.reason)
    return " ".join([", ".join(parts) + ".", *reasons])


def _buffers(tensors: Any) -> Iterable[tuple[int, int]]:
    """Address and size of the buffer of every CPU tensor.

    Up to 0.28, each layer's KV cache has a separate buffer; from 0.29 on, all layers share one. A Mamba layer has a
    list of tensors.
    """
    if isinstance(tensors, torch.Tensor):
        if tensors.is_mkldnn:
            yield cpu_linear.buffer(tensors)
        elif tensors.device.type == "cpu":
            yield tensors.untyped_storage().data_ptr(), tensors.untyped_storage().nbytes()
    elif isinstance(tensors, dict):
        yield from _buffers(list(tensors.values()))
    elif isinstance(tensors, list | tuple):
        for tensor in tensors:
            yield from _buffers(tensor)
