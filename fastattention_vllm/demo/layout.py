"""Where things live in the residual stream."""

import math
from dataclasses import dataclass

from fastattention_vllm.demo.codes import PRESENCE
from fastattention_vllm.demo.spec import DemoModelSpec


@dataclass(frozen=True)
class Layout:
    """Residual dims of a model: H heads, codewords of m coordinates.

    constant          1      the same in every token
    ends_answer       1      1 for numbers and "unknown", else 0
    wants_space       1      1 if an answer here starts with a space, else 0
    number, name      m, m   codeword of the token itself, 0 if it is none
    verdict           m      what all heads agree on; the last MLP writes it, lm_head reads it
    inbox h           m      what the attention of this layer wrote for head h
    state h           m      what the chain of head h knows; the MLP moves inbox h here
    """

    heads: int
    code: int

    constant = 0
    ends_answer = 1
    wants_space = 2

    @classmethod
    def of(cls, spec: DemoModelSpec) -> "Layout":
        """The layout of a model of this shape."""
        return cls(spec.num_heads, spec.code_length)

    @property
    def number(self) -> slice:
        return slice(3, 3 + self.code)

    @property
    def name(self) -> slice:
        return self._after(self.number)

    @property
    def verdict(self) -> slice:
        return self._after(self.name)

    def inbox(self, head: int) -> slice:
        start = self.verdict.stop + head * self.code
        return slice(start, start + self.code)

    def state(self, head: int) -> slice:
        start = self.verdict.stop + (self.heads + head % self.heads) * self.code
        return slice(start, start + self.code)

    @property
    def is_number(self) -> int:
        """The dim which is 1 for numbers, else 0."""
        return self.number.start + PRESENCE

    @property
    def hidden_size(self) -> int:
        """All of the above, rounded up to a multiple of 64 and of the heads."""
        used = self.verdict.stop + 2 * self.heads * self.code
        unit = math.lcm(64, self.heads)
        return -(-used // unit) * unit

    def _after(self, block: slice) -> slice:
        return slice(block.stop, block.stop + self.code)
