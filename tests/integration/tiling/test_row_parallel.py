"""``tiling_all_reduce`` in an engine of two ranks: answers do not change, long steps are split, other layers stay."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

from fastattention_vllm import __version__
from fastattention_vllm.integration.tiling import calibration, row_parallel
from fastattention_vllm.integration.tiling.row_parallel import NAME, MeasuredCuts, TiledRowParallel, log_layers, why_not
from fastattention_vllm.parallel import calibrate, calibration_file
from fastattention_vllm.parallel.choice import Choice, Trial
from tests.integration.engine import MAX_TOKENS, check, engine, generate
from tests.reference_models import hugging_face_answers, llama, opt, random_prompts, save_random

LENGTHS = (1, 17, 130, 300)
MIN_TOKENS = 128
"""Minimum number of tokens: long prompts are split, short ones and decode steps are not."""


def section(blocks: Any) -> dict[str, Any]:
    return {"fastattention": {"tiling_all_reduce": blocks, "tiling_min_tokens": MIN_TOKENS}}


def watch(worker: Any) -> None:
    """Runs in a worker: record the op's inputs and the blocks it gets."""
    from fastattention_vllm.parallel import tiled_linear

    (tiling,) = tiled_linear._tilings.values()
    worker.seen = []

    ask: Any = tiling.blocks

    def blocks(rows: int, weight: Any) -> Any:
        answer = ask(rows, weight)
        worker.seen.append((rows, tuple(answer)))
        return answer

    tiling.blocks = blocks  # type: ignore[method-assign]


def seen(worker: Any) -> list[tuple[int, tuple[int, ...]]]:
    answer: list[tuple[int, tuple[int, ...]]] = worker.seen
    return answer


def compare(
    config: Any, path: Path, capfd: pytest.CaptureFixture[str], layers: int, full: bool = False, **changes: Any
) -> None:
    """Compare the answers with Hugging Face, and the split steps with the expected ones."""
    model, prompts = save_with_biases(config, path), random_prompts(LENGTHS)
    expected = hugging_face_answers(model, prompts, MAX_TOKENS)
    additional = {"fastattention": section(3)["fastattention"] | {"tiling_full_form": full}}
    settings = {"max_num_batched_tokens": 512, "tensor_parallel_size": 2, "additional_config": additional}
    with engine(model, **settings, **changes) as llm:
        llm.collective_rpc(watch)
        check(generate(llm, prompts), expected)
        asked = llm.collective_rpc(seen)
    log = capfd.readouterr().out
    assert (
        f"Tiling-AllReduce: {layers} row-parallel layers in 3 blocks for steps of {MIN_TOKENS} or more tokens." in log
    )
    assert (f"Tiling-AllReduce: {layers // 2} MLPs are tiled as a whole." in log) == full
    assert asked[0] == asked[1], "the ranks must split alike"
    for rows, blocks in asked[0]:
        assert sum(blocks) == rows
        assert (len(blocks) > 1) == (rows >= MIN_TOKENS)
    assert len(asked[0]) % layers == 0
    assert any(len(blocks) == 3 for _, blocks in asked[0])
    assert any(rows == len(LENGTHS) for rows, _ in asked[0]), "decode steps must not be split"


@pytest.mark.more
def test_a_model_without_biases_answers_as_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    compare(llama(4, 2, 64), tmp_path, capfd, layers=6)


@pytest.mark.more
def test_a_model_whose_mlps_are_tiled_answers_as_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    compare(llama(4, 2, 64), tmp_path, capfd, layers=6, full=True)


def test_a_model_with_biases_answers_as_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    compare(opt(), tmp_path, capfd, layers=6)


def save_with_biases(config: Any, path: Path) -> Path:
    """Hugging Face starts with biases of zero, which could be forgotten or added twice unnoticed."""
    model = save_random(config, path)
    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, weight in weights.items():
        if name.endswith(".bias"):
            weights[name] = torch.empty_like(weight).normal_(0, 0.3, generator=generator)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model


@pytest.mark.full
def test_a_compiled_model_answers_as_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    compare(opt(), tmp_path, capfd, layers=6, enforce_eager=False)


@pytest.fixture
def registry() -> Iterator[dict[str, Any]]:
    before = dict(op_registry_oot)
    yield op_registry_oot
    op_registry_oot.clear()
    op_registry_oot.update(before)


def config(blocks: Any, ranks: int = 2) -> Any:
    return SimpleNamespace(
        additional_config=section(blocks), parallel_config=SimpleNamespace(tensor_parallel_size=ranks)
    )


def test_nothing_is_replaced_unless_requested(registry: dict[str, Any]) -> None:
    row_parallel.install(config("off"))
    row_parallel.install(config(2, ranks=1))
    assert NAME not in registry


def test_classes_registered_earlier_keep_the_other_layers(registry: dict[str, Any]) -> None:
    class Other(RowParallelLinear):  # type: ignore[misc]
        pass

    registry[NAME] = Other
    row_parallel.install(config(2))
    ours = registry[NAME]
    assert ours.__mro__[1:3] == (TiledRowParallel, Other)
    assert ours.__name__ == NAME
    row_parallel.install(config(4))
    assert registry[NAME] is ours, "must be registered once"


def layer(**changes: Any) -> Any:
    fit = {
        "tp_size": 2,
        "reduce_results": True,
        "input_is_parallel": True,
        "quant_method": object.__new__(UnquantizedLinearMethod),
        "weight": torch.empty(8, 4),
        "output_size": 8,
        "input_size_per_partition": 4,
    }
    return SimpleNamespace(**(fit | changes))


def test_suitable_layers_are_tiled() -> None:
    assert why_not(layer(), "model.layers.0.mlp.down_proj") == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp_size": 1}, "no all-reduce"),
        ({"reduce_results": False}, "no all-reduce"),
        ({"input_is_parallel": False}, "split their input"),
        ({"quant_method": SimpleNamespace()}, "quantised"),
        ({"weight": torch.empty(0)}, "packed"),
    ],
)
def test_other_layers_are_left_to_vllm(changes: dict[str, Any], reason: str) -> None:
    assert reason in why_not(layer(**changes), "model.layers.0.mlp.down_proj")


def test_layers_with_adapters_are_left_to_vllm() -> None:
    assert why_not(layer(), "model.layers.0.mlp.down_proj.base_layer") == "they use LoRA"


@pytest.mark.parametrize(("collective", "again"), [("gloo", False), ("", False), ("nccl", True)])
def test_a_choice_with_an_unavailable_collective_is_measured_again(
    collective: str, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise another collective than the timed one would be used. Measurements of other versions are ignored."""
    lanes: Any = {"gloo": SimpleNamespace(size=2, rank=0, totals=lambda numbers, device: [max(numbers)] * 2)}
    weight, fresh = torch.zeros(8, 4), Choice((Trial(256, "", (256,), 1.0, 1.0, 1.0),))
    key = calibration.key_of(weight, lanes, 1, 8, {})
    assert key.endswith(f"fastattention {__version__}")
    kept = Choice((Trial(256, collective, (128, 128) if collective else (256,), 1.0, 2.0, 1.0),))
    calibration_file.write(tmp_path / "tiling.json", key, kept)
    monkeypatch.setattr(calibration, "file", lambda: tmp_path / "tiling.json")
    monkeypatch.setattr(calibrate, "measure", lambda *given, **named: fresh)
    found = calibration.of(weight, lanes, lambda *given: given[0], 1, 8, {})
    assert found == (fresh if again else kept)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of one page, which is full."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this user may not mount a file system")
    try:
        (folder / "other").write_bytes(b"x" * 4096)
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_on_a_full_disk_measurements_are_used_but_not_saved(full_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes: Any = {"gloo": SimpleNamespace(size=2, rank=0, totals=lambda numbers, device: [max(numbers)] * 2)}
    weight, fresh = torch.zeros(8, 4), Choice((Trial(256, "", (256,), 1.0, 1.0, 1.0),))
    said: list[str] = []
    warn = functools.lru_cache(lambda text, *of: said.append(text % of))
    monkeypatch.setattr(calibration.logger, "warning_once", lambda text, *of: warn(text, *map(str, of)))
    monkeypatch.setattr(calibration, "file", lambda: full_disk / "tiling.json")
    monkeypatch.setattr(calibrate, "measure", lambda *given, **named: fresh)
    for _ in range(2):
        assert calibration.of(weight, lanes, lambda *given: given[0], 1, 8, {}) == fresh
    (warning,) = said
    assert "could not be saved for the next start: [Errno 28] No space left on device" in warning
    assert [path.name for path in full_disk.iterdir()] == ["other"], "no part of a file is left"


def tiling_seen(worker: Any) -> list[tuple[int, tuple[int, ...]]]:
    """Runs in a worker: the splits of all lengths for all layers' shapes, and which of them were timed."""
    from fastattention_vllm.integration.tiling.row_parallel import TiledRowParallel
    from fastattention_vllm.parallel import tiled_linear

    ((_, tiling),) = tiled_linear._tilings.items()
    layers = [m for m in worker.model_runner.model.modules() if isinstance(m, TiledRowParallel)]
    return [(rows, tuple(tiling.blocks(rows, m.weight))) for m in layers for rows in range(0, 513, 37)]


@pytest.mark.full
def test_automatic_blocks_are_measured_once_and_the_same_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    model, prompts = save_with_biases(opt(), tmp_path / "model"), random_prompts(LENGTHS)
    expected = hugging_face_answers(model, prompts, MAX_TOKENS)
    settings = {"max_num_batched_tokens": 512, "tensor_parallel_size": 2, "additional_config": section("auto")}
    cuts = []
    for start in range(2):
        with engine(model, **settings) as llm:
            check(generate(llm, prompts), expected)
            first, second = llm.collective_rpc(tiling_seen)
        assert first == second
        cuts.append(first)
        assert all(sum(blocks) == rows for rows, blocks in first)
        assert all(len(blocks) == 1 for rows, blocks in first if rows < MIN_TOKENS)
        log = capfd.readouterr().out
        assert ("measuring a layer" in log) == (start == 0)
        assert log.count("512 tokens") >= 2, "must include both shapes"
    assert cuts[0] == cuts[1]
    assert len(list((tmp_path / "cache" / "fastattention").iterdir())) == 1


def test_measured_splits_can_be_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's ``info_once`` hashes its arguments, and choices are a dict."""
    said: list[str] = []
    monkeypatch.setattr(row_parallel.logger, "info_once", functools.lru_cache(lambda text, *of: said.append(text % of)))
    log_layers(4, MeasuredCuts({}, "gloo", 128), {"no bias": 1})
    assert said == [
        "Tiling-AllReduce: 4 row-parallel layers in the fastest number of blocks for steps of 128 or more tokens; "
        "1 not tiled: no bias."
    ]
