"""``ascend_kernel``: whether CANN's operator or this package's Triton kernels compute the layers of an NPU."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from vllm.logger import init_logger

from fastattention_vllm.attention import ascend
from fastattention_vllm.attention.ascend_triton import compilation
from fastattention_vllm.attention.ascend_triton import kernels as ascend_triton
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal

logger = init_logger("vllm.fastattention")

NAMES = {ascend: "torch_npu's fused operator", ascend_triton: "fastattention Triton"}


def choose(vllm_config: Any, problem: AttentionProblem) -> Any:
    """The module of kernels for layers like ``problem``.

    Raises:
        Refusal: the requested kernels cannot run them; names the value and the fix.
    """
    if options_of(vllm_config).ascend_kernel == "fused":
        reason = ascend.can_run(problem)
        if reason is not None:
            raise Refusal(f"fastattention on an NPU: {reason}")
        logger.info_once("Attention kernel: torch_npu's fused operator, with one 2048 x 2048 mask for all lengths.")
        return ascend
    instead = 'or set ascend_kernel to "fused"'
    reason = ascend_triton.can_run(problem)
    if reason is not None:
        raise Refusal(f'ascend_kernel is "triton", but {reason.rstrip(".")}; {instead}.')
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is not None and mode.has_full_cudagraphs():
        # vllm-ascend updates its own operator's arguments when it replays a captured step.
        raise Refusal(
            f'ascend_kernel is "triton", but cudagraph_mode {mode.name} captures attention, which was never tested '
            'with these kernels; pass --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\' or --enforce-eager, '
            f"{instead}."
        )
    logger.info_once("Attention kernel: this package's Triton kernels, which have not yet run on hardware.")
    return ascend_triton


@functools.cache
def compile_at_start(dtype: torch.dtype, head_size: int, group: int) -> None:
    """Compile what layers of this kind launch, once per process, so that no request waits for it.

    Raises:
        Refusal: Triton cannot compile them; names the fix.
    """
    started = time.monotonic()
    try:
        compilation.compile_programs(dtype, head_size, group, logger.info)
    except RuntimeError as error:
        raise Refusal(f'ascend_kernel is "triton", but {error}; set ascend_kernel to "fused".') from error
    logger.info("NPU kernels are ready after %.1f s; Triton's cache keeps them.", time.monotonic() - started)
