"""Tiling-AllReduce on Ascend NPUs, through vllm-ascend's own chooser of row-parallel operations.

vllm-ascend 0.23 asks ``_get_row_parallel_op`` how each row-parallel layer is to run; None is vLLM's plain way. Where
that is the answer and ``tiling_all_reduce`` is set, ours takes its place; layers for which vllm-ascend has a way of its
own (tensor parallelism of MLP or o_proj alone, FlashComm, its fused matmul, sequence parallelism) keep it. Not yet run
on hardware. To be removed when vllm-ascend takes operations from outside.
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
    """vLLM's plain row-parallel layer; one that is cut into blocks once :func:`enable_tiling` has found it fit."""

    tiled_group: str | None = None
    """The ranks' group by vLLM's name."""

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
    """HCCL's sums in vLLM's own group of ranks, on HCCL's own stream: another group would take its buffers again.

    All ranks order all of that group's sums in the order of the model, so that none can be mixed up.
    """

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self.rank = coordinator.rank_in_group
        self.size = coordinator.world_size

    @property
    def group(self) -> dist.ProcessGroup:  # type: ignore[override]
        """vllm-ascend makes another one when it wakes from sleep."""
        group: dist.ProcessGroup = self._coordinator.device_group
        return group

    def totals(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """Over gloo: HCCL does not sum float64, and by some of its algorithms ranks may differ in the last bit."""
        everyones = self.exchange(list(numbers))
        return [sum(column) for column in zip(*everyones, strict=True)]

    def exchange(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._coordinator.cpu_group)
        return found


class AscendTiling(Tiling):
    """Of vllm-ascend's group of tensor-parallel ranks. What an ACL graph captures is not cut."""

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
    """Have vllm-ascend's chooser answer with ours. Safe to call again and again; says nothing if not asked for."""
    original = linear_op._get_row_parallel_op
    if not getattr(original, "_fastattention", False):
        linear_op._get_row_parallel_op = _tiling(original)


def _tiling(choose: Any) -> Any:
    """vllm-ascend's choice, but for plain layers where tiling is asked for."""

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
    """Turn on tiling in all layers that are fit for it, and say in the log how many. Called on every rank.

    After the weights are loaded, which may change how they lie; before the first graph is traced.

    Raises:
        Refusal: ``tiling_full_form`` is set.
    """
    if options_of(vllm_config).tiling_full_form:
        raise Refusal("tiling_full_form is not part of the NPU path; leave it out, tiling_all_reduce works without it.")
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
    """Why a layer cannot be tiled; empty if it can. ``name`` is its path in the model."""
    operation = getattr(layer, "custom_op", None)
    if operation is None:
        return "vllm-ascend's chooser is not asked for them"
    if not isinstance(operation, TiledRowParallelOp):
        return f"vllm-ascend's {type(operation).__name__}"
    reason = row_parallel.why_not(layer, name, AscendUnquantizedLinearMethod)
    if not reason and _should_trans_nz(layer.weight):
        return "their weights lie in an order of the NPU's own (NZ)"
    return reason


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What vllm-ascend does with these tensors itself."""
    multiplied = torch.ops.vllm.unquantized_gemm(x, weight, bias)
    summed: torch.Tensor = tensor_model_parallel_all_reduce(multiplied)
    return summed


def _captures() -> bool:
    """Whether an ACL graph is being captured, in which a sum beside the matmul and the one call have no place."""
    return is_forward_context_available() and bool(_EXTRA_CTX.capturing)


def _fused_linears(coordinator: Any, sums: TensorParallelSums, weights: Sequence[torch.Tensor]) -> Mapping[str, Linear]:
    """``npu_mm_all_reduce_base``, where all ranks can make it; else the log says why not."""
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
    logger.info_once("Tiling-AllReduce: no %s: %s.", mm_all_reduce.NAME, problem)
    return {}


def communicator(group: dist.ProcessGroup) -> str:
    """HCCL's name for a group."""
    rank = dist.get_global_rank(group, dist.get_rank(group))
    backend: Any = group._get_backend(torch.device("npu"))
    name: str = backend.get_hccl_comm_name(rank)
    return name
