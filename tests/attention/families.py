"""Test drivers for every kernel family of the registry, and the features that each one refuses.

``cpu`` runs for real. Without the hardware, ``volta`` runs on the simulated V100, ``ascend`` and ``torch_flash`` run
through float64 stand-ins of the one operator that each calls. ``tests/gpu/test_functional.py`` runs on real GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch

from fastattention_vllm.attention import ascend, flash, functional, torch_flash
from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.volta import kernels as volta
from tests.ascend import operator as ascend_operator
from tests.attention.oracle import LSE_TOLERANCE, OUTPUT_TOLERANCE
from tests.attention.volta import simulated_gpu
from tests.kernels.volta.attention import LSE_TOLERANCE as VOLTA_LSE_TOLERANCE
from tests.kernels.volta.attention import TOLERANCE as VOLTA_TOLERANCE

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([2.0, -1.0, 0.5, 0.0])

FEATURES: dict[str, dict[str, Any]] = {
    "all keys": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (7, 0)},
    "window on both sides": {"window_size": (7, 3)},
    "softcap": {"causal": True, "softcap": 5.0},
    "sinks": {"causal": True, "sinks": SINKS},
    "alibi": {"causal": True, "alibi_slopes": SLOPES},
    "alibi per sequence": {"causal": True, "alibi_slopes": SLOPES.repeat(3, 1) * torch.tensor([[1.0], [2.0], [3.0]])},
    "scale": {"softmax_scale": 0.3},
}
"""Arguments of ``fast_attn_func`` and ``fast_attn_varlen_func`` for four query heads and three sequences."""


@dataclass(frozen=True)
class UnderTest:
    """One family under test."""

    module: ModuleType
    dtype: torch.dtype
    output: tuple[float, float]
    """Relative and absolute tolerance for outputs of about one."""
    lse: tuple[float, float]
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Refused features, dtypes and head sizes (as text), each with a regular expression that the message matches."""
    head_size: int = 64
    page: int = 16


FP32_IS_REFUSED = {"torch.float32": r"query is torch\.float32.*float16"}
UNDER_TEST = {
    "cpu": UnderTest(
        cpu, FP32, OUTPUT_TOLERANCE[FP32], LSE_TOLERANCE, {"head size 20": "head_size is 20.*multiples of 8"}
    ),
    "volta": UnderTest(
        volta,
        FP16,
        (0.0, VOLTA_TOLERANCE),
        (0.0, 10 * VOLTA_LSE_TOLERANCE),
        {
            "alibi per sequence": "alibi_slopes differ between sequences",
            "torch.float32": r"query has dtype torch\.float32, but the Volta kernels need float16",
            "torch.bfloat16": r"query has dtype torch\.bfloat16, but the Volta kernels need float16",
            "head size 20": "head_size is 20, but the Volta kernels support 64, 80",
        },
    ),
    "torch_flash": UnderTest(
        torch_flash,
        FP16,
        OUTPUT_TOLERANCE[FP16],
        LSE_TOLERANCE,
        {
            "softcap": "does not support softcap; install vLLM",
            "sinks": "does not support sinks; install vLLM",
            "alibi": "does not support alibi_slopes; use the CPU",
            "alibi per sequence": "does not support alibi_slopes; use the CPU",
            "head size 20": "head_size is 20, PyTorch's FlashAttention takes multiples of 8 up to 256",
        }
        | FP32_IS_REFUSED,
    ),
    "ascend": UnderTest(
        ascend,
        FP16,
        OUTPUT_TOLERANCE[FP16],
        (1e-6, 1e-5),
        {
            "softcap": "npu_fused_infer_attention_score does not support a soft cap",
            "sinks": "npu_fused_infer_attention_score does not support attention sinks",
            "alibi": "npu_fused_infer_attention_score does not support ALiBi",
            "alibi per sequence": "npu_fused_infer_attention_score does not support ALiBi",
            "torch.float32": r"query is torch\.float32, but the NPU's attention needs float16 or bfloat16",
            "head size 20": "the head size is 20, but it must be a multiple of 16",
        },
        page=128,
    ),
}


def use(name: str, patch: pytest.MonkeyPatch) -> UnderTest:
    """Make ``fast_attn_func`` use this family for tensors on the CPU."""
    tested = UNDER_TEST[name]
    patch.setattr(functional, "kernels_for", lambda device: tested.module)
    if name == "volta":
        simulated_gpu.use(patch)
        patch.setattr(volta, "DEVICE", "cpu")
    if name == "torch_flash":
        patch.setattr(torch_flash, "DEVICE", "cpu")
        library = torch.library.Library("aten", "IMPL")
        library.impl("_flash_attention_forward", flash_attention_forward, "CPU")
        patch.setitem(LIBRARIES, "aten", library)
    if name == "ascend":
        patch.setattr(ascend, "operator", lambda: ascend_operator.npu_fused_infer_attention_score)
    return tested


def refuse_flash(patch: pytest.MonkeyPatch, version: int) -> None:
    """Make ``can_run`` of vLLM's FlashAttention decide about tensors on the CPU; nothing is computed."""
    patch.setattr(flash, "DEVICE", "cpu")
    patch.setattr(flash, "version", lambda head_size: version)


LIBRARIES: dict[str, torch.library.Library] = {}
"""Libraries in use: torch unregisters what a garbage-collected library registered."""


def flash_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, ...]:
    """``aten::_flash_attention_forward`` over ragged sequences, in float64, called through torch's genuine schema.

    Like the CUDA kernels, it aligns masks to the bottom right and returns log-sum-exps as ``[heads, tokens]``, plus
    infinity where a query sees no key and where the sum of its weights is NaN.
    """
    assert not any(others.values())
    assert dropout_p == 0
    assert scale is not None
    assert not return_debug_mask
    assert query.dtype == key.dtype == value.dtype
    assert query.dtype in (FP16, BF16)
    assert cum_seq_q.dtype == cum_seq_k.dtype == torch.int32
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=FP32)
    group = query.shape[1] // key.shape[1]
    spans = zip(cum_seq_q.tolist(), cum_seq_q.tolist()[1:], cum_seq_k.tolist(), cum_seq_k.tolist()[1:], strict=False)
    longest = [0, 0]
    for begin, end, first, last in spans:
        longest = [max(longest[0], end - begin), max(longest[1], last - first)]
        keys, values = (rows[first:last].double().repeat_interleave(group, 1) for rows in (key, value))
        score = torch.einsum("qhd,khd->hqk", query[begin:end].double(), keys) * scale
        distance = torch.arange(last - first) - (torch.arange(end - begin)[:, None] + last - first - (end - begin))
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if is_causal or (window_size_right is not None and window_size_right >= 0):
            hidden |= distance > (0 if is_causal else window_size_right or 0)
        if window_size_left is not None and window_size_left >= 0:
            hidden |= distance < -window_size_left
        score = score.masked_fill(hidden, -math.inf)
        weight = score.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weight, values).to(query.dtype)
        sums = score.logsumexp(-1)
        lse[:, begin:end] = sums.masked_fill((sums == -math.inf) | sums.isnan(), math.inf).float()
    assert longest == [max_q, max_k]
    unused = query.new_empty(0)
    return out, lse, unused, unused, unused
