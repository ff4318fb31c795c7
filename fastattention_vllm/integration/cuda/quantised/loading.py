"""What a checkpoint has put into the parameters of a layer of a quantised model.

vLLM does not check this for quantised models: a tensor that the checkpoint lacks leaves the memory as it was, of a
tensor that is too large a part is taken, and numbers of another dtype are converted without their scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.parameter import PerTensorScaleParameter

from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.linear.volta.packing import scales_in_fp16

aten = torch.ops.aten
QUANTISED = "or leaves this layer unquantised without saying so"
UNQUANTISED = "or quantises this layer without saying so"
"""What else it means if a tensor is missing."""


class Loading:
    """The loads of one parameter. A merged layer loads each part by itself.

    Args:
        layer: the layer's name.
        name: the parameter's name.
        ranks: tensor parallel ranks, among which a tensor of the checkpoint may be divided.
        optional: the checkpoint may lack it.
        alike: all parts of a merged layer must have the same values, because the layer has it once.
        scales: of integers, which the kernels read as fp16.
        unless: what else it means if the tensor is missing.
        fused: the outputs of all parts of a merged layer in the checkpoint, and on this rank. Keys and values may be
            on several ranks, so that a tensor with all parts is not divided evenly.
        divided: whether ranks take equal parts of a tensor. A vocabulary is padded, so its last rank has less.
    """

    def __init__(
        self,
        layer: str,
        name: str,
        ranks: int,
        *,
        optional: bool = False,
        alike: bool = False,
        scales: bool = False,
        unless: str = QUANTISED,
        fused: tuple[int, int] = (1, 1),
        divided: bool = True,
    ) -> None:
        self.fused, self.divided = fused, divided
        self.layer, self.name, self.ranks = layer, name, ranks
        self.optional, self.alike, self.scales, self.unless = optional, alike, scales, unless
        self.numbers: dict[str, int] = {}
        """Numbers that were written, by the part's id."""
        self.counted = False
        """Whether vLLM has ever loaded the parameter through :meth:`wrap`."""

    def wrap(self, loader: Callable[..., None]) -> Callable[..., None]:
        """vLLM's loader of the parameter, with checks.

        Raises:
            Refusal: the tensor's shape or dtype does not fit, or scales are too small for fp16.
        """

        # vLLM's reload calls this twice: first with a tensor without data, to count the numbers that are copied, and
        # once it has all of them with another tensor, as the argument of this name.
        def load(param: Any, loaded: torch.Tensor, *part: Any, **named: Any) -> None:
            if param.is_meta and self.alike:
                return  # Copied for each part, it would count too often, and the layer would begin without its rest.
            self._check_numbers(param, loaded)
            before = param.data.clone() if self.alike and self.numbers else None
            shape = list(loaded.shape)
            # vLLM's own checks of shapes are assertions, which ``python -O`` removes.
            if isinstance(param, PerTensorScaleParameter) and loaded.numel() > 1:
                raise self._misshapen(shape, param)
            try:
                with _Writes() as writes:  # type: ignore[no-untyped-call]
                    loader(param, loaded, *part, **named)
            except torch.OutOfMemoryError:
                raise
            except (AssertionError, IndexError, RuntimeError) as error:
                raise self._misshapen(shape, param) from error
            # A rank takes all of a tensor, or one of as many parts as there are ranks or KV heads. A scale of a whole
            # matrix may be written for each part of it.
            times, rest = divmod(loaded.numel(), max(writes.copied, 1))
            if loaded.numel() > 1 and self.divided and (rest or not times or self.ranks % times):
                whole, own = self.fused
                one_part = any(one is not None for one in (*part, *named.values()))
                if one_part or loaded.numel() * own != writes.copied * whole:
                    raise self._misshapen(shape, param)
            if param.is_meta:
                return
            if before is not None and not torch.equal(before, param.data):
                raise Refusal(
                    f"{self.layer}: {self.name} differs between the parts of this merged layer, which is not "
                    "supported; quantise the model again without activation order (desc_act: false)."
                )
            which = repr((*part, *named.values()))
            self.numbers[which] = writes.copied + writes.filled
            self.counted = True

        return load

    def check(self, parameter: torch.Tensor) -> None:
        """Once all is loaded.

        Raises:
            Refusal: the checkpoint lacks the tensor, or a part of it.
        """
        written = sum(self.numbers.values())
        if written >= parameter.numel() or (self.optional and not self.numbers):
            return
        lacks = f"only {written} of {parameter.numel()} numbers" if written else "none"
        raise Refusal(
            f"{self.layer}: this layer needs {self.name}, but the checkpoint has {lacks}, {self.unless}; download or "
            "copy the model again, or serve another checkpoint."
        )

    def _check_numbers(self, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        """Before they are converted to the parameter's dtype."""
        if not _means_the_same(parameter.dtype, loaded.dtype):
            raise Refusal(
                f"{self.layer}: the checkpoint's {self.name} has dtype {loaded.dtype}, but this layer needs "
                f"{parameter.dtype}; serve another checkpoint."
            )
        if self.scales:
            try:
                scales_in_fp16(loaded)
            except ValueError as error:
                raise Refusal(f"{self.layer}: {error}") from error

    def _misshapen(self, shape: list[int], parameter: torch.Tensor) -> Refusal:
        return Refusal(
            f"{self.layer}: the checkpoint's {self.name} has shape {shape}, which does not fit this layer "
            f"({list(parameter.shape)} on each of {self.ranks} ranks); download or copy the model again, or serve "
            "another checkpoint."
        )


def _means_the_same(wanted: torch.dtype, found: torch.dtype) -> bool:
    """Whether a conversion keeps what numbers mean: words of integers stay words, and floats keep their values."""
    if wanted.is_floating_point and wanted.itemsize > 1:
        # FP8 weights would lose their scales. e8m0 is a dtype of scales: powers of two.
        return found.is_floating_point and (found.itemsize > 1 or found == torch.float8_e8m0fnu)
    return found == wanted or not (wanted.is_floating_point or found.is_floating_point)


def fused_outputs(layer: Any, widths: Sequence[int], whole: int) -> tuple[int, int]:
    """``fused`` of a layer's parameters.

    Args:
        widths: outputs of each part on this rank.
        whole: outputs of all ranks, as vLLM counts them: keys and values on several ranks several times.
    """
    if isinstance(layer, QKVParallelLinear):
        whole = sum(size for _, size in parts_of_qkv(layer))
    return whole, sum(widths)


def parts_of_qkv(layer: QKVParallelLinear) -> list[tuple[str, int]]:
    """The parts of a checkpoint's tensor with queries, keys and values: vLLM's name and the outputs of each."""
    heads, kv_heads = layer.total_num_heads, layer.total_num_kv_heads
    return [("q", heads * layer.head_size), ("k", kv_heads * layer.head_size), ("v", kv_heads * layer.v_head_size)]


class _Writes(TorchDispatchMode):
    """Counts the numbers that are written in place.

    Raises:
        RuntimeError: a tensor is copied into one of another shape, so that its numbers would be repeated.
    """

    copied = filled = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.copy_.default:
            into, source = args[0], args[1]
            if into.shape != source.shape and not into.numel() == source.numel() == 1:
                raise RuntimeError(f"a tensor of shape {list(source.shape)} does not fit {list(into.shape)}")
            self.copied += into.numel()
        elif func in (aten.fill_.Scalar, aten.zero_.default):
            self.filled += args[0].numel()
        return func(*args, **(kwargs or {}))
