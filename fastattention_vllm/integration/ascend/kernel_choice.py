"""``ascend_kernel``: whether CANN's operator or this package's Triton kernels compute the layers of an NPU."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from fastattention_vllm.attention import ascend
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
    logger.info_once(
        "Attention kernel: this package's Triton kernels, which have not yet run on hardware. Triton compiles them at "
        "the first step and keeps the result in its cache."
    )
    return ascend_triton
