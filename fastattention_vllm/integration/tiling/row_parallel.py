"""vLLM's RowParallelLinear with ``tiling_all_reduce``: the all-reduce overlaps with the matmul.

In every version, vLLM creates its layers through a registry in which a plugin can replace a class. The class registered
here behaves like the one that it replaces, except for layers that :func:`enable_tiling` has selected. On a GPU, layers
already exist when this plugin's code first runs; their class is changed when tiling is enabled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.tiling import calibration as tiling_times
from fastattention_vllm.parallel import tiled_linear
from fastattention_vllm.parallel.agreement import agreed
from fastattention_vllm.parallel.choice import Choice, Trial
from fastattention_vllm.parallel.collective import Collective
from fastattention_vllm.parallel.named_collectives import DEFAULT_COLLECTIVES, open_named_collectives
from fastattention_vllm.parallel.plan import even
from fastattention_vllm.parallel.rows_ready import RowsReady
from fastattention_vllm.parallel.shared_segment import Exchange
from fastattention_vllm.parallel.tiled_linear import Activation, Linear, Tiling

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.fastattention")

NAME = "RowParallelLinear"
MLPS = ("LlamaMLP", "Qwen2MLP")
"""vLLM's classes that consist of gate_up_proj, act_fn and down_proj in this order, and nothing else."""
TIMEOUT = 300.0
"""Seconds that a rank waits for the other ranks' part of a sum. vLLM also gives up a step after this time."""


class Cuts(Protocol):
    """How the layers of a model are split into blocks. The log shows its ``str``."""

    def of(self, rows: int, weight: torch.Tensor) -> tuple[str, Sequence[int]]:
        """The name of a collective, and the rows of each block."""


@dataclass(frozen=True)
class EvenCuts:
    """A fixed number of blocks, set by the user."""

    collective: str
    count: int
    min_rows: int

    def of(self, rows: int, weight: torch.Tensor) -> tuple[str, Sequence[int]]:
        return self.collective, even(rows, self.count) if rows >= self.min_rows else (rows,)

    def __str__(self) -> str:
        return f"{self.count} blocks for steps of {self.min_rows} or more tokens"


@dataclass(frozen=True)
class MeasuredCuts:
    """The fastest choices of a calibration."""

    choices: Mapping[torch.Size, Choice]
    """By the shape of a layer's weight. Empty: nothing is split."""
    collective: str
    """The collective for layers that are not split."""
    min_rows: int

    def of(self, rows: int, weight: torch.Tensor) -> tuple[str, Sequence[int]]:
        if rows < self.min_rows or not self.choices:
            return self.collective, (rows,)
        return self.choices[weight.shape].of(rows)

    def __str__(self) -> str:
        return f"the fastest number of blocks for steps of {self.min_rows} or more tokens"


class VllmTiling(Tiling):
    """Tiling for vLLM's group of tensor-parallel ranks."""

    def __init__(
        self,
        collectives: Mapping[str, Collective],
        cuts: Cuts,
        activation: Activation | None,
        ready: RowsReady | None,
    ) -> None:
        super().__init__(next(iter(collectives.values())), activation=activation, ready=ready)
        self._collectives = collectives
        self._cuts = cuts

    def blocks(self, rows: int, weight: torch.Tensor) -> Sequence[int]:
        return self._cuts.of(rows, weight)[1]

    def plain(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return plain(x, weight, bias)

    def collective_for(self, rows: int, weight: torch.Tensor) -> Collective:
        return self._collectives.get(self._cuts.of(rows, weight)[0], self.collective)


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The computation that vLLM does itself: a matmul followed by an all-reduce."""
    summed: torch.Tensor = get_tp_group()._all_reduce_out_place(torch.nn.functional.linear(x, weight, bias))
    return summed


class TiledRowParallel:
    """Mixin placed ahead of ``RowParallelLinear`` in the MRO."""

    tiled_group: str | None = None
    """vLLM's name for the group of ranks. None: vLLM's own code runs this layer."""

    def forward(self: Any, input_: torch.Tensor) -> Any:
        if self.tiled_group is None or input_.dim() != 2:
            return super().forward(input_)  # type: ignore[misc]
        bias = None if self.skip_bias_add else self.bias
        output = tiled_linear.tiled_linear_all_reduce(input_, self.weight, bias, self.tiled_group)
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None


class TiledMlp:
    """Mixin placed ahead of one of ``MLPS`` in the MRO."""

    tiled_group: str

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2:
            plain: torch.Tensor = super().forward(x)  # type: ignore[misc]
            return plain
        return tiled_linear.tiled_mlp_all_reduce(x, self.gate_up_proj.weight, self.down_proj.weight, self.tiled_group)


def install(vllm_config: VllmConfig) -> None:
    """Register the class for row-parallel layers, if tiling is enabled. Call this before the model is built."""
    if not asked_for(vllm_config) or issubclass(op_registry_oot.get(NAME, RowParallelLinear), TiledRowParallel):
        return
    registered = op_registry_oot.pop(NAME, RowParallelLinear)
    PluggableLayer.register_oot(type(NAME, (TiledRowParallel, registered), {}), name=NAME)


def enable_tiling(vllm_config: VllmConfig, model: torch.nn.Module) -> None:
    """Enable tiling in all suitable layers and log their number. Every rank of the world calls this.

    It must run after the weights are loaded, because loading may change their layout, and before the first graph is
    traced.

    Raises:
        Refusal: see :func:`_follow_attention`, or another rank failed. A rank that fails while the others time a sum
            with it ends their start after ``TIMEOUT``.
    """
    if asked_for(vllm_config):
        with agreed(exchange, Refusal) as among:
            _enable_tiling(vllm_config, model, among)


def _enable_tiling(vllm_config: VllmConfig, model: torch.nn.Module, exchange: Exchange) -> None:
    group = get_tp_group()
    reasons: Counter[str] = Counter()
    tiled: list[Any] = []
    for name, layer in model.named_modules():
        if isinstance(layer, RowParallelLinear):
            reason = why_not(layer, name)
            if reason:
                reasons[reason] += 1
            else:
                tiled.append(layer)
    device = group.device.type
    fixed = isinstance(options_of(vllm_config).tiling_all_reduce, int)
    names = DEFAULT_COLLECTIVES[device][: 1 if fixed else None]
    logger.info_once("Tiling-AllReduce: %d layers can be tiled; opening %s.", len(tiled), ", ".join(names))
    collectives = open_named_collectives(
        names,
        _all_tensor_parallel_groups(),
        dist.get_rank(),
        device,
        TIMEOUT,
        exchange,
        lambda problem: logger.info_once("Tiling-AllReduce: %s", problem),
    )
    cuts = decide_cuts(vllm_config, [layer.weight for layer in tiled], collectives, plain, {})
    ready = None
    activation = None
    if options_of(vllm_config).tiling_full_form:
        ready = _follow_attention(tiled, reasons, cuts)
        activation = _enable_mlp_tiling(model, group.unique_name)
    tiled_linear.register(group.unique_name, VllmTiling(collectives, cuts, activation, ready))
    for layer in tiled:
        if not isinstance(layer, TiledRowParallel):
            layer.__class__ = type(NAME, (TiledRowParallel, type(layer)), {})
        layer.tiled_group = group.unique_name
    log_layers(len(tiled), cuts, reasons)


@dataclass(frozen=True)
class AttentionBlocks:
    """How attention splits its rows for the o_proj that follows it."""

    ready: RowsReady
    of: Callable[[int], Sequence[int]]


_attention_blocks: AttentionBlocks | None = None


def attention_blocks() -> AttentionBlocks | None:
    """None if attention is not split."""
    return _attention_blocks


def _follow_attention(tiled: list[Any], reasons: Counter[str], cuts: Cuts) -> RowsReady:
    """Split attention into the blocks of the o_proj that follows it.

    Raises:
        Refusal: not every row-parallel layer is tiled. Rows that attention marks for an untiled layer would be used by
            the next tiled one.
    """
    global _attention_blocks
    weights = {layer.weight.shape: layer.weight for layer in tiled if layer.prefix.endswith(".o_proj")}
    if reasons or len(weights) != 1:
        what = ", ".join(sorted(reasons)) or f"{len(weights)} shapes of layers called o_proj"
        raise Refusal(
            f"tiling_full_form needs a model whose row-parallel layers can all be tiled, but this one has: {what}; "
            "remove tiling_full_form."
        )
    (weight,) = weights.values()
    ready = RowsReady(weight.shape[0])
    _attention_blocks = AttentionBlocks(ready, lambda rows: cuts.of(rows, weight)[1])
    return ready


def _enable_mlp_tiling(model: torch.nn.Module, group: str) -> Activation | None:
    """Enable tiling in all suitable MLPs, and return their activation."""
    fit: list[Any] = [module for module in model.modules() if type(module).__name__ in MLPS and _fits(module)]
    activations = {type(module.act_fn) for module in fit}
    if len(activations) != 1:
        logger.info_once("Tiling-AllReduce: no MLP (of class %s) is tiled as a whole.", " or ".join(MLPS))
        return None
    for module in fit:
        module.__class__ = type(type(module).__name__, (TiledMlp, type(module)), {})
        module.tiled_group = group
    logger.info_once("Tiling-AllReduce: %d MLPs are tiled as a whole.", len(fit))
    act_fn: Any = fit[0].act_fn
    # torch.compile cannot fuse the activation, because it is inside an opaque op. So on a GPU, use vLLM's kernel.
    activation: Activation = act_fn.forward_cuda if fit[0].down_proj.weight.is_cuda else act_fn
    return activation


def _fits(mlp: Any) -> bool:
    """Whether both layers are plain matrices of this rank. The caller has checked that down_proj is tiled."""
    first, second = mlp.gate_up_proj, mlp.down_proj
    shape = (sum(first.output_partition_sizes), first.input_size)
    plain = type(first.quant_method) is UnquantizedLinearMethod and tuple(first.weight.shape) == shape
    return plain and first.bias is None and second.bias is None and not first.gather_output


def decide_cuts(
    vllm_config: VllmConfig,
    weights: list[torch.Tensor],
    collectives: Mapping[str, Collective],
    plain: Linear,
    fused_linears: Mapping[str, Linear],
) -> Cuts:
    """How the layers of ``weights`` are split.

    Args:
        fused_linears: functions that compute a whole layer in one call, by name, as further candidates for "auto".
    """
    options = options_of(vllm_config)
    count, min_tokens = options.tiling_all_reduce, options.tiling_min_tokens
    first = next(iter(collectives))
    if isinstance(count, int):
        return EvenCuts(first, count, min_tokens)
    max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    choices: dict[torch.Size, Choice] = {}
    for weight in weights if max_tokens >= min_tokens else []:
        if weight.shape not in choices:
            choices[weight.shape] = choice = tiling_times.of(
                weight, collectives, plain, min_tokens, max_tokens, fused_linears
            )
            for trial in choice.trials:
                logger.info_once("Tiling-AllReduce: %s.", describe(weight.shape, trial))
    return MeasuredCuts(choices, first, min_tokens)


def describe(shape: torch.Size, trial: Trial) -> str:
    """One line for the log."""
    layer = f"{shape[1]} inputs per rank, {shape[0]} outputs"
    if not trial.collective:
        return f"{layer}: {trial.rows} tokens stay in one block, because no split was clearly faster"
    how = f"blocks of {', '.join(map(str, trial.blocks))} with" if len(trial.blocks) > 1 else "one call of"
    return (
        f"{layer}: {trial.rows} tokens in {how} {trial.collective}, measured "
        f"{trial.plain_seconds / trial.seconds:.2f}x as fast; this hides {100 * trial.hidden:.0f} % of the shorter of "
        "matmul and all-reduce"
    )


@dataclass(frozen=True)
class Tiled:
    """What :func:`enable_tiling` has decided in this process."""

    layers: int
    cuts: Cuts


decided: Tiled | None = None
"""None before the decision, and where tiling is off."""


def log_layers(tiled: int, cuts: Cuts, reasons: Mapping[str, int]) -> None:
    """Log and remember the decision. ``reasons``: for each reason why layers are not tiled, the number of layers."""
    global decided
    decided = Tiled(tiled, cuts)
    rest = "".join(f"; {number} not tiled: {reason}" for reason, number in sorted(reasons.items()))
    logger.info_once(
        "Tiling-AllReduce: %d row-parallel layers in %s%s.", tiled, str(cuts), rest
    )  # info_once hashes its arguments


def why_not(layer: Any, name: str, unquantised: type[Any] = UnquantizedLinearMethod) -> str:
    """Why a layer cannot be tiled; empty if it can.

    Args:
        name: the layer's path in the model.
        unquantised: this platform's quant method for unquantised weights.
    """
    if layer.tp_size == 1 or not layer.reduce_results:
        return "they have no all-reduce"
    if name.endswith(".base_layer"):
        return "they use LoRA"
    if not layer.input_is_parallel:
        return "they split their input themselves"
    if type(layer.quant_method) is not unquantised:
        return f"they are quantised ({type(layer.quant_method).__name__})"
    packed = layer.weight.device.type == "cpu" and compat.has_compiled_cpu_ops()
    if packed or tuple(layer.weight.shape) != (layer.output_size, layer.input_size_per_partition):
        return "their weights are packed for this processor"
    return ""


def asked_for(vllm_config: VllmConfig) -> bool:
    """Whether tiling is enabled and there are several ranks."""
    return options_of(vllm_config).tiling_all_reduce != "off" and vllm_config.parallel_config.tensor_parallel_size > 1


def _all_tensor_parallel_groups() -> list[list[int]]:
    """All tensor-parallel groups of the world, because every process must open every group."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, list(get_tp_group().ranks))
    return sorted({tuple(ranks): ranks for ranks in found}.values())


def exchange(value: Any) -> list[Any]:
    """The values of all ranks of this process's tensor-parallel group, which all call this."""
    group = get_tp_group()
    found: list[Any] = [None] * group.world_size
    dist.all_gather_object(found, value, group=group.cpu_group)
    return found
