"""Linear layers on CPUs: this package's kernels on weights in rows, or torch's oneDNN on weights that it has packed.

Why: ``torch.nn.functional.linear`` reads weights at a third of the memory's speed or less as soon as there are two
tokens, and where oneDNN does not support a dtype (bf16 and fp16 on AVX2), torch's own loops compute prompts at an
eighth of the CPU's speed (benchmarks/notes/cpu_serving.md). With bf16 on CPUs with AVX-512 bf16, weights are packed
once for oneDNN, as vLLM's compiled CPU ops, which a pure-Python vLLM lacks, do.
Remove when: vLLM publishes CPU wheels. Then keep the kernels where they are faster.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fastattention_vllm.attention.cpu import kernels
from fastattention_vllm.attention.cpu.linear import FEW_TOKENS
from fastattention_vllm.attention.cpu.linear import linear as _linear_on_rows
from fastattention_vllm.integration import compat

ROWS = 512
"""The number of tokens for which oneDNN packs weights. For few tokens, this layout is at least as fast as the layout
for 1 token. With the layout for 1 token, a prefill takes 1.5 times as long."""

PRIMITIVE_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""The variables for the size of torch's cache of oneDNN primitives, and of oneDNN's own cache."""
PRIMITIVES = 128

_library: Any = None  # a torch.library.Library; its methods are untyped
_packed: dict[int, torch.Tensor] = {}
_handles: weakref.WeakKeyDictionary[torch.nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()


def replace_linears_once_loaded() -> None:
    """Make vLLM's linear layers choose among these ways when their weights are loaded. Idempotent.

    This replaces a function, because there is no hook. All versions look the function up when a layer is loaded.
    """
    if compat.has_compiled_cpu_ops():
        return
    from vllm.model_executor.layers import utils

    _define()  # also if no layer needs it: compiled code of an earlier start may
    if not isinstance(utils.dispatch_cpu_unquantized_gemm, _Dispatch):
        utils.dispatch_cpu_unquantized_gemm = _Dispatch(utils.dispatch_cpu_unquantized_gemm)


def keep_few_primitives() -> None:
    """Limit oneDNN's caches, unless the user has set them. Call this before the first linear layer runs.

    bf16 and fp16 layers need compiled code for every number of tokens. Two caches keep 1024 entries each, so a server's
    heap grew by 1 to 2 GB under mixed load. Compilation is so fast that smaller caches have no measurable cost.
    """
    for name in PRIMITIVE_CACHES:
        os.environ.setdefault(name, str(PRIMITIVES))


def packed_weights() -> list[torch.Tensor]:
    """All packed weights in use, in oneDNN's internal layouts."""
    return list(_packed.values())


def buffer(packed: torch.Tensor) -> tuple[int, int]:
    """Address and size in bytes of a packed weight, which has no torch storage."""
    return torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)


class _Dispatch:
    """Sets ``layer.cpu_linear``. Falls back to vLLM's ``dispatch_cpu_unquantized_gemm``, which it replaces."""

    def __init__(self, original: Callable[[torch.nn.Module, bool], None]) -> None:
        self.original = original

    def __call__(self, layer: torch.nn.Module, remove_weight: bool) -> None:
        # Layers that keep their weight (embeddings, and the output layer, which may share it) would store it twice.
        if not ((remove_weight and _pack(layer)) or _use_rows(layer)):
            self.original(layer, remove_weight)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear``, computed by whichever kernels are faster on this CPU."""
    limit = tokens_on_rows(x.dtype)
    usual = weight.stride(-1) == 1 and (bias is None or bias.shape == weight.shape[:1])
    if usual and (limit is None or x.numel() <= limit * x.shape[-1]):
        return _linear_on_rows(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


@functools.cache
def tokens_on_rows(dtype: torch.dtype) -> int | None:
    """For up to how many tokens this package's kernels are faster than torch's on weights in rows. None: for all."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16) or not kernels.isa().startswith(("avx", "amx")):
        return 0  # not measured on Arm
    if kernels.isa() == "avx2" or (dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()):
        return None
    return FEW_TOKENS


def _use_rows(layer: Any) -> bool:
    """Use this package's kernels on the layer's weight as it is. False if the weight is not suitable."""
    weight = layer.weight
    if weight.device.type != "cpu" or weight.ndim != 2 or not weight.numel() or tokens_on_rows(weight.dtype) == 0:
        return False
    layer.cpu_linear = torch.ops.fastattention.linear
    return True


def _pack(layer: Any) -> bool:
    """Pack the layer's weight and drop the original. False if the weight is not suitable."""
    weight = layer.weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or weight.ndim != 2 or not can_pack():
        return False
    handle = _handles.get(layer)
    if handle is None:  # a reloaded layer keeps its handle, which compiled code may contain
        handle = _handles[layer] = torch.tensor(id(layer))
        weakref.finalize(layer, _packed.pop, id(layer), None)
    _packed[int(handle)] = _laid_out(weight.data)
    features = weight.shape[0]
    # A tensor, because a number would become part of the compiled code, which later processes would then not find.
    layer.cpu_linear = lambda x, weight, bias: torch.ops.fastattention.packed_linear(x, handle, features, bias)
    layer.weight = torch.nn.Parameter(weight.data.new_empty(0), requires_grad=False)
    return True


@functools.cache
def can_pack() -> bool:
    """Whether packing helps on this CPU, and torch's private ops for it give the same results as its linear."""
    if not getattr(torch.cpu, "_is_avx512_bf16_supported", bool)():
        return False  # oneDNN does not pack bf16 on AVX2, gains nothing on plain AVX-512, and was not tried on Arm
    weight = torch.linspace(-1, 1, 64 * 96, dtype=torch.bfloat16).reshape(64, 96)
    x, bias = weight[:3].flip(0), weight[0, :64]
    try:
        packed = _laid_out(weight)
        ours, _ = _linear(x, packed, bias), buffer(packed)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.allclose(ours, torch.nn.functional.linear(x, weight, bias), rtol=0.02, atol=0.02)


def _laid_out(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return packed


def _linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    bias = None if bias is None else bias.contiguous()  # the op ignores its strides
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


@functools.cache
def _define() -> None:
    """Define the ops that torch.compile calls. It can trace neither kernels outside of torch nor oneDNN's layouts."""
    global _library
    _library = torch.library.Library("fastattention", "FRAGMENT")
    _library.define("packed_linear(Tensor x, Tensor handle, int features, Tensor? bias) -> Tensor")
    _library.impl("packed_linear", lambda x, handle, features, bias: _linear(x, _packed[handle.item()], bias), "CPU")
    _library.impl("packed_linear", lambda x, handle, features, bias: x.new_empty(*x.shape[:-1], features), "Meta")
    _library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    _library.impl("linear", linear, "CPU")
    _library.impl("linear", lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]), "Meta")
