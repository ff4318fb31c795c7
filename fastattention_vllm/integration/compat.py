"""All differences between vLLM versions, detected by feature tests, with the versions that each test is for.

Version numbers are compared only to refuse untested versions. Some differences need no code: ``use_cascade_attention``
(used up to 0.31) has a default in vLLM's base class; on CPUs, ``seq_lens`` is on the CPU in all versions; and
``**kwargs`` or defaults accept arguments that newer versions add. ``cpu/stand_ins/ops.py`` lists the compiled CPU ops
that each version calls.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any, cast

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fastattention_vllm.integration.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GIB = 1 << 30
HOST_LAYERS_OFF = "remove --worker-cls, or set host_kv_layers to 0"
SUPPORTED_VLLM = SpecifierSet(">=0.19.1,<0.34")
"""`make conformance` tests 0.19.1, 0.23.0, 0.28.0 and 0.32.0. With 0.26.0, 0.30.0 and 0.33.0, a small engine was
compared with Hugging Face by hand. The versions in between were not run."""

BACKEND_NAME = "FASTATTENTION"
BACKEND_PATH = "fastattention_vllm.integration.cpu.backend.FastAttentionBackend"
BACKENDS = {"cuda": "fastattention_vllm.integration.cuda.select.FastAttentionCudaBackend"}
"""Attention backends by the name of the vLLM platform that finds their device; BACKEND_PATH where none of them does.
vllm-ascend's platform does not read it (``ascend/platform.py``)."""


def check_vllm_version() -> None:
    """Refuse a vLLM outside the tested range.

    Raises:
        Refusal: names the installed version, the range, and a command that installs a supported version.
    """
    installed = Version(metadata.version("vllm"))
    if not SUPPORTED_VLLM.contains(Version(installed.base_version), prereleases=True):
        raise Refusal(
            f"vLLM {installed} is installed, but this version of fastattention-vllm supports "
            f"vllm{SUPPORTED_VLLM}; install a supported version (`make serve` does so), or uninstall "
            "fastattention-vllm."
        )


def ensure_backend_member() -> Any:
    """Make ``FASTATTENTION`` a member of vLLM's ``AttentionBackendEnum``. Repeated calls are safe.

    The member must survive pickling: ``vllm serve`` spawns its engine and worker processes, and Ray sends the config to
    actors. Both unpickle the config *before* plugins are loaded there. A plain enum member is unpickled by looking up
    its value, which fails in the new process, so the member has a ``__reduce_ex__`` that registers it on arrival.
    """
    from vllm.v1.attention.backends import registry

    members: Any = registry.AttentionBackendEnum
    if BACKEND_NAME not in members.__members__:
        if hasattr(members, "register"):  # >= 0.32
            registry.register_backend(BACKEND_NAME, backend_path())
        else:  # <= 0.31
            _add_member(members)
            registry.register_backend(members[BACKEND_NAME], backend_path())
    member = members[BACKEND_NAME]
    member.__reduce_ex__ = _reduce
    return member


@functools.cache
def backend_path() -> str:
    """The backend class for the device that vLLM will detect. This queries the driver without initialising a GPU."""
    from vllm.platforms import builtin_platform_plugins

    for platform, path in BACKENDS.items():
        with contextlib.suppress(Exception):  # like vLLM, treat a failed probe as "not found"
            if builtin_platform_plugins[platform]() is not None:
                return path
    return BACKEND_PATH


def _add_member(members: Any) -> None:
    """Add a member to a finished ``Enum`` class, as the class body would. Python has no function for this."""
    member = object.__new__(members)
    member._name_, member._value_ = BACKEND_NAME, backend_path()
    member.__objclass__ = members
    member._sort_order_ = len(members._member_names_)
    members._member_map_[BACKEND_NAME] = member
    members._value2member_map_[member._value_] = member
    members._member_names_.append(BACKEND_NAME)


def _reduce(protocol: int) -> tuple[Callable[[], Any], tuple[()]]:
    return ensure_backend_member, ()


class BackendMembers:
    """Mixin placed ahead of vLLM's ``AttentionBackend`` in the MRO, with members that only some versions use."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """<= 0.28: the backend chooses the shape. This is the 4-D shape of the default layout in newer versions."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """>= 0.29. Any layout works, because the kernels use strides. The first one keeps a head's tokens together."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)


def split_kv_cache(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of K and V, each ``[num_blocks, block_size, num_kv_heads, head_size]``, into vLLM's cache tensor.

    The cache is ``[num_blocks, num_kv_heads, block_size, K | V]`` with any strides. In upstream's tests up to 0.25 it
    is ``[num_blocks, 2, block_size, num_kv_heads, head_size]``.
    """
    if kv_cache.dim() == 5:
        key, value = kv_cache.unbind(1)
        return key, value
    tokens_first = kv_cache.transpose(1, 2)
    return tokens_first[..., :head_size], tokens_first[..., head_size:]


def keys_before_values(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Like :func:`split_kv_cache`, but a head's page stores all keys before all values, as in vLLM's CPU_ATTN.

    CPUs read this up to 1.08 times as fast as keys and values that alternate by token. A page that is not contiguous
    (heads innermost, or 5-D) is split as in :func:`split_kv_cache`.
    """
    if kv_cache.dim() == 5 or kv_cache.stride()[2:] != (2 * head_size, 1):
        return split_kv_cache(kv_cache, head_size)
    blocks, heads, block_size, _ = kv_cache.shape
    block_stride, head_stride, _, _ = kv_cache.stride()
    shape, strides = (blocks, block_size, heads, head_size), (block_stride, head_size, head_stride, 1)
    values = kv_cache.storage_offset() + block_size * head_size
    return kv_cache.as_strided(shape, strides), kv_cache.as_strided(shape, strides, values)


def kv_caches_of(layer: Any) -> tuple[torch.Tensor, ...]:
    """The cache that vLLM bound to a layer: one tensor, or with vllm-ascend one tensor for K and one for V.

    <= 0.19: a list with one entry for each virtual engine of the pipeline.
    """
    kv_cache: Any = layer.kv_cache
    if isinstance(kv_cache, tuple):
        return kv_cache
    return (kv_cache[0] if isinstance(kv_cache, list) else kv_cache,)


def num_blocks_of(kv_cache: torch.Tensor) -> int:
    """``[num_blocks, ...]``; FLASH_ATTN <= 0.19: ``[2, num_blocks, ...]``."""
    return kv_cache.shape[1] if kv_cache.dim() == 5 and kv_cache.shape[0] == 2 else kv_cache.shape[0]


def uses_this_backend(vllm_config: VllmConfig) -> bool:
    """Whether the attention layers of a configured engine are this package's; without a choice, only on CPUs."""
    from vllm.platforms import current_platform

    backend = vllm_config.attention_config.backend
    if backend is not None:
        return bool(backend.name == BACKEND_NAME)
    return type(current_platform).__name__ == "FastAttentionCpuPlatform" and not has_compiled_cpu_ops()


def check_worker_class(vllm_config: VllmConfig, base: type[Any], instead: str = "remove --worker-cls") -> None:
    """Refuse a ``--worker-cls`` that does not do what ``base`` does for this package.

    Raises:
        Refusal: the class that the user named does not inherit from ``base``.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname

    named: Any = vllm_config.parallel_config.worker_cls
    if named == "auto":  # the platform has not replaced it, so the user has named none
        return
    used = resolve_obj_by_qualname(named) if isinstance(named, str) else named
    if not issubclass(used, base):
        raise Refusal(
            f"--worker-cls {used.__module__}.{used.__qualname__} is not supported: fastattention allocates memory in "
            f"{base.__module__}.{base.__qualname__}, from which it does not inherit; {instead}."
        )


def extend_gpu_worker(vllm_config: VllmConfig, find: Callable[[Any], Any]) -> None:
    """:func:`extend_worker` for vLLM's worker on NVIDIA GPUs."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    check_worker_class(vllm_config, Worker, HOST_LAYERS_OFF)
    extend_worker(Worker, find)
    add_shared_caches_before_layout(GPUModelRunner)


def add_shared_caches_before_layout(runner: Any) -> None:
    """<= 0.23: let a model with linear-attention layers have layers that share a cache.

    The V1 runner then changes the strides of all attention layers' caches, and 0.19 looks for the caches of host
    layers, which it adds only afterwards. The caches of layers that share one are the same tensor, whose strides may be
    set twice. Newer versions have no such pass, or skip caches that it does not find.
    """
    update = getattr(runner, "_update_hybrid_attention_mamba_layout", None)
    if update is None or hasattr(update, "_fastattention"):
        return

    @functools.wraps(update)
    def update_with_shared_caches(self: Any, kv_caches: dict[str, Any], *more: Any) -> None:
        for layer, target in self.shared_kv_cache_layers.items():
            kv_caches[layer] = kv_caches[target]
        update(self, kv_caches, *more)

    update_with_shared_caches._fastattention = True  # type: ignore[attr-defined]
    runner._update_hybrid_attention_mamba_layout = update_with_shared_caches


def extend_worker(worker: Any, find: Callable[[Any], Any]) -> None:
    """Let host layers limit the number of blocks, and allocate their pool when vLLM allocates its own cache.

    All versions: vLLM has no hook for either on GPUs and NPUs, and users would have to select a worker class of this
    package with --worker-cls. The change is made in the worker process, and only if there are host layers. Remove it
    when a KV cache spec or a platform may specify where a layer's cache is.
    """
    if hasattr(worker, "_fastattention_find"):
        return
    worker._fastattention_find = staticmethod(find)
    determine, initialize = worker.determine_available_memory, worker.initialize_from_config

    @functools.wraps(determine)
    def determine_available_memory(self: Any) -> int:
        available: int = determine(self)
        host_layers = find(self.vllm_config)
        return int(host_layers.clamp(available)) if host_layers else available

    @functools.wraps(initialize)
    def initialize_from_config(self: Any, kv_cache_config: Any) -> None:
        host_layers = find(self.vllm_config)
        if host_layers is None:
            initialize(self, kv_cache_config)
            return
        with host_layers.together():
            initialize(self, kv_cache_config)
            host_layers.allocate(self.vllm_config.compilation_config.static_forward_context, kv_cache_config)

    worker.determine_available_memory = determine_available_memory
    worker.initialize_from_config = initialize_from_config


def settle_scheduled_window(builder: Any, impl: type[Any]) -> None:
    """Tell a metadata builder of FlashAttention 3 the window of all layers on the device, for which it plans steps.

    0.19.1: vLLM finds it in the first step and expects no layers but ``impl``, so host layers ended the start with an
    AssertionError. Newer versions skip other layers, as this does. FlashAttention 2 plans nothing.
    """
    if getattr(builder, "aot_sliding_window", ()) is not None or not builder.aot_schedule:
        return
    layers = builder.vllm_config.compilation_config.static_forward_context.values()
    windows = {layer.impl.sliding_window for layer in layers if isinstance(getattr(layer, "impl", None), impl)}
    builder.aot_schedule = len(windows) == 1
    builder.aot_sliding_window = (windows.pop() if builder.aot_schedule else None) or (-1, -1)


def captures_backends_metadata(vllm_config: VllmConfig) -> bool:
    """Whether graphs of whole steps are captured with the metadata that a builder makes for captures.

    <= 0.19: the second model runner asks for no such metadata.
    """
    from vllm import envs

    second = getattr(vllm_config, "use_v2_model_runner", envs.VLLM_USE_V2_MODEL_RUNNER)
    if not second:
        return True
    from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

    return "for_cudagraph_capture" in inspect.signature(build_attn_metadata).parameters


def before_gpu_profiling(callback: Callable[[Any, torch.nn.Module], None]) -> None:
    """:func:`before_profiling` for vLLM's worker on NVIDIA GPUs."""
    from vllm.v1.worker.gpu_worker import Worker

    before_profiling(Worker, callback)


def before_profiling(worker: Any, callback: Callable[[Any, torch.nn.Module], None]) -> None:
    """Call ``callback(vllm_config, model)`` after the weights are loaded and before vLLM first runs the model.

    All versions: on GPUs and NPUs, plugins have no hook between the two. The change is made in the worker process, and
    only for features that need it. Callbacks run in the order of their first registration; each is registered once.

    Args:
        worker: the worker's class.
    """
    callbacks = getattr(worker, "_fastattention_before_profiling", None)
    if callbacks is not None:
        if callback not in callbacks:
            callbacks.append(callback)
        return
    worker._fastattention_before_profiling = callbacks = [callback]
    determine = worker.determine_available_memory

    @functools.wraps(determine)
    def determine_available_memory(self: Any) -> int:
        with torch.inference_mode():
            for one in callbacks:
                one(self.vllm_config, self.model_runner.get_model())
        available: int = determine(self)
        return available

    worker.determine_available_memory = determine_available_memory


@contextmanager
def without_fp8_cache(vllm_config: VllmConfig) -> Iterator[None]:
    """Hide an fp8 KV cache from vLLM's CPU platform.

    In 0.19 the platform refuses it, or silently uses another dtype, because it has no kernels for it. From 0.23 on it
    does not check.
    """
    cache: Any = vllm_config.cache_config
    asked = cache.cache_dtype
    if asked.startswith("fp8"):
        cache.cache_dtype = "auto"
    try:
        yield
    finally:
        cache.cache_dtype = asked


@contextmanager
def same_block_size(vllm_config: VllmConfig) -> Iterator[None]:
    """Keep the block size, which vLLM's CPU platform sets for every configuration that it sees."""
    cache = vllm_config.cache_config
    block_size = cache.block_size
    try:
        yield
    finally:
        cache.block_size = block_size


def calculates_kv_scales(vllm_config: VllmConfig) -> bool:
    """<= 0.26: whether --calculate-kv-scales takes the scales of an fp8 cache from the first prompt. Removed later."""
    return bool(getattr(vllm_config.cache_config, "calculate_kv_scales", False))


def dynamic_tables_are_scaled() -> bool:
    """Whether the table of rotary embeddings of type "dynamic" has ``max_position_embeddings`` x ``factor`` rows.

    vLLM 0.19.1. In 0.32 and 0.33 it has ``max_position_embeddings`` rows.
    """
    from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_scaling_rope import DynamicNTKScalingRotaryEmbedding

    return "max_trained_positions" not in inspect.signature(DynamicNTKScalingRotaryEmbedding.__init__).parameters


def set_max_model_len(vllm_config: VllmConfig, length: int) -> None:
    """Limit the length of requests while vLLM makes its configuration.

    All versions: without prefix caching, the blocks of a model with states are as long as a request, and vLLM takes
    another length for an option of the user's that it refuses.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if getattr(cache, "mamba_block_size", None) == model.max_model_len:
        cache.mamba_block_size = length
    model.max_model_len = length


def checkpoint_overrides_kv_cache_dtype() -> bool:
    """0.19 yes, 0.32 no: whether a checkpoint's kv_cache_scheme overrides --kv-cache-dtype, if that is not auto.

    Only the source text of the layer shows this.
    """
    from vllm.model_executor.layers.attention import Attention

    return 'kv_cache_scheme is not None and kv_cache_dtype == "auto"' not in inspect.getsource(Attention.__init__)


def keep_scales_of_kv_cache() -> None:
    """Keep the scales of a checkpoint's KV cache as numbers, too, when they are loaded. Repeated calls are safe.

    0.19 yes, 0.23 no: for compressed-tensors, vLLM sets the tensors ``_k_scale`` and ``_v_scale`` of a layer alone and
    leaves the numbers at 1. Kernels take numbers, and reading a tensor in a step would wait for the device. Whatever
    uses this method has imported its module before it makes a layer.
    """
    module: Any = sys.modules.get("vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors")
    if module is None:
        return
    method = module.CompressedTensorsKVCacheMethod
    load = method.process_weights_after_loading
    if hasattr(load, "__wrapped__") or "_k_scale_float" in inspect.getsource(load):
        return

    @functools.wraps(load)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        load(self, layer)
        for name in ("_k_scale", "_v_scale"):
            scale = getattr(layer, name).detach()
            # Buffers, as in newer versions: vLLM reloads parameters in place, and the numbers would not follow.
            delattr(layer, name)
            layer.register_buffer(name, scale)
            # There are more than one only with a scale per head, which is refused.
            setattr(layer, f"{name}_float", float(scale.max()))

    method.process_weights_after_loading = process_weights_after_loading


def refuses_float16(model_type: str) -> bool:
    """Whether vLLM refuses float16 for this model type. 0.19 to 0.33: a table in vLLM's configuration of the model."""
    from vllm.config import model

    return model_type in getattr(model, "_FLOAT16_NOT_SUPPORTED_MODELS", {})


def requested_kv_bytes(vllm_config: VllmConfig) -> int | None:
    """KV cache bytes per rank as set by the user, with --kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE.

    From 0.23 on, vLLM has copied the variable into the option before this is called.
    """
    from vllm import envs

    cache = vllm_config.cache_config
    if cache.kv_cache_memory_bytes is None and hasattr(cache, "cpu_kvcache_space_bytes"):
        space = envs.VLLM_CPU_KVCACHE_SPACE
        return None if space is None else int(space) * GIB
    requested: int | None = cache.kv_cache_memory_bytes
    return requested


def set_kv_bytes(vllm_config: VllmConfig, count: int) -> None:
    """Set the KV cache of every rank to ``count`` bytes, after vLLM's CPU platform has chosen a size."""
    cache: Any = vllm_config.cache_config
    cache.kv_cache_memory_bytes = count
    if hasattr(cache, "cpu_kvcache_space_bytes"):  # <= 0.19: the CPU worker reads nothing else
        cache.cpu_kvcache_space_bytes = count


def max_tokens_in_flight(vllm_config: VllmConfig) -> int:
    """Tokens of one request that are being computed. 0.26 counts several steps ahead, 0.23 one step."""
    count: int = getattr(vllm_config, "max_in_flight_tokens", vllm_config.scheduler_config.max_num_batched_tokens)
    return count


def fits_length_beside_null_block() -> bool:
    """0.32 yes, 0.29 no: whether vLLM leaves out its reserved null block when it fits an automatic length to the cache.

    Only the source text of the function shows this.
    """
    from vllm.v1.core import kv_cache_utils

    return "null block" in inspect.getsource(kv_cache_utils.get_kv_cache_configs)


def waiting_requests(scheduler_stats: Any) -> int:
    """Requests that wait for a step. vLLM 0.23 and newer count those apart that the scheduler has skipped."""
    return int(scheduler_stats.num_waiting_reqs + getattr(scheduler_stats, "num_skipped_waiting_reqs", 0))


def check_ray(vllm_config: VllmConfig) -> None:
    """Refuse Ray if vLLM's Ray executor does not run on CPUs. <= 0.19 has only the executor built on compiled graphs.

    Raises:
        Refusal: --distributed-executor-backend is ray.
    """
    asked = vllm_config.parallel_config.distributed_executor_backend
    if asked == "ray" and importlib.util.find_spec("vllm.v1.executor.ray_executor_v2") is None:
        raise Refusal(
            f"--distributed-executor-backend ray does not run on CPUs with vLLM {metadata.version('vllm')}; "
            "use --distributed-executor-backend mp, or vLLM 0.23 or newer."
        )


def ranks_on_this_machine(vllm_config: VllmConfig) -> int:
    """The number of ranks on a Ray worker's machine. From 0.32 on, the executor tells each worker its machine's slots.

    In older versions it is unknown, and all ranks are counted, so that each gets too few CPUs rather than shared ones.
    """
    slots = getattr(vllm_config.parallel_config, "assigned_physical_gpu_ids", None)
    return len(slots) if slots else int(vllm_config.parallel_config.local_world_size)


def v2_runner_is_missing(vllm_config: VllmConfig) -> bool:
    """Whether vLLM would start its V2 model runner on CPUs although this installation has none that runs there.

    <= 0.19: VLLM_USE_V2_MODEL_RUNNER=1 is accepted silently, but the CPU worker creates a V1 runner, and the scheduler
    sends it V2 data. From 0.23 on there is a V2 runner for CPUs, whose kernels need Triton. vLLM checks for Triton, but
    accepts a Triton for GPUs if CUDA_VISIBLE_DEVICES is empty. Remove this when V2 runs without Triton.
    """
    from vllm import envs

    chosen = getattr(vllm_config, "use_v2_model_runner", envs.VLLM_USE_V2_MODEL_RUNNER)
    return bool(chosen) and not (has_v2_runner_for_cpus() and has_triton_for_cpus())


def has_v2_runner_for_cpus() -> bool:
    """0.23 yes, 0.19 no."""
    try:
        return importlib.util.find_spec("vllm.v1.worker.cpu.model_runner") is not None
    except ModuleNotFoundError:  # the package that would contain it is missing
        return False


def has_triton_for_cpus() -> bool:
    try:
        from triton.backends import backends
    except ImportError:
        return False
    return "cpu" in backends


def pins_memory_without_a_gpu() -> bool:
    """0.23 yes, 0.19 and 0.26 no: whether LoRA's tensors are pinned on every platform, which needs a GPU driver."""
    from vllm.utils import torch_utils

    return bool(getattr(torch_utils, "PIN_MEMORY", False))


def has_compiled_cpu_ops() -> bool:
    """Whether this vLLM includes its own CPU kernels. A CPU build does; a pure-Python installation does not."""
    import vllm._custom_ops  # noqa: F401  its import loads the kernels, through the platform's import_kernels

    return compiled_cpu_ops_are_loaded()


def compiled_cpu_ops_are_loaded() -> bool:
    """Checks for an op that this package never defines itself."""
    return hasattr(torch.ops._C, "cpu_attention_with_kv_cache")


def has_cpu_expert_router() -> bool:
    """0.30 yes, 0.28 no: on CPUs, whether experts are chosen in torch and computed by two operators of ``_C``."""
    return importlib.util.find_spec("vllm.model_executor.layers.fused_moe.router.cpu_router") is not None


def settle_hybrid_block_size(vllm_config: VllmConfig, backend: type[Any]) -> None:
    """Enlarge the blocks of a model with linear-attention layers until one holds a state, as vLLM does later.

    >= 0.23: vLLM does it in the worker, when the weights are loaded. The plan needs the size before. The second time
    changes nothing. (0.19 does it when it makes the configuration.)
    """
    from vllm.platforms import current_platform

    if hasattr(type(current_platform), "_align_hybrid_block_size"):  # the instance has every attribute: None
        current_platform._align_hybrid_block_size(vllm_config, backend)


def keep_block_size(vllm_config: VllmConfig) -> None:
    """0.32 yes, 0.26 no: keep the block size for which the host layers were planned.

    For layers of several backends, such as device and host layers, vLLM takes the smallest block that all accept, and
    asks none which it prefers. It keeps only a size that the user has set.
    """
    from vllm.platforms import current_platform

    if hasattr(type(current_platform), "_preferred_block_size_for_backends"):
        vllm_config.cache_config.user_specified_block_size = True


def is_state_layer(layer: Any) -> bool:
    """Whether a layer keeps a state of constant size instead of keys and values."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    return isinstance(layer, MambaBase)


def has_cpu_linear_attention() -> bool:
    """0.32 yes, 0.28 no: whether this package can replace the CPU operator of Gated DeltaNet layers.

    0.19 has no such operator. In 0.23 the operator exists, but was never replaced.
    """
    if has_compiled_cpu_ops() or not has_kernel_dispatcher():
        return False
    return importlib.util.find_spec("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention") is not None


def has_kernel_dispatcher() -> bool:
    """>= 0.32: replacements of Triton kernels are registered by name when a worker requests them."""
    return importlib.util.find_spec("vllm.triton_utils.dispatcher") is not None


def has_own_gptq_kernels() -> bool:
    """0.19 yes, 0.23 no: whether vLLM has GPTQ kernels besides Marlin's, which need compute capability 7.5."""
    return importlib.util.find_spec("vllm.model_executor.layers.quantization.gptq") is not None


def has_integer_experts_without_marlin() -> bool:
    """0.23 yes, 0.32 no: whether the method of GPTQ and AWQ experts always uses kernels of its own."""
    from vllm.model_executor.layers.quantization import moe_wna16

    return not hasattr(moe_wna16, "select_wna16_moe_backend")


def experts_class() -> type[Any]:
    """The layer of a mixture of experts that has the weights. <= 0.19: FusedMoE; newer: RoutedExperts inside of it."""
    from vllm.model_executor.layers import fused_moe

    found: type[Any] = getattr(fused_moe, "RoutedExperts", None) or fused_moe.FusedMoE
    return found


def is_layer_skipped(prefix: str, listed: list[str], parts: Mapping[str, list[str]], whole: bool = False) -> bool:
    """Whether a list of unquantised layers contains a layer: its ``whole`` name, or a part of it.

    0.32 has an option of three values where older versions have one of two.

    Args:
        parts: the parts of merged layers, by the last component of the merged layer's name.
    """
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    if "match_mode" in inspect.signature(is_layer_skipped).parameters:
        return bool(is_layer_skipped(prefix, listed, parts, match_mode="exact" if whole else "substring"))
    return bool(is_layer_skipped(prefix, listed, parts, skip_with_substr=not whole))


def replace_triton_kernels(kernels: Mapping[str, Any]) -> None:
    """Replace Triton kernels by ``kernels``, a mapping from the full name of a Triton kernel to its replacement.

    <= 0.31: the CPU model runner takes replacements from ``cpu_triton_utils``, by the kernel's short name. Kernels that
    this version does not replace there are skipped.
    """
    if has_kernel_dispatcher():
        from vllm.triton_utils.dispatcher import register_kernels

        with _hidden_modules("llvmlite"):
            register_kernels(dict(kernels))
        return
    from vllm.utils import cpu_triton_utils

    for name, function in kernels.items():
        attribute = name.rpartition(".")[2]
        if hasattr(cpu_triton_utils, attribute):
            setattr(cpu_triton_utils, attribute, _Launchable(function))


@contextmanager
def _hidden_modules(package: str) -> Iterator[None]:
    """Take a package's modules out of ``sys.modules`` meanwhile.

    >= 0.32: the dispatcher looks at the attributes of every loaded module, and ends at the C library that llvmlite
    holds, whose ``__dict__`` is a function of that library.
    """
    names = [name for name in sys.modules if name == package or name.startswith(f"{package}.")]
    taken = {name: sys.modules.pop(name) for name in names}
    try:
        yield
    finally:
        sys.modules.update(taken)


def verifies_speculated_tokens() -> bool:
    """0.23 yes, 0.19 no: the CPU worker of 0.19 asserts that there is no speculative decoding."""
    if has_kernel_dispatcher():
        return True
    from vllm.utils import cpu_triton_utils

    return hasattr(cpu_triton_utils, "rejection_greedy_sample_kernel")


def generation_error() -> type[Exception] | None:
    """The error of a request that servers send to the client without a traceback in the log.

    0.32 has it in ``vllm.exceptions``, and 0.19 where it is raised.
    """
    for name in ("vllm.exceptions", "vllm.entrypoints.openai.engine.serving"):
        found = getattr(sys.modules.get(name), "GenerationError", None)
        if found is not None:
            return cast("type[Exception]", found)
    return None


class _Launchable:
    """A function that can be launched like a Triton kernel: ``kernel[grid](...)``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __getitem__(self, grid: object) -> Callable[..., Any]:
        return self.function
