"""Tasks for ranks that use genuine vllm-ascend (see tests/parallel/ranks.py). They run in the ranks' processes.

Replaced by stand-ins: vLLM's and vllm-ascend's configuration, HCCL (by gloo), and the NPU's operators (on CPUs).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
import vllm_ascend.ops  # noqa: F401  before linear: they import each other
from vllm import forward_context
from vllm.config import ParallelConfig
from vllm.config import vllm as vllm_config_module
from vllm.distributed import parallel_state
from vllm_ascend import ascend_config
from vllm_ascend.ops import linear, linear_op
from vllm_ascend.ops.linear import AscendRowParallelLinear

from fastattention_vllm.integration.ascend import row_parallel as ascend_row_parallel
from fastattention_vllm.integration.ascend.row_parallel import TiledRowParallelOp
from fastattention_vllm.integration.tiling import row_parallel
from fastattention_vllm.parallel import mm_all_reduce as mm_all_reduce_layer
from tests.ascend import mm_all_reduce

MIN_TOKENS = 128
"""Maximum number of tokens in a step; longer steps are split."""
LIBRARIES: list[torch.library.Library] = []


class Worker:
    """Stand-in for vllm-ascend's worker, which cannot be imported without CANN."""

    def determine_available_memory(self) -> int:
        return 1


def ascend_settings(**changes: Any) -> SimpleNamespace:
    """The part of vllm-ascend's configuration that its chooser reads: defaults, except for ``changes``."""
    finegrained = SimpleNamespace(mlp_tensor_parallel_size=0, oproj_tensor_parallel_size=0)
    settings = {
        "finegrained_tp_config": finegrained,
        "enable_matmul_allreduce": False,
        "enable_flashcomm1": False,
        "enable_flashcomm2_parallel_size": 0,
        "enable_shared_expert_dp": False,
        "enable_sp_by_pass": False,
        "weight_nz_mode": 1,
        "layer_sharding": None,
    }
    return SimpleNamespace(**(settings | changes))


def vllm_settings(ranks: int, blocks: Any, **more: Any) -> SimpleNamespace:
    options = {"tiling_all_reduce": blocks, "tiling_min_tokens": MIN_TOKENS, **more}
    return SimpleNamespace(
        additional_config={"fastattention": options, "refresh": True},
        parallel_config=ParallelConfig(
            tensor_parallel_size=ranks,
            distributed_executor_backend="mp",
            worker_cls=f"{Worker.__module__}.{Worker.__name__}",
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
        model_config=SimpleNamespace(hf_config=None, hf_text_config=SimpleNamespace(), is_moe=False),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


@contextlib.contextmanager
def settings(vllm: Any, ascend: Any) -> Iterator[None]:
    with (
        mock.patch.object(vllm_config_module, "_current_vllm_config", vllm),
        mock.patch.object(ascend_config, "_ASCEND_CONFIG", ascend),
        mock.patch.object(ascend_config, "_is_ascend_config_initialized", return_value=True),
    ):
        yield


def join(rank: int) -> tuple[str, str]:
    """Set up vLLM's own process groups over gloo, once per process. Returns the genuine classes that are in use."""
    ranks = dist.get_world_size()
    for package, name, function in (
        ("vllm", "unquantized_gemm", linear.unquantized_gemm),
        ("vllm", "all_reduce", parallel_state.all_reduce),
        ("npu", "npu_mm_all_reduce_base", mm_all_reduce.npu_mm_all_reduce_base),
    ):
        library = torch.library.Library(package, "IMPL")
        library.impl(name, function, "CPU")
        LIBRARIES.append(library)
    torch.npu.current_device = lambda: 0
    with settings(vllm_settings(ranks, "off"), ascend_settings()):
        parallel_state.init_distributed_environment(ranks, rank, "env://", rank, "gloo")
        parallel_state.initialize_model_parallel(ranks, backend="gloo")
    coordinator = parallel_state.get_tp_group()
    mm_all_reduce.groups["hccl group"] = coordinator.device_group
    ascend_row_parallel.communicator = lambda group: "hccl group"
    ascend_row_parallel.install()
    return type(coordinator.device_communicator).__name__, linear_op._get_row_parallel_op.__module__


@dataclass(frozen=True)
class Layer:
    """A row-parallel layer over all ranks. Its values are integers, which every dtype sums exactly in any order."""

    inputs: int = 32
    outputs: int = 24
    dtype: torch.dtype = torch.bfloat16
    bias: bool = True
    skip_bias_add: bool = False
    return_bias: bool = True

    def make(self, rank: int, prefix: str = "model.layers.0.self_attn.o_proj") -> AscendRowParallelLinear:
        """Must be called within :func:`settings`."""
        layer = AscendRowParallelLinear(
            self.inputs,
            self.outputs,
            bias=self.bias,
            skip_bias_add=self.skip_bias_add,
            params_dtype=self.dtype,
            return_bias=self.return_bias,
            prefix=prefix,
        ).requires_grad_(False)
        layer.weight.copy_(numbers(layer.weight.shape, 1000 + rank))
        if self.bias:
            layer.bias.copy_(numbers(layer.bias.shape, 7))
        return layer

    def input(self, rank: int, rows: int) -> torch.Tensor:
        """The input of this rank: [rows, inputs of this rank]."""
        return numbers((rows, self.inputs // dist.get_world_size()), 2000 + rank).to(self.dtype)


def numbers(shape: Any, seed: int) -> torch.Tensor:
    return torch.randint(-1, 2, tuple(shape), generator=torch.Generator().manual_seed(seed)).float()


def with_tiling(rank: int, layer: AscendRowParallelLinear, config: Any) -> None:
    """Enable tiling the way vllm-ascend's worker does, before it profiles."""
    worker: Any = Worker()
    worker.vllm_config = config
    worker.model_runner = SimpleNamespace(get_model=lambda: torch.nn.ModuleDict({"o_proj": layer}))
    assert worker.determine_available_memory() == 1


def compared(
    rank: int, shape: Layer, rows: list[int], blocks: Any, capturing: bool = False
) -> list[tuple[Any, Any, list[tuple[int, bool]]]]:
    """For each number of rows: our layer's result, the result of vllm-ascend's plain layer, and the sums that ours
    started, each as (number of rows, whether it ran asynchronously).
    """
    config = vllm_settings(dist.get_world_size(), blocks)
    found = []
    with settings(config, ascend_settings()):
        layer = shape.make(rank)
        assert type(layer.custom_op) is TiledRowParallelOp
        before = layer(shape.input(rank, 300))
        with_tiling(rank, layer, config)
        ours = layer.custom_op
        context = SimpleNamespace(capturing=capturing)
        with mock.patch.object(forward_context, "_forward_context", context):
            for count in rows:
                x = shape.input(rank, count)
                with sums_seen() as sums:
                    tiled = layer(x)
                layer.custom_op = None
                plain = layer(x)
                layer.custom_op = ours
                found.append((tiled, plain, sums))
        layer.custom_op = None
        assert same(before, layer(shape.input(rank, 300))), "before tiling was enabled"
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(same(left, right) for left, right in zip(one, other, strict=True))
    return one is other or (one.dtype == other.dtype and torch.equal(one, other))


@contextlib.contextmanager
def sums_seen() -> Iterator[list[tuple[int, bool]]]:
    seen: list[tuple[int, bool]] = []
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *given: Any, async_op: bool = False, **named: Any) -> Any:
        seen.append((len(tensor), async_op))
        return original(tensor, *given, async_op=async_op, **named)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield seen


def compiled(rank: int, shape: Layer, rows: list[int]) -> int:
    """Compile the layer once for any number of rows and compare it with the plain one. Returns the number of graphs."""
    config = vllm_settings(dist.get_world_size(), 3)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    with settings(config, ascend_settings()), torch.inference_mode():
        layer, plain = shape.make(rank), shape.make(rank)
        with_tiling(rank, layer, config)
        plain.custom_op = None
        run = torch.compile(lambda x: layer(x * 1), backend=backend, fullgraph=True, dynamic=True)
        for count in rows:
            x = shape.input(rank, count)
            assert same(run(x), plain(x)), count
    return len(graphs)


def chosen(
    rank: int, seconds: dict[str, float], cache: str, broken: bool = False, ranks: int = 0
) -> tuple[Any, list[Any], list[tuple[int, bool]], list[str]]:
    """What "auto" chooses for a layer when each implementation is delayed by a given time.

    Args:
        seconds: Delay of "plain", "cut" (per block) and "one" (the fused call).
        cache: vLLM's cache folder.
        broken: Whether the fused call fails.
        ranks: Number of ranks assumed by the limits of the fused call; 0 means the actual number.

    Returns:
        The trials; whether each result equals the plain one; the fused calls made for the results; the log lines.
    """
    shape = Layer()
    config = vllm_settings(dist.get_world_size(), "auto")
    said: list[str] = []

    def kept_back(function: Any, name: str) -> Any:
        def slow(*given: Any, **named: Any) -> Any:
            time.sleep(seconds[name])
            return function(*given, **named)

        return slow

    def fails(*given: Any) -> Any:
        raise RuntimeError("EZ9999: no such links")

    genuine = mm_all_reduce_layer.layer(lambda: ascend_row_parallel.communicator(None))
    one = fails if broken else kept_back(genuine, "one")
    kept: list[Any] = []
    original = row_parallel.tiling_times.of

    def of(*given: Any) -> Any:
        kept.append(original(*given))
        return kept[-1]

    limits = mm_all_reduce_layer.why_not
    with (
        settings(config, ascend_settings()),
        mock.patch.dict("os.environ", {"VLLM_CACHE_ROOT": cache}),
        mock.patch.object(mm_all_reduce_layer, "layer", return_value=one),
        mock.patch.object(mm_all_reduce_layer, "why_not", lambda dtype, size, near: limits(dtype, ranks or size, near)),
        mock.patch.object(ascend_row_parallel, "plain", kept_back(ascend_row_parallel.plain, "plain")),
        mock.patch.object(torch, "mm", kept_back(torch.mm, "cut")),
        mock.patch.object(row_parallel.tiling_times, "of", of),
        mock.patch.object(
            row_parallel.logger, "info_once", lambda text, *values: said.append(text % values if values else text)
        ),
        mock.patch.object(ascend_row_parallel, "logger", row_parallel.logger),
    ):
        layer = shape.make(rank)
        with_tiling(rank, layer, config)
        inputs = [shape.input(rank, rows) for rows in (MIN_TOKENS - 1, 300, 512)]
        mm_all_reduce.calls.clear()
        results = [layer(x) for x in inputs]
        calls = list(mm_all_reduce.calls)
        with mock.patch.object(forward_context, "_forward_context", SimpleNamespace(capturing=True)):
            layer(inputs[-1])
        assert mm_all_reduce.calls == calls, "must not run while a graph is captured"
        layer.custom_op = None
        answers = [same(result, layer(x)) for result, x in zip(results, inputs, strict=True)]
    return kept[0].trials, answers, calls, said


def after_waking(rank: int) -> tuple[bool, int]:
    """vllm-ascend replaces the coordinator's group when it wakes up; returns whether sums go through the new group."""
    shape, coordinator = Layer(), parallel_state.get_tp_group()
    config = vllm_settings(dist.get_world_size(), 2)
    asleep = coordinator.device_group
    with settings(config, ascend_settings()):
        layer = shape.make(rank)
        with_tiling(rank, layer, config)
        layer(shape.input(rank, 300))
        coordinator.device_group = awake = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
        groups = []
        original = dist.all_reduce

        def all_reduce(*given: Any, group: Any = None, **named: Any) -> Any:
            groups.append(group)
            return original(*given, group=group, **named)

        try:
            with mock.patch.object(dist, "all_reduce", all_reduce):
                layer(shape.input(rank, 300))
        finally:
            coordinator.device_group = asleep
    return all(group is awake for group in groups), len(groups)


def totals(rank: int) -> tuple[list[float], list[float]]:
    """Sums of numbers that differ from rank to rank: ours, and those of the class that sums on the device."""
    sums = ascend_row_parallel.TensorParallelSums(parallel_state.get_tp_group())
    own = [0.1 + rank, 1e-9 * rank]
    calls = mock.Mock(side_effect=AssertionError("HCCL does not sum float64"))
    with mock.patch.object(dist, "all_reduce", calls):
        ours = sums.totals(own, torch.device("cpu"))
    return ours, super(ascend_row_parallel.TensorParallelSums, sums).totals(own, torch.device("cpu"))
