"""Tiling-AllReduce on Ascend NPUs, through vllm-ascend's own choice of row-parallel operations.

vllm-ascend 0.23 calls ``_get_row_parallel_op`` to choose an operation for each row-parallel layer; None means vLLM's
plain layer. If the result is None and ``tiling_all_reduce`` is set, the operation of this module is used. Layers for
which vllm-ascend has its own operation (tensor parallelism of only MLP or o_proj, FlashComm, its fused matmul, sequence
parallelism) keep it. Not yet run on hardware. Remove this when vllm-ascend accepts operations from plugins.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import vllm_ascend.ops  # noqa: F401  before linear_op: they import each other
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import in_the_same_node_as
from vllm.forward_context import is_forward_context_available
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm_ascend.ascend_forward_context import _EXTRA_CTX
from vllm_ascend.ops import linear_op
from vllm_ascend.ops.linear import AscendUnquantizedLinearMethod
from vllm_ascend.ops.linear_op import CustomRowParallelOp
from vllm_ascend.utils import _should_trans_nz

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.tiling import row_parallel
from fastattention_vllm.parallel import mm_all_reduce, tiled_linear
from fastattention_vllm.parallel.collective import Collective, ProcessGroupCollective
from fastattention_vllm.parallel.plan import GRANULE
from fastattention_vllm.parallel.tiled_linear import Linear, Tiling

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.fastattention")

COLLECTIVE = "hccl"


class TiledRowParallelOp(CustomRowParallelOp):
    """vLLM's plain row-parallel layer, or a layer in blocks once :func:`enable_tiling` has selected it."""

    tiled_group: str | None = None
    """vLLM's name for the group of ranks."""

    def apply(self, input_: torch.Tensor) -> Any:
        layer = self.layer
        if self.tiled_group is None or input_.dim() != 2:
            return RowParallelLinear.forward(layer, input_)
        bias = None if layer.skip_bias_add else layer.bias
        output = tiled_linear.tiled_linear_all_reduce(input_, layer.weight, bias, self.tiled_group)
        if not layer.return_bias:
            return output
        return output, layer.bias if layer.skip_bias_add else None


class TensorParallelSums(ProcessGroupCollective):
    """HCCL's sums in vLLM's own group of ranks, on HCCL's own stream. A second group would allocate its buffers again.

    All ranks start this group's sums in the order of the model, so sums cannot be confused.
    """

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self.rank = coordinator.rank_in_group
        self.size = coordinator.world_size

    @property
    def group(self) -> dist.ProcessGroup:  # type: ignore[override]
        """The current group. vllm-ascend creates a new one when it wakes up from sleep mode."""
        group: dist.ProcessGroup = self._coordinator.device_group
        return group

    def totals(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """Uses gloo: HCCL does not sum float64, and with some of its algorithms ranks may differ in the last bit."""
        everyones = self.exchange(list(numbers))
        return [sum(column) for column in zip(*everyones, strict=True)]

    def exchange(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._coordinator.cpu_group)
        return found


class AscendTiling(Tiling):
    """Tiling for vllm-ascend's group of tensor-parallel ranks. Layers in captured ACL graphs are not split."""

    def __init__(self, collective: Collective, cuts: row_parallel.Cuts, fused_linears: Mapping[str, Linear]) -> None:
        super().__init__(collective)
        self._cuts = cuts
        self._fused_linears = fused_linears

    def blocks(self, rows: int, weight: torch.Tensor) -> Sequence[int]:
        return (rows,) if _captures() else self._cuts.of(rows, weight)[1]

    def plain(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        chosen = "" if _captures() else self._cuts.of(x.shape[0], weight)[0]
        return self._fused_linears.get(chosen, plain)(x, weight, bias)


def install() -> None:
    """Wrap vllm-ascend's choice. Repeated calls are safe. Without ``tiling_all_reduce`` the choice is unchanged."""
    original = linear_op._get_row_parallel_op
    if not getattr(original, "_fastattention", False):
        linear_op._get_row_parallel_op = _tiling(original)


def _tiling(choose: Any) -> Any:
    """vllm-ascend's choice, except for plain layers if tiling is enabled."""

    @functools.wraps(choose)
    def _get_row_parallel_op(prefix: str, layer: Any) -> Any:
        chosen = choose(prefix, layer)
        config = get_current_vllm_config_or_none()
        if config is None or not row_parallel.asked_for(config):
            return chosen
        compat.before_profiling(resolve_obj_by_qualname(config.parallel_config.worker_cls), enable_tiling)
        return TiledRowParallelOp(layer) if chosen is None else chosen

    _get_row_parallel_op._fastattention = True  # type: ignore[attr-defined]
    return _get_row_parallel_op


def enable_tiling(vllm_config: VllmConfig, model: torch.nn.Module) -> None:
    """Enable tiling in all suitable layers and log their number. Every rank calls this.

    It must run after the weights are loaded, because loading may change their layout, and before the first graph is
    traced.

    Raises:
        Refusal: ``tiling_full_form`` is set.
    """
    if options_of(vllm_config).tiling_full_form:
        raise Refusal(
            "tiling_full_form is not supported on NPUs; remove it and use tiling_all_reduce, which works without it."
        )
    coordinator = get_tp_group()
    sums = TensorParallelSums(coordinator)
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, RowParallelLinear)]
    layers: list[tuple[str, Any]] = [(why_not(module, name), module) for name, module in modules]
    tiled = [layer for reason, layer in layers if not reason]
    for reason, layer in layers:
        if reason and isinstance(getattr(layer, "custom_op", None), TiledRowParallelOp):
            layer.custom_op = None
    weights = [layer.weight for layer in tiled]
    timed = options_of(vllm_config).tiling_all_reduce == "auto"
    fused_linears = _fused_linears(coordinator, sums, weights) if timed and weights else {}
    cuts = row_parallel.decide_cuts(vllm_config, weights, {COLLECTIVE: sums}, plain, fused_linears)
    tiled_linear.register(coordinator.unique_name, AscendTiling(sums, cuts, fused_linears))
    for layer in tiled:
        layer.custom_op.tiled_group = coordinator.unique_name
    row_parallel.log_layers(len(tiled), cuts, Counter(reason for reason, _ in layers if reason))


def why_not(layer: Any, name: str) -> str:
    """Why a layer cannot be tiled; empty if it can. ``name`` is the layer's path in the model."""
    operation = getattr(layer, "custom_op", None)
    if operation is None:
        return "vllm-ascend does not choose an operation for them"
    if not isinstance(operation, TiledRowParallelOp):
        return f"they use vllm-ascend's {type(operation).__name__}"
    reason = row_parallel.why_not(layer, name, AscendUnquantizedLinearMethod)
    if not reason and _should_trans_nz(layer.weight):
        return "their weights are in the NPU's NZ format"
    return reason


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The computation that vllm-ascend does itself: a matmul followed by an all-reduce."""
    multiplied = torch.ops.vllm.unquantized_gemm(x, weight, bias)
    summed: torch.Tensor = tensor_model_parallel_all_reduce(multiplied)
    return summed


def _captures() -> bool:
    """Whether an ACL graph is being captured, which must contain neither overlapped sums nor the fused call."""
    return is_forward_context_available() and bool(_EXTRA_CTX.capturing)


def _fused_linears(coordinator: Any, sums: TensorParallelSums, weights: Sequence[torch.Tensor]) -> Mapping[str, Linear]:
    """``npu_mm_all_reduce_base`` if all ranks can call it; otherwise the log says why not."""
    one_machine = all(in_the_same_node_as(coordinator.cpu_group))
    problem = mm_all_reduce.why_not(weights[0].dtype, sums.size, one_machine)
    if not problem:
        layer = mm_all_reduce.layer(lambda: communicator(sums.group))
        try:
            layer(weights[0].new_zeros(GRANULE, weights[0].shape[1]), weights[0], None).cpu()
        except RuntimeError as error:
            problem = str(error)
        problem = next(filter(None, sums.exchange(problem)), "")
        if not problem:
            return {mm_all_reduce.NAME: layer}
    logger.info_once("Tiling-AllReduce: %s is not available: %s.", mm_all_reduce.NAME, problem)
    return {}


def communicator(group: dist.ProcessGroup) -> str:
    """HCCL's name of a group."""
    rank = dist.get_global_rank(group, dist.get_rank(group))
    backend: Any = group._get_backend(torch.device("npu"))
    name: str = backend.get_hccl_comm_name(rank)
    return name
