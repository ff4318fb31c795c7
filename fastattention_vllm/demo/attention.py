"""Attention weights of the demo model."""

from dataclasses import dataclass
from functools import cached_property

import torch

from fastattention_vllm.demo.codes import name_codes
from fastattention_vllm.demo.layout import Layout
from fastattention_vllm.demo.position import NAME_BONUS, RotaryPlan
from fastattention_vllm.demo.spec import DemoModelSpec

# Scores are in nats. ln(524288) is 13.2; the smallest gap between a target and any competitor is 40.
_NAME_MATCH = 80.0
_NUMBER_BONUS = 40.0
_NUMBER_MATCH = 160.0
_NUMBER_PENALTY = 40.0


def layer_sign(layer: int) -> float:
    """The sign of the codewords that this layer writes.

    It alternates. If a layer fails to replace a state, the next layer sees the negative of a codeword,
    which matches nothing.
    """
    return -1.0 if layer % 2 else 1.0


@dataclass(frozen=True)
class SignedPermutation:
    """A secret encoding of codewords: only a reader with the same permutation and signs recovers them."""

    order: torch.Tensor
    signs: torch.Tensor

    @classmethod
    def draw(cls, length: int, generator: torch.Generator) -> "SignedPermutation":
        """Draw a random signed permutation."""
        order = torch.randperm(length, generator=generator)
        signs = 1.0 - 2.0 * torch.randint(0, 2, (length,), generator=generator).double()
        return cls(order, signs)

    def rows(self, matrix: torch.Tensor) -> torch.Tensor:
        """Permute the rows of the matrix [length, n] and apply the signs."""
        return self.signs[:, None] * matrix[self.order]


def _generator(layer: int, group: int) -> torch.Generator:
    return torch.Generator().manual_seed(1 + layer * 1009 + group)


class AttentionBuilder:
    """Projections of one layer, as float64 matrices [out, in]."""

    def __init__(self, spec: DemoModelSpec, layer: int) -> None:
        self.spec = spec
        self.layer = layer
        self.layout = Layout.of(spec)
        self.plan = RotaryPlan(spec.head_size, spec.code_length)

    def weights(self) -> dict[str, torch.Tensor]:
        """q_proj [H D, hidden], k_proj and v_proj [G D, hidden], o_proj [hidden, H D]."""
        queries: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        keys, values = [], []
        for group in range(self.spec.num_kv_heads):
            head_weights = _GroupWeights(self, group)
            heads = range(group * self.spec.group_size, (group + 1) * self.spec.group_size)
            keys.append(head_weights.key())
            values.append(head_weights.value())
            queries.extend(head_weights.query(head) for head in heads)
            outputs.extend(head_weights.output(head) for head in heads)
        return {
            "q_proj": torch.cat(queries),
            "k_proj": torch.cat(keys),
            "v_proj": torch.cat(values),
            "o_proj": torch.cat(outputs, dim=1),
        }


class _GroupWeights:
    """Weights of one KV head of a layer and of the query heads that share it."""

    def __init__(self, builder: AttentionBuilder, group: int) -> None:
        self.spec = builder.spec
        self.layer = builder.layer
        self.layout = builder.layout
        self.plan = builder.plan
        self.group = group
        self.root = self.spec.head_size**0.5  # attention divides scores by it
        length = self.spec.code_length
        self.key_cipher = SignedPermutation.draw(length, _generator(self.layer, -1))
        # Encodings of different groups are orthogonal, so a codeword read with another group's key does not match
        # itself.
        self.key_cipher.signs.mul_(name_codes(length)[group])
        generator = _generator(self.layer, group)
        self.value_cipher = SignedPermutation.draw(length, generator)
        self.key_angles = 2 * torch.pi * torch.rand(self.plan.flag_pair, generator=generator, dtype=torch.float64)

    @cached_property
    def identity(self) -> torch.Tensor:
        return torch.eye(self.spec.code_length, dtype=torch.float64)

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self.spec.head_size, self.layout.hidden_size, dtype=torch.float64)

    def query(self, head: int) -> torch.Tensor:
        """[D, hidden]: what this head looks for."""
        weight = self._zeros()
        flag = self.plan.flag_pair
        constant, is_number = self.layout.constant, self.layout.presence(self.layout.number)
        if self.layer == 0:
            for kernel, present in ((self.plan.recency(), False), (self.plan.two_before(), True)):
                angles = kernel.phases + self.key_angles
                vector = self.plan.ladder_vector(kernel.amplitudes, angles)
                if present:
                    weight[:, is_number] += vector
                else:
                    vector[flag] = NAME_BONUS
                    weight[:, constant] += vector
                    weight[:, is_number] -= vector
            return weight
        state = self.layout.state(head + 1)
        sign = layer_sign(self.layer - 1)
        match = _NAME_MATCH if self.layer == 1 else _NUMBER_MATCH
        amplitude = (match / self.spec.code_length) ** 0.5 * self.root**0.5
        weight[self.plan.content_dims, state] = amplitude * sign * self.key_cipher.rows(self.identity)
        if self.layer == 1:
            # Queries that have a name prefer numbers; queries without a name avoid them.
            weight[flag, self.layout.presence(state)] = 2 * _NUMBER_BONUS * sign
            weight[flag, constant] = -_NUMBER_BONUS
        else:
            weight[flag, constant] = -_NUMBER_PENALTY
        return weight

    def key(self) -> torch.Tensor:
        """[D, hidden]: what a position offers to be found by."""
        weight = self._zeros()
        flag = self.plan.flag_pair
        if self.layer == 0:
            ones = torch.full_like(self.key_angles, self.root)
            weight[:, self.layout.constant] = self.plan.ladder_vector(ones, self.key_angles)
            weight[flag, self.layout.presence(self.layout.name)] = self.root
            return weight
        match = _NAME_MATCH if self.layer == 1 else _NUMBER_MATCH
        amplitude = (match / self.spec.code_length) ** 0.5 * self.root**0.5
        code = amplitude * self.key_cipher.rows(self.identity)
        weight[flag, self.layout.presence(self.layout.number)] = self.root
        if self.layer > 1:
            weight[self.plan.content_dims, self.layout.number] = code / 2
            code = code / 2
        # Read other slots than this group's queries do, so that one error cannot corrupt both in the same way.
        size = self.spec.group_size
        for head in range(self.group * size, (self.group + 1) * size):
            state = self.layout.state(head + 1 + size)
            weight[self.plan.content_dims, state] += layer_sign(self.layer - 1) * code / size
        return weight

    def value(self) -> torch.Tensor:
        """[D, hidden]: the codeword of the token, repeated to fill the head."""
        weight = self._zeros()
        source = self.layout.name if self.layer == 0 else self.layout.number
        weight[:, source] = self._spread()
        return weight

    def output(self, head: int) -> torch.Tensor:
        """[hidden, D]: averages the repetitions into the inbox of the head."""
        spread = self._spread()
        weight = self._zeros().T.contiguous()
        weight[self.layout.inbox(head)] = layer_sign(self.layer) * spread.T / spread.abs().sum(0)[:, None]
        return weight

    def _spread(self) -> torch.Tensor:
        """[D, m]: repeats a codeword over all dims of a value."""
        dims = torch.arange(self.spec.head_size) % self.spec.code_length
        return self.value_cipher.rows(self.identity)[dims]
