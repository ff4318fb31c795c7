"""Random-weight models that both vLLM and Hugging Face transformers load, and the answers of the latter."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    Cohere2Config,
    DynamicCache,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    ModernBertConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.bloom.modeling_bloom import BloomGelu

VOCAB = 1000
WINDOW = 48
"""Window size: shorter than most prompts, and not a multiple of a block or a tile."""


def llama(num_heads: int, num_kv_heads: int, head_size: int, layers: int = 3) -> LlamaConfig:
    return LlamaConfig(**decoder_shape(num_heads, num_kv_heads, head_size, layers))


def qwen2(num_heads: int, num_kv_heads: int, head_size: int, layers: int = 3) -> Qwen2Config:
    """Biases in the projections of queries, keys and values. Its head size is hidden_size / num_attention_heads."""
    shape = decoder_shape(num_heads, num_kv_heads, head_size, layers) | {"hidden_size": num_heads * head_size}
    del shape["head_dim"]
    return Qwen2Config(**shape)


def qwen3(num_heads: int, num_kv_heads: int, head_size: int, layers: int = 3) -> Qwen3Config:
    return Qwen3Config(**decoder_shape(num_heads, num_kv_heads, head_size, layers))


def mistral() -> MistralConfig:
    """A sliding window in every layer."""
    return MistralConfig(**decoder_shape(4, 2, 64, 3), sliding_window=WINDOW)


def cohere2() -> Cohere2Config:
    """Windowed layers see one token more than sliding_window says."""
    return Cohere2Config(**decoder_shape(4, 2, 64, 4), sliding_window=WINDOW, layer_norm_eps=1e-5)


def pangu(windows: Sequence[int | None], **shape: object) -> LlamaConfig:
    """openPangu, of which each layer may have a window of its own. Hugging Face's Llama has the same weights."""
    shape = decoder_shape(4, 2, 32, len(windows)) | shape
    return LlamaConfig(**shape, interleaved_sliding_window=list(windows), bias=False)


def gemma2() -> Gemma2Config:
    """Soft-capped scores, alternating windowed and full layers, head size 256."""
    return Gemma2Config(
        **decoder_shape(4, 2, 256, 4) | {"tie_word_embeddings": True},
        sliding_window=WINDOW,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=20.0,
    )


def gemma3() -> Gemma3TextConfig:
    """One full layer after every five windowed ones."""
    return Gemma3TextConfig(**decoder_shape(4, 1, 256, 7), sliding_window=WINDOW, query_pre_attn_scalar=256)


def gemma3n() -> Gemma3nTextConfig:
    """The last layers have no KV cache; each reads the cache of an earlier layer of its kind."""
    return Gemma3nTextConfig(
        **decoder_shape(4, 2, 64, 6) | {"tie_word_embeddings": True},
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=3,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=32,
        altup_num_inputs=2,
        laurel_rank=16,
        activation_sparsity_pattern=[0.0] * 6,
    )


def gpt_oss() -> GptOssConfig:
    """Attention sinks, alternating windowed and full layers, mixture of experts."""
    shape = decoder_shape(8, 2, 64, 4) | {"intermediate_size": 64, "hidden_size": 128}
    return GptOssConfig(**shape, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2)


def qwen3_moe() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **decoder_shape(4, 2, 64, 3),
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        decoder_sparse_step=1,
    )


def qwen3_next(layers: int = 4) -> Qwen3NextConfig:
    """Gated DeltaNet in three layers of four, experts and a shared expert, and gated attention."""
    return Qwen3NextConfig(
        **decoder_shape(4, 2, 64, layers),
        **_linear_attention(),
        **_experts(),
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def qwen3_5(layers: int = 4) -> Qwen3_5TextConfig:
    """As Qwen3-Next, but dense, and with another order of the projections' weights."""
    return Qwen3_5TextConfig(**decoder_shape(4, 2, 64, layers), **_linear_attention(), **_quarter_rope())


def qwen3_5_moe(layers: int = 4) -> Qwen3_5MoeTextConfig:
    return Qwen3_5MoeTextConfig(
        **decoder_shape(4, 2, 64, layers), **_linear_attention(), **_experts(), **_quarter_rope()
    )


def _linear_attention() -> dict[str, object]:
    return {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
    }


def _experts() -> dict[str, object]:
    return {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }


def _quarter_rope() -> dict[str, object]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    return {"rope_parameters": rope | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}}


def mixtral() -> MixtralConfig:
    return MixtralConfig(**decoder_shape(4, 2, 64, 3), num_local_experts=4, num_experts_per_tok=2)


def phi3() -> Phi3Config:
    """Fused projections and a sliding window; its head size is hidden_size / num_attention_heads."""
    shape = decoder_shape(4, 2, 96, 3) | {"hidden_size": 384}
    del shape["head_dim"]
    return Phi3Config(**shape, sliding_window=WINDOW, pad_token_id=0)


def bloom() -> BloomConfig:
    """ALiBi. The number of heads, six, is not a power of two, so the slopes come from the other formula."""
    return BloomConfig(
        vocab_size=VOCAB,
        hidden_size=6 * 32,
        n_head=6,
        n_layer=3,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.15,
    )


def opt() -> OPTConfig:
    return OPTConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        word_embed_proj_dim=128,
        ffn_dim=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        init_std=0.15,
    )


def bert() -> BertConfig:
    """Encoder-only: every token sees every token."""
    return BertConfig(**_encoder_shape(), layer_norm_eps=1e-12, pad_token_id=0)


def modernbert() -> ModernBertConfig:
    """Encoder-only, with a window on both sides in two layers of three."""
    return ModernBertConfig(
        **_encoder_shape(), local_attention=2 * WINDOW, global_attn_every_n_layers=3, pad_token_id=0
    )


def _encoder_shape() -> dict[str, object]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
    }


def decoder_shape(num_heads: int, num_kv_heads: int, head_size: int, layers: int) -> dict[str, object]:
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
        # Large enough for peaked logits, so that greedy tokens do not depend on rounding.
        "initializer_range": 0.15,
    }


def save_random(config: PretrainedConfig, path: Path, seed: int = 0, kind: type = AutoModelForCausalLM) -> Path:
    """Write a model with random weights to ``path``. ``kind=AutoModel`` omits the head, as embedding models do."""
    torch.manual_seed(seed)
    kind.from_config(config, dtype=torch.float32).save_pretrained(path)
    if hasattr(config, "interleaved_sliding_window"):
        file = path / "config.json"
        changed = json.loads(file.read_text()) | {"architectures": ["PanguEmbeddedForCausalLM"]}
        file.write_text(json.dumps(changed))
    return path


def load(path: Path, kind: Any = AutoModelForCausalLM) -> Any:
    """Hugging Face's fp32 model. Each layer of a :func:`pangu` sees its window."""
    model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    for module in model.modules():
        # vLLM computes Bloom's activation exactly, transformers by a tanh that differs in the third decimal.
        if isinstance(getattr(module, "gelu_impl", None), BloomGelu):
            module.gelu_impl = torch.nn.GELU()
    windows = getattr(model.config, "interleaved_sliding_window", [])
    for layer, window in zip(model.model.layers if windows else [], windows, strict=True):
        if window is not None:
            layer.register_forward_pre_hook(partial(_hide_beyond, window), with_kwargs=True)
    return model


def _hide_beyond(window: int, layer: torch.nn.Module, args: Any, arguments: dict[str, Any]) -> Any:
    """A layer's arguments with a mask of ``[1, 1, new tokens, all tokens]`` that also hides what is before a window."""
    mask: torch.Tensor = arguments["attention_mask"]
    new, tokens = mask.shape[-2:]
    distance = torch.arange(tokens - new, tokens)[:, None] - torch.arange(tokens)
    return args, arguments | {"attention_mask": mask.masked_fill(distance >= window, torch.finfo(mask.dtype).min)}


def save_smooth_gpt_oss(path: Path) -> Path:
    """A gpt-oss whose log-probabilities bf16 moves by less than 0.05, where :func:`gpt_oss`'s move by 0.1 to 0.9.

    It chooses all of its experts. Without a layer's sinks they move by 0.2 to 5 in the first 142 tokens, without
    windows by 0.4 to 2, and with windows of one token less by 0.07 to 0.12.
    """
    config = gpt_oss()
    config.num_experts_per_tok, config.initializer_range = config.num_local_experts, 0.05
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight *= 3
        for layer in model.model.layers:
            layer.self_attn.sinks += 3
            layer.self_attn.o_proj.weight *= 3
    model.save_pretrained(path)
    return path


def save_repetitive(config: PretrainedConfig, path: Path) -> Path:
    """Random weights whose answers often run through cycles of five tokens, so that n-gram drafts are found.

    Answers leave these cycles as often, which rejects drafts. A random model repeats nothing.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tokens = torch.arange(VOCAB // 5 * 5)
    following = tokens // 5 * 5 + (tokens + 1) % 5
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        model.lm_head.weight[following] += 0.7 * embeddings[tokens]
        embeddings *= 60  # about as much of a token's last state as all layers add
    model.save_pretrained(path)
    return path


def random_prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def repeating_prompts() -> list[list[int]]:
    """Two prompts of 320 and 480 tokens: 40 and 60 random ones, eight times."""
    return [prompt * 8 for prompt in random_prompts((40, 60))]


@dataclass(frozen=True)
class Answer:
    """Greedy continuation of one prompt, and the natural log-probability of each of its tokens."""

    token_ids: list[int]
    logprobs: list[float]


Rounding = Callable[[torch.Tensor], torch.Tensor]


class RoundedCache(DynamicCache):
    """A cache that rounds its keys and values."""

    def __init__(self, config: PretrainedConfig, round_key: Rounding, round_value: Rounding) -> None:
        super().__init__(config=config)
        self.round_key, self.round_value = round_key, round_value

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *more: Any, **named: Any) -> Any:
        return super().update(self.round_key(key_states), self.round_value(value_states), *more, **named)


def hugging_face_answers(
    path: Path,
    prompts: Sequence[list[int]],
    max_tokens: int,
    rounding: tuple[Rounding, Rounding] | None = None,
    kind: Any = AutoModelForCausalLM,
) -> list[Answer]:
    """Greedy answers in fp32. ``rounding`` is applied to each key and value before it is stored in the KV cache."""
    model = load(path, kind)
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
                past_key_values=None if rounding is None else RoundedCache(model.config, *rounding),
            )
        tokens = out.sequences[0, len(prompt) :].tolist()
        logprobs = [float(scores[0].log_softmax(-1)[token]) for scores, token in zip(out.scores, tokens, strict=True)]
        answers.append(Answer(tokens, logprobs))
    return answers


def hugging_face_states(path: Path, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
    """The last hidden state of every token, ``[tokens, hidden_size]`` per prompt."""
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
