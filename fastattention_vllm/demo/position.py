"""Rotary position embedding as a ruler: which pairs measure distance, and how.

Pair i of a head (dims i and i + D/2) turns by f_i = theta^(-2i/D) per position. theta is chosen so
that the pairs form two groups:

* the *ladder*: fast pairs, from 1 rad per position down to about 1e-7, which measure distance;
* the *content* pairs: the last m/2, slower than 1e-8. After a million positions they have turned by
  0.01 rad, so their m dims compare codewords almost as if there were no rotation.

The pair between the two groups is slow enough to hold a flag.

Let a key be the unit vector at angle psi in each ladder pair, and let a query have amplitude a_i at
angle phi_i + psi. At distance d (query position - key position) their score is the *kernel*

    sum_i a_i cos(f_i d + phi_i).

The model needs two kernels. Both are given per half decade of frequency and interpolated, because
the density of the ladder depends on the head size. The recency kernel was found by a linear
program: it falls as steeply as possible over distances 0 to 24, and no later distance, up to half
a million, comes near the scores there. psi is free. It differs by layer and KV head, so that keys
read from the wrong place match nothing.
"""

import math
from dataclasses import dataclass

import torch

_SLOWEST = 1e-8  # rad per position of the first content pair

# Amplitudes, indexed by -log10(frequency).
_TWO_BEFORE = {0: 110.0, 0.25: 90.0, 0.5: 60.0, 1: 30.0, 2: 15.0, 5: 12.0, 7: 10.0}
_RECENCY = {0.75: 0.0, 1: 13.0, 1.5: 129.0, 2: 90.0, 2.5: 67.0, 3: 46.0}
_RECENCY |= {3.5: 43.0, 4: 41.0, 5: 40.0, 5.25: 20.0, 5.5: 0.0}
_RECENCY_PHASE = {1: math.pi / 2, 1.5: 0.4, 2: 0.0}

NAME_BONUS = 110.0
"""Added to the recency kernel for a name. If the sum is too low, no name is within reach and nothing is found."""


@dataclass(frozen=True)
class Kernel:
    """Amplitudes and phases, one per ladder pair."""

    amplitudes: torch.Tensor
    phases: torch.Tensor

    def score(self, frequencies: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
        """The kernel at each distance."""
        angles = distances[:, None] * frequencies[: len(self.phases)] + self.phases
        return (torch.cos(angles) * self.amplitudes).sum(-1)


@dataclass(frozen=True)
class RotaryPlan:
    """The purpose of each dim of a head.

    Args:
        head_size: D.
        code_length: m, at most D/2.
    """

    head_size: int
    code_length: int

    @property
    def flag_pair(self) -> int:
        """The pair between the ladder pairs before it and the content pairs after it."""
        return self.head_size // 2 - self.code_length // 2 - 1

    @property
    def theta(self) -> float:
        """The rope_theta for which the first content pair turns by `_SLOWEST`."""
        return float((1 / _SLOWEST) ** (self.head_size / (2 * (self.flag_pair + 1))))

    @property
    def frequencies(self) -> torch.Tensor:
        """[D/2] rad per position."""
        pairs = torch.arange(self.head_size // 2, dtype=torch.float64)
        return self.theta ** (-2 * pairs / self.head_size)

    @property
    def content_dims(self) -> torch.Tensor:
        """[m] dims that hardly turn."""
        half = self.head_size // 2
        pairs = torch.arange(self.flag_pair + 1, half)
        return torch.cat((pairs, pairs + half))

    def ladder_vector(self, amplitudes: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """The head vector [D] with these amplitudes and angles in the ladder pairs."""
        vector = torch.zeros(self.head_size, dtype=torch.float64)
        vector[: self.flag_pair] = amplitudes * torch.cos(angles)
        half = self.head_size // 2
        vector[half : half + self.flag_pair] = amplitudes * torch.sin(angles)
        return vector

    def two_before(self) -> Kernel:
        """A kernel that peaks at distance 2 and nowhere else."""
        return Kernel(self._amplitudes(_TWO_BEFORE), -2 * self.frequencies[: self.flag_pair])

    def recency(self) -> Kernel:
        """A kernel that falls by 3 or more per position at first, and stays low after that."""
        phases = _interpolate(_RECENCY_PHASE, self._decades())
        return Kernel(self._amplitudes(_RECENCY), phases)

    def _decades(self) -> torch.Tensor:
        return -torch.log10(self.frequencies[: self.flag_pair])

    def _amplitudes(self, per_half_decade: dict[float, float]) -> torch.Tensor:
        decades = self._decades()
        return _interpolate(per_half_decade, decades) * (decades[1] - decades[0]) / 0.5


def _interpolate(table: dict[float, float], at: torch.Tensor) -> torch.Tensor:
    """Piecewise linear through the table, constant beyond its ends."""
    x = torch.tensor(list(table), dtype=torch.float64)
    y = torch.tensor(list(table.values()), dtype=torch.float64)
    right = torch.searchsorted(x, at.contiguous()).clamp(1, len(x) - 1)
    left = right - 1
    share = ((at - x[left]) / (x[right] - x[left])).clamp(0, 1)
    return y[left] + share * (y[right] - y[left])
