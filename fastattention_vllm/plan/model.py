"""The shape of a model, as its config.json describes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastattention_vllm.plan import matrices
from fastattention_vllm.plan.errors import PlanError
from fastattention_vllm.plan.matrices import Matrix
from fastattention_vllm.plan.weights import NO_SCHEME, PLAIN_BYTES, CacheScheme, Stored, cache_scheme, stored
from fastattention_vllm.plan.weights import PLAIN as UNQUANTISED

GATED = 3
PLAIN = 2
MLP_MATRICES = {
    "LlamaForCausalLM": GATED,
    "MistralForCausalLM": GATED,
    "Qwen2ForCausalLM": GATED,
    "Qwen3ForCausalLM": GATED,
    "GemmaForCausalLM": GATED,
    "Gemma2ForCausalLM": GATED,
    "Gemma3ForCausalLM": GATED,
    "Gemma3ForConditionalGeneration": GATED,
    "Mistral3ForConditionalGeneration": GATED,
    "Phi3ForCausalLM": GATED,
    "Qwen3_5ForCausalLM": GATED,
    "Qwen3_5ForConditionalGeneration": GATED,
    "GPTNeoXForCausalLM": PLAIN,
}
"""The architectures that the planner supports, each with the number of matrices in an MLP."""
GEMMA3 = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
TIED_BY_DEFAULT = ("GemmaForCausalLM", "Gemma2ForCausalLM", *GEMMA3)
TWO_WAY_IMAGES = ("Gemma3ForConditionalGeneration",)
"""Architectures in which the tokens of an image attend to each other in both directions. The engine serves their text.
"""
GEMMA3_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
"""What transformers assumes of a Gemma-3 whose config.json does not say it. The published ones leave most of it out."""
SOFT_CAPS = {"Gemma2ForCausalLM": 50.0}
"""What transformers assumes of attn_logit_softcapping."""
HYBRIDS = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
"""Architectures with Gated DeltaNet layers, and with full-attention layers whose output is gated."""
GEMMA3_PATTERN = 6
"""In Gemma-3, every sixth layer sees the whole context."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
OTHER_ATTENTION = {
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "linear_num_value_heads": "linear attention",
    "attention_chunk_size": "chunked attention",
    "num_kv_shared_layers": "layers that share a KV cache",
    "dual_chunk_attention_config": "dual-chunk attention",
    "param_sink_number": "attention with static sinks",
    "rswa_window": "attention to the prompt and to a window of recent tokens (R-SWA)",
}
"""Keys of a config.json that select attention which the planner does not support."""
SCALED_ALREADY = ("default", "su", "longrope", "llama3")
"""Kinds of RoPE scaling that do not multiply max_position_embeddings in vLLM."""


@dataclass(frozen=True)
class LinearAttention:
    """The Gated DeltaNet layers of a model."""

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    convolution: int
    """Width of the causal convolution."""

    def channels(self, ranks: int) -> int:
        """Inputs of the convolution: queries, keys and values."""
        return (2 * self.key_heads * self.key_size + self.value_heads * self.value_size) // ranks

    def state_bytes(self, ranks: int) -> int:
        """One layer's state of one request: a matrix per head in fp32, and the last inputs of the convolution."""
        matrices = 4 * self.value_heads // ranks * self.key_size * self.value_size
        return matrices + 2 * (self.convolution - 1) * self.channels(ranks)

    def matrices(self, hidden_size: int) -> tuple[Matrix, ...]:
        """One layer's projections and convolution, without its MLP."""
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        return tuple(matrices.linear_attention(hidden_size, keys, values, self.value_heads, self.convolution))


@dataclass(frozen=True)
class ModelShape:
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_positions: int
    dtype: str
    mlp_matrices: int
    tied_embeddings: bool
    window: int
    """Number of tokens that a windowed layer sees; 0 without such layers."""
    windowed_layers: tuple[int, ...]
    quantisation: str
    """The method by which the weights are quantised; empty if they are not."""
    stored: tuple[tuple[Stored, ...], ...] = ()
    """The formats of each layer's matrices, in the order of ``matrices``; empty if the weights are not quantised."""
    head: Stored = UNQUANTISED
    """The format of the matrix of logits."""
    linear: LinearAttention | None = None
    has_images: bool = False
    """Whether the model also has an image encoder, which is not described here."""
    soft_cap: float = 0
    """Of attention logits; 0: none."""
    cache: CacheScheme = NO_SCHEME
    """The KV cache that the checkpoint asks for."""
    unscaled_positions: int = 0
    """max_position_embeddings beside YaRN. Newer vLLM takes it for the longest context; 0.19 scales the original one. 0
    without YaRN."""

    @property
    def linear_layers(self) -> tuple[int, ...]:
        return self.linear.layers if self.linear else ()

    @property
    def serves_text_alone(self) -> bool:
        """Whether the engine serves the model only without images."""
        return self.architecture in TWO_WAY_IMAGES

    @property
    def full_layers(self) -> tuple[int, ...]:
        others = {*self.windowed_layers, *self.linear_layers}
        return tuple(index for index in range(self.num_layers) if index not in others)

    @property
    def kv_layers(self) -> int:
        """Number of layers with a KV cache."""
        return self.num_layers - len(self.linear_layers)

    @property
    def heads_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    def kv_heads_per_rank(self, ranks: int) -> int:
        """With more ranks than KV heads, vLLM keeps copies."""
        return max(1, self.num_kv_heads // ranks)

    def matrices(self, index: int | None = None) -> tuple[Matrix, ...]:
        """The matrices of layer ``index``, or of any layer with attention."""
        mlp = matrices.mlp(self.hidden_size, self.intermediate_size, self.mlp_matrices == GATED)
        if self.linear and index in self.linear.layers:
            return (*self.linear.matrices(self.hidden_size), *mlp)
        sizes = self.hidden_size, self.num_heads, self.num_kv_heads, self.head_size
        found = [*matrices.attention(*sizes, gated=self.linear is not None), *mlp]
        return tuple(matrices.renamed(matrix, self.architecture) for matrix in found)

    def layer_parameters(self, ranks: int = 1, index: int | None = None) -> int:
        """The matrices of layer ``index``, or of any layer with attention, on one of ``ranks`` ranks."""
        return sum(matrix.parameters(ranks) for matrix in self.matrices(index))

    def layer_bytes(self, ranks: int, index: int) -> float | None:
        """Bytes of the matrices of layer ``index`` on one of ``ranks`` ranks. None: not known."""
        found = self.matrices(index)
        formats = self.stored[index] if self.stored else (UNQUANTISED,) * len(found)
        total = 0.0
        for matrix, form in zip(found, formats, strict=True):
            if form.bytes is None:
                return None
            total += form.bytes * matrix.parameters(ranks)
        return total

    def weight_bytes(self, ranks: int = 1) -> int | None:
        """Bytes of all matrices on one rank. None: not known."""
        layers = [self.layer_bytes(ranks, index) for index in range(self.num_layers)]
        known = [size for size in layers if size is not None]
        if len(known) < len(layers) or self.head.bytes is None:
            return None
        per_weight = PLAIN_BYTES + (0 if self.tied_embeddings else self.head.bytes)
        return int(sum(known) + per_weight * self.head_parameters(ranks))

    def layers_parameters(self, ranks: int = 1) -> int:
        """The matrices of all layers on one rank."""
        return sum(self.layer_parameters(ranks, index) for index in range(self.num_layers))

    def head_parameters(self, ranks: int = 1) -> int:
        """The matrix of logits on one rank."""
        return self.vocab_size * self.hidden_size // ranks

    def embedding_parameters(self, ranks: int = 1) -> int:
        """The embeddings and the matrix of logits on one rank."""
        return self.head_parameters(ranks) * (1 if self.tied_embeddings else 2)

    def parameters(self, ranks: int = 1) -> int:
        """All matrices on one rank. Norms and biases, under 0.1 % of them, are left out."""
        return self.layers_parameters(ranks) + self.embedding_parameters(ranks)

    def check_ranks(self, ranks: int) -> None:
        """Raise ``PlanError`` if vLLM cannot divide the heads and MLPs among so many ranks."""
        heads, kv_heads, wide = self.num_heads, self.num_kv_heads, self.intermediate_size
        possible = [
            n
            for n in range(1, heads + 1)
            if heads % n == 0
            and wide % n == 0
            and (kv_heads % n == 0 or n % kv_heads == 0)
            and (self.linear is None or (self.linear.key_heads % n == 0 and self.linear.value_heads % n == 0))
        ]
        if ranks not in possible:
            raise PlanError(
                f"--tp {ranks} does not divide the model's {heads} query heads, {kv_heads} KV heads and "
                f"intermediate_size {wide}; possible values: {', '.join(map(str, possible))}."
            )


def read(model: str) -> ModelShape:
    """The shape of the model in the folder ``model``.

    Raises:
        PlanError: there is no such folder or config.json, or the planner does not support the model.
    """
    folder = Path(model)
    if not folder.is_dir():
        raise PlanError(
            f"{model} is not a folder here; download the model's config.json into a folder and pass that folder, "
            "because published names are not looked up."
        )
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"{folder} contains no config.json; download the model's config.json into it.") from None
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read as JSON ({error}); download it again.") from error
    if not isinstance(found, dict):
        raise PlanError(f"{path} does not contain a JSON object; download it again.")
    try:
        return shape_of(found, str(path))
    except PlanError:
        raise
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise PlanError(f"{path} has an entry of an unexpected kind ({error}); download it again.") from error


def shape_of(config: Mapping[str, Any], where: str) -> ModelShape:
    has_images = isinstance(config.get("text_config"), dict)
    if has_images:  # the language model of a model with images is described in a section of its own
        config = {**config, **config["text_config"], "architectures": config.get("architectures")}
    architecture = _architecture(config, where)
    config = {**(GEMMA3_DEFAULTS if architecture in GEMMA3 else {}), **config}

    def size(*names: str, otherwise: int | None = None) -> int:
        for name in names:
            value = config.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"{where}: {name} is {value!r}, which must be an integer of at least 1; correct it.")
            return value
        if otherwise is None:
            raise PlanError(f"{where} has no {names[0]}; use the config.json that belongs to the model.")
        return otherwise

    layers, hidden, heads = size("num_hidden_layers"), size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", otherwise=heads)
    if heads % kv_heads:
        raise PlanError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; correct it."
        )
    if heads > hidden and not config.get("head_dim"):
        raise PlanError(f"{where}: num_attention_heads {heads} is more than hidden_size {hidden}; correct it.")
    window, windowed = _windows(config, architecture, layers)
    quantisation = config.get("quantization_config") or {}
    shape = ModelShape(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size("head_dim", otherwise=hidden // heads),
        vocab_size=size("vocab_size"),
        max_positions=_positions(config, architecture, size("max_position_embeddings")),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float16"),
        mlp_matrices=MLP_MATRICES[architecture],
        tied_embeddings=bool(config.get("tie_word_embeddings", architecture in TIED_BY_DEFAULT)),
        window=window if windowed else 0,
        windowed_layers=windowed,
        quantisation=str(quantisation.get("quant_method", "an unnamed method")) if quantisation else "",
        linear=_linear_attention(config, size, layers) if architecture in HYBRIDS else None,
        has_images=has_images,
        soft_cap=float(config.get("attn_logit_softcapping", SOFT_CAPS.get(architecture, 0)) or 0),
        cache=cache_scheme(quantisation),
        unscaled_positions=size("max_position_embeddings") if _scaling(config)[0] == "yarn" else 0,
    )
    return _with_formats(shape, quantisation) if quantisation else shape


def _with_formats(shape: ModelShape, quantisation: Mapping[str, Any]) -> ModelShape:
    """The shape with the format of each matrix."""
    architecture = shape.architecture

    def form(index: int, matrix: Matrix) -> Stored:
        if not matrix.is_linear:
            return UNQUANTISED
        names = matrices.full_names(architecture, index, matrix.name)
        merged = matrices.full_names(architecture, index, matrix.merged) if matrix.merged else ()
        return stored(quantisation, names, merged)

    return replace(
        shape,
        stored=tuple(
            tuple(form(index, matrix) for matrix in shape.matrices(index)) for index in range(shape.num_layers)
        ),
        head=stored(quantisation, matrices.HEADS, is_head=True),
    )


def _linear_attention(config: Mapping[str, Any], size: Callable[..., int], layers: int) -> LinearAttention:
    interval = config.get("full_attention_interval") or 4
    kinds = config.get("layer_types") or [
        "full_attention" if (index + 1) % interval == 0 else "linear_attention" for index in range(layers)
    ]
    return LinearAttention(
        layers=tuple(index for index, kind in enumerate(kinds[:layers]) if kind == "linear_attention"),
        key_heads=size("linear_num_key_heads"),
        value_heads=size("linear_num_value_heads"),
        key_size=size("linear_key_head_dim"),
        value_size=size("linear_value_head_dim"),
        convolution=size("linear_conv_kernel_dim"),
    )


def _architecture(config: Mapping[str, Any], where: str) -> str:
    named = config.get("architectures") or []
    architecture = str(named[0]) if named else "none"
    experts = next((name for name in EXPERTS if (config.get(name) or 0) != 0), None)
    if experts:
        raise PlanError(
            f"{where} describes a mixture of experts ({experts} {config[experts]}), which the planner does not "
            "support; plan a dense model."
        )
    for key, attention in OTHER_ATTENTION.items():
        if config.get(key) and not (key == "linear_num_value_heads" and architecture in HYBRIDS):
            value = "" if isinstance(config[key], Mapping) else f" {config[key]}"
            raise PlanError(
                f"{where} describes {attention} ({key}{value}), which the planner does not support; plan a model with "
                "full or sliding-window attention."
            )
    if architecture not in MLP_MATRICES:
        raise PlanError(
            f"{where}: the architecture {architecture} is not supported by the planner; use one of "
            f"{', '.join(MLP_MATRICES)}."
        )
    return architecture


def _windows(config: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, tuple[int, ...]]:
    """The window, and the layers that have one."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return 0, ()
    kinds = config.get("layer_types")
    if kinds:
        has_window = ["sliding" in str(kind) for kind in kinds[:layers]]
    elif architecture == "Gemma2ForCausalLM":
        has_window = [index % 2 == 0 for index in range(layers)]
    elif architecture in GEMMA3:
        pattern = config.get("sliding_window_pattern") or GEMMA3_PATTERN
        has_window = [(index + 1) % pattern != 0 for index in range(layers)]
    else:
        begin = config.get("max_window_layers", 0) if config.get("use_sliding_window") else 0
        has_window = [index >= begin for index in range(layers)]
    return int(window), tuple(index for index, windowed in enumerate(has_window) if windowed)


def _scaling(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The kind of RoPE scaling, and its entry. The kind is empty without scaling."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or ""
    return (str(kind) if scaling.get("factor") else ""), scaling


def _positions(config: Mapping[str, Any], architecture: str, positions: int) -> int:
    """The longest context that the model can be served with."""
    kind, scaling = _scaling(config)
    if not kind or kind in SCALED_ALREADY or architecture in GEMMA3:
        return positions
    factor = float(scaling["factor"])
    if kind == "yarn":
        return int(scaling.get("original_max_position_embeddings", positions) * factor)
    return int(positions * factor)
