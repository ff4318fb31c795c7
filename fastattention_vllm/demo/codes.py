"""Codewords of +1 and -1 for the names and numbers that the demo model knows.

Both families come from Reed-Muller codes of length m = 2^r, evaluated at the m points of
GF(2)^r, so that any two words are far apart by construction:

* names: the m linear forms (the rows of a Hadamard matrix), pairwise orthogonal;
* numbers: quadratic forms with a quadratic part, RM(2, r): two different words agree in at most
  3/4 of the coordinates, that is, their inner product is at most m/2.

No form has a constant term, so coordinate 0 (the form at the point 0) is +1 in every word.
The model uses this coordinate as a presence flag: it is 0 where a token has no word.
"""

from itertools import combinations

import torch

from fastattention_vllm.demo.vocabulary import NAMES, NUMBERS

PRESENCE = 0
"""The coordinate that is +1 in every codeword."""


def _monomials(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values in {0, 1} of the linear [r, length] and quadratic [r(r-1)/2, length] monomials."""
    rank = length.bit_length() - 1
    points = torch.arange(length)
    linear = torch.stack([(points >> bit) & 1 for bit in range(rank)])
    quadratic = torch.stack([linear[a] * linear[b] for a, b in combinations(range(rank), 2)])
    return linear, quadratic


def _words(messages: torch.Tensor, monomials: torch.Tensor) -> torch.Tensor:
    """The +-1 words [count, length] of the sums of monomials that the message bits select."""
    bits = (messages[:, None] >> torch.arange(len(monomials))) & 1
    return 1.0 - 2.0 * ((bits @ monomials) % 2).double()


def name_codes(length: int) -> torch.Tensor:
    """The codewords [len(NAMES), length] of the key names, row i for NAMES[i]."""
    linear, _ = _monomials(length)
    return _words(torch.arange(len(NAMES)), linear)


def number_codes(length: int) -> torch.Tensor:
    """The codewords [len(NUMBERS), length] of the digit strings, row i for NUMBERS[i]."""
    linear, quadratic = _monomials(length)
    index = torch.arange(len(NUMBERS))
    quadratic_forms = 2 ** len(quadratic) - 1  # without 0, so that no number equals a name
    return _words(1 + index % quadratic_forms, quadratic) * _words(index // quadratic_forms, linear)
