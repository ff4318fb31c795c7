"""`fastattention doctor --tp` on this machine's CPU, and its answers to invalid options."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastattention_vllm.doctor.tensor_parallel import LayerKind, kinds_of, line
from fastattention_vllm.parallel.choice import Trial


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastattention_vllm.cli", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)


def config(path: Path, **changes: object) -> Path:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    (path / "config.json").write_text(json.dumps(sizes | changes))
    return path


def test_each_layer_has_a_line_for_each_number_of_tokens(tmp_path: Path) -> None:
    done = doctor("--tp", "2", "--model", str(config(tmp_path)), "--tokens", "512", "--min-tokens", "256")
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first == "2 ranks (CPU, one thread each); sums by gloo"
    names = [text.split(":")[0] for text in rest]
    assert names == [f"{name}, {count} tokens" for name in ("o_proj 64x64", "down_proj 96x64") for count in (256, 512)]


def test_layers_that_do_not_divide_are_refused_in_a_sentence(tmp_path: Path) -> None:
    done = doctor("--tp", "5", "--model", str(config(tmp_path)))
    assert done.returncode == 2
    assert done.stderr == "fastattention doctor: o_proj has 64 inputs, which are not a multiple of --tp 5.\n"


def test_sizes_come_from_the_config(tmp_path: Path) -> None:
    assert kinds_of(config(tmp_path, head_dim=32)) == [LayerKind("o_proj", 128, 64), LayerKind("down_proj", 96, 64)]
    (tmp_path / "config.json").write_text('{"text_config": ' + (config(tmp_path) / "config.json").read_text() + "}")
    assert kinds_of(tmp_path / "config.json") == [LayerKind("o_proj", 64, 64), LayerKind("down_proj", 96, 64)]


SIZES = '{"hidden_size": %d, "num_attention_heads": %d, "intermediate_size": 96}'


@pytest.mark.parametrize(
    "text", ["{", "{}", "[1]", '{"hidden_size": 64, "num_attention_heads": 4}', SIZES % (64, 0), SIZES % (-64, 4)]
)
def test_a_config_without_sizes_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="--model"):
        kinds_of(tmp_path)


def test_a_measurement_that_exceeds_its_time_is_reported(tmp_path: Path) -> None:
    done = doctor("--tp", "2", "--model", str(config(tmp_path)), "--limit", "1")
    assert done.returncode == 1
    assert done.stderr.endswith("or the measurement took longer than --limit 1 s.\n")


def test_a_line_shows_plan_and_gain() -> None:
    kind = LayerKind("down_proj", 28672, 8192)
    cut = Trial(4096, "nccl:16", (1024, 3072), 0.0015, 0.002, 0.001)
    assert line(kind, cut) == (
        "down_proj 28672x8192, 4096 tokens: 2.000 ms plain, 1.500 ms in blocks of 1024 + 3072 by nccl:16: 1.33x, "
        "50 % of 1.000 ms that can be hidden"
    )
    assert "left as it is" in line(kind, Trial(4096, "", (4096,), 0.002, 0.002, 0.001))
