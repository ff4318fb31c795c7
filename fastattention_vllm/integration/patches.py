"""Everything of vLLM and vllm-ascend that this package replaces: why, for which versions, and when to remove it.

Functions are replaced only where vLLM has no hook. Each entry lists the statements that replace something, and a test
(tests/integration/test_patches.py) fails if the package has such a statement that no entry lists. vLLM's official
plugin interfaces (platform, backend class, options, quantisation methods) are not listed.

This module only describes the patches. The code that applies them is in the module of each feature.
"""

from __future__ import annotations

from dataclasses import dataclass

ALL = "all"
"""All versions in the supported range (``compat.SUPPORTED_VLLM``)."""


@dataclass(frozen=True)
class Patch:
    """One replaced name, or several that are replaced together."""

    names: tuple[str, ...]
    """The names in vLLM."""
    why: str
    remove_when: str
    sites: tuple[str, ...]
    """``module:function:statement`` of each replacing statement, below ``integration``."""
    versions: str = ALL
    """Versions of vLLM, or of vllm-ascend if the names belong to it."""
    issue: str = ""
    """URL of the upstream issue; empty if none is known."""


PATCHES = (
    Patch(
        names=("vllm.v1.attention.backends.registry.AttentionBackendEnum",),
        why="--attention-backend accepts only members of this enum. FASTATTENTION becomes a member that can be "
        "unpickled in a new process before plugins are loaded there. From 0.32 on, vLLM itself adds the member.",
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
        why="Host layers limit the number of blocks and allocate their pool when vLLM allocates its own cache. Tiling "
        "selects layers between loading and the first run. vLLM has no hook for either on GPUs and NPUs.",
        remove_when="a KV cache spec or a platform can specify where a layer's cache is, and plugins are called after "
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
        names=("vllm.v1.worker.gpu_worker.Worker.reload_weights", "vllm_ascend.worker.worker.NPUWorker.reload_weights"),
        why="reload_weights leaves some weights of some models as they were, and answers with what memory held where "
        "a checkpoint is not complete.",
        remove_when="vLLM loads every weight again or fails, and checks a checkpoint before it loads it again",
        sites=("checkpoint/reload:check_first:worker.reload_weights",),
    ),
    Patch(
        names=(
            "the execute_model of vLLM's two GPUModelRunner classes",
            "vllm.v1.cudagraph_dispatcher.CudagraphDispatcher.dispatch",
            "vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager.dispatch",
        ),
        why="With host layers, a decode step is one CUDA graph, or runs in pieces where copies of a part of long "
        "contexts to the GPU gain more. vLLM chooses by the number of tokens only.",
        remove_when="a backend can exclude whole graphs for a step",
        sites=(
            "cuda/graph_steps:choose_whole_steps:CudagraphDispatcher._fastattention_step",
            "cuda/graph_steps:choose_whole_steps:runner.execute_model",
            "cuda/graph_steps:choose_whole_steps:CudagraphDispatcher.dispatch",
            "cuda/graph_steps:choose_whole_steps:CudaGraphManager.dispatch",
        ),
    ),
    Patch(
        names=("vllm.v1.spec_decode.ngram_proposer.NgramProposer.batch_propose",),
        why="With host layers, decode steps are CUDA graphs that hold a fixed number of drafts. vLLM's n-gram drafting "
        "finds fewer or none, and such steps run in pieces. Where pieces are slower, missing drafts are made up.",
        remove_when="vLLM captures steps with fewer drafts, too",
        sites=("cuda/graph_steps:fill_ngram_drafts:NgramProposer.batch_propose",),
    ),
    Patch(
        names=("GPUModelRunner._update_hybrid_attention_mamba_layout of vllm.v1.worker.gpu_model_runner",),
        why="In models with linear-attention layers, vLLM 0.19 changes the strides of all attention layers' caches "
        "before it adds those of layers that share a cache, which ends the start with a KeyError.",
        remove_when="vLLM 0.19 is no longer supported",
        versions="0.19.1 to 0.23",
        sites=("compat:add_shared_caches_before_layout:runner._update_hybrid_attention_mamba_layout",),
    ),
    Patch(
        names=("aot_schedule and aot_sliding_window of FlashAttention's metadata builder",),
        why="FlashAttention 3 plans a step for the one window that all layers have. vLLM looks for it among all layers "
        "and asserts that each is FlashAttention's own; host layers are not.",
        remove_when="the oldest supported vLLM skips other layers, as 0.23 does",
        versions="0.19.1",
        sites=(
            "compat:settle_scheduled_window:builder.aot_schedule",
            "compat:settle_scheduled_window:builder.aot_sliding_window",
        ),
    ),
    Patch(
        names=("CompressedTensorsKVCacheMethod.process_weights_after_loading of vLLM's quantisation methods",),
        why="vLLM 0.19 loads the scales of a checkpoint's KV cache as tensors and leaves the numbers at 1, which "
        "kernels take.",
        remove_when="vLLM 0.19 is no longer supported",
        versions="0.19.1",
        sites=(
            "compat:keep_scales_of_kv_cache:method.process_weights_after_loading",
            "compat:keep_scales_of_kv_cache.process_weights_after_loading:delattr",
            "compat:keep_scales_of_kv_cache.process_weights_after_loading:setattr",
        ),
    ),
    Patch(
        names=("vllm.config.model._check_valid_dtype", "the apply_config_platform_defaults of vLLM's CUDA platforms"),
        why="On GPUs of compute capability 7.x, vLLM recommends bfloat16, which they lack, for models that do not run "
        "in float16. Models that the kernels refuse are refused before any process is started. On the V100, "
        "torch.compile is off by default. Models with some numbers of experts are compiled without padding, see "
        "https://github.com/vllm-project/vllm/issues/56900. vLLM has no hook for any of these.",
        remove_when="plugins can check a configuration and set defaults on built-in platforms",
        sites=(
            "cuda/start:refuse_float16:module._check_valid_dtype",
            "cuda/start:check_and_set_defaults:platform.apply_config_platform_defaults",
        ),
    ),
    Patch(
        names=("the impl, attn_backend and kv_sharing_target_layer_name of attention layers",),
        why="A host layer looks like a layer that shares the cache of a device layer, so that the scheduler, prefix "
        "caching and preemption still work with one set of block ids.",
        remove_when="a KV cache spec can place a layer's cache outside the device",
        sites=(
            "host_layers/layers:_set_up:layer.kv_sharing_target_layer_name",
            "host_layers/layers:_set_up:layer.attn_backend",
            "host_layers/layers:_set_up:layer.impl",
        ),
    ),
    Patch(
        names=("ca_comm of the tensor-parallel group's communicator",),
        why="push_all_reduce makes small sums where vLLM's own kernel for them is not available. vLLM has no hook for "
        "another one.",
        remove_when="a plugin can name the communicator's way of small sums",
        sites=("tiling/small_sums:enable:communicator.ca_comm",),
    ),
    Patch(
        names=("the operation chunk_gated_delta_rule of Gated DeltaNet layers",),
        why="Triton compiles its kernels for prompts to FMA with spilled registers on compute capability 7.0. vLLM has "
        "a hook for the operation's class, but its first layers are created before this plugin's backend is asked for.",
        remove_when="V100 is no longer supported",
        sites=("cuda/gated_delta:install:layer.chunk_gated_delta_rule",),
    ),
    Patch(
        names=("vllm.model_executor.layers.linear.RowParallelLinear", "the classes LlamaMLP and Qwen2MLP of models"),
        why="tiling_all_reduce overlaps the all-reduce with the matmul. If layers are created before this plugin's "
        "code first runs, as on GPUs, their class is changed afterwards.",
        remove_when="vLLM's row-parallel layers accept an operation from a plugin",
        sites=(
            "tiling/row_parallel:install:op_registry_oot.pop",
            "tiling/row_parallel:install:PluggableLayer.register_oot",
            "tiling/row_parallel:_enable_tiling:layer.__class__",
            "tiling/row_parallel:_enable_tiling:layer.tiled_group",
            "tiling/row_parallel:_enable_mlp_tiling:module.__class__",
            "tiling/row_parallel:_enable_mlp_tiling:module.tiled_group",
        ),
    ),
    Patch(
        names=("vllm.v1.engine.input_processor.InputProcessor.process_inputs",),
        why="On CPUs, prompt_logprobs would end an engine with adapters. vLLM's hook for refusing a request is not "
        "told which engine of the process it is for.",
        remove_when="Platform.validate_request gets the engine's configuration, or vLLM's layer for logits takes rows "
        "of prompts",
        sites=("cpu/prompt_logprobs:refuse_with_adapters:InputProcessor.process_inputs",),
    ),
    Patch(
        names=("vllm.distributed.device_communicators.shm_broadcast.SpinCondition",),
        why="On CPUs, a process that waits for a message yields its CPU in a loop for a second before it sleeps, and "
        "takes the CPU from a step of the workers. vLLM has no option for the time. Its writers drop notifications, "
        "which readers that sleep need.",
        remove_when="vLLM has an option for the time, and its writers drop no notification",
        sites=("cpu/queue_waiting:_replace:module.SpinCondition",),
    ),
    Patch(
        names=("vllm.v1.engine.async_llm.AsyncLLM.shutdown",),
        why="When a server stops, it may cancel the task that informs waiting requests. These requests and the server "
        "then wait forever.",
        remove_when="AsyncLLM.shutdown itself calls OutputProcessor.propagate_error",
        versions="0.19.1 to 0.33",
        sites=("serving/server_end:tell_requests:module.AsyncLLM.shutdown",),
    ),
    Patch(
        names=("vllm.v1.engine.core_client.AsyncMPClient.get_output_async",),
        why="When a server stops, the task that reads from its engine reports a dead engine, with a traceback.",
        remove_when="vLLM tells the stop of an engine from its death",
        versions="0.19.1 to 0.33",
        sites=("serving/server_end:stop_reading:module.AsyncMPClient.get_output_async",),
    ),
    Patch(
        names=(
            "vllm.distributed.device_communicators.shm_broadcast.MessageQueue.wait_until_ready",
            "the lock of tqdm.std.tqdm in processes that vLLM starts",
        ),
        why="vLLM kills its engine and workers when a server stops. Python then finds the names of their queues and of "
        "a lock of their progress bars, and warns of leaks in the server's last lines.",
        remove_when="vLLM lets its engine and workers end by themselves, or removes the names itself",
        versions="0.19.1 to 0.33",
        sites=(
            "serving/shared_names:free_names_of_queues:module.MessageQueue.wait_until_ready",
            "serving/shared_names:free_names_of_queues.wait_until_ready:memory.is_creator",
        ),
    ),
    Patch(
        names=("uvicorn.server.Server.shutdown",),
        why="vLLM sets no timeout_graceful_shutdown, so its server waits forever for a client that has stopped "
        "reading.",
        remove_when="vLLM sets timeout_graceful_shutdown",
        versions="0.19.1 to 0.33",
        sites=("serving/server_end:limit_waiting:module.Server.shutdown",),
    ),
    Patch(
        names=(
            "vllm.v1.executor.multiproc_executor.MultiprocExecutor.shutdown",
            "vllm.v1.executor.ray_executor_v2.RayExecutorV2.shutdown",
            "vllm.v1.engine.async_llm.AsyncLLM.shutdown",
            "uvicorn.server.Server.shutdown",
        ),
        why="A server whose engine has died exits with status 0, and its log ends in tracebacks that do not name the "
        "worker that ended. Supervisors do not restart it.",
        remove_when="vllm serve exits with an error after the engine's death and names the worker that ended",
        versions="0.19.1 to 0.33",
        sites=(
            "serving/engine_end:_record_at_shutdown:executor.shutdown",
            "serving/engine_end:note_stops:module.AsyncLLM.shutdown",
            "serving/engine_end:fail_with_the_engine:module.Server.shutdown",
        ),
    ),
    Patch(
        names=("uvicorn.server.Server.startup",),
        why="The metrics and the status of this backend are part of vLLM's own server. Its endpoint plugins have to be "
        "named in VLLM_PLUGINS.",
        remove_when="vLLM loads endpoint plugins that are not named",
        sites=("serving/server_start:attach_at_start:module.Server.startup",),
    ),
    Patch(
        names=("the __init__ and forward of vllm.model_executor.layers.logits_processor.LogitsProcessor",),
        why="Logits with NaN are counted, and said once. vLLM samples from them without a word. Its own count, "
        "VLLM_COMPUTE_NANS_IN_LOGITS, waits for the device in each step in most versions, and is off by default.",
        remove_when="vLLM reports NaN by default, without waiting for the device",
        sites=("serving/nan_logits:count_logits:kind.__init__", "serving/nan_logits:count_logits:kind.forward"),
    ),
    Patch(
        names=("a method fastattention_stats, added to vllm.v1.worker.worker_base.WorkerBase",),
        why="collective_rpc calls methods of the worker, and a worker extension belongs to the user.",
        remove_when="a plugin can register a method for collective_rpc",
        sites=("serving/worker_stats:add_method:setattr",),
    ),
    Patch(
        names=(
            "the loaders of vllm.v1.engine.async_llm, core_client, shm_broadcast, worker_base, the executors, "
            "uvicorn.server and tqdm.std",
        ),
        why="What is replaced in them is replaced when they are imported. Importing them here would cost every process "
        "1.5 seconds.",
        remove_when="the patches of these modules are removed",
        sites=(
            "serving/once_imported:_watch:sys.meta_path.insert",
            "serving/once_imported:_Watch.find_spec:spec.loader.exec_module",
        ),
    ),
    Patch(
        names=("torch.ops._C",),
        why="A pure-Python vLLM lacks the compiled CPU ops. The ops that supported models call are defined in torch. "
        "If a vLLM includes the compiled ops, nothing is replaced.",
        remove_when="vLLM publishes CPU wheels",
        sites=("cpu/stand_ins/ops:define_missing_ops:torch.library.Library", "cpu/stand_ins/ops:_define:_library.impl"),
    ),
    Patch(
        names=(
            "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention.cpu_gdn_attention_core",
            "the class vllm.model_executor.layers.layernorm.RMSNormGated",
        ),
        why="The operator of Gated DeltaNet layers takes bf16 only, and calls compiled kernels that a pure-Python vLLM "
        "lacks. The norm after it is several torch calls.",
        remove_when="vLLM publishes CPU wheels, and the operator takes fp32 and fp16",
        versions="0.32",
        sites=(
            "cpu/stand_ins/linear_attention:replace_operator:gdn_attention.cpu_gdn_attention_core",
            "cpu/stand_ins/linear_attention:replace_operator:_operator.__annotations__",
            "cpu/stand_ins/gated_norm:register:CustomOp.register_oot",
        ),
    ),
    Patch(
        names=("vllm.v1.worker.gpu_model_runner.copy_kv_cache_blocks_inplace",),
        why="With --prefix-match-unit below the block size, vLLM copies only as much of a shared block as a "
        "linear-attention layer's state takes, and attention layers read the rest. Seen in 0.32.",
        remove_when="vLLM copies the longest view of each address",
        versions="0.32",
        sites=("cpu/stand_ins/block_copies:copy_whole_blocks:gpu_model_runner.copy_kv_cache_blocks_inplace",),
    ),
    Patch(
        names=(
            "the import of transformers.models.gemma3.image_processing_gemma3",
            "the import of transformers.models.qwen2_vl.image_processing_qwen2_vl",
            "transformers.processing_utils.MODALITY_TO_AUTOPROCESSOR_MAPPING",
            "transformers.processing_utils.MODALITY_TO_BASE_CLASS_MAPPING",
        ),
        why="vLLM's modules of models with images import them, and they import torchvision, of which PyPI has no build "
        "for CPUs. Empty modules replace torchvision meanwhile. Transformers loads no processor without its part for "
        "videos, which needs torchvision too: a class with the settings of videos replaces it.",
        remove_when="vLLM imports the processors that transformers chooses, and transformers loads them without videos",
        versions="0.32",
        sites=(
            "cpu/stand_ins/vision:_empty_torchvision:setattr",
            "cpu/stand_ins/vision:_load_settings_of_videos:"
            "processors.MODALITY_TO_AUTOPROCESSOR_MAPPING._MAPPING_NAMES['video_processor']",
            "cpu/stand_ins/vision:_load_settings_of_videos:"
            "processors.MODALITY_TO_BASE_CLASS_MAPPING['video_processor']",
        ),
    ),
    Patch(
        names=("vllm.model_executor.layers.utils.check_cpu_sgl_kernel",),
        why="On a CPU with AMX, vLLM runs small weights with a compiled kernel that a pure-Python vLLM lacks.",
        remove_when="vLLM publishes CPU wheels",
        sites=("cpu/stand_ins/ops:keep_linears_off_compiled_kernels:linear_dispatch.check_cpu_sgl_kernel",),
    ),
    Patch(
        names=(
            "Triton kernels of the CPU model runner, the rejection sampler, drafters, and copies of linear-attention "
            "states",
        ),
        why="Triton has no CPU target here, and vLLM's own replacements are compiled C++ that a pure-Python vLLM "
        "lacks. From 0.32 on, vLLM requests replacements; before, they are attributes of vllm.utils.cpu_triton_utils.",
        remove_when="vLLM publishes CPU wheels",
        sites=("compat:replace_triton_kernels:setattr", "compat:replace_triton_kernels:register_kernels"),
    ),
    Patch(
        names=("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm",),
        why="This package's kernels read weights at the speed of memory, and torch's oneDNN packs bf16 weights once "
        "where it supports bf16. vLLM's compiled ops pack them too, but a pure-Python vLLM lacks them.",
        remove_when="vLLM publishes CPU wheels that are as fast",
        sites=(
            "cpu/stand_ins/linear:replace_linears_once_loaded:utils.dispatch_cpu_unquantized_gemm",
            "cpu/stand_ins/linear:_use_rows:layer.cpu_linear",
            "cpu/stand_ins/linear:_pack:layer.cpu_linear",
            "cpu/stand_ins/linear:_pack:layer.weight",
        ),
    ),
    Patch(
        names=("vllm.v1.worker.cpu_model_runner.CPUModelRunner.sample_tokens",),
        why="A seeded request whose prompt takes several steps ends the engine, because vLLM rewinds its generator, "
        "which torch cannot do on CPUs.",
        remove_when="vLLM checks whether a generator can be rewound",
        versions="0.19.1 to 0.32",
        sites=("cpu/stand_ins/sampling:spare_generators_of_unfinished_prompts:CPUModelRunner.sample_tokens",),
    ),
    Patch(
        names=("vllm.v1.sample.ops.topk_topp_sampler.apply_top_k_only",),
        why="A request with top_k and without top_p ends the engine in a step of a server that speculates in which no "
        "request has draft tokens: vLLM asks for the largest of no numbers.",
        remove_when="vLLM's apply_top_k_only takes 0 rows",
        versions="0.23 to 0.33",
        sites=("cpu/stand_ins/sampling:let_steps_without_drafts_pass:topk_topp_sampler.apply_top_k_only",),
    ),
    Patch(
        names=("vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU",),
        why="vLLM's torch ops use the last adapter for index -1, which means no adapter. A subclass corrects this.",
        remove_when="vLLM's bgmv_* torch ops handle -1",
        sites=(),
    ),
    Patch(
        names=("vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.executor.ray_executor_v2.RayExecutorV2"),
        why="Subclasses of these place weights and KV cache in huge pages, and give Ray worker slots on a machine "
        "without GPUs. Both replace the defaults in vLLM's configuration.",
        remove_when="a platform can specify the classes of worker and executor",
        sites=(
            "cpu/platform:FastAttentionCpuPlatform.check_and_update_config:vllm_config.parallel_config.worker_cls",
            "cpu/platform:FastAttentionCpuPlatform.check_and_update_config:"
            "vllm_config.parallel_config.distributed_executor_backend",
        ),
    ),
    Patch(
        names=("ray._private.ray_constants.ENABLE_RAY_CLUSTER",),
        why="A cluster for one machine should listen only on 127.0.0.1, for which Ray has no option.",
        remove_when="ray.init has an option for the listening address",
        sites=("serving/ray_cluster:keep_to_this_machine:constants.ENABLE_RAY_CLUSTER",),
    ),
    Patch(
        names=("vllm.v1.executor.ray_executor_v2.RayExecutorV2._init_executor",),
        why="On GPUs, a cluster that vLLM starts for one machine listens on all addresses, and the shared memory of "
        "workers' queues stays when Ray kills the workers.",
        remove_when="vLLM starts such a cluster on 127.0.0.1, and removes the names of its queues",
        versions="0.23 to 0.33",
        sites=("serving/ray_cluster:change_executor:module.RayExecutorV2._init_executor",),
    ),
    Patch(
        names=(
            "vllm_ascend.platform.NPUPlatform.get_attn_backend_cls",
            "vllm_ascend.platform.NPUPlatform.apply_config_platform_defaults",
        ),
        why="vllm-ascend chooses the attention class by the model alone and silently replaces any other backend. "
        "vLLM's cached choices are cleared. A model's folder is checked before any process is started.",
        remove_when="vllm-ascend uses the class that a backend was registered with, and plugins can check a "
        "configuration",
        versions="vllm-ascend 0.23",
        sites=(
            "ascend/platform:install:NPUPlatform.get_attn_backend_cls",
            "ascend/platform:check_model:platform.apply_config_platform_defaults",
            "ascend/platform:install:selector._cached_get_attn_backend.cache_clear",
        ),
    ),
    Patch(
        names=("vllm_ascend.ops.linear_op._get_row_parallel_op",),
        why="tiling_all_reduce on NPUs replaces the operation of row-parallel layers for which vllm-ascend has none.",
        remove_when="vllm-ascend accepts operations from plugins",
        versions="vllm-ascend 0.23",
        sites=(
            "ascend/row_parallel:install:linear_op._get_row_parallel_op",
            "ascend/row_parallel:enable_tiling:layer.custom_op",
            "ascend/row_parallel:enable_tiling:layer.custom_op.tiled_group",
        ),
    ),
)
