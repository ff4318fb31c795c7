"""Random-weight models that vLLM and Hugging Face transformers both load, and the latter's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

VOCAB = 1000


def llama(num_heads: int, num_kv_heads: int, head_size: int, layers: int = 3) -> LlamaConfig:
    return LlamaConfig(**_shape(num_heads, num_kv_heads, head_size, layers))


def qwen3(num_heads: int, num_kv_heads: int, head_size: int, layers: int = 3) -> Qwen3Config:
    return Qwen3Config(**_shape(num_heads, num_kv_heads, head_size, layers))


def _shape(num_heads: int, num_kv_heads: int, head_size: int, layers: int) -> dict[str, object]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        # Large enough for peaked logits: greedy tokens then do not hang on rounding.
        "initializer_range": 0.15,
    }


def save_random(config: PretrainedConfig, path: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def random_prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@dataclass(frozen=True)
class Answer:
    """Greedy continuation of one prompt and the natural-log probability of each of its tokens."""

    token_ids: list[int]
    logprobs: list[float]


def hugging_face_answers(path: Path, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    answers = []
    for prompt in prompts:
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        tokens = out.sequences[0, len(prompt) :].tolist()
        logprobs = [float(scores[0].log_softmax(-1)[token]) for scores, token in zip(out.scores, tokens, strict=True)]
        answers.append(Answer(tokens, logprobs))
    return answers
