"""vLLM's start on NVIDIA GPUs: a model that no kernel computes is refused before any process is started. The V100, and
models with some numbers of experts, get other defaults.

All GPUs have the name ``--quantization fastattention``, which chooses itself only for quantised checkpoints below
compute capability 7.5.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.logger import init_logger

from fastattention_vllm.integration import compat, drafter, support
from fastattention_vllm.integration.checkpoint import reload
from fastattention_vllm.integration.checkpoint.positions import check_positions
from fastattention_vllm.integration.checkpoint.weights import check_weights
from fastattention_vllm.integration.cuda.select import FLASH
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.serving import compile_cache
from fastattention_vllm.integration.serving.once_imported import once_imported

logger = init_logger("vllm.fastattention")

V100 = (7, 0)


def install() -> None:
    """Repeated calls are safe. This queries the driver without initialising a GPU."""
    from vllm.platforms import current_platform

    from fastattention_vllm.integration.cuda.quantised import registration

    registration.install()
    once_imported("vllm.v1.worker.gpu_worker", lambda module: reload.check_first(module.Worker))
    found = current_platform.get_device_capability()
    if found is None or tuple(found) < V100:
        return
    capability = (found.major, found.minor)
    if capability < FLASH:
        refuse_float16(capability)
    check_and_set_defaults(type(current_platform), capability)


def refuse_float16(capability: tuple[int, int]) -> None:
    """Extend vLLM's refusal of float16 for some model types, which recommends bfloat16, by what these GPUs can run."""
    from vllm.config import model as module

    check = getattr(module, "_check_valid_dtype", None)
    if check is None or hasattr(check, "_fastattention"):
        return

    @functools.wraps(check)
    def _check_valid_dtype(model_type: str, dtype: torch.dtype) -> Any:
        if dtype == torch.float16 and compat.refuses_float16(model_type):
            from fastattention_vllm.integration.cuda import xformers

            raise Refusal(
                f"model type {model_type!r} does not run in float16, because it is numerically unstable there, and "
                f"this GPU (compute capability {capability[0]}.{capability[1]}) has no bfloat16; "
                f"{xformers.instead_of_float16(model_type)}."
            )
        return check(model_type, dtype)

    _check_valid_dtype._fastattention = True  # type: ignore[attr-defined]
    module._check_valid_dtype = _check_valid_dtype


def check_and_set_defaults(platform: Any, capability: tuple[int, int]) -> None:
    """Use the call in which vLLM's platforms set defaults, before vLLM sets its own."""
    before = platform.apply_config_platform_defaults
    if hasattr(before, "_fastattention"):
        return

    def apply_config_platform_defaults(cls: Any, vllm_config: Any) -> None:
        before(vllm_config)
        if vllm_config.attention_config.backend is not compat.ensure_backend_member():
            return
        compile_cache.check_open_files()
        check_positions(vllm_config)
        support.say_what_chooses_the_cache(vllm_config)
        if capability >= FLASH:
            support.check_supported(vllm_config, support.WITHOUT_KERNELS)
            drafter.use_this_backend(vllm_config)
        else:
            check_and_set_volta_defaults(vllm_config, capability)
        check_weights(vllm_config)  # not before: what a model lacks matters only if it is one that runs
        keep_router_logits_packed(vllm_config)
        compile_cache.prepare(vllm_config)

    apply_config_platform_defaults._fastattention = True  # type: ignore[attr-defined]
    platform.apply_config_platform_defaults = classmethod(apply_config_platform_defaults)


def check_and_set_volta_defaults(vllm_config: Any, capability: tuple[int, int]) -> None:
    """The same on GPUs below compute capability 8.0."""
    support.check_supported(vllm_config, support.UNTESTED_ON_VOLTA)
    support.check_kv_cache(vllm_config)
    from fastattention_vllm.integration.cuda import xformers
    from fastattention_vllm.integration.cuda.quantised import registration

    registration.check_experts(vllm_config)
    drafter.use_this_backend(vllm_config)
    reason = xformers.why_volta_refuses(vllm_config)
    if reason is not None:
        xformers.check_asked(vllm_config, reason)
    elif capability == V100:
        prefer_whole_graphs(vllm_config)


def prefer_whole_graphs(vllm_config: Any) -> None:
    """Without torch.compile, whole decode steps become CUDA graphs. Whatever the user has set stays.

    Inductor's Triton kernels for compute capability 7.0 are untested upstream, and compiling them takes long. vLLM's
    own compiled operators run in their place.
    """
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    if compilation.mode is not None or compilation.cudagraph_mode is not None or not vllm_config.optimization_level:
        return
    compilation.mode = CompilationMode.NONE
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    logger.info_once(
        "Compute capability 7.0: torch.compile is off and whole decode steps are CUDA graphs. "
        "--compilation-config '{\"mode\": 3}' turns torch.compile on."
    )


def keep_router_logits_packed(vllm_config: Any) -> None:
    """Keep torch.compile from padding the rows of router logits, which vLLM reads as if no gaps were between them.

    Inductor pads the rows of a linear layer whose width is not a multiple of 8, if its benchmark finds that faster.
    vLLM then chooses experts by the logits of other tokens, with every attention backend. In 3 of 21 compilations of a
    model with 4 experts on an H100, answers of vLLM 0.23.0 were wrong. Whatever the user has set stays.

    Remove this when https://github.com/vllm-project/vllm/issues/56900 is solved in all supported versions.
    """
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    experts = vllm_config.model_config.get_num_experts()
    options = compilation.inductor_compile_config
    packed = experts <= 1 or experts % 8 == 0
    if packed or compilation.mode == CompilationMode.NONE or "shape_padding" in options:
        return
    options["shape_padding"] = False
    logger.info_once(
        "torch.compile pads no matrices, because vLLM would choose wrong experts if the router's logits of %d experts "
        "were padded (vLLM issue 56900).",
        experts,
    )
