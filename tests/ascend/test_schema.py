"""Genuine torch_npu accepts each of our calls: its schema, and the shapes that its Meta kernel infers.

Meta kernels check little: neither head sizes nor masks. tests/ascend/operator.py checks these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_npu

from fastattention_vllm.attention import ascend
from fastattention_vllm.attention.problem import AttentionProblem
from tests.ascend.test_attention import SHAPES, build, quantised
from tests.attention.oracle import Case

NAME = "npu::npu_fused_infer_attention_score"
PROBLEMS = {
    f"{shape}, head size {size}, {kind}": (shape, size, kind)
    for shape in SHAPES
    for size in (64, 128, 192)
    for kind in ("paged", "window", "contiguous", "int8")
}


def problem_of(shape: str, size: int, kind: str) -> AttentionProblem:
    new, kept = SHAPES[shape]
    case = Case(new, kept, 8, 2, size, page_size=128, dtype=torch.bfloat16, layout="NHD")
    if kind == "window":
        case = replace(case, window=(50, -1))
    if kind == "contiguous":
        case = replace(case, page_size=0)
    return quantised(build(case)) if kind == "int8" else build(case)


def meta(given: dict[str, Any]) -> dict[str, Any]:
    return {name: what.to("meta") if isinstance(what, torch.Tensor) else what for name, what in given.items()}


@pytest.mark.parametrize("what", PROBLEMS)
def test_schema_and_meta_kernel_accept_each_call(what: str) -> None:
    problem = problem_of(*PROBLEMS[what])
    calls = ascend.plan(problem)
    assert calls
    for call in calls:
        given = ascend.arguments(problem, call, lse=True)
        schema = torch._C._get_schema(NAME, "")
        asked = {argument.name for argument in schema.arguments}
        assert given.keys() <= asked
        out, lse = torch_npu.npu_fused_infer_attention_score(**meta(given))
        assert out.device.type == "meta"
        assert out.shape == given["query"].shape
        assert out.dtype == given["query"].dtype
        query = given["query"]
        expected = (len(query), 8, 1) if call.layout == "TND" else (query.shape[0], 8, query.shape[1], 1)
        assert lse.shape == expected
        assert lse.dtype == torch.float32


def test_the_schema_refuses_unknown_arguments() -> None:
    problem = problem_of("prefill", 128, "paged")
    given = ascend.arguments(problem, ascend.plan(problem)[0])
    with pytest.raises(RuntimeError, match="actual_seq_lengths_q"):
        torch_npu.npu_fused_infer_attention_score(**meta(given), actual_seq_lengths_q=[1])
    with pytest.raises(RuntimeError, match="sparse_mode"):
        torch_npu.npu_fused_infer_attention_score(**(meta(given) | {"sparse_mode": "causal"}))


def test_the_operator_is_torch_npus_own() -> None:
    assert torch_npu.npu_fused_infer_attention_score is ascend.operator()
    for key in ("Meta", "PrivateUse1"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(NAME, key)
    assert not torch.npu.is_available(), "these tests need a machine without an NPU"
