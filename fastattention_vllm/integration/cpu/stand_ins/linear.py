"""bf16 linear layers on weights that torch's own oneDNN has packed once.

Why: ``torch.nn.functional.linear`` has oneDNN read a weight as it lies, row by row; laid out for its kernels, the same
oneDNN needs 10 to 25 % less time for the few tokens of a decoding step (benchmarks/notes/cpu_serving.md). vLLM's
compiled CPU ops, which a pure-Python vLLM lacks, do this too.
Remove when: vLLM publishes CPU wheels.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fastattention_vllm.integration import compat

ROWS = 512
"""The number of tokens that oneDNN is told to lay weights out for. For few tokens that is as fast as the layout for 1
token or faster; the other way round, a prefill takes half as long again."""

PRIMITIVE_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""Entries that torch's oneDNN keeps, and that oneDNN keeps itself."""
PRIMITIVES = 128

_library: Any = None  # a torch.library.Library; its methods are untyped
_packed: dict[int, torch.Tensor] = {}
_handles: weakref.WeakKeyDictionary[torch.nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()


def pack_weights_once_loaded() -> None:
    """Let vLLM's linear layers give their weights to ``_pack`` where it takes them. Idempotent.

    A replaced function, for want of a hook. Serves all versions: each looks the function up when a layer is loaded.
    """
    if compat.has_compiled_cpu_ops():
        return
    from vllm.model_executor.layers import utils

    if not isinstance(utils.dispatch_cpu_unquantized_gemm, _Dispatch):
        utils.dispatch_cpu_unquantized_gemm = _Dispatch(utils.dispatch_cpu_unquantized_gemm)


def keep_few_primitives() -> None:
    """Bound what oneDNN remembers, unless the user set it. To be called before the first linear layer runs.

    bf16 and fp16 layers need compiled code for every number of tokens, and two caches keep 1024 pieces of it each:
    under mixed load a server's heap grew by 1 to 2 GB. A piece is compiled so fast that fewer cost nothing measurable.
    """
    for name in PRIMITIVE_CACHES:
        os.environ.setdefault(name, str(PRIMITIVES))


def packed_weights() -> list[torch.Tensor]:
    """All that are in use, in layouts that only oneDNN knows."""
    return list(_packed.values())


def buffer(packed: torch.Tensor) -> tuple[int, int]:
    """Address and size in bytes of a packed weight, which has no storage to ask."""
    return torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)


class _Dispatch:
    """Decides what ``layer.cpu_linear`` is, as vLLM's ``dispatch_cpu_unquantized_gemm`` does, which it asks last."""

    def __init__(self, original: Callable[[torch.nn.Module, bool], None]) -> None:
        self.original = original

    def __call__(self, layer: torch.nn.Module, remove_weight: bool) -> None:
        # What keeps its weight (embeddings, and the output layer, which may share it with one) would have it twice.
        if not (remove_weight and _pack(layer)):
            self.original(layer, remove_weight)


def _pack(layer: Any) -> bool:
    """Pack the layer's weight and drop the original; False where torch's own linear keeps it."""
    weight = layer.weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or weight.ndim != 2 or not can_pack():
        return False
    handle = _handles.get(layer)
    if handle is None:  # a layer loaded again keeps the one that compiled code may hold
        handle = _handles[layer] = torch.tensor(id(layer))
        weakref.finalize(layer, _packed.pop, id(layer), None)
    _packed[int(handle)] = _laid_out(weight.data)
    features = weight.shape[0]
    # A tensor, because a number would become part of the compiled code, which is then found by no later process.
    layer.cpu_linear = lambda x, weight, bias: torch.ops.fastattention.packed_linear(x, handle, features, bias)
    layer.weight = torch.nn.Parameter(weight.data.new_empty(0), requires_grad=False)
    return True


@functools.cache
def can_pack() -> bool:
    """Whether this CPU gains by it, and this torch, whose private ops these are, computes what its linear does."""
    if not getattr(torch.cpu, "_is_avx512_bf16_supported", bool)():
        return False  # from AVX2 oneDNN packs no bf16, with plain AVX-512 nothing is gained, and Arm was not tried
    weight = torch.linspace(-1, 1, 64 * 96, dtype=torch.bfloat16).reshape(64, 96)
    x, bias = weight[:3].flip(0), weight[0, :64]
    try:
        packed = _laid_out(weight)
        ours, _ = _linear(x, packed, bias), buffer(packed)
    except (AttributeError, RuntimeError, TypeError):
        return False
    if not torch.allclose(ours, torch.nn.functional.linear(x, weight, bias), rtol=0.02, atol=0.02):
        return False
    _define()
    return True


def _laid_out(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return packed


def _linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    bias = None if bias is None else bias.contiguous()  # its strides are not looked at
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


def _define() -> None:
    """The op that torch.compile sees: it cannot trace tensors in oneDNN's layouts."""
    global _library
    _library = torch.library.Library("fastattention", "FRAGMENT")
    _library.define("packed_linear(Tensor x, Tensor handle, int features, Tensor? bias) -> Tensor")
    _library.impl("packed_linear", lambda x, handle, features, bias: _linear(x, _packed[handle.item()], bias), "CPU")
    _library.impl("packed_linear", lambda x, handle, features, bias: x.new_empty(*x.shape[:-1], features), "Meta")
