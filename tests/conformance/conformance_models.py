"""Configurations of the models that upstream's attention tests name, so that nothing is downloaded.

The tests read heads, head size, dtype and window from the configurations and create random tensors. Each configuration
is in a folder named after the model, so the name is a path when tests run from the parent folder. Some architectures
are stand-ins, where the genuine one would add parts that do not concern attention (experts).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": 128,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Meta-Llama-3-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    "microsoft/Phi-tiny-MoE-instruct": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "sliding_window": 2047,
    },
    "google/embeddinggemma-300m": {
        "architectures": ["Gemma3TextModel"],
        "model_type": "gemma3_text",
        "hidden_size": 768,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 2048,
        "sliding_window": 512,
        "use_bidirectional_attention": True,
    },
}


def write(folder: Path) -> None:
    for name, config in CONFIGS.items():
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(_COMMON | config, indent=1))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
