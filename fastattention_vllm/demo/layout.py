"""Layout of the residual stream: which dims hold what."""

import math
from dataclasses import dataclass

from fastattention_vllm.demo.codes import PRESENCE
from fastattention_vllm.demo.spec import DemoModelSpec

_FLAGS = 3


@dataclass(frozen=True)
class Layout:
    """Residual dims of a model with H heads and codewords of m coordinates.

    constant          1      the same in every token
    ends_answer       1      1 for numbers and "unknown", else 0
    wants_space       1      1 if an answer here starts with a space, else 0
    number, name      m, m   codeword of the token itself, or 0 if it has none
    verdict           m      what all heads agree on; written by the last MLP, read by lm_head
    inbox h           m      what this layer's attention wrote for head h
    state h           m      what the chain of head h has found; the MLP moves inbox h here
    """

    heads: int
    code: int
    min_hidden: int = 0

    constant = 0
    ends_answer = 1
    wants_space = 2

    @classmethod
    def of(cls, spec: DemoModelSpec) -> "Layout":
        """Return the layout of a model of this shape."""
        return cls(spec.num_heads, spec.code_length, spec.min_hidden_size)

    @property
    def number(self) -> slice:
        return self._block(0)

    @property
    def name(self) -> slice:
        return self._block(1)

    @property
    def verdict(self) -> slice:
        return self._block(2)

    def inbox(self, head: int) -> slice:
        """The inbox of a head from 0 to H - 1."""
        return self._block(3 + head)

    def state(self, head: int) -> slice:
        """The state of a head; the index is taken modulo H."""
        return self._block(3 + self.heads + head % self.heads)

    def presence(self, block: slice) -> int:
        """The dim of a block that is 1 when the block holds a codeword."""
        return int(block.start) + PRESENCE

    @property
    def hidden_size(self) -> int:
        """The number of all dims above, rounded up to a multiple of 64 and of the number of heads."""
        used = max(_FLAGS + (3 + 2 * self.heads) * self.code, self.min_hidden)
        unit = math.lcm(64, self.heads)
        return -(-used // unit) * unit

    def _block(self, index: int) -> slice:
        start = _FLAGS + index * self.code
        return slice(start, start + self.code)
