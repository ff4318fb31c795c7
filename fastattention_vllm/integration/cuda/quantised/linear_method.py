"""A layer with quantised weights: its parameters while it is loaded, and afterwards the kernels' form of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
)

from fastattention_vllm.attention.volta import kernels as attention_kernels
from fastattention_vllm.attention.volta.images import ImageError
from fastattention_vllm.integration.cuda.quantised.loading import Loading, fused_outputs
from fastattention_vllm.integration.cuda.quantised.progress import Progress
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.linear.volta import kernels
from fastattention_vllm.linear.volta.packing import PackedWeights, pack
from fastattention_vllm.linear.weights import QuantisedMatrix, WeightFormat

logger = init_logger("vllm.fastattention")

SCALES, FACTOR, ORDER = "packed_scales", "packed_factor", "input_order"
"""Names of parameters of a loaded layer. The packed matrix keeps the name of the checkpoint's, which LoRA looks for."""


class QuantisedLinearMethod(LinearMethodBase):
    """Of one layer. A class for each format says which parameters its checkpoints have, and what they mean."""

    KEPT: ClassVar[str]
    """The name of the checkpoint's matrix."""
    progress: Progress
    """Of the model, to whose layers this one belongs."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def reporting_to(self, progress: Progress) -> QuantisedLinearMethod:
        """Itself."""
        self.progress = progress
        return self

    @abstractmethod
    def weight_format(self) -> WeightFormat:
        """The format of this layer's matrix. Sizes are known by now."""

    @abstractmethod
    def add_parameters(self, layer: torch.nn.Module) -> None:
        """Add the checkpoint's tensors with :meth:`add`."""

    @abstractmethod
    def matrix(self, layer: Any) -> QuantisedMatrix:
        """The loaded matrix."""

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Add the parameters that vLLM loads.

        Raises:
            Refusal: the kernels cannot multiply by this matrix.
        """
        self.k, self.whole_k = input_size_per_partition, input_size
        self.widths, self.whole_n = tuple(output_partition_sizes), output_size
        self.n = sum(self.widths)
        self.fused = fused_outputs(layer, self.widths, output_size)
        self.dtype = params_dtype
        self.ordered: bool | None = None
        self.loader: Callable[..., None] = extra_weight_attrs["weight_loader"]
        self.loadings: dict[str, Loading] = {}
        # Kept, because vLLM 0.19.1 has no current configuration while it loads weights again.
        self.vllm_config = get_current_vllm_config()
        self.ranks = get_tensor_model_parallel_world_size()
        self.form = self.weight_format()
        reason = kernels.supports(self.form, self.k, self.n)
        if reason is not None:
            raise self.refusal(reason.removesuffix("."), "use another --tensor-parallel-size or another checkpoint")
        self.add_parameters(layer)
        self.nbytes = sum(getattr(layer, name).nbytes for name in self.loadings)
        self.progress.expect(self.nbytes)

    def add(
        self,
        layer: torch.nn.Module,
        name: str,
        kind: type[BasevLLMParameter],
        data: torch.Tensor,
        *,
        loader: Callable[..., None] | None = None,
        optional: bool = False,
        alike: bool = False,
        scales: bool = False,
        **where: Any,
    ) -> None:
        """Register a parameter whose loads are checked."""
        loading = Loading(
            self.prefix, name, self.ranks, optional=optional, alike=alike, scales=scales, fused=self.fused
        )
        self.loadings[name] = loading
        layer.register_parameter(name, kind(data=data, weight_loader=loading.wrap(loader or self.loader), **where))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Replace the parameters by the kernels' form.

        Raises:
            Refusal: the checkpoint lacks a tensor or has values that the kernels cannot read.
        """
        if self.vllm_config.load_config.load_format == "dummy":
            raise self.refusal(
                "--load-format dummy leaves quantised weights undefined", "serve a checkpoint, or an unquantised model"
            )
        for name, loading in self.loadings.items():
            loading.check(getattr(layer, name))
        self.progress.begin()
        try:
            matrix = self.matrix(layer)
            weights = pack(matrix)
        except ValueError as error:
            if isinstance(error, Refusal):
                raise
            raise Refusal(f"{self.prefix}: {error}") from error
        for name, loading in self.loadings.items():
            delattr(layer, name)
            loading.numbers.clear()  # weights may be loaded again, and must be complete then, too
        ordered = getattr(layer, ORDER, None) is not None
        if self.ordered not in (None, ordered):  # vLLM copies what is loaded again into the tensors of the first load
            raise self.refusal(
                "either the weights loaded at the start or the new ones have an activation order, but not both",
                "start the server again with the new checkpoint",
            )
        self.ordered = ordered
        keep(layer, self.KEPT, weights.packed)
        keep(layer, SCALES, weights.scales)
        keep(layer, FACTOR, weights.factor)
        if weights.packed.is_cuda:
            self._load_kernels()
        self.progress.end(self.nbytes)

    def _load_kernels(self) -> None:
        target = attention_kernels.choose(options_of(self.vllm_config).volta_kernels)
        try:
            kernels.load(self.form)
        except ImageError as error:
            raise Refusal(str(error)) from error
        logger.info_once("Kernels for quantised weights: fastattention Volta, %s; %s.", str(target), str(self.form))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        order = getattr(layer, ORDER, None)
        if order is not None:
            x = x.index_select(-1, order)
        weights = PackedWeights(
            self.form, self.k, self.n, getattr(layer, self.KEPT), getattr(layer, SCALES), getattr(layer, FACTOR)
        )
        return kernels.apply(x, weights, bias)

    def refusal(self, reason: str, instead: str) -> Refusal:
        return Refusal(f"{self.prefix}: {reason}; {instead}.")


def keep(layer: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    """Register a tensor of a loaded layer, so that vLLM counts and moves it."""
    parameter = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
    layer.register_parameter(name, parameter)


class IntegerMethod(QuantisedLinearMethod):
    """Integers with scales per group or channel.

    Args:
        bits: 4 or 8.
        group_size: -1 for scales per channel.
        zero_points: whether the checkpoint has them.
    """

    def __init__(self, prefix: str, bits: int, group_size: int, zero_points: bool) -> None:
        super().__init__(prefix)
        self.bits, self.group_size, self.zero_points = bits, group_size, zero_points
        self.per_word = 32 // bits

    def weight_format(self) -> WeightFormat:
        kind: Any = f"int{self.bits}"
        # A single group is a channel, except if ranks hold parts of it.
        if self.group_size == -1:
            return WeightFormat(kind, "channel", zero_points=self.zero_points)
        if self.k != self.whole_k and self.k % self.group_size:
            raise self.refusal(
                f"each rank has {self.k} of {self.whole_k} inputs, which is not a multiple of the group size "
                f"{self.group_size}",
                "use a smaller --tensor-parallel-size",
            )
        return WeightFormat(kind, "group", self.group_size, self.zero_points)

    @property
    def in_words(self) -> dict[str, Any]:
        """What vLLM's packed parameters want to know."""
        return {"packed_factor": self.per_word}

    @property
    def groups(self) -> int:
        return 1 if self.group_size == -1 else -(-self.k // self.group_size)

    def scales_kind(self, packed: bool) -> Any:
        """The class of parameters with a row per group. Scales per channel are the same on all ranks of a row-parallel
        layer."""
        if self.group_size == -1:
            return PackedColumnParameter if packed else ChannelQuantScaleParameter
        return PackedvLLMParameter if packed else GroupQuantScaleParameter

    def axes(self, k: int, n: int) -> dict[str, Any]:
        """The axes of a tensor with a row per group."""
        return {"output_dim": n} | ({} if self.group_size == -1 else {"input_dim": k})

    def check_vocabulary(self, layer: torch.nn.Module) -> None:
        """vLLM pads the columns of output layers, but not those of words that have several of them."""
        if isinstance(layer, ParallelLMHead) and layer.num_embeddings_padded != layer.org_vocab_size:
            raise self.refusal(
                f"vLLM pads a quantised output layer from {layer.org_vocab_size} to {layer.num_embeddings_padded} "
                "columns, which the words of this format do not allow",
                "serve a checkpoint whose lm_head is unquantised",
            )

    def check_sizes(self, sizes: Sequence[int], divisor: int, what: str) -> None:
        for size in sizes:
            if size % divisor:
                raise self.refusal(
                    f"{what} {size} is not a multiple of {divisor}, the numbers in a word",
                    "use a smaller --tensor-parallel-size",
                )
