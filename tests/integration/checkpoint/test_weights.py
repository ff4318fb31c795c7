"""Damaged weights are refused before any process is started, and complete ones are not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fastattention_vllm.integration.checkpoint.weights import INDEX, check_weights
from fastattention_vllm.integration.refusal import Refusal


def config(folder: Path, load_format: str = "auto") -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(folder), hf_text_config=SimpleNamespace()),
        load_config=SimpleNamespace(load_format=load_format),
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards, as Hugging Face writes them."""
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    for name, file in names.items():
        save_file({name: torch.ones(100), f"{name}2": torch.ones(3, 5)}, tmp_path / file, metadata={"format": "pt"})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    return tmp_path


def test_complete_weights_pass(model: Path) -> None:
    check_weights(config(model))
    save_file({}, model / "empty.safetensors")
    check_weights(config(model))


@pytest.mark.parametrize("kept", [0, 5, 20, 300, -1])
def test_a_file_that_was_cut_off(model: Path, kept: int) -> None:
    path = model / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(Refusal, match=r"/model-2\.safetensors .*; download or copy the model again\.$"):
        check_weights(config(model))


def test_a_pointer_of_git_lfs_is_called_that(model: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
    (model / "model-1.safetensors").write_text(pointer)
    with pytest.raises(Refusal, match=r"/model-1\.safetensors is a Git LFS pointer, .* run `git lfs pull` in /"):
        check_weights(config(model))


def test_gguf_files_are_not_read(tmp_path: Path, model: Path) -> None:
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "model-Q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(Refusal, match=r"/only has model-Q4\.gguf and no safetensors files; a folder of GGUF"):
        check_weights(config(tmp_path / "only"))
    (model / "model-Q4.gguf").write_bytes(b"GGUF")
    check_weights(config(model))


@pytest.mark.parametrize("content", [b"\xff" * 1000, b"version 1 of a text\n", b"\0" * 1000])
def test_a_file_of_another_kind(model: Path, content: bytes) -> None:
    (model / "model-1.safetensors").write_bytes(content)
    with pytest.raises(Refusal, match=r"/model-1\.safetensors is not a complete safetensors file"):
        check_weights(config(model))


def test_what_is_no_file_is_not_waited_for(model: Path) -> None:
    (model / INDEX).unlink()
    (model / "model-2.safetensors").unlink()
    os.mkfifo(model / "model-2.safetensors")
    with pytest.raises(Refusal, match=r"/model-2\.safetensors is not a complete safetensors file \(it is not a file\)"):
        check_weights(config(model))


def test_a_shard_that_is_missing(model: Path) -> None:
    (model / "model-1.safetensors").unlink()
    with pytest.raises(Refusal, match=r"names model-1\.safetensors, which is not in this folder; download or copy"):
        check_weights(config(model))


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index(model: Path, content: str) -> None:
    (model / INDEX).write_text(content)
    with pytest.raises(Refusal, match="is not an index of weights"):
        check_weights(config(model))


def test_other_formats_and_models_of_a_hub_are_left_to_vllm(model: Path) -> None:
    (model / "model-1.safetensors").write_bytes(b"")
    check_weights(config(model, "dummy"))
    check_weights(config(Path("owner/name")))


def test_weights_in_another_format_are_left_to_vllm(model: Path) -> None:
    for path in model.glob("*.safetensors"):
        path.rename(path.with_suffix(".bin"))
    check_weights(config(model))


def test_hidden_files_are_ignored_as_in_vllm(model: Path) -> None:
    (model / "._model-1.safetensors").write_bytes(b"\xff" * 100)
    check_weights(config(model))


def test_mistrals_own_files_need_no_others(model: Path) -> None:
    (model / "model-1.safetensors").rename(model / "consolidated.safetensors")
    check_weights(config(model))
    (model / "consolidated.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(Refusal, match=r"/consolidated\.safetensors is not a complete"):
        check_weights(config(model))


def test_an_index_that_names_numbers(model: Path) -> None:
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": 3}}))
    with pytest.raises(Refusal, match="names 3, which is not in this folder"):
        check_weights(config(model))


def test_a_tensor_that_the_index_names_and_its_file_lacks(model: Path) -> None:
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (model / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(Refusal, match=r"says that model-2\.safetensors has the tensor c, which it lacks; download"):
        check_weights(config(model))


def test_a_tensor_that_other_layers_have(model: Path) -> None:
    parts = ("q_proj", "k_proj", "v_proj")
    tensors = {f"layers.{n}.{part}.weight": torch.ones(2) for n in (0, 1) for part in parts}
    lacking = tensors.pop("layers.1.k_proj.weight")
    save_file(tensors, model / "model-1.safetensors")
    (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}))
    # vLLM reads no file that the index does not name.
    save_file({"layers.1.k_proj.weight": lacking}, model / "model-3.safetensors")
    with pytest.raises(Refusal, match=r"lack the tensor layers\.1\.k_proj\.weight, which other layers or experts have"):
        check_weights(config(model))


def test_files_that_the_index_does_not_name_are_not_read(model: Path) -> None:
    parts = ("q_proj", "k_proj", "v_proj")
    tensors = {f"layers.{n}.{part}.weight": torch.ones(2) for n in (0, 1) for part in parts}
    save_file(tensors, model / "model-1.safetensors")
    (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}))
    save_file({"layers.2.q_proj.weight": torch.ones(2)}, model / "extra.safetensors")
    (model / "model-2.safetensors").write_bytes(b"cut off")
    check_weights(config(model))


def test_mistrals_files_have_an_index_of_their_own(model: Path) -> None:
    save_file({"a": torch.ones(1)}, model / "consolidated-1.safetensors")
    (model / "consolidated-2.safetensors").write_bytes(b"cut off")
    index = model / "consolidated.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "consolidated-1.safetensors"}}))
    check_weights(config(model))
    index.write_text(json.dumps({"weight_map": {"a": "consolidated-3.safetensors"}}))
    with pytest.raises(Refusal, match=r"names consolidated-3\.safetensors, which is not in this folder"):
        check_weights(config(model))


def test_a_numbered_file_that_is_missing_without_an_index(tmp_path: Path) -> None:
    for number in (1, 3):
        save_file({str(number): torch.ones(1)}, tmp_path / f"model-{number:05}-of-00003.safetensors")
    with pytest.raises(Refusal, match=r"but not model-00002-of-00003\.safetensors; download or copy"):
        check_weights(config(tmp_path))
    save_file({"all": torch.ones(1)}, tmp_path / "model.safetensors")  # so the numbered ones may be left over
    check_weights(config(tmp_path))
