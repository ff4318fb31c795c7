"""MLP weights of the demo model.

Each MLP computes down(silu(gate) * up) and contains two kinds of neuron:

* *linear*: the gate is a large constant, so the neuron passes a scaled `up` on;
* *ramp*: a pair with gates k (x - low) and k (x - high) and a constant `up`. The difference of the
  pair is 0 for x below `low` and 1 above `high`. Two ramps, of x and of -x, restore a noisy or
  weakened codeword coordinate to exactly -1, 0 or +1.
"""

from dataclasses import dataclass

import torch

from fastattention_vllm.demo.attention import layer_sign
from fastattention_vllm.demo.layout import Layout
from fastattention_vllm.demo.spec import DemoModelSpec

_OPEN = 16.0  # silu(16) is 16 to within 2e-6


@dataclass(frozen=True)
class _Ramp:
    low: float
    high: float
    steepness: float


class MlpBuilder:
    """Projections of one MLP, as float64 matrices [out, in]."""

    def __init__(self, spec: DemoModelSpec) -> None:
        self.spec = spec
        self.layout = Layout.of(spec)
        shape = (spec.intermediate_size, self.layout.hidden_size)
        self._gate = torch.zeros(shape, dtype=torch.float64)
        self._up = torch.zeros(shape, dtype=torch.float64)
        self._down = torch.zeros(shape, dtype=torch.float64).T.contiguous()

    def weights(self) -> dict[str, torch.Tensor]:
        """gate_proj and up_proj [neurons, hidden], down_proj [hidden, neurons]."""
        return {"gate_proj": self._gate, "up_proj": self._up, "down_proj": self._down}

    def add_update(self) -> None:
        """Replace each state with its restored inbox, and clear the inbox.

        Neurons are ordered by head because tensor parallelism splits them in this order. The low threshold
        turns a value that lost one of its repetitions into 0.
        """
        ramp = _Ramp(0.85, 0.93, 200.0)
        neuron = 0
        for head in range(self.spec.num_heads):
            inbox, state = self.layout.inbox(head), self.layout.state(head)
            for source, target in zip(_dims(inbox), _dims(state), strict=True):
                self._add_restoring_copy(neuron, {source: 1.0}, target, ramp)
                self._add_clear(neuron + 4, source)
                self._add_clear(neuron + 5, target)
                neuron += 6

    def add_verdict(self) -> None:
        """Write what all inboxes agree on. A coordinate becomes 0 if any head abstains on it."""
        heads = self.spec.num_heads
        ramp = _Ramp(1 - 0.6 / heads, 1 - 0.3 / heads, max(128.0, 40.0 * heads))
        sign = layer_sign(self.spec.num_layers - 1)
        for index, target in enumerate(_dims(self.layout.verdict)):
            # Spread evenly over all neurons, so that every tensor-parallel rank gets a share.
            inboxes = {self.layout.inbox(h).start + index: sign / heads for h in range(heads)}
            self._add_restoring_copy(index * 6 * heads, inboxes, target, ramp)

    def _add_restoring_copy(self, neuron: int, source: dict[int, float], target: int, ramp: _Ramp) -> None:
        """Neurons `neuron` to `neuron + 3`: target += ramp(source) - ramp(-source)."""
        constant = self.layout.constant
        height = 1 / (ramp.steepness * (ramp.high - ramp.low))
        for side in (1.0, -1.0):
            for threshold, slope in ((ramp.low, height), (ramp.high, -height)):
                for dim, share in source.items():
                    self._gate[neuron, dim] = ramp.steepness * side * share
                self._gate[neuron, constant] = -ramp.steepness * threshold
                self._up[neuron, constant] = 1.0
                self._down[target, neuron] = side * slope
                neuron += 1

    def _add_clear(self, neuron: int, dim: int) -> None:
        """One neuron: dim -= dim."""
        self._gate[neuron, self.layout.constant] = _OPEN
        self._up[neuron, dim] = 1.0
        self._down[dim, neuron] = -1 / _OPEN


def _dims(block: slice) -> range:
    return range(block.start, block.stop)
