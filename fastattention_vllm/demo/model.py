"""A Llama-architecture model that looks numbers up, built weight by weight.

The model continues "... alpha=7319 ... alpha=" with 7319, however long the text in between is.
Every weight is constructed for this purpose: nothing is trained, and randomness plays no part in
the answers. Every part is needed, too: each query head runs its own chain through all layers, all
chains must end at the same number, and if one does not, the model says "unknown". A lost layer,
head, tensor-parallel rank or KV page therefore cannot go unnoticed.

A residual vector holds (see `layout`): a large constant, which makes RMSNorm the same scaling
everywhere; two flags; the codewords (see `codes`) of the token itself, if it is a number or a name;
and for each head an *inbox*, which attention writes, and a *state*, which persists across layers.
m is the codeword length, D the head size, H the number of query heads.

1. Embedding: the constant, the flags and the codewords of the token. Inboxes and states are 0.

2. Layer 0, tag. The fast rotary pairs measure distance (see `position`). A number attends to the
   token two before it, which is "alpha" in "alpha=7319". Any other token attends to the latest
   name, if there is one within about 30 tokens. The value is the codeword of the name, or 0 for
   tokens that are not names. After this layer, each number and the end of the question carry the
   name that they belong to.

3. Layer 1, retrieve. The query is the name that the token carries, in the slow rotary pairs. The
   key is the name that the position carries, plus a flag for numbers. A number with the same name
   scores 120 nats, a token with the same name that is no number (the question itself) 80, and
   a number with another name 40. If the number is missing, the question therefore finds itself,
   and its value is 0. The value is the codeword of the number.

4. Layers 2 and up, retrieve again. The query is the number found so far. The key of a position is
   half the number at the position and half the number that the position found in the previous
   layer. The score is 120 nats when both halves agree with the query, and at most 80 otherwise.
   Earlier layers must therefore have worked at the query's position *and* at the key's. The value
   is again the number's codeword.

5. Each MLP (see `mlp`) restores inbox h to exactly -1, 0 or +1, moves it to state h and clears the
   inbox. In the next layer the query of head h reads state h + 1, and keys read states of the next
   group, so the chains cross between tensor-parallel ranks. The last MLP writes a verdict instead:
   the codeword on which all inboxes agree.

6. lm_head. The score of a number is the similarity of its codeword to the verdict (1 if equal, at
   most 1/2 otherwise). "unknown" scores a constant 15/16. The end token wins after an answer.

Stale or misplaced data are detected as well: the sign of codewords alternates with the layer, keys
and values are encoded per layer and KV head (a signed permutation of coordinates, an angle for each
rotary pair), and a value is repeated over all D dims, with every repetition needed.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from fastattention_vllm.demo.attention import AttentionBuilder
from fastattention_vllm.demo.codes import name_codes, number_codes
from fastattention_vllm.demo.layout import Layout
from fastattention_vllm.demo.mlp import MlpBuilder
from fastattention_vllm.demo.position import RotaryPlan
from fastattention_vllm.demo.spec import DemoModelSpec
from fastattention_vllm.demo.tokenizer import (
    BOS,
    EOS,
    PAD,
    save_tokenizer,
    token_id,
    token_roles,
    vocabulary,
)
from fastattention_vllm.demo.vocabulary import UNKNOWN

_LOUDNESS = 32.0  # how much RMSNorm amplifies everything except the constant
_LOGIT_SCALE = 512.0
_UNKNOWN_SHARE = 15 / 16
_SPACE_LOGIT = 24.0


def build_demo_model(path: str | os.PathLike[str], spec: DemoModelSpec | None = None) -> Path:
    """Write a model directory that transformers and vLLM load like any Llama model.

    The directory appears complete or not at all. Its contents depend only on the spec.

    Args:
        path: The directory to create; it must not exist, or must be empty.
        spec: Shape of the model.

    Returns:
        The directory.

    Raises:
        FileExistsError: `path` is a file, or a directory that is not empty.
    """
    spec = spec or DemoModelSpec()
    target = Path(path).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not an empty directory; remove it, or choose another path.")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write(draft, spec)
        for file in draft.iterdir():
            file.chmod(0o644)  # safetensors makes its file readable by the owner only
        draft.chmod(0o755)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return target


def build_weights(spec: DemoModelSpec) -> dict[str, torch.Tensor]:
    """All weights, by their names in a Llama checkpoint."""
    layout = Layout.of(spec)
    norm = _norm(layout)
    weights = {"model.embed_tokens.weight": _embedding(layout), "model.norm.weight": norm}
    update, verdict = MlpBuilder(spec), MlpBuilder(spec)
    update.add_update()
    verdict.add_verdict()
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        mlp = update if layer < spec.num_layers - 1 else verdict
        for name, weight in AttentionBuilder(spec, layer).weights().items():
            weights[f"{prefix}.self_attn.{name}.weight"] = weight.to(spec.torch_dtype)
        for name, weight in mlp.weights().items():
            weights[f"{prefix}.mlp.{name}.weight"] = weight.to(spec.torch_dtype, copy=True)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = norm.clone()
    weights["lm_head.weight"] = _lm_head(layout)
    return {name: weight.to(spec.torch_dtype).contiguous() for name, weight in weights.items()}


def _norm(layout: Layout) -> torch.Tensor:
    """[hidden]: scales the constant to 1 and everything else to its value before RMSNorm."""
    weight = torch.full((layout.hidden_size,), _LOUDNESS, dtype=torch.float64)
    weight[layout.constant] = layout.hidden_size**-0.5
    return weight


def _embedding(layout: Layout) -> torch.Tensor:
    """The embedding matrix [vocabulary, hidden]."""
    weight = torch.zeros(len(vocabulary()), layout.hidden_size, dtype=torch.float64)
    # The constant is so large that the root mean square is always constant / sqrt(hidden).
    weight[:, layout.constant] = _LOUDNESS * layout.hidden_size**0.5
    names, numbers = name_codes(layout.code), number_codes(layout.code)
    for token, role in token_roles().items():
        weight[token, layout.ends_answer] = float(role.ends_answer)
        weight[token, layout.wants_space] = float(role.wants_space)
        if role.name is not None:
            weight[token, layout.name] = names[role.name]
        if role.number is not None:
            weight[token, layout.number] = numbers[role.number]
    return weight


def _lm_head(layout: Layout) -> torch.Tensor:
    """The lm_head matrix [vocabulary, hidden]."""
    weight = torch.zeros(len(vocabulary()), layout.hidden_size, dtype=torch.float64)
    numbers = number_codes(layout.code) / layout.code
    spaced = {token for text, token in vocabulary().items() if text.startswith("Ġ")}
    unknown = {token_id(UNKNOWN), token_id(" " + UNKNOWN)}
    for token, role in token_roles().items():
        if role.number is not None:
            weight[token, layout.verdict] = _LOGIT_SCALE * numbers[role.number]
        elif token in unknown:
            weight[token, layout.constant] = _LOGIT_SCALE * _UNKNOWN_SHARE
        else:
            continue
        if token in spaced:
            weight[token, layout.constant] -= _SPACE_LOGIT
            weight[token, layout.wants_space] = _SPACE_LOGIT
        else:
            weight[token, layout.wants_space] = -_SPACE_LOGIT
    weight[token_id(EOS), layout.ends_answer] = 2 * _LOGIT_SCALE
    return weight


def _config(spec: DemoModelSpec) -> dict[str, object]:
    tokens = vocabulary()
    rope_theta = RotaryPlan(spec.head_size, spec.code_length).theta
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": tokens[BOS],
        "eos_token_id": tokens[EOS],
        "pad_token_id": tokens[PAD],
        "head_dim": spec.head_size,
        "hidden_act": "silu",
        "hidden_size": Layout.of(spec).hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "mlp_bias": False,
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "rope_theta": rope_theta,
        "tie_word_embeddings": False,
        "dtype": spec.dtype,
        "use_cache": True,
        "vocab_size": len(tokens),
    }


def _generation_config() -> dict[str, object]:
    tokens = vocabulary()
    return {
        "bos_token_id": tokens[BOS],
        "eos_token_id": tokens[EOS],
        "pad_token_id": tokens[PAD],
        "do_sample": False,
        "max_new_tokens": 16,
    }


def _write(directory: Path, spec: DemoModelSpec) -> None:
    for name, content in (
        ("config.json", _config(spec)),
        ("generation_config.json", _generation_config()),
    ):
        text = json.dumps(content, indent=2) + "\n"
        (directory / name).write_text(text, encoding="utf-8")
    save_tokenizer(directory, spec.max_position_embeddings)
    save_file(build_weights(spec), directory / "model.safetensors", metadata={"format": "pt"})
