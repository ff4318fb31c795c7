"""Small models with every kind of attention, with random shapes, on which engines are compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import torch
from transformers import (
    BloomConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GptOssConfig,
    LagunaConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
)

from fastattention_vllm.placement.kv_size import KvSize
from fastattention_vllm.placement.plan import Layers, Limits, PlacementError, plan
from tests import reference_models as reference
from tests.reference_models import VOCAB, RoundedCache, Rounding, decoder_shape, save_random

FULL, WINDOWED, NARROW = "F", "W", "N"
KIND_NAMES = {FULL: "full_attention", WINDOWED: "sliding_attention"}
MIXED = ("gemma2", "gemma3", "gemma3n", "gpt-oss", "laguna")
"""Model kinds that have both full and windowed layers."""


@dataclass(frozen=True)
class Model:
    """Description of a model. Its printed form recreates it."""

    kind: str
    layers: str
    """One letter per layer: F attends to all tokens, W to a window, and N (only in pangu) to one of another length."""
    heads: tuple[int, ...]
    """Query heads of each layer; they only differ in laguna."""
    kv_heads: int
    head_size: int
    window: int
    seed: int
    shared: int = 0
    """Number of final layers that read the KV cache of an earlier one."""

    def config(self) -> PretrainedConfig:
        shape = decoder_shape(self.heads[0], self.kv_heads, self.head_size, len(self.layers))
        shape["hidden_size"] = 192  # the head counts of the layers must divide this, whatever their size
        if self.kind == "pangu":
            return reference.pangu(self.windows(), **shape)
        kinds = {"layer_types": [KIND_NAMES[letter] for letter in self.layers], "sliding_window": self.window}
        tied = {"tie_word_embeddings": True}
        if self.kind == "llama":
            return LlamaConfig(**shape)
        if self.kind == "mistral":
            return MistralConfig(**shape, sliding_window=self.window)
        if self.kind == "bloom":
            config: BloomConfig = reference.bloom()
            config.n_head, config.n_layer = self.heads[0], len(self.layers)
            config.hidden_size = self.heads[0] * self.head_size
            return config
        if self.kind == "gemma2":
            caps = {"query_pre_attn_scalar": self.head_size, "attn_logit_softcapping": 20.0}
            return Gemma2Config(**shape | tied, **kinds, **caps)
        if self.kind == "gemma3":
            return Gemma3TextConfig(**shape, **kinds, query_pre_attn_scalar=self.head_size)
        if self.kind == "gemma3n":
            return Gemma3nTextConfig(
                **shape | tied,
                **kinds,
                # The embedding of a padding token is zero. vLLM's Gemma-3n divides by its norm, so drafting one gives
                # NaN.
                pad_token_id=None,
                num_kv_shared_layers=self.shared,
                vocab_size_per_layer_input=VOCAB,
                hidden_size_per_layer_input=32,
                altup_num_inputs=2,
                laurel_rank=16,
                activation_sparsity_pattern=[0.0] * len(self.layers),
            )
        if self.kind == "gpt-oss":
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
            # Its experts multiply twice: with larger weights fp32's own rounding exceeds the tolerance.
            size = {"intermediate_size": 64, "initializer_range": 0.08}
            return GptOssConfig(**shape | size, **kinds, **experts)
        assert self.kind == "laguna"
        return LagunaConfig(
            **shape,
            **kinds,
            num_attention_heads_per_layer=list(self.heads),
            num_experts=0,
            mlp_layer_types=["dense"] * len(self.layers),
        )

    def windows(self) -> list[int | None]:
        """Of the layers that have a KV cache."""
        lengths = {FULL: None, WINDOWED: self.window, NARROW: 3 + self.window // 3}
        return [lengths[letter] for letter in self.own]

    @property
    def own(self) -> str:
        """The layers that have a KV cache (and do not share another layer's)."""
        return self.layers[: len(self.layers) - self.shared]

    def path(self, root: Path) -> Path:
        """The model's folder, written by the first caller."""
        path = root / "-".join(str(part) for part in (self.kind, self.layers, *self.heads, *self._rest()))
        return path if path.exists() else save_random(self.config(), path, self.seed)

    def _rest(self) -> tuple[int, ...]:
        return self.kv_heads, self.head_size, self.window, self.seed, self.shared

    def kv_size(self, block_size: int, tokens_per_step: int) -> KvSize:
        """The KV size in blocks: each layer has one byte per block."""
        windows = tuple(window for window in self.windows() if window is not None)
        full = self.own.count(FULL)
        return KvSize(block_size, 1, full, len(windows), tokens_per_step=tokens_per_step, windows=windows)

    def possible_host_layers(self, one_table: bool = False) -> list[tuple[int, ...]]:
        """All selections that are accepted: a layer of each kind stays on the device, and no block tables are added.

        ``one_table``: full and windowed layers share one, which a full layer keeps.
        """
        windows = dict(enumerate(self.windows()))
        full = tuple(index for index, window in windows.items() if window is None)
        lengths = {index: window for index, window in windows.items() if window is not None}
        last = {window: index for index, window in windows.items()}
        fixed = frozenset(last.values()) if self.shared else frozenset[int]()
        layers, size = Layers(full, tuple(lengths), fixed, tuple(lengths.values())), self.kv_size(16, 1)
        if one_table and full:
            layers = Layers(tuple(windows), fixed=fixed, promoted=frozenset(lengths))
            size = replace(size, full_layers=len(windows), windowed_layers=0, windows=())
        found = []
        for count in range(1, len(self.own)):
            for host in combinations(range(len(self.own)), count):
                try:
                    plan(layers, size, host, Limits(0, 0, 0))
                except PlacementError:
                    continue
                found.append(host)
        return found


class Forced:
    """Hugging Face's fp32 log-probabilities of every token after every prefix of a text."""

    def __init__(self, path: Path) -> None:
        self.model = reference.load(path)

    def logprobs(self, text: Sequence[int], rounding: Rounding | None = None) -> torch.Tensor:
        """``[tokens, vocabulary]``: row i is the distribution after token i, with all keys and values rounded."""
        cache = RoundedCache(self.model.config, rounding, rounding) if rounding else None
        with torch.no_grad():
            return self.model(torch.tensor([text]), past_key_values=cache).logits[0].float().log_softmax(-1)


def draw_model(numbers: random.Random) -> Model:
    kind = numbers.choice(["llama", "mistral", "bloom", *MIXED, *MIXED])
    count = numbers.randint(2, 5)
    kv_heads = numbers.choice([1, 2])
    heads = [kv_heads * numbers.choice([1, 2, 3, 4])] * count
    head_size = numbers.choice([32, 64, 80])
    layers, shared = FULL * count, 0
    if kind == "mistral":
        layers = WINDOWED * count
    elif kind == "bloom":
        kv_heads, head_size = numbers.choice([4, 6]), 32
        heads = [kv_heads] * count
    elif kind == "gemma3n":
        # The sharing layers read the last layer of their kind, and vLLM expects those at the end in this order.
        shared = numbers.randint(1, 3)
        own = letters(numbers, numbers.randint(0, 3)) + WINDOWED + FULL
        layers = own + letters(numbers, shared)
        heads = heads[:1] * len(layers)
    elif kind in MIXED:
        # Half of the draws have equal numbers of both kinds, many of which may be on the host.
        count = numbers.choice([2, 4, 4, 5, 6, 6])
        half = count // 2
        in_order = FULL * half + WINDOWED * half + letters(numbers, count % 2)
        layers = "".join(numbers.sample(in_order, count))
        if kind == "gpt-oss":  # vLLM supports only this order, whatever the configuration says
            layers = (WINDOWED + FULL) * half + WINDOWED * (count % 2)
        heads = [kv_heads * numbers.choice([1, 2, 3, 4]) for _ in layers] if kind == "laguna" else heads[:1] * count
    window = numbers.choice([reference.WINDOW, 7, 100])
    return Model(kind, layers, tuple(heads), kv_heads, head_size, window, numbers.randint(0, 3), shared)


def draw_several_windows(numbers: random.Random) -> Model:
    """A model with windows of two lengths, with or without full layers."""
    kinds = numbers.choice([WINDOWED + NARROW, FULL + WINDOWED + NARROW])
    layers = "".join(numbers.sample(kinds * 2, len(kinds) * 2))
    kv_heads, window = numbers.choice([1, 2]), numbers.choice([reference.WINDOW, 7, 100])
    heads = (kv_heads * numbers.choice([1, 2, 3, 4]),) * len(layers)
    return Model("pangu", layers, heads, kv_heads, numbers.choice([32, 64, 80]), window, numbers.randint(0, 3))


def letters(numbers: random.Random, count: int) -> str:
    return "".join(numbers.choice([FULL, WINDOWED]) for _ in range(count))
