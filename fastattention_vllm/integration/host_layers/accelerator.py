"""The part of the runtime that is the same for all GPUs and NPUs."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.logger import init_logger

from fastattention_vllm.attention.cpu import kernels as cpu_kernels
from fastattention_vllm.integration import binding, drafter
from fastattention_vllm.integration.host_layers.device import local_rank
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.placement import budget, cpu_claims
from fastattention_vllm.placement import cpus as topology
from fastattention_vllm.placement.graph_calls import GraphCalls
from fastattention_vllm.placement.host_attention import Device
from fastattention_vllm.placement.link import Link

logger = init_logger("vllm.fastattention")

OWN_CPUS = "start each of them with `taskset`, as in `taskset -c 0-7 vllm serve ...`"
SPIN_SECONDS = 0.003
"""How long attention threads spin. They stay awake between host layers, because their CPUs are idle while the device
computes."""


class AcceleratorRuntime:
    """One GPU or NPU."""

    called = "GPU"
    beside_states = False
    keeps_copies = False

    def __init__(
        self, vllm_config: Any, host_backend: type[Any], kernels: Device, named: str, device: torch.device
    ) -> None:
        """``host_backend``: the backend of host layers. ``kernels``: compute the device's part of host layers."""
        self.vllm_config = vllm_config
        self.host_backend = host_backend
        self._kernels = kernels
        self.named = named
        self.device = device
        self.first_cpu = -1
        """The CPU that the attention threads leave to their caller, or -1."""

    def cpus(self) -> list[int]:
        return topology.split_cpus(topology.physical_cpus(), self._ranks())[local_rank()]

    def _ranks(self) -> int:
        return int(self.vllm_config.parallel_config.local_world_size)

    def prepare(self) -> None:
        """Start the CPU threads, leave cores to vLLM, and hook into its worker."""
        cpus = self.cpus()
        own = topology.beside_a_device(cpus, self._ranks())
        threads = options_of(self.vllm_config).cpu_threads or len(own)
        if binding.floats() or topology.quota_is_smaller():
            own = []
        elif why := topology.why_not_bound():
            logger.warning("Threads are not bound to CPUs, because the system does not allow it (%s).", why)
            own = []
        elif taken := cpu_claims.claim(own):
            logger.warning(
                "Another server computes on CPUs %s too, so threads are not bound to CPUs. To give each server its own "
                "CPUs, %s.",
                ",".join(map(str, taken)),
                OWN_CPUS,
            )
            own = []
        else:
            binding.share_with_other_servers(own, os.sched_getaffinity(0), OWN_CPUS)
        self.first_cpu = own[0] if own and threads <= len(own) else -1  # more threads share the first CPU
        try:
            cpu_kernels.set_num_threads(threads, own)
            cpu_kernels.set_spin(SPIN_SECONDS)
        except (RuntimeError, ValueError) as error:
            raise Refusal(f"host layers need the CPU kernels: {error}") from error
        logger.info_once(
            "Host layers: CPU instruction set %s, %s; the %s uses %s.",
            cpu_kernels.isa(),
            topology.describe_pinning(threads, own, cpus),
            self.called,
            self.named,
        )
        self.extend_worker()

    def extend_worker(self) -> None:
        """Make the worker limit and allocate the host layers' pool together with its own cache."""
        raise NotImplementedError

    def graph_calls(self, link: Link) -> GraphCalls | None:
        return None

    def kernels(self) -> Device:
        return self._kernels

    def kv_bytes(self) -> int:
        """An estimate of what vLLM's profiling will find. If it finds less memory, vLLM's own check reports that."""
        config = self.vllm_config
        asked = config.cache_config.kv_cache_memory_bytes
        if asked:
            return int(asked)
        device_module: Any = torch.get_device_module(self.device)
        free, total = device_module.mem_get_info(self.device)
        model, ranks = config.model_config.hf_text_config, config.parallel_config.tensor_parallel_size
        activations = budget.activation_bytes(
            tokens=config.scheduler_config.max_num_batched_tokens,
            sequences=config.scheduler_config.max_num_seqs,
            hidden=model.hidden_size,
            intermediate=getattr(model, "intermediate_size", 4 * model.hidden_size),
            vocabulary=model.vocab_size,
            heads=config.model_config.get_num_attention_heads(config.parallel_config),
            head_size=config.model_config.get_head_size(),
            ranks=ranks,
        )
        if options_of(config).host_kv_dtype != "auto":
            activations += budget.WIDENED_BYTES
        # The drafter is loaded after the model.
        used = total - free + drafter.weight_bytes(config)
        return budget.device_kv_bytes(total, used, activations, config.cache_config.gpu_memory_utilization)
