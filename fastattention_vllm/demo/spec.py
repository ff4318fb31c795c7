"""The parameters of the demo model."""

from dataclasses import dataclass
from typing import Final

import torch

DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
MAX_HEADS: Final = 32
MAX_HEADS_BFLOAT16: Final = 25
MAX_POSITIONS: Final = 1 << 20


@dataclass(frozen=True)
class DemoModelSpec:
    """Shape of a demo model. Every accepted combination answers correctly.

    Raises:
        ValueError: The construction does not support a value or a combination of values.
    """

    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    dtype: str = "bfloat16"
    max_position_embeddings: int = 524288
    min_hidden_size: int = 0
    """Hidden size. The construction needs a certain width; a larger one is filled with zeros and costs as much time as
    a real model of that size.
    """
    min_intermediate_size: int = 0

    def __post_init__(self) -> None:
        if self.num_layers < 2:
            raise ValueError(
                f"num_layers is {self.num_layers}, but the model needs at least 2 layers: "
                "one to tag numbers with names and one to retrieve them."
            )
        if not 1 <= self.num_heads <= MAX_HEADS:
            raise ValueError(f"num_heads is {self.num_heads}, but it must be from 1 to {MAX_HEADS}.")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads is {self.num_kv_heads}, but it must divide num_heads ({self.num_heads}).")
        if self.head_size % 16 or not 64 <= self.head_size <= 256:
            raise ValueError(f"head_size is {self.head_size}, but it must be a multiple of 16 from 64 to 256.")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, but it must be one of {', '.join(DTYPES)}.")
        if self.dtype == "bfloat16" and self.num_heads > MAX_HEADS_BFLOAT16:
            raise ValueError(
                f"num_heads is {self.num_heads}, but bfloat16 is precise enough for only {MAX_HEADS_BFLOAT16} heads; "
                "use float16 or float32."
            )
        if not 64 <= self.max_position_embeddings <= MAX_POSITIONS:
            raise ValueError(
                f"max_position_embeddings is {self.max_position_embeddings}, but it must be from 64 to {MAX_POSITIONS}."
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return DTYPES[self.dtype]

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def code_length(self) -> int:
        """m, the length of a codeword: 32, or 64 for heads of 256, so that values repeat it."""
        return 64 if self.head_size == 256 else 32

    @property
    def intermediate_size(self) -> int:
        """Neurons per MLP: six per slot coordinate."""
        return max(6 * self.num_heads * self.code_length, self.min_intermediate_size)
