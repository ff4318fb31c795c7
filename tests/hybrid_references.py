"""Hugging Face's answers of models with Gated DeltaNet layers.

Its chunked rule adds up many decays in fp32 and takes differences of the sums, which costs up to 2e-4 of a
log-probability in these models; the kernels of this package keep more digits there. So the tokens are those of fp32,
and their log-probabilities are computed by the same code in fp64.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.reference_models import Answer, hugging_face_answers

RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


def hybrid_answers(path: Path, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer]:
    """Greedy tokens in fp32, with log-probabilities in fp64."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    compute_in_fp64(model)
    answers = []
    for prompt, answer in zip(prompts, hugging_face_answers(path, prompts, max_tokens), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer.token_ids])).logits[0].double()
        steps = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        answers.append(
            Answer(answer.token_ids, [float(step[token]) for step, token in zip(steps, answer.token_ids, strict=True)])
        )
    return answers


def compute_in_fp64(model: torch.nn.Module) -> None:
    """Let a model in fp64 compute its Gated DeltaNet layers without casts to fp32."""
    layers = [layer for layer in model.modules() if type(layer).__name__.endswith("GatedDeltaNet")]
    assert layers, f"{type(model).__name__} has no Gated DeltaNet layer"
    module = sys.modules[type(layers[0]).__module__]
    rules = {name: in_fp64(getattr(module, name)) for name in RULES}
    for layer in layers:
        layer.forward = in_fp64(type(layer).forward, **rules).__get__(layer)


def in_fp64(function: Callable[..., Any], **called: Callable[..., Any]) -> Callable[..., Any]:
    """The same function without its casts to fp32. ``called``: replaces functions that it calls."""
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    source = re.sub(r"^@.*\n", "", source, flags=re.MULTILINE)
    sharper = source.replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    assert sharper != source, f"{function.__name__} casts nothing to fp32"
    namespace = vars(sys.modules[function.__module__]) | called
    exec(sharper, namespace)
    found: Callable[..., Any] = namespace[function.__name__]
    return found
