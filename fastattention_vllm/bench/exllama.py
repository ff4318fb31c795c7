"""The kernel by which vLLM multiplies by GPTQ weights on a V100: exllama's, called as its linear method does.

Used by: volta_linear.py.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from fastattention_vllm.bench.contender import Call
from fastattention_vllm.linear.weights import MIDDLE, QuantisedMatrix


@functools.cache
def operators() -> Any | str:
    """``vllm._custom_ops``, or why its kernel cannot be had."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed here."
    try:
        from vllm import _custom_ops

        _ = torch.ops._C.gptq_gemm
    except Exception as error:  # whatever a vLLM without this kernel raises: the peer is then left out by name
        return f"this vLLM has no gptq_gemm ({type(error).__name__}: {error})."
    return _custom_ops


def call(x: torch.Tensor, given: QuantisedMatrix) -> Call:
    """``x @ given``. The zero points must be those of the middle, as in most GPTQ checkpoints."""
    ops: Any = operators()
    form = given.format
    bits = 4 if form.kind == "int4" else 8
    middle = MIDDLE[form.kind]
    word = int.from_bytes(bytes([middle << 4 | middle if bits == 4 else middle] * 4), "little") - (1 << 32)
    zeros = torch.full((len(given.scales), given.n * bits // 32), word, dtype=torch.int32, device=x.device)
    no_order = torch.empty(0, dtype=torch.int32, device=x.device)
    words = given.numbers.clone()
    ops.gptq_shuffle(words, no_order, bits)

    def run() -> torch.Tensor:
        # Exllama's form of the weights, and zero points that are not less by one.
        out: torch.Tensor = ops.gptq_gemm(x, words, zeros, given.scales, no_order, True, True, bits)
        return out

    return run
