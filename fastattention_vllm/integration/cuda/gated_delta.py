"""Gated DeltaNet layers on V100: prompts are computed by this package's kernels or by cuBLAS instead of Triton.

Why: Triton's kernels for prompts have no tensor cores on compute capability 7.0 and spill kilobytes of registers for
each thread. Its kernels for single tokens are good, and stay. The package's kernels are for heads of 128
(``attention/volta/delta_kernels.py``); torch's operators compute the others (``attention/volta/gated_delta.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from vllm.logger import init_logger

from fastattention_vllm.attention.volta import delta_kernels
from fastattention_vllm.attention.volta.gated_delta import (
    WORKSPACE_BYTES,
    Schedule,
    gated_delta_rule,
    tokens_at_once,
)

logger = init_logger("vllm.fastattention")

OPERATION = "chunk_gated_delta_rule"
"""The attribute of vLLM's layers that holds the operation for prompts, with one call for all requests."""


class GatedDeltaRule(torch.nn.Module):
    """Takes the place of vLLM's ``ChunkGatedDeltaRule``, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.schedules: _Known[Schedule] = _Known()
        self.plans: _Known[delta_kernels.Plan] = _Known()
        self.reserved = False

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        output_final_state: bool,
        cu_seqlens: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = True,
        core_attn_out: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            q, k: ``[1, tokens, key_heads, key_size]``.
            v: ``[1, tokens, value_heads, value_size]``.
            g, beta: ``[1, tokens, value_heads]``.
            initial_state: ``[requests, value_heads, value_size, key_size]``.
            cu_seqlens: ``[requests + 1]``, the first token of each request and the end of the last. Read on the CPU.
            core_attn_out: also receives the output.
            _: vLLM's schedules for other kernels.

        Returns:
            The output in v's shape, and the states after it in fp32.
        """
        if not self.reserved:
            # vLLM calls this first with few tokens, while it measures the memory that it needs beside the KV cache.
            torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
            self.reserved = True
        tensors = q[0], k[0], v[0], g[0], beta[0], initial_state
        if delta_kernels.fits(q, v):
            at_once = delta_kernels.chunks_at_once(v.shape[2])
            plan = self.plans.of(cu_seqlens, lambda starts: delta_kernels.Plan(starts, at_once, q.device))
            out, states = delta_kernels.gated_delta_rule(*tensors, plan, normalise=use_qk_l2norm_in_kernel)
        else:
            at_once = tokens_at_once(v.shape[2], k.shape[3], v.shape[3])
            schedule = self.schedules.of(cu_seqlens, lambda starts: Schedule(starts, at_once, q.device))
            out, states = gated_delta_rule(*tensors, schedule, normalise=use_qk_l2norm_in_kernel)
        if core_attn_out is not None:
            core_attn_out.view(-1)[: out.numel()].copy_(out.view(-1))
        return out[None], states if output_final_state else None


Made = TypeVar("Made")


class _Known(Generic[Made]):
    """What was made for the step in progress. vLLM makes a new tensor for each step and group of layers."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[weakref.ref[torch.Tensor], Made]] = {}

    def of(self, starts: torch.Tensor, make: Callable[[list[int]], Made]) -> Made:
        place = id(starts)
        found = self.known.get(place)
        if found is None or found[0]() is not starts:
            forgotten = weakref.ref(starts, lambda _: self.known.pop(place, None))
            found = self.known[place] = forgotten, make(starts.tolist())
        return found[1]


def install(vllm_config: Any) -> None:
    """Replace the operation in all layers of a loaded model. Further calls do nothing.

    Raises:
        ImageError: the kernels are not built, or do not match this code.
    """
    layers = [
        layer
        for layer in vllm_config.compilation_config.static_forward_context.values()
        if isinstance(getattr(layer, OPERATION, None), torch.nn.Module)
        # With other kernels, vLLM passes other arguments. V100 has no others.
        and getattr(layer, "gdn_prefill_backend", "triton") == "triton"
    ]
    if not layers or isinstance(getattr(layers[0], OPERATION), GatedDeltaRule):
        return
    delta_kernels.load()
    operation = GatedDeltaRule()
    for layer in layers:
        layer.chunk_gated_delta_rule = operation
    logger.info_once(
        "Prompts in %d Gated DeltaNet layers: this package's kernels for heads of %d, cuBLAS in fp32 for others, with "
        "up to %d MiB of temporary memory. Triton's kernels for them are slow on compute capability 7.0.",
        len(layers),
        delta_kernels.SIZE,
        WORKSPACE_BYTES >> 20,
    )
