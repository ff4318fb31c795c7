"""configs/*.yaml: vLLM's own parser reads them, and the models that they name fit by arithmetic and by the planner."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from fastattention_vllm.attention.volta.launch import HEAD_SIZES
from fastattention_vllm.plan import hardware
from fastattention_vllm.plan.errors import DoesNotFitError
from fastattention_vllm.plan.memory import MemoryPlan, Request, plan_memory
from fastattention_vllm.plan.model import ModelShape, read, shape_of

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
GIB = 1 << 30
HALF = 2
"""Bytes of an fp16 number."""
BESIDE = 1.5 * GIB
"""Room for what is neither weights nor KV cache: the CUDA context, activations of a step and CUDA graphs. Estimated."""
GPUS = {"v100-16g": 16160, "v100-32g": 32480, "v100-8x32g-256k": 32480, "t4-16g": 15079}
"""MiB of one GPU, the least that `nvidia-smi` reports for such a card."""
DEVICES = {
    "v100-16g": ("v100-16g", "v100-pcie-16g"),
    "v100-32g": ("v100-32g", "v100-pcie-32g"),
    "v100-8x32g-256k": ("v100-32g", "v100-pcie-32g"),
    "t4-16g": ("t4-16g",),
    "ampere-24g-256k": ("rtx3090-24g", "rtx4090-24g", "a10-24g", "l4-24g"),
    "ascend-910b-8x-128k": ("ascend-910b-64g",),
}
"""The planner's names of the devices that a file is for. It knows no machine without a device."""
ON_THE_HOST = {"ampere-24g-256k"}
"""Files whose requests need host layers."""
HYBRIDS = {"v100-4x32g-qwen3.5": ("v100-32g", "qwen3.5-27b")}
"""Files for models with states: the planner's device, and the folder of the model's shape in tests/plan/shapes."""
CPU_MEMORY = {"cpu-server": 32 * GIB}
"""Memory of the machine that a file is for."""
CPU_BESIDE = hardware.measured().server_gib.value * GIB + 2 * GIB
"""vLLM's processes, and the operating system with other programs. Estimated."""


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

    def planned(self, dtype: str) -> ModelShape:
        """As the planner reads it. The layers of all these models have the matrices of Llama's."""
        return shape_of(
            {
                "architectures": ["LlamaForCausalLM"],
                "num_hidden_layers": self.layers,
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_size,
                "vocab_size": self.vocabulary,
                "tie_word_embeddings": self.tied,
                "max_position_embeddings": self.positions,
                "torch_dtype": dtype,
            },
            "published shape",
        )


SHAPES = {
    "Qwen/Qwen3-4B-Instruct-2507": Shape(4.0e9, 36, 2560, 9728, 32, 8, 151936, True, 262144),
    "Qwen/Qwen3-8B": Shape(8.2e9, 36, 4096, 12288, 32, 8, 151936, False, 40960),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": Shape(36e9, 64, 5120, 27648, 80, 8, 155136, False, 524288),
    "meta-llama/Llama-3.3-70B-Instruct": Shape(70.6e9, 80, 8192, 28672, 64, 8, 128256, False, 131072),
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


def test_every_config_is_checked() -> None:
    names = {path.stem for path in CONFIGS} - {"cpu-demo"}  # which the server tests run
    assert names == set(DEVICES) | set(HYBRIDS) | set(CPU_MEMORY)
    assert {name for name in names if name.startswith(("v100", "t4"))} == set(GPUS) | set(HYBRIDS)


def planned(name: str, device: str, shape: ModelShape | None = None) -> MemoryPlan:
    """The plan of one request of the file's length on the usual host of ``device``."""
    config = load(name)
    shape = shape or SHAPES[config["model"]].planned(config["dtype"])
    request = Request(
        context=config["max-model-len"],
        batched_tokens=config["max-num-batched-tokens"],
        utilization=config["gpu-memory-utilization"],
    )
    machine = hardware.machine(device, config.get("tensor-parallel-size", 1))
    return plan_memory(shape, machine, request)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_fits_and_caches_prefixes(name: str) -> None:
    device, folder = HYBRIDS[name]
    found = planned(name, device, read(str(ROOT / "tests" / "plan" / "shapes" / folder)))
    assert found.kv_dtype == load(name)["dtype"]
    assert not found.placement.host
    comment = (ROOT / "configs" / f"{name}.yaml").read_text()
    words = {3: "Three"}
    assert f"{words[found.largest_batch_on_device]} such requests fit" in comment
    assert f"take {found.device.weights / GIB:.1f} GiB" in comment
    assert f"one request of {load(name)['max-model-len']} tokens {found.device_kv_needed / GIB:.2f} GiB" in comment
    assert f"whole blocks of {found.size.block_size} tokens" in comment
    parsed = parse(ROOT / "configs" / f"{name}.yaml")
    assert parsed.enable_prefix_caching
    assert parsed.mamba_cache_mode == "align"


@pytest.mark.parametrize(("name", "device"), [(name, device) for name in DEVICES for device in DEVICES[name]])
def test_the_planner_says_that_it_fits(name: str, device: str) -> None:
    found = planned(name, device)
    assert found.kv_dtype == load(name)["dtype"], "these kernels do not have the file's dtype"
    assert found.longest_context >= load(name)["max-model-len"]
    assert bool(found.placement.host) == (name in ON_THE_HOST)
    assert found.host_kv_gib is None, "a plain start is not enough: host_kv_gib must be set"


def test_the_planner_refuses_what_does_not_fit() -> None:
    with pytest.raises(DoesNotFitError):
        plan_memory(
            SHAPES["ByteDance-Seed/Seed-OSS-36B-Instruct"].planned("float16"),
            hardware.machine("v100-32g", 1),
            Request(context=1024),
        )


def test_the_comment_for_ascend_has_the_planners_numbers() -> None:
    found = planned("ascend-910b-8x-128k", "ascend-910b-64g")
    comment = (ROOT / "configs" / "ascend-910b-8x-128k.yaml").read_text()
    assert found.largest_batch_on_device == 7
    assert "Seven such requests fit" in comment
    assert "Not yet run on\n# hardware" in comment


@pytest.mark.parametrize("name", CPU_MEMORY)
def test_the_model_fits_a_cpu(name: str) -> None:
    """Two requests of full length, and vLLM's null block, fit into the KV cache."""
    config = load(name)
    shape, cache = SHAPES[config["model"]], config["kv-cache-memory-bytes"]
    assert config["max-model-len"] <= shape.positions
    assert 2 * config["max-model-len"] * shape.kv_bytes(1) + 128 * shape.kv_bytes(1) <= cache
    assert shape.parameters * HALF + cache + CPU_BESIDE <= CPU_MEMORY[name]
    assert f"{CPU_MEMORY[name] // GIB} GiB of memory" in (ROOT / "configs" / f"{name}.yaml").read_text()


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


@pytest.mark.parametrize("name", [*DEVICES, *CPU_MEMORY])
def test_its_comment_has_these_numbers(name: str) -> None:
    config = load(name)
    shape, ranks = SHAPES[config["model"]], config.get("tensor-parallel-size", 1)
    comment = (ROOT / "configs" / f"{name}.yaml").read_text()
    cache = config["max-model-len"] * shape.kv_bytes(ranks) / GIB
    assert f"weights take {shape.parameters * HALF / ranks / GIB:.1f} GiB" in comment
    assert f"{shape.kv_bytes(ranks) >> 10} KiB per token" in comment
    assert re.search(rf"{cache:.3g} GiB for one\s+(# )?request of {config['max-model-len']} tokens", comment)
    assert "Not yet run on" in comment or name in CPU_MEMORY
