"""benchmarks/hybrid_host_layers.py: its model, its comparison of answers, and a run on this CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import hybrid_host_layers
import hybrid_model
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from fastattention_vllm.integration import compat
from tests.benchmarks.conftest import BENCHMARKS
from tests.plan.shapes import shape

ANSWER = [(5, {5: -1.0, 9: -1.01}), (6, {6: -1.5}), (7, {7: -0.5})]


def test_the_model_has_all_weights_of_its_architecture(tmp_path: Path) -> None:
    path = tmp_path / "model"
    hybrid_model.build(path, hybrid_model.TINY)
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).state_dict()
    with safe_open(path / "model.safetensors", "pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    drafter = {name.removeprefix("mtp."): found.pop(name) for name in list(found) if name.startswith("mtp.")}
    experts = {name for name in expected if ".mlp.experts." in name}
    assert {name for name in found if ".mlp.experts." not in name} == set(expected) - experts
    assert all(found[name] == tuple(expected[name].shape) for name in set(expected) - experts)
    assert len(found) - len(set(expected) - experts) == 3 * hybrid_model.EXPERTS
    # transformers has no class for an MTP layer: attention of a full layer, experts of the first one.
    for name, size in drafter.items():
        if name.startswith("layers.0."):
            source = 0 if ".mlp." in name else hybrid_model.TINY.full[0]
            assert size == found[f"model.{name.replace('layers.0', f'layers.{source}', 1)}"]
    hidden = hybrid_model.TINY.hidden
    rest = {name: size for name, size in drafter.items() if not name.startswith("layers.0.")}
    norms = {f"{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    assert rest == norms | {"fc.weight": (hidden, 2 * hidden)}


def test_its_attention_has_the_shape_of_qwen3_5_27b() -> None:
    model, own = shape("qwen3.5-27b"), hybrid_model.Shape()
    assert model.linear is not None
    assert (own.layers, own.full) == (model.num_layers, model.full_layers)
    assert (own.heads, own.kv_heads, own.head_size) == (model.num_heads, model.num_kv_heads, model.head_size)
    assert (own.channels, own.value_heads) == (model.linear.channels(1), model.linear.value_heads)
    assert (own.state_size, hybrid_model.WIDTH) == (model.linear.value_size, model.linear.convolution)


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        ([(5, {5: -1.01}), (6, {6: -1.5}), (7, {7: -0.5})], True),
        ([(9, {9: -1.0, 5: -1.02}), (1, {1: -9.0}), (1, {1: -9.0})], True),
        ([(5, {5: -1.0}), (6, {6: -1.6}), (7, {7: -0.5})], False),
        ([(9, {9: -0.5, 5: -1.0}), (6, {6: -1.5}), (7, {7: -0.5})], False),
        ([(8, {8: -1.0}), (6, {6: -1.5}), (7, {7: -0.5})], False),
    ],
    ids=["rounded", "after an equally good token", "another probability", "a better token", "equal by chance"],
)
def test_answers_agree_up_to_an_equally_good_token(other: hybrid_host_layers.Steps, equal: bool) -> None:
    assert hybrid_host_layers.agree(ANSWER, other) == equal


def test_answers_may_be_twice_as_far_as_rounding_takes_them(tmp_path: Path) -> None:
    file = tmp_path / "reference.json"
    reference = hybrid_host_layers.Reference(ANSWER, rounding=0.05)
    reference.save(file, 100)
    hybrid_host_layers.Reference(ANSWER[:1]).save(file, 200)
    assert hybrid_host_layers.Reference.load(file, 100) == reference
    assert hybrid_host_layers.Reference.load(file, 200) == hybrid_host_layers.Reference(ANSWER[:1])
    assert hybrid_host_layers.Reference.load(file, 300) is None
    assert hybrid_host_layers.Reference.load(tmp_path / "none.json", 100) is None
    assert reference.allowed() == 0.1
    assert hybrid_host_layers.Reference(ANSWER, rounding=0.01).allowed() == hybrid_host_layers.ALLOWED
    other = [(5, {5: -1.0, 9: -1.3}), (6, {6: -1.58}), (7, {7: -0.5})]
    assert hybrid_host_layers.distance(other, ANSWER) == pytest.approx(0.08)


@pytest.mark.more
@pytest.mark.skipif(not compat.has_cpu_linear_attention(), reason="this vLLM's operator for states is not replaced")
def test_a_run_on_this_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "hybrid_host_layers.py"), "--tiny", "--model", str(tmp_path / "model")]
    command += ["--tokens", "600", "1000", "--host-layers", "0", "1", "--device-gib", "0.03", "--chunk", "256"]
    command += ["--decode", "2", "--rounds", "1", "--json", str(tmp_path / "result.json")]
    subprocess.run(command, check=True, timeout=300)
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    answers = [(tokens_of(row), row["metric"], row["ours"]) for row in rows if row["unit"] == "1 = yes"]
    same, reference = "cooperative cached prompt has the same answer", "cooperative answer is the reference's"
    without_host, both = [(600, same, 1), (1000, same, 1)], [(600, same, 1), (600, reference, 1)]
    both += [(1000, same, 1), (1000, reference, 1), (1000, "cooperative answer needs the pool", 1)]
    assert answers == [*without_host, *without_host, *both]
    rates = [row for row in rows if row["metric"] == "cooperative decode"]
    ways = ["0 host layers", "0 host layers", "steps of 128 tokens", "steps of 128 tokens"]
    assert [row["case"].rpartition(", ")[2] for row in rates] == ways + ["stream all", "CPU alone", "auto"] * 2
    assert [tokens_of(row) for row in rows if row["unit"] == "nats"] == [600, 1000]
    reused = [row["cached"] for row in rows if row["metric"] == "cooperative prefill"]
    assert reused[::2] == [0, 0, 0]
    assert all(0 < tokens <= 600 for tokens in reused[1::2])


def tokens_of(row: dict[str, Any]) -> int:
    return int(row["case"].partition(") ")[2].partition(" ")[0])
