"""Quantised copies of a model folder: the projections of its layers are quantised, everything else is left as it is."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.integration.cuda.quantised.formats import Format

PROJECTIONS = re.compile(r"(.*\.(?:[qkvo]|gate|up|down)_proj)\.weight")


ALLOWED = 2**-5
"""Tolerance of log-probabilities: 32 steps of an fp16 logit between 1 and 2, as between two backends on GPUs."""


@dataclass(frozen=True)
class Checkpoints:
    """Two models with the same weights."""

    quantised: Path
    plain: Path
    """Unquantised, in fp16."""


def write(model: Path, form: Format, folder: Path, left: str = "") -> Checkpoints:
    """Write both below ``folder``. Projections whose names contain ``left`` stay unquantised."""
    found = Checkpoints(folder / "quantised", folder / "plain")
    quantised, plain = {}, {}
    for name, weight in load_file(model / "model.safetensors").items():
        matched = PROJECTIONS.fullmatch(name)
        if matched is None or (left and left in name):
            quantised[name] = plain[name] = weight.half()
            continue
        stored = form.store(weight.float())
        plain[name] = stored.weight
        quantised |= {f"{matched[1]}.{tensor}": value.clone() for tensor, value in stored.tensors.items()}
    for path, tensors in ((found.quantised, quantised), (found.plain, plain)):
        shutil.copytree(model, path, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors",
                  metadata={"format": "pt"})  # fmt: skip
        config = json.loads((path / "config.json").read_text()) | {"dtype": "float16"}
        if path == found.quantised:
            config["quantization_config"] = form.config
        (path / "config.json").write_text(json.dumps(config))
    return found


def compare(outputs: Sequence[Any], plain: Path, device: str = "cpu", allowed: float = ALLOWED) -> None:
    """Each token of an engine's greedy answers is as likely as Hugging Face says in fp32, and nearly the best one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).to(device)
    for output in outputs:
        answer = output.outputs[0]
        tokens = [*output.prompt_token_ids, *answer.token_ids]
        with torch.inference_mode():
            found = model(torch.tensor([tokens], device=device)).logits[0].float().log_softmax(-1)
        steps = found[len(output.prompt_token_ids) - 1 : -1]
        for token, step, given in zip(answer.token_ids, steps, answer.logprobs, strict=True):
            assert abs(given[token].logprob - float(step[token])) < allowed
            assert float(step.max() - step[token]) < 2 * allowed
