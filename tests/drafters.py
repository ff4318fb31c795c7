"""Drafters with random weights, and one that knows the answers, whose drafts the model accepts."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.reference_models import VOCAB, Answer

WEIGHTS = "model.safetensors"
DRAFT_VOCAB = 500
"""An EAGLE-3 head may know fewer tokens than the model."""


def save_eagle(target: Path, path: Path) -> Path:
    """An EAGLE head with the shape of the model's first layer."""
    return _save_head(target, path, "LlamaForCausalLM", "layers.0.", inputs=2)


def save_eagle3(target: Path, path: Path) -> Path:
    """It reads the hidden states of three layers, and its attention reads embeddings and hidden states."""
    return _save_head(target, path, "LlamaForCausalLMEagle3", "midlayer.", inputs=3)


def _save_head(target: Path, path: Path, architecture: str, prefix: str, inputs: int) -> Path:
    path.mkdir()
    config, weights = json.loads((target / "config.json").read_text()), load_file(target / WEIGHTS)
    config |= {"architectures": [architecture], "num_hidden_layers": 1}
    generator, size = torch.Generator().manual_seed(5), config["hidden_size"]
    layer = {n.removeprefix("model.layers.0."): w for n, w in weights.items() if n.startswith("model.layers.0.")}
    head = {"fc.weight": torch.randn(size, inputs * size, generator=generator) * 0.1}
    if prefix == "midlayer.":
        config["draft_vocab_size"] = DRAFT_VOCAB
        for name in ("q_proj", "k_proj", "v_proj"):
            layer[f"self_attn.{name}.weight"] = torch.cat([layer[f"self_attn.{name}.weight"]] * 2, dim=1)
        head["norm.weight"] = layer["hidden_norm.weight"] = torch.ones(size)
        head["lm_head.weight"] = weights["lm_head.weight"][:: VOCAB // DRAFT_VOCAB][:DRAFT_VOCAB].contiguous()
        head["d2t"] = torch.arange(VOCAB)[:: VOCAB // DRAFT_VOCAB][:DRAFT_VOCAB] - torch.arange(DRAFT_VOCAB)
    else:
        del layer["input_layernorm.weight"]  # the first layer has none
    (path / "config.json").write_text(json.dumps(config))
    save_file({f"{prefix}{n}": w.clone() for n, w in layer.items()} | head, path / WEIGHTS, metadata={"format": "pt"})
    return path


def add_mtp(target: Path, path: Path) -> Path:
    """A copy of a hybrid model, with or without images, with an MTP layer, which is a copy of its last layer."""
    shutil.copytree(target, path)
    config, weights = json.loads((path / "config.json").read_text()), load_file(path / WEIGHTS)
    text = config.get("text_config", config)
    text |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    for name in ("mrope_section", "mrope_interleaved"):  # vLLM drops them from the model of text only, not from MTP
        config.get("rope_parameters", {}).pop(name, None)
    last, size = f".layers.{text['num_hidden_layers'] - 1}.", text["hidden_size"]
    head = {f"mtp.layers.0.{n.split(last)[1]}": w.clone() for n, w in weights.items() if last in n}
    head["mtp.fc.weight"] = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(5)) * 0.1
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        head[f"mtp.{name}.weight"] = torch.zeros(size)  # these norms add one
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights | head, path / WEIGHTS, metadata={"format": "pt"})
    return path


@contextmanager
def knowing(prompts: Sequence[list[int]], expected: Sequence[Answer], every: int | None = 5) -> Iterator[None]:
    """Replace what a drafter proposes by the model's own answers, with an error every few tokens.

    The drafter still computes its passes. Prompts must differ in their lengths. With None, nothing is replaced.
    """
    if every is None:
        yield
        return
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    answers = {len(prompt): answer.token_ids for prompt, answer in zip(prompts, expected, strict=True)}
    assert len(answers) == len(prompts)
    original = SpecDecodeBaseProposer.propose
    signature = inspect.signature(original)

    def propose(self: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        drafts: torch.Tensor = original(self, *arguments, **named)
        runner = sys._getframe(1).f_locals["self"]
        given = signature.bind(self, *arguments, **named).arguments["next_token_ids"].tolist()
        for row, request in enumerate(runner.input_batch.req_ids):
            _tell(drafts[row], given[row], runner.requests[request], answers, every)
        return drafts

    SpecDecodeBaseProposer.propose = propose
    try:
        yield
    finally:
        SpecDecodeBaseProposer.propose = original


def _tell(drafts: torch.Tensor, given: int, request: Any, answers: Mapping[int, list[int]], every: int) -> None:
    """``given``: the request's newest token, which vLLM may not have counted yet."""
    answer = answers[request.num_prompt_tokens]
    begin = max(0, len(request.output_token_ids) - 1)
    if given not in answer[begin:]:  # the prompt is not complete
        return
    at = answer.index(given, begin)
    for number, token in enumerate(answer[at + 1 : at + 1 + len(drafts)]):
        wrong = (at + number) % every == every - 1
        drafts[number] = (token + wrong) % VOCAB
