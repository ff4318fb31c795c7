"""Demo models, built and loaded once per session."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from fastattention_vllm.demo import DemoModelSpec, build_demo_model


@dataclass(frozen=True)
class Demo:
    """A demo model, loaded by transformers."""

    spec: DemoModelSpec
    path: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast

    def encode(self, text: str) -> torch.Tensor:
        """Token ids [1, n] with the begin token."""
        return torch.tensor([self.tokenizer(text).input_ids])

    def next_token(self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None) -> str:
        """The most likely continuation of token ids [1, n], as text."""
        with torch.inference_mode():
            output = self.model(tokens, position_ids=position_ids, use_cache=False, logits_to_keep=1)
        return self.tokenizer.decode(output.logits[0, -1].argmax())

    def generate(self, tokens: torch.Tensor) -> str:
        """Greedy continuation of token ids [1, n], special tokens included."""
        with torch.inference_mode():
            output = self.model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=5)
        return self.tokenizer.decode(output[0, tokens.shape[1] :])


LoadDemo = Callable[[DemoModelSpec], Demo]


@pytest.fixture(scope="session")
def load_demo(tmp_path_factory: pytest.TempPathFactory) -> LoadDemo:
    """A function that builds and loads the model of a spec."""

    @cache
    def load(spec: DemoModelSpec) -> Demo:
        path = build_demo_model(tmp_path_factory.mktemp("demo") / "model", spec)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=spec.torch_dtype).eval()
        return Demo(spec, path, model, AutoTokenizer.from_pretrained(path))

    return load
