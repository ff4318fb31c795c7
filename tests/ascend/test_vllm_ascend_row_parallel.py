"""Tiling-AllReduce through genuine vllm-ascend: its chooser, layer and base class, with ranks over gloo on CPUs."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state
from vllm_ascend import ascend_config, utils
from vllm_ascend.ops import linear, linear_op
from vllm_ascend.ops.linear_op import CustomRowParallelOp

from fastattention_vllm.integration.ascend import row_parallel as ascend_row_parallel
from fastattention_vllm.integration.ascend.row_parallel import TiledRowParallelOp
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.tiling import row_parallel
from fastattention_vllm.parallel import mm_all_reduce, tiled_linear
from tests.ascend import row_parallel_tasks as tasks
from tests.ascend.row_parallel_tasks import Layer, ascend_settings, settings, vllm_settings
from tests.parallel import ranks as ranks_module
from tests.parallel.ranks import Ranks

O_PROJ, DOWN_PROJ = "model.layers.3.self_attn.o_proj", "model.layers.3.mlp.down_proj"
SECONDS = 600.0
"""Timeout of a task: each rank imports all of vLLM and vllm-ascend before its first one."""


@contextlib.contextmanager
def start(size: int) -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch, Ranks(size) as ranks:
        patch.setattr(ranks_module, "SECONDS", SECONDS)
        assert ranks.run(tasks.join) == [("NPUCommunicator", "vllm_ascend.ops.linear_op")] * size
        yield ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with start(2) as ranks:
        yield ranks


def check(found: list[Any], rows: list[int], blocks: list[list[tuple[int, bool]]]) -> None:
    """Check the results of all ranks. ``blocks`` lists the sums for each number of rows."""
    for answers in found:
        for count, (tiled, plain, sums), expected in zip(rows, answers, blocks, strict=True):
            assert tasks.same(tiled, plain), count
            assert sums == expected, count


ROWS = [0, 1, 127, 128, 129, 300, 517]
CUTS = [
    *([(rows, False)] for rows in (0, 1, 127)),
    [(128, False)],  # a block is not smaller than a granule
    [(128, True), (1, True)],
    [(128, True), (128, True), (44, True)],
    [(256, True), (128, True), (133, True)],
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_answers_are_those_of_the_plain_layer(two: Ranks, bias: bool, dtype: torch.dtype) -> None:
    """Equal to the bit, because integers sum exactly in any order. Short steps are summed as vllm-ascend does."""
    check(two.run(tasks.compared, Layer(bias=bias, dtype=dtype), ROWS, 3), ROWS, CUTS)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layer", [Layer(skip_bias_add=True), Layer(return_bias=False)])
def test_a_bias_that_the_caller_adds_is_returned(two: Ranks, layer: Layer) -> None:
    check(two.run(tasks.compared, layer, [300], 2), [300], [[(256, True), (44, True)]])


@pytest.mark.timeout(1200)
def test_three_ranks() -> None:
    with start(3) as ranks:
        found = ranks.run(tasks.compared, Layer(inputs=36), [1, 300], 2)
    check(found, [1, 300], [[(1, False)], [(256, True), (44, True)]])


@pytest.mark.timeout(1200)
def test_captured_steps_are_summed_by_vllm_ascend(two: Ranks) -> None:
    found = two.run(tasks.compared, Layer(), [300], 3, True)
    check(found, [300], [[(300, False)]])


@pytest.mark.timeout(1200)
def test_one_graph_serves_all_lengths(two: Ranks) -> None:
    assert two.run(tasks.compiled, Layer(return_bias=False), [300, 2, 129, 128, 517]) == [1, 1]


@pytest.mark.timeout(1200)
def test_a_recreated_group_is_used(two: Ranks) -> None:
    assert two.run(tasks.after_waking) == [(True, 2)] * 2


@pytest.mark.timeout(1200)
def test_ranks_agree_without_the_device(two: Ranks) -> None:
    for ours, reference in two.run(tasks.totals):
        assert ours == pytest.approx(reference)
    assert two.run(tasks.totals)[0][0] == two.run(tasks.totals)[1][0]


SLOW, FAST = 0.02, 0.0
WAYS = {
    "one call": ({"plain": SLOW, "cut": SLOW, "one": FAST}, mm_all_reduce.NAME, False),
    "a cut": ({"plain": SLOW, "cut": FAST, "one": SLOW}, "hccl", True),
    "plain": ({"plain": FAST, "cut": SLOW, "one": SLOW}, "", False),
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", WAYS)
def test_auto_chooses_the_fastest_and_saves_it(two: Ranks, way: str, tmp_path: Path) -> None:
    """Each implementation is the fastest in turn; the results do not change."""
    seconds, name, cut = WAYS[way]
    (first, *_), _ = found = two.run(tasks.chosen, seconds, str(tmp_path))
    for rank, (trials, same, calls, said) in enumerate(found):
        assert trials == first, "the ranks must agree"
        assert [trial.rows for trial in trials] == [128, 256, 512]
        assert trials[-1].collective == name
        assert (len(trials[-1].blocks) > 1) == cut
        assert all(same)
        assert calls == ([(300, rank == 0), (512, rank == 0)] if way == "one call" else []), "bias on one rank only"
        assert any("measuring a layer" in line for line in said)
    again = two.run(tasks.chosen, {"plain": FAST, "cut": FAST, "one": FAST}, str(tmp_path))
    for trials, same, _, said in again:
        assert trials == first, "must come from the file"
        assert all(same)
        assert not any("measuring a layer" in line for line in said)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("refused", "why"), [((True, 0), "EZ9999"), ((False, 6), "2, 4 or 8 NPUs, not 6")])
def test_a_failing_fused_call_is_logged(two: Ranks, refused: tuple[bool, int], why: str, tmp_path: Path) -> None:
    seconds = {"plain": SLOW, "cut": FAST, "one": FAST}
    for trials, same, calls, said in two.run(tasks.chosen, seconds, str(tmp_path), *refused):
        assert trials[-1].collective == "hccl"
        assert all(same)
        assert calls == []
        assert [line for line in said if why in line and f"{mm_all_reduce.NAME} is not available" in line]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((torch.bfloat16, 8, True), ""),
        ((torch.float16, 2, True), ""),
        ((torch.float32, 8, True), "float32"),
        ((torch.float16, 3, True), "not 3"),
        ((torch.float16, 16, True), "not 16"),
        ((torch.float16, 8, False), "one machine"),
    ],
)
def test_limits_of_the_fused_call(given: tuple[torch.dtype, int, bool], why: str) -> None:
    assert why in mm_all_reduce.why_not(*given)
    assert bool(why) == bool(mm_all_reduce.why_not(*given))


# --- which layers are replaced: one process, no sums


@pytest.fixture
def chooser(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-ascend's own chooser, wrapped, with stand-ins for the process groups."""
    group = SimpleNamespace(rank_in_group=0, world_size=2, device_group=None, cpu_group=None, unique_name="tp:0")
    monkeypatch.setattr(parallel_state, "_TP", group)
    for name in ("get_mlp_tp_group", "get_otp_group"):
        monkeypatch.setattr(linear_op, name, lambda: group)
    monkeypatch.setattr(linear_op.MatmulAllreduceRowParallelOp, "get_hcomm_info", classmethod(lambda *_: "hcom"))
    monkeypatch.setattr(linear_op, "_get_row_parallel_op", linear_op._get_row_parallel_op)
    monkeypatch.setattr(tiled_linear, "_tilings", {})
    if hasattr(tasks.Worker, "_fastattention_before_profiling"):
        monkeypatch.delattr(tasks.Worker, "_fastattention_before_profiling")
    monkeypatch.setattr(tasks.Worker, "determine_available_memory", tasks.Worker.determine_available_memory)
    monkeypatch.setattr(utils, "is_310p", lambda: False)
    ascend_row_parallel.install()


def finegrained(**sizes: int) -> SimpleNamespace:
    return SimpleNamespace(**({"mlp_tensor_parallel_size": 0, "oproj_tensor_parallel_size": 0} | sizes))


SPECIAL = {
    "MLPRowParallelOp": (DOWN_PROJ, {"finegrained_tp_config": finegrained(mlp_tensor_parallel_size=2)}),
    "OProjRowParallelOp": (O_PROJ, {"finegrained_tp_config": finegrained(oproj_tensor_parallel_size=2)}),
    "MatmulAllreduceRowParallelOp": (O_PROJ, {"enable_matmul_allreduce": True}),
    "SequenceRowParallelOp": (DOWN_PROJ, {"enable_flashcomm1": True}),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_layers_with_their_own_operator_in_vllm_ascend_keep_it(chooser: None, kind: str) -> None:
    prefix, changes = SPECIAL[kind]
    with settings(vllm_settings(2, 3), ascend_settings(**changes)):
        chosen = linear_op.get_parallel_op(False, prefix, torch.nn.Module(), "row")[0]
    assert type(chosen).__name__ == kind


def test_plain_layers_become_ours(chooser: None) -> None:
    with settings(vllm_settings(2, 3), ascend_settings()):
        chosen, rank, size = linear_op.get_parallel_op(False, O_PROJ, torch.nn.Module(), "row")
        assert type(chosen) is TiledRowParallelOp
        assert isinstance(chosen, CustomRowParallelOp)
        assert (rank, size) == (0, 2)
        assert linear.get_parallel_op is linear_op.get_parallel_op
        assert linear_op.get_parallel_op(True, O_PROJ, torch.nn.Module(), "row") == (None, 0, 1)


@pytest.mark.parametrize(("blocks", "ranks"), [("off", 2), (3, 1), ("auto", 1)])
def test_nothing_is_replaced_unless_requested(chooser: None, blocks: Any, ranks: int) -> None:
    with settings(vllm_settings(ranks, blocks), ascend_settings()):
        assert linear_op._get_row_parallel_op(O_PROJ, torch.nn.Module()) is None
    assert not hasattr(tasks.Worker, "_fastattention_before_profiling")


def test_without_a_configuration_vllm_ascend_chooses(chooser: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # the original needs a configuration
    monkeypatch.setattr(linear_op, "enable_dsa_cp_with_layer_shard", lambda: False)
    with settings(None, ascend_settings()):
        assert linear_op._get_row_parallel_op(O_PROJ, torch.nn.Module()) is None


def test_installing_again_changes_nothing(chooser: None) -> None:
    ours = linear_op._get_row_parallel_op
    ascend_row_parallel.install()
    assert linear_op._get_row_parallel_op is ours


def model() -> dict[str, Any]:
    """Layers of every kind. Must be called within :func:`settings`."""
    layers = {name: Layer().make(0, f"model.layers.0.{name}") for name in ("o_proj", "down_proj", "int8", "whole")}
    layers["int8"].quant_method = SimpleNamespace()
    layers["whole"].reduce_results = False
    layers["fused"] = Layer().make(0)
    layers["fused"].custom_op = object.__new__(linear_op.MatmulAllreduceRowParallelOp)
    layers["alone"] = Layer().make(0)
    layers["alone"].custom_op = None
    adapted = torch.nn.Module()
    adapted.base_layer = Layer().make(0)
    return layers | {"adapted": adapted}


def test_tiling_is_enabled_in_layers_that_fit_and_the_rest_is_counted(
    chooser: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(row_parallel.logger, "info_once", lambda text, *values: said.append(text % values))
    config = vllm_settings(2, 3)
    with settings(config, ascend_settings()):
        layers = model()
        ascend_row_parallel.enable_tiling(config, torch.nn.ModuleDict(layers))
    assert said == [
        "Tiling-AllReduce: 2 row-parallel layers in 3 blocks for steps of 128 or more tokens; "
        "1 not tiled: they are quantised (SimpleNamespace); 1 not tiled: they have no all-reduce; "
        "1 not tiled: they use LoRA; 1 not tiled: they use vllm-ascend's MatmulAllreduceRowParallelOp; "
        "1 not tiled: vllm-ascend does not choose an operation for them."
    ]
    assert layers["o_proj"].custom_op.tiled_group == layers["down_proj"].custom_op.tiled_group == "tp:0"
    for left in (layers["int8"], layers["whole"], layers["alone"], layers["adapted"].base_layer):
        assert left.custom_op is None, "must be vllm-ascend's own path"
    assert type(layers["fused"].custom_op) is linear_op.MatmulAllreduceRowParallelOp


@pytest.mark.parametrize(("mode", "tiled"), [(0, True), (1, True), (2, False)])
def test_weights_in_the_npus_private_format_are_not_tiled(chooser: None, mode: int, tiled: bool) -> None:
    config = vllm_settings(2, 3)
    with settings(config, ascend_settings(weight_nz_mode=mode)):
        layer = Layer().make(0)
        reason = ascend_row_parallel.why_not(layer, O_PROJ)
    assert reason == ("" if tiled else "their weights are in the NPU's NZ format")


def test_the_full_form_stops_the_start(chooser: None) -> None:
    config = vllm_settings(2, 3, tiling_full_form=True)
    with pytest.raises(Refusal, match="tiling_full_form"):
        ascend_row_parallel.enable_tiling(config, torch.nn.ModuleDict())


def test_the_settings_have_the_names_that_vllm_ascend_reads() -> None:
    """Otherwise a stand-in could hide that a name has changed."""
    source = inspect.getsource(utils) + inspect.getsource(ascend_config)
    for name in vars(ascend_settings()):
        assert name in source, name
