"""vLLM platform for machines without an accelerator: pure-Python vLLM with this package's attention kernels."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform

from fastattention_vllm.attention.cpu import kernels as cpu_kernels
from fastattention_vllm.integration import binding, compat, drafter, multimodal
from fastattention_vllm.integration.checkpoint.positions import check_positions
from fastattention_vllm.integration.checkpoint.weights import check_weights
from fastattention_vllm.integration.cpu import prompt_logprobs
from fastattention_vllm.integration.cpu import resources as cpu_resources
from fastattention_vllm.integration.cpu.stand_ins import linear as cpu_linear
from fastattention_vllm.integration.cpu.stand_ins import ops as cpu_ops
from fastattention_vllm.integration.cpu.stand_ins import sampling as cpu_sampling
from fastattention_vllm.integration.host_layers import plan as host_plan
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.serving import compile_cache, ray_cluster
from fastattention_vllm.integration.support import check_supported
from fastattention_vllm.placement import cpu_claims
from fastattention_vllm.placement import cpus as topology
from fastattention_vllm.placement.host_memory import GIB

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.fastattention")

PUNICA_WRAPPER = "fastattention_vllm.integration.cpu.stand_ins.lora.CpuPunicaWrapper"
WORKER = "fastattention_vllm.integration.cpu.worker.FastAttentionCpuWorker"
RAY_EXECUTOR = "fastattention_vllm.integration.cpu.ray_executor.CpuRayExecutor"


class FastAttentionCpuPlatform(CpuPlatform):
    """``CpuPlatform`` that honours ``--attention-backend`` and needs none of vLLM's compiled CPU ops."""

    # vLLM leaves this empty for CPUs and then refuses Ray. On a CPU-only machine, Ray's "GPU" slots are abstract worker
    # slots, which CpuRayExecutor creates.
    ray_device_key: str = "GPU"
    # vLLM compiles a few small functions even with --enforce-eager; on CPUs that would need a C++ compiler at run time.
    simple_compile_backend: str = "eager"

    @classmethod
    def device_count(cls) -> int:
        return len(topology.physical_cpus())

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if vllm_config.model_config is None:  # partial configs of vLLM's own tools
            super().check_and_update_config(vllm_config)
            return
        if drafter.is_of_draft_model(vllm_config):
            # A worker makes it from the engine's configuration, which was checked and has the sizes.
            with compat.without_fp8_cache(vllm_config), compat.same_block_size(vllm_config):
                super().check_and_update_config(vllm_config)
            return
        if vllm_config.lora_config is not None:
            prompt_logprobs.refuse_with_adapters()
        options_of(vllm_config)  # a wrong key must fail here, not in a worker
        ours = cls._uses_fastattention(vllm_config.attention_config.backend)
        if ours:
            check_supported(vllm_config)
            check_positions(vllm_config)
            multimodal.allow_images_only(vllm_config)
            cls._check_kernels()
            check_weights(vllm_config)
            drafter.use_this_backend(vllm_config)
            if vllm_config.parallel_config.worker_cls == "auto":
                vllm_config.parallel_config.worker_cls = WORKER
            cls._check_worker(vllm_config)
        compat.check_ray(vllm_config)
        cls._bind_cpus(vllm_config)
        if ours:
            with compat.without_fp8_cache(vllm_config):
                super().check_and_update_config(vllm_config)
        else:
            super().check_and_update_config(vllm_config)
        cls._check_compiler(vllm_config)
        compile_cache.check_open_files()
        compile_cache.prepare(vllm_config)
        if ours and vllm_config.model_config.is_hybrid:
            # Not at the top: what it imports of vLLM needs the platform.
            from fastattention_vllm.integration.cpu.backend import FastAttentionBackend

            compat.settle_hybrid_block_size(vllm_config, FastAttentionBackend)
        cls._size_kv_cache(vllm_config)
        if vllm_config.parallel_config.distributed_executor_backend == "ray":
            vllm_config.parallel_config.distributed_executor_backend = RAY_EXECUTOR

    @classmethod
    def import_kernels(cls) -> None:
        super().import_kernels()
        cpu_ops.define_missing_ops()

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        if compat.has_compiled_cpu_ops():
            super().register_triton_kernel_overrides()
        else:
            cpu_ops.register_kernel_overrides()

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return PUNICA_WRAPPER

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        # In every version, a worker calls this while it builds the model, before it arranges the weights.
        cpu_linear.keep_few_primitives()
        cpu_ops.keep_linears_off_compiled_kernels()
        cpu_linear.replace_linears_once_loaded()
        cpu_sampling.spare_generators_of_unfinished_prompts()
        cpu_sampling.let_steps_without_drafts_pass()
        if cls._uses_fastattention(selected_backend):
            return compat.BACKEND_PATH
        return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))

    @staticmethod
    def _uses_fastattention(backend: Any) -> bool:
        """Whether this package's backend runs: if it is selected, or if none is and vLLM has no CPU kernels.

        Raises:
            Refusal: another backend is selected that this vLLM cannot run.
        """
        if backend is not None and backend.name == compat.BACKEND_NAME:
            return True
        if compat.has_compiled_cpu_ops():
            return False
        if backend is not None:
            raise Refusal(
                f"--attention-backend {backend.name} cannot run here: this vLLM is a pure-Python install without "
                "compiled CPU kernels, and no accelerator was found; use --attention-backend fastattention."
            )
        return True

    @classmethod
    def prepare_worker(cls, vllm_config: VllmConfig) -> None:
        """Bind a Ray worker's threads to CPUs of its own machine, and connect it through the network that Ray uses.

        The server decided for its own machine, and vLLM copied its environment to the workers. A user's values on the
        worker's machine take precedence. Other executors' workers need nothing.
        """
        if vllm_config.parallel_config.distributed_executor_backend != RAY_EXECUTOR:
            return
        # Not at the top: only this executor needs Ray.
        from fastattention_vllm.integration.cpu import ray_executor

        cls._bind_cpus(vllm_config, compat.ranks_on_this_machine(vllm_config))
        ray_executor.choose_gloo_interface()

    @staticmethod
    def free_queue_names(vllm_config: VllmConfig) -> None:
        """Leave no shared memory behind if Ray kills this worker, whose tensor-parallel group is now connected."""
        if vllm_config.parallel_config.distributed_executor_backend == RAY_EXECUTOR:
            ray_cluster.free_group_name()

    @staticmethod
    def _check_worker(vllm_config: VllmConfig) -> None:
        """A user's worker class must do what ours does."""
        if vllm_config.parallel_config.worker_cls == WORKER:
            return
        # Not at the top: vLLM's worker module imports much that the API server never needs.
        from fastattention_vllm.integration.cpu.worker import FastAttentionCpuWorker

        compat.check_worker_class(vllm_config, FastAttentionCpuWorker)

    @staticmethod
    def _check_kernels() -> None:
        try:
            cpu_kernels.isa()
        except (RuntimeError, ValueError) as error:
            raise Refusal(str(error)) from error

    @staticmethod
    def _check_compiler(vllm_config: VllmConfig) -> None:
        """torch.compile generates C++ that includes Python.h. Without a compiler or headers, a worker would fail."""
        from vllm.config import CompilationMode

        if vllm_config.compilation_config.mode == CompilationMode.NONE:
            return
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise Refusal(
                f"torch.compile needs a C++ compiler, but {compiler} was not found; "
                "run `apt-get install g++`, set CXX, or pass --enforce-eager."
            )
        headers = Path(sysconfig.get_path("include"))
        if not (headers / "Python.h").exists():
            raise Refusal(
                f"torch.compile needs Python's C headers, but {headers} has no Python.h; "
                "run `apt-get install python3-dev`, or pass --enforce-eager."
            )

    @staticmethod
    def _bind_cpus(vllm_config: VllmConfig, ranks: int | None = None) -> None:
        """Bind every local rank to separate CPUs. Leave all ranks unbound if a quota allows fewer CPUs than there are,
        or if another server computes on some of these CPUs.

        vLLM's "auto" requires one NUMA node per rank. As in vLLM, the CPUs that VLLM_CPU_NUM_OF_RESERVED_CPU reserves
        for other work are the last ones, and the user's own list takes precedence over it.

        Args:
            ranks: the ranks on this machine, if vLLM's configuration does not tell.

        Raises:
            Refusal: no CPU would be left, or the user's own list of CPUs is wrong.
        """
        from vllm import envs

        # Torch's OpenMP threads and the attention threads alternate on the same CPUs. A thread that spins after its
        # turn takes time from the others. `OMP_WAIT_POLICY=ACTIVE make serve` shows the difference.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        ranks = ranks or vllm_config.parallel_config.local_world_size
        # Replace a value that was set for a previous engine of this process or its parent, but never the user's value.
        asked = os.environ.get(binding.THREADS_BIND, "auto") or "auto"
        if why := topology.why_not_bound():
            logger.warning("Threads are not bound to CPUs, because the system does not allow it (%s).", why)
            os.environ[binding.OWN_BIND] = os.environ[binding.THREADS_BIND] = binding.NOBIND
            return
        if asked not in ("auto", os.environ.get(binding.OWN_BIND)):
            binding.check_bind(asked, ranks)
            cpu_claims.claim(binding.cpus_bound_by(asked))
            return
        reserved = envs.VLLM_CPU_NUM_OF_RESERVED_CPU or 0
        if topology.quota_is_smaller():
            if reserved:
                logger.warning(
                    "VLLM_CPU_NUM_OF_RESERVED_CPU=%d has no effect: the CPU quota of this container is smaller than "
                    "its number of CPUs, so threads are not bound to CPUs.",
                    reserved,
                )
            os.environ[binding.OWN_BIND] = os.environ[binding.THREADS_BIND] = binding.NOBIND
            return
        cpus = topology.physical_cpus()
        if not 0 <= reserved < len(cpus):
            raise Refusal(
                f"VLLM_CPU_NUM_OF_RESERVED_CPU={reserved} is not between 0 and {len(cpus) - 1}, so none of the "
                f"{len(cpus)} CPUs would be left for the server; set it to a smaller number, or unset it."
            )
        cpus = cpus[: len(cpus) - reserved]
        # Ray's workers do not inherit this process's environment, so they would take each other for other servers.
        with_ray = vllm_config.parallel_config.distributed_executor_backend in ("ray", RAY_EXECUTOR)
        if not with_ray and (taken := cpu_claims.claim(cpus)):
            logger.warning(
                "Another server computes on CPUs %s too, so threads are not bound to CPUs, and Linux shares them among "
                "the servers%s. To give each server its own CPUs, set %s.",
                ",".join(map(str, taken)),
                f", and VLLM_CPU_NUM_OF_RESERVED_CPU={reserved} has no effect" if reserved else "",
                binding.THREADS_BIND,
            )
            os.environ[binding.OWN_BIND] = os.environ[binding.THREADS_BIND] = binding.NOBIND
            return
        groups = topology.split_cpus(cpus, ranks)
        os.environ[binding.OWN_BIND] = os.environ[binding.THREADS_BIND] = binding.format_bind(groups)

    @staticmethod
    def _size_kv_cache(vllm_config: VllmConfig) -> None:
        model = vllm_config.model_config
        placement = host_plan.plan_without_gpu(vllm_config)
        size, weight_bytes = placement.device_size, cpu_resources.checkpoint_bytes(model.model)
        draft = drafter.model_of(vllm_config)
        if draft is not None and draft.model != model.model:
            weight_bytes += cpu_resources.checkpoint_bytes(draft.model)
        automatic_length = host_plan.length_is_automatic(vllm_config)
        kv_bytes = cpu_resources.kv_bytes_per_rank(
            compat.requested_kv_bytes(vllm_config),
            size,
            None if automatic_length else model.max_model_len,
            weight_bytes,
            vllm_config.parallel_config.local_world_size,
        )
        if automatic_length:
            # vLLM fits the length too, but up to 0.29 it ignores its reserved null block: the longest requests would
            # wait for that block forever.
            longest = host_plan.longest_request(placement, vllm_config, kv_bytes, weight_bytes)
            compat.set_max_model_len(vllm_config, min(model.max_model_len, longest or model.max_model_len))
        compat.set_kv_bytes(vllm_config, kv_bytes)
        if size.of_request(1):
            logger.info_once("KV cache: %.2f GiB per rank.", kv_bytes / GIB)
