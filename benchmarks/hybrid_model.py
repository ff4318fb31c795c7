"""Writes a Qwen3-Next with random weights, in the attention shape of Qwen3.5-27B, whose answers depend on far keys.

Used by: hybrid_host_layers.py.

Queries are scaled so that each attends mostly to a few keys, wherever in the context they are. With usual random
weights, attention averages over all values, and an answer would hardly show an error in the KV cache.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB = 1000
WIDTH = 4
"""Of the causal convolution."""
EXPERTS = 2
"""vLLM 0.23 needs one layer with experts. It is the first, where all variants have the same input."""
QUERY_SCALE = 4.0
"""Scores have this standard deviation, so the largest of 262144 weighs about a third."""
LOGIT_SCALE = 3.0


@dataclass(frozen=True)
class Shape:
    layers: int = 64
    """Every fourth has full attention."""
    hidden: int = 512
    intermediate: int = 512
    heads: int = 24
    kv_heads: int = 4
    head_size: int = 256
    key_heads: int = 16
    value_heads: int = 48
    state_size: int = 128
    """Of keys and values of linear attention."""
    positions: int = 1 << 20

    @property
    def full(self) -> tuple[int, ...]:
        return tuple(range(3, self.layers, 4))

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.state_size

    @property
    def kv_bytes(self) -> int:
        """K and V of one token in one full-attention layer, in fp16."""
        return 2 * self.kv_heads * self.head_size * 2


TINY = Shape(8, 128, 128, 4, 2, 64, 2, 4, 32, positions=4096)
"""For a test on a CPU."""


def build(path: Path, shape: Shape, device: str = "cpu") -> None:
    """Write ``config.json`` and fp16 weights into the new folder ``path``."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config(shape), indent=1))
    torch.manual_seed(0)
    named = {"model.embed_tokens.weight": normal(VOCAB, shape.hidden, 1.0, device)}
    named["lm_head.weight"] = normal(VOCAB, shape.hidden, LOGIT_SCALE / math.sqrt(shape.hidden), device)
    named["model.norm.weight"] = torch.zeros(shape.hidden)
    for index in range(shape.layers):
        parts = full_attention(shape, device) if index in shape.full else linear_attention(shape, device)
        parts |= mlp(shape, device, experts=index == 0)
        parts |= {f"{name}_layernorm.weight": torch.zeros(shape.hidden) for name in ("input", "post_attention")}
        named |= {f"model.layers.{index}.{name}": weight for name, weight in parts.items()}
    named |= {f"mtp.{name}": weight for name, weight in drafter(shape, device).items()}
    halves = {name: weight.to("cpu", torch.float16).contiguous() for name, weight in named.items()}
    save_file(halves, path / "model.safetensors", metadata={"format": "pt"})


def config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "dtype": "float16",
        "vocab_size": VOCAB,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "layer_types": [
            "full_attention" if index in shape.full else "linear_attention" for index in range(shape.layers)
        ],
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
        "max_position_embeddings": shape.positions,
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "linear_key_head_dim": shape.state_size,
        "linear_value_head_dim": shape.state_size,
        "linear_conv_kernel_dim": WIDTH,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": shape.intermediate,
        "shared_expert_intermediate_size": shape.intermediate,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(1, shape.layers)),
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def normal(rows: int, columns: int, deviation: float, device: str) -> torch.Tensor:
    return deviation * torch.randn(rows, columns, device=device)


def projection(out: int, inputs: int, device: str) -> torch.Tensor:
    """Keeps the size of what it projects."""
    return normal(out, inputs, 1 / math.sqrt(inputs), device)


def full_attention(shape: Shape, device: str) -> dict[str, torch.Tensor]:
    inner = shape.heads * shape.head_size
    return {
        "self_attn.q_proj.weight": projection(2 * inner, shape.hidden, device),  # each head's query and gate
        "self_attn.k_proj.weight": projection(shape.kv_heads * shape.head_size, shape.hidden, device),
        "self_attn.v_proj.weight": projection(shape.kv_heads * shape.head_size, shape.hidden, device),
        "self_attn.o_proj.weight": projection(shape.hidden, inner, device),
        # These norms multiply by 1 + weight.
        "self_attn.q_norm.weight": torch.full((shape.head_size,), QUERY_SCALE - 1),
        "self_attn.k_norm.weight": torch.zeros(shape.head_size),
    }


def linear_attention(shape: Shape, device: str) -> dict[str, torch.Tensor]:
    values = shape.value_heads * shape.state_size
    step = torch.empty(shape.value_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return {
        "linear_attn.in_proj_qkvz.weight": projection(shape.channels + values, shape.hidden, device),
        "linear_attn.in_proj_ba.weight": projection(2 * shape.value_heads, shape.hidden, device),
        "linear_attn.conv1d.weight": normal(shape.channels, WIDTH, 0.5, device)[:, None],
        "linear_attn.dt_bias": step + torch.log(-torch.expm1(-step)),  # the inverse of softplus
        "linear_attn.A_log": torch.empty(shape.value_heads).uniform_(1, 16).log(),
        "linear_attn.norm.weight": torch.ones(shape.state_size),
        "linear_attn.out_proj.weight": projection(shape.hidden, values, device),
    }


def drafter(shape: Shape, device: str) -> dict[str, torch.Tensor]:
    """An MTP layer: full attention and experts, over a token's embedding beside the model's last hidden state."""
    layer = full_attention(shape, device) | mlp(shape, device, experts=True)
    layer |= {f"{name}_layernorm.weight": torch.zeros(shape.hidden) for name in ("input", "post_attention")}
    named = {f"layers.0.{name}": weight for name, weight in layer.items()}
    named["fc.weight"] = projection(shape.hidden, 2 * shape.hidden, device)
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return named | {f"{name}.weight": torch.zeros(shape.hidden) for name in norms}


def mlp(shape: Shape, device: str, *, experts: bool) -> dict[str, torch.Tensor]:
    several = ["mlp.shared_expert.", *(f"mlp.experts.{number}." for number in range(EXPERTS))]
    names = several if experts else ["mlp."]
    found = {}
    for name in names:
        found[f"{name}gate_proj.weight"] = projection(shape.intermediate, shape.hidden, device)
        found[f"{name}up_proj.weight"] = projection(shape.intermediate, shape.hidden, device)
        found[f"{name}down_proj.weight"] = projection(shape.hidden, shape.intermediate, device)
    if experts:
        found["mlp.gate.weight"] = projection(EXPERTS, shape.hidden, device)
        found["mlp.shared_expert_gate.weight"] = projection(1, shape.hidden, device)
    return found
