"""What is loaded again is checked before, on every kind of worker. The models that cannot be are found in vLLM."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from safetensors.torch import save_file

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.checkpoint.reload import LOADED_ONCE, check_first
from fastattention_vllm.integration.refusal import Refusal

COPIES = ("copy_", "default_weight_loader")
"""A parameter's own loader may call these, and load_weights may not."""
DRAFTERS = ("Eagle3", "DSpark", "MTP")
"""Classes with these names draft. vLLM never loads a drafter again."""


def copying_classes(source: str) -> Iterator[str]:
    """Those whose load_weights, or what it calls in the same file, copies into parameters."""
    tree = ast.parse(source)
    called: dict[str, list[ast.FunctionDef]] = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name not in ("load_weights", "weight_loader", "__init__"):
            called[node.name].append(node)
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        functions = [one for one in kind.body if isinstance(one, ast.FunctionDef) and one.name == "load_weights"]
        for function in functions:  # which grows meanwhile
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func).rpartition(".")[2]
                    functions += [one for one in called.get(name, ()) if one not in functions]
        if any(copies(node) for function in functions for node in ast.walk(function)):
            yield kind.name


def copies(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).rpartition(".")[2] in COPIES
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(one, ast.Subscript) and ast.unparse(one.value).endswith(".data") for one in targets)


def test_every_model_that_copies_weights_itself_is_refused() -> None:
    found = set()
    for folder in ("model_executor/models", "models"):
        root = Path(vllm.__file__).parent / folder
        for file in root.rglob("*.py"):
            begin = file.relative_to(root).with_suffix("").parts[0]
            found |= {f"{begin}.{name}" for name in copying_classes(file.read_text())}
    found = {name for name in found if not any(part in name for part in DRAFTERS)}
    assert "gpt_oss.GptOssModel" in found
    assert found <= LOADED_ONCE, found - LOADED_ONCE


def test_loaders_of_parameters_may_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of MiniMax-M2 and Bailing-MoE-V3. A copy past the loader is lost."""
    reload = pytest.importorskip("vllm.model_executor.model_loader.reload")
    bailing = pytest.importorskip("vllm.model_executor.models.bailing_moe_v3")
    minimax = pytest.importorskip("vllm.model_executor.models.minimax_m2")
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    monkeypatch.setattr(bailing, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(bailing, "get_tensor_model_parallel_world_size", lambda: 1)

    def loaded(own: Callable[..., None], past: bool = False) -> list[float]:
        model: Any = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        model.weight.weight_loader = own
        reload.record_metadata_for_reloading(model)
        reload.initialize_layerwise_reload(model)
        (own if past else model.weight.weight_loader)(model.weight, torch.ones(4))
        reload.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))
        return list(model.weight.tolist())

    for own in (bailing._load_a_log, minimax.MiniMaxM2MoE.ebias_weight_loader, default_weight_loader):
        assert loaded(own) == [1.0] * 4
    assert loaded(default_weight_loader, past=True) == [0.0] * 4


NAMES = [f"layers.{n}.self_attn.{part}.weight" for n in range(2) for part in ("q_proj", "k_proj", "v_proj", "o_proj")]


def save(folder: Path, names: list[str]) -> Path:
    folder.mkdir()
    save_file({name: torch.ones(2) for name in names}, folder / "model.safetensors")
    return folder


@pytest.fixture
def worker(tmp_path: Path) -> Any:
    """Of a GPU: all of it that is called."""

    class Worker:
        def __init__(self) -> None:
            self.vllm_config = SimpleNamespace(
                attention_config=SimpleNamespace(backend=SimpleNamespace(name=compat.BACKEND_NAME)),
                model_config=SimpleNamespace(model=str(save(tmp_path / "own", NAMES)), hf_text_config=None),
                load_config=SimpleNamespace(load_format="auto"),
            )
            self.model = torch.nn.Sequential(torch.nn.Linear(1, 1))
            self.model_runner = SimpleNamespace(get_model=lambda: self.model)
            self.loaded: list[Any] = []

        def reload_weights(self, *args: Any, **kwargs: Any) -> None:
            assert not args
            given = kwargs["weights_iterator"]
            self.loaded.append(kwargs["weights_path"] if given is None else [name for name, _ in given])

    check_first(Worker)
    check_first(Worker)
    return Worker()


def test_a_folder_is_checked_before_anything_is_loaded(worker: Any, tmp_path: Path) -> None:
    worker.reload_weights()
    worker.reload_weights(weights_path=(good := str(save(tmp_path / "good", NAMES))))
    assert worker.loaded == [None, good]
    lacking = "layers.1.self_attn.k_proj.weight"
    save(tmp_path / "bad", [name for name in NAMES if name != lacking])
    for arguments in ({"weights_path": str(tmp_path / "bad")}, {"weights_path": str(tmp_path / "bad"), "extra": 1}):
        with pytest.raises(Refusal, match=f"/bad lack the tensor {lacking}"):
            worker.reload_weights(**arguments)
    (tmp_path / "own" / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(Refusal, match=r"/own/model\.safetensors is not a complete"):
        worker.reload_weights()
    assert worker.loaded == [None, good]


def test_weights_of_an_iterator_are_checked_when_they_are_loaded(worker: Any) -> None:
    tensor = torch.ones(2)
    worker.reload_weights([(name, tensor) for name in NAMES])
    worker.reload_weights(weights_iterator=iter([(NAMES[3], tensor)]))  # a part of the model
    with pytest.raises(Refusal, match=r"lack the tensor layers\.1\.self_attn\.k_proj\.weight, so the parameter that"):
        worker.reload_weights([(name, tensor) for name in NAMES if name != "layers.1.self_attn.k_proj.weight"])
    worker.reload_weights([(NAMES[0], tensor)], is_checkpoint_format=False)  # copied one by one
    assert worker.loaded[0] == NAMES


def test_a_model_inside_another_one_is_refused(worker: Any) -> None:
    gpt_oss = pytest.importorskip("vllm.model_executor.models.gpt_oss")
    inner = torch.nn.Linear(1, 1)
    inner.__class__ = type("Inner", (gpt_oss.GptOssModel,), {})
    worker.model.append(inner)
    with pytest.raises(Refusal, match="would not replace all weights of Sequential"):
        worker.reload_weights()
    assert not worker.loaded


def test_another_backend_is_left_alone(worker: Any) -> None:
    worker.vllm_config.attention_config.backend = SimpleNamespace(name="FLASH_ATTN")
    worker.vllm_config.model_config.model = "/nowhere"
    worker.reload_weights(weights_iterator=None, weights_path="anything")
    assert worker.loaded == ["anything"]
    check_first(type("WithoutReload", (), {}))
