"""vLLM platform for machines without an accelerator: official vLLM as pure Python, our attention kernels."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform

from fastattention_vllm.attention import cpu as cpu_kernels
from fastattention_vllm.integration import compat, cpu_ops, cpu_resources
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.support import check_supported

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.fastattention")

RAY_EXECUTOR = "fastattention_vllm.integration.ray_executor.CpuRayExecutor"


class FastAttentionCpuPlatform(CpuPlatform):
    """``CpuPlatform`` that honours ``--attention-backend`` and needs none of vLLM's compiled CPU ops."""

    # vLLM leaves this empty for CPUs and then refuses Ray. On a CPU-only machine Ray's "GPU" slots are abstract
    # worker slots, which CpuRayExecutor creates.
    ray_device_key: str = "GPU"
    _own_bind = ""

    @classmethod
    def device_count(cls) -> int:
        return len(cpu_resources.physical_cpus())

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if vllm_config.model_config is None:  # partial configs of vLLM's own tools
            super().check_and_update_config(vllm_config)
            return
        options_of(vllm_config)  # a wrong key must fail here, not in a worker
        if cls._uses_fastattention(vllm_config.attention_config.backend):
            check_supported(vllm_config)
            cls._check_kernels()
        cls._check_weights(vllm_config)
        cls._bind_cpus(vllm_config)
        super().check_and_update_config(vllm_config)
        cls._check_compiler(vllm_config)
        cls._size_kv_cache(vllm_config)
        if vllm_config.parallel_config.distributed_executor_backend == "ray":
            vllm_config.parallel_config.distributed_executor_backend = RAY_EXECUTOR

    @classmethod
    def import_kernels(cls) -> None:
        super().import_kernels()
        cpu_ops.define_missing_ops()

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        super().register_triton_kernel_overrides()
        cpu_ops.register_kernel_overrides()

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if cls._uses_fastattention(selected_backend):
            return compat.BACKEND_PATH
        return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))

    @staticmethod
    def _uses_fastattention(backend: Any) -> bool:
        """Our backend when asked for, and when nothing is asked for and vLLM has no CPU kernels of its own.

        Raises:
            Refusal: another backend is asked for and this vLLM cannot run it.
        """
        if backend is not None and backend.name == compat.BACKEND_NAME:
            return True
        if cpu_ops.has_compiled_vllm_ops():
            return False
        if backend is not None:
            raise Refusal(
                f"--attention-backend {backend.name} cannot run here: this vLLM is a pure-Python install without "
                "compiled CPU kernels, and no accelerator was found; use --attention-backend fastattention."
            )
        return True

    @staticmethod
    def _check_kernels() -> None:
        try:
            cpu_kernels.isa()
        except (RuntimeError, ValueError) as error:
            raise Refusal(str(error)) from error

    @staticmethod
    def _check_weights(vllm_config: VllmConfig) -> None:
        quantization = vllm_config.model_config.quantization
        if quantization is not None and not cpu_ops.has_compiled_vllm_ops():
            raise Refusal(
                f"quantised weights ({quantization}) are not supported: they need vLLM's compiled CPU kernels, which "
                "a pure-Python vLLM does not have; serve the unquantised model."
            )

    @staticmethod
    def _check_compiler(vllm_config: VllmConfig) -> None:
        """torch.compile writes C++ on CPUs; without a compiler it fails deep inside a worker."""
        from vllm.config import CompilationMode

        if vllm_config.compilation_config.mode == CompilationMode.NONE:
            return
        wanted = os.environ.get("CXX")
        candidates = [wanted] if wanted else ["g++", "clang++"]
        if not any(map(shutil.which, candidates)):
            raise Refusal(
                f"torch.compile needs a C++ compiler and none was found (tried {', '.join(candidates)}); "
                "`apt-get install g++`, set CXX, or pass --enforce-eager."
            )

    @classmethod
    def _bind_cpus(cls, vllm_config: VllmConfig) -> None:
        """Give every local rank its own CPUs. vLLM's "auto" demands one NUMA node per rank."""
        # What an earlier engine of this process was given is ours to replace; what the user set is not.
        if os.environ.get(cpu_resources.THREADS_BIND, "") not in ("", cls._own_bind):
            return
        ranks = vllm_config.parallel_config.local_world_size
        groups = cpu_resources.split_cpus(cpu_resources.physical_cpus(), ranks)
        cls._own_bind = os.environ[cpu_resources.THREADS_BIND] = cpu_resources.format_bind(groups)
        # Torch's OpenMP threads and the attention pool take turns on the same CPUs: a thread that spins for work
        # after its turn steals the other's.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    @staticmethod
    def _size_kv_cache(vllm_config: VllmConfig) -> None:
        model, cache = vllm_config.model_config, vllm_config.cache_config
        parallel = vllm_config.parallel_config
        bytes_per_block = (
            2
            * cache.block_size
            * model.get_num_layers(parallel)
            * model.get_num_kv_heads(parallel)
            * model.get_head_size()
            * model.dtype.itemsize
        )
        cache.kv_cache_memory_bytes = cpu_resources.kv_bytes_per_rank(
            cache.kv_cache_memory_bytes,
            bytes_per_block,
            cache.block_size,
            model.max_model_len,
            parallel.local_world_size,
        )
        logger.info_once(
            "KV cache: %.2f GiB per rank, %d tokens.",
            cache.kv_cache_memory_bytes / cpu_resources.GIB,
            cache.kv_cache_memory_bytes // bytes_per_block * cache.block_size,
        )
