"""configs/*.yaml: vLLM's own parser reads them, and the models that those for V100 and T4 name fit by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from fastattention_vllm.attention.volta.launch import HEAD_SIZES

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
GIB = 1 << 30
HALF = 2
"""Bytes of an fp16 number."""
BESIDE = 1.5 * GIB
"""Room for what is neither weights nor KV cache: the CUDA context, activations of a step and CUDA graphs. Estimated."""
GPUS = {"v100-16g": 16160, "v100-32g": 32480, "v100-8x32g-256k": 32480, "t4-16g": 15079}
"""MiB of one GPU, the least that `nvidia-smi` reports for such a card."""


@dataclass(frozen=True)
class Shape:
    """As in config.json of the model on its Hugging Face page, which calls it ``published`` parameters large."""

    published: float
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    positions: int
    head_size: int = 128

    @property
    def parameters(self) -> int:
        """Without norms and biases, which are small."""
        attention = 2 * self.hidden * self.heads * self.head_size + 2 * self.hidden * self.kv_heads * self.head_size
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + embeddings

    def kv_bytes(self, ranks: int) -> int:
        """Per token and rank."""
        return self.layers * 2 * -(-self.kv_heads // ranks) * self.head_size * HALF


SHAPES = {
    "Qwen/Qwen3-4B-Instruct-2507": Shape(4.0e9, 36, 2560, 9728, 32, 8, 151936, True, 262144),
    "Qwen/Qwen3-8B": Shape(8.2e9, 36, 4096, 12288, 32, 8, 151936, False, 40960),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": Shape(36e9, 64, 5120, 27648, 80, 8, 155136, False, 524288),
}


def load(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def parse(path: Path) -> Any:
    """As `vllm serve --config PATH`, or with a model for a file that names none."""
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    model = [] if "model" in yaml.safe_load(path.read_text()) else ["MODEL"]
    return parser.parse_args(["serve", *model, "--config", str(path)])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_vllm_parses_it(path: Path) -> None:
    parsed = vars(parse(path))
    for key, value in yaml.safe_load(path.read_text()).items():
        found = parsed[key.replace("-", "_")]
        assert (found[0] if isinstance(found, list) else found) == value, key


def test_vllm_refuses_a_misspelt_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((ROOT / "configs" / "v100-16g.yaml").read_text() + "max-model-length: 7\n")
    with pytest.raises(SystemExit):
        parse(wrong)
    assert "max-model-length" in capsys.readouterr().err


def test_every_config_for_these_gpus_is_checked() -> None:
    assert {path.stem for path in CONFIGS if path.stem.startswith(("v100", "t4"))} == set(GPUS)


@pytest.mark.parametrize("model", SHAPES)
def test_the_shape_has_the_published_size(model: str) -> None:
    shape = SHAPES[model]
    assert shape.parameters == pytest.approx(shape.published, rel=0.02)


@pytest.mark.parametrize("name", GPUS)
def test_the_model_fits(name: str) -> None:
    config = load(name)
    shape, ranks, tokens = SHAPES[config["model"]], config.get("tensor-parallel-size", 1), config["max-model-len"]
    assert config["dtype"] == "float16"
    assert shape.head_size in HEAD_SIZES
    assert tokens <= shape.positions
    weights, cache = shape.parameters * HALF / ranks, tokens * shape.kv_bytes(ranks)
    usable = GPUS[name] * (1 << 20) * config["gpu-memory-utilization"]
    assert weights + cache + BESIDE <= usable, [part / GIB for part in (weights, cache, BESIDE, usable)]
    if GPUS[name] < 20 << 10:
        assert shape.parameters < 4.1e9


@pytest.mark.parametrize("name", GPUS)
def test_its_comment_has_these_numbers(name: str) -> None:
    config = load(name)
    shape, ranks = SHAPES[config["model"]], config.get("tensor-parallel-size", 1)
    comment = (ROOT / "configs" / f"{name}.yaml").read_text()
    cache = config["max-model-len"] * shape.kv_bytes(ranks) / GIB
    assert f"weights take {shape.parameters * HALF / ranks / GIB:.1f} GiB" in comment
    assert f"{shape.kv_bytes(ranks) >> 10} KiB per token" in comment
    assert f"{cache:.3g} GiB for one" in comment
    assert "Not yet run on" in comment
