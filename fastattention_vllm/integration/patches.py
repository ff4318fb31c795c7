"""Everything of vLLM and vllm-ascend that this package replaces: why, for which versions, and when to remove it.

A replaced function is used where vLLM offers no hook. Each entry names the statements that replace it, and a test
(tests/integration/test_patches.py) fails if the package has a statement of that kind which no entry names. What vLLM
asks a plugin for (its platform, its backend class, its options) is not listed: that is what plugins are for.

This module imports nothing and changes nothing; the code that replaces is where the feature is.
"""

from __future__ import annotations

from dataclasses import dataclass

ALL = "all"
"""Of the supported range (``compat.SUPPORTED_VLLM``)."""


@dataclass(frozen=True)
class Patch:
    """One replaced name, or several that are replaced together."""

    names: tuple[str, ...]
    """As vLLM has them."""
    why: str
    remove_when: str
    sites: tuple[str, ...]
    """``module:function:statement`` of each replacing statement, below ``integration``."""
    versions: str = ALL
    """Of vLLM, or of vllm-ascend where the names are its own."""
    issue: str = ""
    """Address of the upstream issue; empty if none is known."""


PATCHES = (
    Patch(
        names=("vllm.v1.attention.backends.registry.AttentionBackendEnum",),
        why="--attention-backend takes members of this enum only. FASTATTENTION becomes one; it unpickles in a fresh "
        "process, before plugins are loaded there. From 0.32 on vLLM itself adds the member.",
        remove_when="registered backends survive pickling into spawned processes and Ray actors",
        sites=(
            "compat:ensure_backend_member:member.__reduce_ex__",
            "compat:_add_member:member._name_",
            "compat:_add_member:member._value_",
            "compat:_add_member:member.__objclass__",
            "compat:_add_member:member._sort_order_",
            "compat:_add_member:members._member_map_[BACKEND_NAME]",
            "compat:_add_member:members._value2member_map_[member._value_]",
        ),
    ),
    Patch(
        names=(
            "vllm.v1.worker.gpu_worker.Worker.determine_available_memory",
            "vllm.v1.worker.gpu_worker.Worker.initialize_from_config",
            "vllm_ascend.worker.worker.NPUWorker.determine_available_memory",
            "vllm_ascend.worker.worker.NPUWorker.initialize_from_config",
        ),
        why="Host layers bound the number of blocks and allocate their pool when vLLM allocates its own cache; tiling "
        "looks for fitting layers between loading and the first run. vLLM has no hook for either on GPUs and NPUs.",
        remove_when="a KV cache spec or a platform may say where a layer's cache lies, and plugins are called after "
        "the weights are loaded",
        sites=(
            "compat:extend_worker:worker._fastattention_find",
            "compat:extend_worker:worker.determine_available_memory",
            "compat:extend_worker:worker.initialize_from_config",
            "compat:before_profiling:worker._fastattention_before_profiling",
            "compat:before_profiling:worker.determine_available_memory",
        ),
    ),
    Patch(
        names=("the impl, attn_backend and kv_sharing_target_layer_name of attention layers",),
        why="A host layer is made to look like a layer that shares the cache of a device layer, so that the scheduler, "
        "prefix caching and preemption go on working on one space of blocks.",
        remove_when="a KV cache spec may place a layer's cache outside the device",
        sites=(
            "host_layers/layers:set_up:layer.kv_sharing_target_layer_name",
            "host_layers/layers:set_up:layer.attn_backend",
            "host_layers/layers:set_up:layer.impl",
        ),
    ),
    Patch(
        names=("vllm.model_executor.layers.linear.RowParallelLinear", "the classes LlamaMLP and Qwen2MLP of models"),
        why="tiling_all_reduce hides the all-reduce behind the matmul. Layers that are made before this plugin's code "
        "first runs, as on GPUs, get the class afterwards.",
        remove_when="vLLM's row-parallel layers take an operation from outside",
        sites=(
            "tiling/row_parallel:install:op_registry_oot.pop",
            "tiling/row_parallel:install:PluggableLayer.register_oot",
            "tiling/row_parallel:enable_tiling:layer.__class__",
            "tiling/row_parallel:enable_tiling:layer.tiled_group",
            "tiling/row_parallel:_enable_mlp_tiling:module.__class__",
            "tiling/row_parallel:_enable_mlp_tiling:module.tiled_group",
        ),
    ),
    Patch(
        names=("vllm.v1.engine.async_llm.AsyncLLM.shutdown",),
        why="A server that is told to stop may cancel the task that would tell waiting requests so; they and the "
        "server then wait for ever.",
        remove_when="AsyncLLM.shutdown itself calls OutputProcessor.propagate_error",
        versions="0.19.1 to 0.33",
        sites=("serving/server_end:tell_requests:module.AsyncLLM.shutdown",),
    ),
    Patch(
        names=("uvicorn.server.Server.shutdown",),
        why="vLLM sets no timeout_graceful_shutdown, so its server waits for ever for a client that stopped reading.",
        remove_when="vLLM sets timeout_graceful_shutdown",
        versions="0.19.1 to 0.33",
        sites=("serving/server_end:limit_waiting:module.Server.shutdown",),
    ),
    Patch(
        names=("the loaders of vllm.v1.engine.async_llm and uvicorn.server",),
        why="The two functions above are replaced when their modules are imported: importing them here would cost "
        "every worker process a second and a half.",
        remove_when="both of the above are removed",
        sites=(
            "serving/server_end:once_imported:sys.meta_path.insert",
            "serving/server_end:_Watch.find_spec:spec.loader.exec_module",
        ),
    ),
    Patch(
        names=("torch.ops._C",),
        why="vLLM's compiled CPU ops are missing in a pure-Python vLLM. Those that supported models call are defined "
        "in torch; where a vLLM brings them, nothing is.",
        remove_when="vLLM publishes CPU wheels",
        sites=("cpu/stand_ins/ops:define_missing_ops:torch.library.Library", "cpu/stand_ins/ops:_define:_library.impl"),
    ),
    Patch(
        names=("vllm.model_executor.layers.utils.check_cpu_sgl_kernel",),
        why="On a CPU with AMX vLLM sends small weights to a compiled kernel that a pure-Python vLLM lacks.",
        remove_when="vLLM publishes CPU wheels",
        sites=("cpu/stand_ins/ops:keep_linears_off_compiled_kernels:linear_dispatch.check_cpu_sgl_kernel",),
    ),
    Patch(
        names=("Triton kernels of the CPU model runner and the rejection sampler",),
        why="Triton has no target for CPUs here, and vLLM's own replacements are compiled C++ that a pure-Python vLLM "
        "lacks. From 0.32 on vLLM asks for replacements; before, they are attributes of vllm.utils.cpu_triton_utils.",
        remove_when="vLLM publishes CPU wheels",
        sites=("compat:replace_triton_kernels:setattr", "compat:replace_triton_kernels:register_kernels"),
    ),
    Patch(
        names=("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm",),
        why="bf16 weights are packed once by torch's oneDNN, which decodes 10 to 25 % faster. vLLM's compiled ops do "
        "the same, and a pure-Python vLLM lacks them.",
        remove_when="vLLM publishes CPU wheels",
        sites=(
            "cpu/stand_ins/linear:pack_weights_once_loaded:utils.dispatch_cpu_unquantized_gemm",
            "cpu/stand_ins/linear:_pack:layer.cpu_linear",
            "cpu/stand_ins/linear:_pack:layer.weight",
        ),
    ),
    Patch(
        names=("vllm.v1.worker.cpu_model_runner.CPUModelRunner.sample_tokens",),
        why="A seeded request whose prompt takes several steps ends the engine: vLLM winds its generator back, which "
        "torch cannot do on CPUs.",
        remove_when="vLLM asks before it winds a generator back",
        versions="0.19.1 to 0.32",
        sites=("cpu/stand_ins/sampling:spare_generators_of_unfinished_prompts:CPUModelRunner.sample_tokens",),
    ),
    Patch(
        names=("vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU",),
        why="vLLM's torch ops take adapter index -1, which means none, for the last adapter. Ours derives from it.",
        remove_when="vLLM's bgmv_* torch ops heed -1",
        sites=(),
    ),
    Patch(
        names=("vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.executor.ray_executor_v2.RayExecutorV2"),
        why="Classes that derive from these place weights and KV cache in huge pages, and give Ray worker slots on a "
        "machine without GPUs. Both are put into vLLM's configuration in the place of its defaults.",
        remove_when="a platform may name the worker's and the executor's class",
        sites=(
            "cpu/platform:FastAttentionCpuPlatform.check_and_update_config:vllm_config.parallel_config.worker_cls",
            "cpu/platform:FastAttentionCpuPlatform.check_and_update_config:"
            "vllm_config.parallel_config.distributed_executor_backend",
        ),
    ),
    Patch(
        names=("ray._private.ray_constants.ENABLE_RAY_CLUSTER",),
        why="A cluster that is started for one machine is to listen on 127.0.0.1; Ray has no option for it.",
        remove_when="ray.init takes the address to listen on",
        sites=("cpu/ray_executor:_keep_to_this_machine:constants.ENABLE_RAY_CLUSTER",),
    ),
    Patch(
        names=("vllm_ascend.platform.NPUPlatform.get_attn_backend_cls",),
        why="vllm-ascend chooses the attention class by the model alone and replaces any other backend in silence. "
        "The choices that vLLM remembers from before are forgotten.",
        remove_when="vllm-ascend takes the class that a backend was registered with",
        versions="vllm-ascend 0.23",
        sites=(
            "ascend/platform:install:NPUPlatform.get_attn_backend_cls",
            "ascend/platform:install:selector._cached_get_attn_backend.cache_clear",
        ),
    ),
    Patch(
        names=("vllm_ascend.ops.linear_op._get_row_parallel_op",),
        why="tiling_all_reduce on NPUs: row-parallel layers that vllm-ascend leaves to vLLM are ours.",
        remove_when="vllm-ascend takes operations from outside",
        versions="vllm-ascend 0.23",
        sites=(
            "ascend/row_parallel:install:linear_op._get_row_parallel_op",
            "ascend/row_parallel:enable_tiling:layer.custom_op",
            "ascend/row_parallel:enable_tiling:layer.custom_op.tiled_group",
        ),
    ),
)
