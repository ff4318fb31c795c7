"""The matrices of a model's layers: their names in checkpoints, their sizes, and how ranks divide them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

PARENTS = ("model.layers", "model.language_model.layers", "language_model.model.layers")
"""What names of layers begin with: text models, models with images, and the latter in vLLM."""
HEADS = ("lm_head", "language_model.lm_head")
"""The matrix of logits."""
OTHER_PARENTS = {"GPTNeoXForCausalLM": ("gpt_neox.layers",)}
OTHER_NAMES = {
    "Phi3ForCausalLM": {
        "self_attn.q_proj": "self_attn.qkv_proj",
        "self_attn.k_proj": "self_attn.qkv_proj",
        "self_attn.v_proj": "self_attn.qkv_proj",
        "mlp.gate_proj": "mlp.gate_up_proj",
        "mlp.up_proj": "mlp.gate_up_proj",
    },
    "GPTNeoXForCausalLM": {
        "self_attn.q_proj": "attention.query_key_value",
        "self_attn.k_proj": "attention.query_key_value",
        "self_attn.v_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
}
"""Names in the checkpoints of architectures that have others than Llama."""


@dataclass(frozen=True)
class Matrix:
    name: str
    """In a checkpoint, without the layer, as in self_attn.q_proj."""
    inputs: int
    widths: tuple[int, ...]
    """Outputs of each part that ranks divide by itself."""
    merged: str = ""
    """vLLM's layer that holds this matrix beside others; empty if it holds this one alone."""
    inputs_divided: bool = False
    """Whether ranks divide the inputs instead of the outputs."""
    most_ranks: int | None = None
    """With more ranks than these, vLLM keeps copies. None: no limit."""
    is_linear: bool = True
    """Whether it belongs to a linear layer. Others are never quantised."""

    @property
    def layer(self) -> str:
        """vLLM's name of the layer that holds it."""
        return self.merged or self.name

    def inputs_of(self, ranks: int) -> int:
        return self.inputs // ranks if self.inputs_divided else self.inputs

    def widths_of(self, ranks: int) -> tuple[int, ...]:
        parts = 1 if self.inputs_divided else min(ranks, self.most_ranks or ranks)
        return tuple(width // parts for width in self.widths)

    def parameters(self, ranks: int) -> int:
        """On one rank."""
        return self.inputs_of(ranks) * sum(self.widths_of(ranks))


def full_names(architecture: str, index: int, name: str) -> tuple[str, ...]:
    """All names that a checkpoint of this architecture may give to ``name`` of layer ``index``."""
    return tuple(f"{parent}.{index}.{name}" for parent in OTHER_PARENTS.get(architecture, PARENTS))


def mlp(hidden: int, intermediate: int, gated: bool) -> Iterator[Matrix]:
    merged = "mlp.gate_up_proj" if gated else ""
    if gated:
        yield Matrix("mlp.gate_proj", hidden, (intermediate,), merged)
    yield Matrix("mlp.up_proj", hidden, (intermediate,), merged)
    yield Matrix("mlp.down_proj", intermediate, (hidden,), inputs_divided=True)


def attention(hidden: int, heads: int, kv_heads: int, head_size: int, gated: bool) -> Iterator[Matrix]:
    """``gated``: queries have a gate of the same size."""
    merged = "self_attn.qkv_proj"
    yield Matrix("self_attn.q_proj", hidden, ((1 + gated) * heads * head_size,), merged)
    for name in ("self_attn.k_proj", "self_attn.v_proj"):
        yield Matrix(name, hidden, (kv_heads * head_size,), merged, most_ranks=kv_heads)
    yield Matrix("self_attn.o_proj", heads * head_size, (hidden,), inputs_divided=True)


def linear_attention(hidden: int, keys: int, values: int, heads: int, convolution: int) -> Iterator[Matrix]:
    """Of a Gated DeltaNet layer.

    Args:
        keys: numbers in the keys of all heads.
        values: the same of values.
        heads: those of values.
        convolution: its width.
    """
    inner, ends = "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"
    yield Matrix("linear_attn.in_proj_qkv", hidden, (keys, keys, values), inner)
    yield Matrix("linear_attn.in_proj_z", hidden, (values,), inner)
    yield Matrix("linear_attn.in_proj_b", hidden, (heads,), ends)
    yield Matrix("linear_attn.in_proj_a", hidden, (heads,), ends)
    yield Matrix("linear_attn.conv1d", convolution, (keys, keys, values), is_linear=False)
    yield Matrix("linear_attn.out_proj", values, (hidden,), inputs_divided=True)


def renamed(matrix: Matrix, architecture: str) -> Matrix:
    name = OTHER_NAMES.get(architecture, {}).get(matrix.name)
    return matrix if name is None else replace(matrix, name=name, merged=name)
