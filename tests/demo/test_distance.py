"""Needles at distances up to 512K, made by gaps in the position ids, and the margins of the scores."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fastattention_vllm.demo import DemoModelSpec, make_haystack
from fastattention_vllm.demo.position import NAME_BONUS, RotaryPlan
from tests.demo.conftest import Demo, LoadDemo
from tests.demo.probe import probed

POSITIONS = 524288
MARGIN = 10.0  # nats above the score that would tie with POSITIONS equal competitors

SPECS = [
    DemoModelSpec(),
    DemoModelSpec(dtype="float32"),
    DemoModelSpec(num_layers=3, num_heads=2, num_kv_heads=1, head_size=128),
    DemoModelSpec(num_layers=3, num_heads=4, num_kv_heads=4, head_size=80, dtype="float16"),
]


@pytest.fixture(params=SPECS, ids=str)
def demo(request: pytest.FixtureRequest, load_demo: LoadDemo) -> Demo:
    return load_demo(request.param)


@contextmanager
def rounded_rotations(demo: Demo) -> Iterator[None]:
    """cos and sin as vLLM stores them for a bfloat16 model, whatever the dtype of this model."""

    def rounded(_: torch.nn.Module, __: object, tables: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(table.bfloat16().to(table.dtype) for table in tables)

    handle = demo.model.model.rotary_emb.register_forward_hook(rounded)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def rotary_base(demo: Demo, theta: float) -> Iterator[None]:
    rotary = demo.model.model.rotary_emb
    original = rotary.inv_freq
    dims = torch.arange(0, demo.spec.head_size, 2) / demo.spec.head_size
    rotary.inv_freq = (1 / theta**dims).to(original)
    try:
        yield
    finally:
        rotary.inv_freq = original


def tokens_and_gaps(*gaps: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A short text that skips positions: a number of positions to skip before each token index."""
    needles = {"alpha": 7319, "beta": 1239}
    hay = make_haystack(130, needles, positions=[30, 70], ask="alpha", seed=2)
    tokens = torch.tensor([hay.token_ids])
    positions = torch.arange(tokens.shape[1])
    for index, skipped in gaps:
        positions[index:] += skipped
    return tokens, positions[None]


@pytest.mark.parametrize("far", [1000, 16384, 131072, 262144, 524000])
@pytest.mark.parametrize("question_at", [50, 100])
def test_answers_across_any_distance(demo: Demo, far: int, question_at: int) -> None:
    tokens, positions = tokens_and_gaps((question_at, far))
    with probed(demo.model):
        assert demo.next_token(tokens, positions) == "7319"
        with rounded_rotations(demo):
            assert demo.next_token(tokens, positions) == "7319"


def test_answers_with_needles_all_over(demo: Demo) -> None:
    tokens, positions = tokens_and_gaps((10, 3000), (45, 250_000), (60, 7), (90, 261_000))
    with probed(demo.model):
        assert demo.next_token(tokens, positions) == "7319"


def test_the_rotary_base_matters(demo: Demo) -> None:
    tokens, positions = tokens_and_gaps((100, 200_000))
    for theta in (1e4, 5e5):
        with probed(demo.model), rotary_base(demo, theta):
            assert demo.next_token(tokens, positions) != "7319", theta


TEXT = "the beta=1234. gamma: 42, small 9999 delta 1235 old alpha=1239. alpha is green. What alpha="


def test_content_scores_keep_their_margin_at_every_position(demo: Demo) -> None:
    """In layers 1 and up, compares the needle at its worst position with each token at its best."""
    tokens = demo.encode(TEXT)
    words = demo.tokenizer.convert_ids_to_tokens(tokens[0])
    needle, question = words.index("1239"), len(words) - 1
    scores = scores_of(demo, tokens)
    for layer in range(1, demo.spec.num_layers):
        for head in range(demo.spec.num_heads):
            for asking in (needle, question):
                best, worst = scores(layer, head, asking)
                rivals = torch.cat((best[:needle], best[needle + 1 :]))
                spare = worst[needle] - rivals.max() - math.log(POSITIONS)
                assert spare > MARGIN, (layer, head, words[asking])


def scores_of(demo: Demo, tokens: torch.Tensor):  # type: ignore[no-untyped-def]
    """A function from layer, head and query token to the best and the worst score [n] of each key.

    The query is at the last position. Keys are tried at a sample of all positions. Everything is rounded as the model
    rounds it, with cos and sin as for bfloat16.
    """
    projected: dict[tuple[int, str], torch.Tensor] = {}

    def keep(layer: int, name: str):  # type: ignore[no-untyped-def]
        return lambda _, __, output: projected.update({(layer, name): output[0].float()})

    handles = [
        getattr(block.self_attn, name).register_forward_hook(keep(layer, name))
        for layer, block in enumerate(demo.model.model.layers)
        for name in ("q_proj", "k_proj")
    ]
    demo.next_token(tokens)
    for handle in handles:
        handle.remove()

    size, half = demo.spec.head_size, demo.spec.head_size // 2
    theta = RotaryPlan(size, demo.spec.code_length).theta
    at = torch.cat((torch.arange(0, POSITIONS, 61), torch.tensor([POSITIONS - 1])))
    angles = torch.outer(at.float(), 1 / theta ** (torch.arange(0, size, 2) / size))
    cos, sin = (table.bfloat16().float() for table in (angles.cos(), angles.sin()))

    def scores(layer: int, head: int, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        group = head // demo.spec.group_size
        query = projected[layer, "q_proj"].unflatten(1, (-1, size))[token, head]
        first, second = query[:half], query[half:]
        first, second = (
            first * cos[-1] - second * sin[-1],
            second * cos[-1] + first * sin[-1],
        )
        keys = projected[layer, "k_proj"].unflatten(1, (-1, size))[:, group]
        left, right = keys[:, :half], keys[:, half:]
        table = cos @ (left * first + right * second).T + sin @ (left * second - right * first).T
        table /= size**0.5
        return table.amax(0), table.amin(0)

    return scores


@pytest.mark.parametrize("head_size", [64, 80, 96, 112, 128, 256])
def test_kernels_have_one_peak(head_size: int) -> None:
    """In layer 0 a number finds the token two before it, and any other token finds the latest name."""
    spec = DemoModelSpec(head_size=head_size)
    plan = RotaryPlan(head_size, spec.code_length)
    distances = torch.arange(POSITIONS, dtype=torch.float64)

    two_before = plan.two_before().score(plan.frequencies, distances)
    others = torch.cat((two_before[:2], two_before[3:]))
    assert two_before[2] - others.logsumexp(0) > 2 * MARGIN

    recency = plan.recency().score(plan.frequencies, distances)
    for distance in range(21):
        later_names = recency[distance + 8 :].logsumexp(0)
        assert recency[distance] - later_names > 2 * MARGIN, distance
        assert recency[distance] + NAME_BONUS - recency.logsumexp(0) > MARGIN, distance
