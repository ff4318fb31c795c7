"""Quantised copies of a model folder: the projections of its layers are quantised, everything else is left as it is."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.integration.cuda.quantised.formats import Format

PROJECTIONS = re.compile(r"(.*\.(?:[qkvo]|gate|up|down)_proj)\.weight")


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


def logits(model: Path, prompt: list[int]) -> torch.Tensor:
    """fp32 ``[tokens, vocabulary]``, by Hugging Face transformers."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        found: torch.Tensor = loaded(torch.tensor([prompt])).logits[0].float()
    return found
