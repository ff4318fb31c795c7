"""FP8 weights of any checkpoint. Activations stay fp16, so scales of activations are loaded and left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.parameter import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)

from fastattention_vllm.integration.cuda.quantised.linear_method import QuantisedLinearMethod
from fastattention_vllm.integration.cuda.quantised.loading import parts_of_qkv
from fastattention_vllm.linear.weights import BLOCK, QuantisedMatrix, WeightFormat

PARTS = {"q": 0, "k": 1, "v": 2}


class Fp8Method(QuantisedLinearMethod):
    """
    Args:
        scales: of what the checkpoint has a scale each; ``tensor`` is one of each part of a merged layer.
        scales_name: the name of the tensor of scales.
        input_scale: whether the checkpoint has a scale of the activations.
    """

    KEPT: ClassVar[str] = "weight"

    def __init__(
        self, prefix: str, scales: Literal["tensor", "channel", "block"], scales_name: str, input_scale: bool
    ) -> None:
        super().__init__(prefix)
        self.scales, self.scales_name, self.input_scale = scales, scales_name, input_scale

    def weight_format(self) -> WeightFormat:
        if self.scales == "block":
            self._check_blocks()
        return WeightFormat("fp8_e4m3", "channel" if self.scales == "tensor" and len(self.widths) > 1 else self.scales)

    def _check_blocks(self) -> None:
        """Parts and ranks must begin with a block, because each has its own rows of scales."""
        divided = self.n != self.whole_n
        sizes = [*(self.widths if divided else self.widths[:-1]), *([self.k] if self.k != self.whole_k else [])]
        for size in sizes:
            if size % BLOCK:
                raise self.refusal(
                    f"a part of {size} inputs or outputs is not a multiple of the {BLOCK} of a block of scales",
                    "use a smaller --tensor-parallel-size",
                )

    def add_parameters(self, layer: Any) -> None:
        weight = torch.empty(self.n, self.k, dtype=torch.float8_e4m3fn)
        self.add(layer, "weight", ModelWeightParameter, weight, input_dim=1, output_dim=0)
        parts, float32 = len(self.widths), torch.float32
        if self.scales == "tensor":
            self.add(layer, self.scales_name, PerTensorScaleParameter, torch.empty(parts, dtype=float32),
                     loader=load_scalar)  # fmt: skip
        elif self.scales == "channel":
            self.add(layer, self.scales_name, ChannelQuantScaleParameter, torch.empty(self.n, 1, dtype=float32),
                     output_dim=0)  # fmt: skip
        else:
            layer.weight_block_size = [BLOCK, BLOCK]  # vLLM's loader of merged layers reads it
            shape = (-(-self.n // BLOCK), -(-self.k // BLOCK))
            self.add(layer, self.scales_name, BlockQuantScaleParameter, torch.empty(shape, dtype=float32),
                     loader=part_by_part(layer, self.loader), input_dim=1, output_dim=0)  # fmt: skip
        if self.input_scale:
            self.add(layer, "input_scale", PerTensorScaleParameter, torch.empty(parts, dtype=float32),
                     loader=load_scalar, optional=True)  # fmt: skip

    def matrix(self, layer: Any) -> QuantisedMatrix:
        scales = getattr(layer, self.scales_name).data
        if self.scales == "tensor":
            widths = torch.tensor(self.widths, device=scales.device)
            scales = scales.repeat_interleave(widths)[None] if len(self.widths) > 1 else scales[None]
        else:
            scales = scales.t()
        return QuantisedMatrix(self.form, self.k, self.n, layer.weight.data.t(), scales)


def part_by_part(layer: Any, load: Callable[..., None]) -> Callable[..., None]:
    """vLLM's loader of scales of blocks, for checkpoints in which queries, keys and values are one tensor, as in Phi-3.
    <= 0.19: vLLM takes a row of scales for each output. :class:`Fp8Method` checks that each part begins with a block.
    """
    if not isinstance(layer, QKVParallelLinear):
        return load

    def load_parts(parameter: Any, loaded: torch.Tensor, part: str | None = None) -> None:
        if part is not None:
            load(parameter, loaded, part)
            return
        begin = 0
        for name, outputs in parts_of_qkv(layer):
            rows = -(-outputs // BLOCK)
            load(parameter, loaded.narrow(0, begin, rows), name)
            begin += rows
        if begin != len(loaded):
            raise RuntimeError("more rows than the parts have")

    return load_parts


def load_scalar(parameter: Any, loaded: torch.Tensor, part: str | int | tuple[int, ...] | None = None) -> None:
    """Load a scale of one, several or (``None``) all parts of a merged layer. vLLM would write the first part alone."""
    parts = range(len(parameter)) if part is None else part if isinstance(part, tuple) else [PARTS.get(part, part)]  # type: ignore[arg-type]
    for index in parts:
        parameter.data[index : index + 1].copy_(loaded.reshape(1))
