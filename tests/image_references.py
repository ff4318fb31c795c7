"""Models with images: random weights, the files of their processors, and Hugging Face's answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Gemma3Config,
    PaliGemmaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
)

from fastattention_vllm.integration.cpu.stand_ins import vision
from tests import reference_models as reference
from tests.hybrid_references import compute_in_fp64
from tests.reference_models import VOCAB, Answer, decoder_shape, save_random

SPECIAL = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
CHAT = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    + IMAGE
    + "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
TOKENS = {
    "vision_start_token_id": SPECIAL.index("<|vision_start|>"),
    "vision_end_token_id": SPECIAL.index("<|vision_end|>"),
    "image_token_id": SPECIAL.index("<|image_pad|>"),
    "video_token_id": SPECIAL.index("<|video_pad|>"),
}


def qwen2_vl() -> Qwen2VLConfig:
    tower = _tower(14) | {"embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2}
    return Qwen2VLConfig(text_config=_mrope_text(), vision_config=tower, **TOKENS)


def qwen2_5_vl() -> Qwen2_5_VLConfig:
    """Two of three layers of the tower attend within windows of 2 x 2 tokens, which do not divide every image."""
    tower = _tower(14) | {"out_hidden_size": 128, "intermediate_size": 128, "window_size": 56}
    return Qwen2_5_VLConfig(text_config=_mrope_text(), vision_config=tower | {"fullatt_block_indexes": [1]}, **TOKENS)


def qwen3_vl() -> Qwen3VLConfig:
    """States of the tower's first layers are added to the first layers of the text."""
    text = decoder_shape(4, 2, 64, 3) | {"rope_parameters": _rope([8, 12, 12]) | {"mrope_interleaved": True}}
    tower = _tower(16) | _interpolated() | {"deepstack_visual_indexes": [0, 1]}
    return Qwen3VLConfig(text_config=text, vision_config=tower, **TOKENS)


def qwen3_5(layers: int = 4) -> Qwen3_5Config:
    """Gated DeltaNet in three layers of four."""
    text = reference.qwen3_5(layers).to_dict()
    return Qwen3_5Config(text_config=text, vision_config=_tower(16) | _interpolated(), **TOKENS)


def qwen3_5_moe() -> Qwen3_5MoeConfig:
    text = reference.qwen3_5_moe().to_dict()
    return Qwen3_5MoeConfig(text_config=text, vision_config=_tower(16) | _interpolated(), **TOKENS)


def gemma3() -> Gemma3Config:
    """The tokens of an image attend to each other in both directions."""
    tower = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
    }
    return Gemma3Config(text_config=reference.gemma3().to_dict(), vision_config=tower, mm_tokens_per_image=4)


def paligemma() -> PaliGemmaConfig:
    tower = gemma3().vision_config.to_dict() | {"projection_dim": 128, "vision_use_head": False}
    text = decoder_shape(4, 1, 64, 2) | {"model_type": "gemma", "tie_word_embeddings": True}
    return PaliGemmaConfig(text_config=text, vision_config=tower, projection_dim=128, hidden_size=128)


def _tower(patch: int) -> dict[str, Any]:
    # The initializer's range makes the tower's output large enough to change the answers.
    return {
        "depth": 3,
        "hidden_size": 64,
        "num_heads": 4,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.15,
    }


def _interpolated() -> dict[str, Any]:
    """A grid of 8 x 8 positions, from which those of the patches are interpolated."""
    return {"out_hidden_size": 128, "intermediate_size": 128, "num_position_embeddings": 64}


def _mrope_text() -> dict[str, Any]:
    shape = decoder_shape(4, 2, 32, 3) | {"rope_parameters": _rope([4, 6, 6])}
    del shape["head_dim"]  # hidden_size / num_attention_heads
    return shape


def _rope(sections: list[int]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}


PROCESSORS = {
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_5": "Qwen3VL",
    "qwen3_5_moe": "Qwen3VL",
}


def save_with_processor(config: PretrainedConfig, path: Path, seed: int = 0) -> Path:
    """Random weights, and the files of tokenizer and processor that a published checkpoint has."""
    save_random(config, path, seed, AutoModelForImageTextToText)
    # Every byte is a token. Transformers requires this kind of tokenizer of some models, whatever the file says.
    known = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    known += [f"w{number}" for number in range(len(known), VOCAB)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(known)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        additional_special_tokens=list(SPECIAL[2:]),
        eos_token=SPECIAL[1],
        pad_token=SPECIAL[0],
    )
    saved.chat_template = CHAT
    saved.save_pretrained(path)
    patch, kind = config.vision_config.patch_size, PROCESSORS[config.model_type]
    pixels = (2 * patch) ** 2  # of one token
    both = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "processor_class": f"{kind}Processor"}
    both |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.3, 0.25, 0.2]}
    limits = {"shortest_edge": 4 * pixels, "longest_edge": 160 * pixels}
    files = {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast", "size": limits},
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen3VLVideoProcessor" if kind == "Qwen3VL" else "Qwen2VLVideoProcessor",
            "size": limits | {"longest_edge": 768 * pixels},
        },
    }
    for name, entries in files.items():
        (path / name).write_text(json.dumps(entries | both))
    return path


def picture(seed: int, height: int, width: int) -> Image.Image:
    """Noise around a colour that depends on the seed."""
    drawn = np.random.default_rng(seed)
    darkest = drawn.integers(0, 192, 3)
    return Image.fromarray(drawn.integers(darkest, darkest + 64, (height, width, 3)).astype(np.uint8))


def letters(count: int, seed: int) -> str:
    """As many tokens."""
    drawn = np.random.default_rng(seed).integers(ord("a"), ord("z") + 1, count)
    return "".join(map(chr, drawn.tolist()))


@dataclass(frozen=True)
class Case:
    """A prompt, with ``IMAGE`` in the place of each of its images."""

    prompt: str
    images: list[Image.Image] = field(default_factory=list)

    def for_vllm(self) -> dict[str, Any]:
        given: dict[str, Any] = {"prompt": self.prompt}
        return given | {"multi_modal_data": {"image": self.images}} if self.images else given


def image_answers(path: Path, cases: Sequence[Case], max_tokens: int) -> list[Answer]:
    """Greedy answers in fp32. Log-probabilities of models with Gated DeltaNet layers are those in fp64."""
    vision.spare_torchvision()
    processor = AutoProcessor.from_pretrained(path)
    prepared = [processor(text=[case.prompt], images=case.images or None, return_tensors="pt") for case in cases]
    model = _model(path, torch.float32)
    answers = []
    for inputs in prepared:
        with torch.no_grad():
            out = model.generate(
                **inputs,
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        logprobs = [float(scores[0].log_softmax(-1)[token]) for scores, token in zip(out.scores, tokens, strict=True)]
        answers.append(Answer(tokens, logprobs))
    if "linear_attention" not in (getattr(model.config.text_config, "layer_types", None) or ()):
        return answers
    model = _model(path, torch.float64)
    compute_in_fp64(model)
    return [_logprobs_of(model, inputs, answer) for inputs, answer in zip(prepared, answers, strict=True)]


def _model(path: Path, dtype: torch.dtype) -> Any:
    return AutoModelForImageTextToText.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def _logprobs_of(model: Any, inputs: Any, answer: Answer) -> Answer:
    new = torch.tensor([answer.token_ids])
    whole = dict(inputs)
    for name, value in (("input_ids", new), ("attention_mask", new * 0 + 1), ("mm_token_type_ids", new * 0)):
        if name in whole:
            whole[name] = torch.cat([whole[name], value], 1)
    with torch.no_grad():
        steps = model(**whole).logits[0, -len(answer.token_ids) - 1 : -1].double().log_softmax(-1)
    chosen = [float(step[token]) for step, token in zip(steps, answer.token_ids, strict=True)]
    return Answer(answer.token_ids, chosen)


MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen2.5-vl": qwen2_5_vl,
    "qwen2-vl": qwen2_vl,
    "qwen3-vl": qwen3_vl,
    "qwen3.5": qwen3_5,
    "qwen3.5-moe": qwen3_5_moe,
}
