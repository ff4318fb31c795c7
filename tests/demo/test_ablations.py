"""No part of the demo model can fail unnoticed.

Each test damages one part and expects a wrong answer.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fastattention_vllm.demo import DemoModelSpec, make_haystack
from tests.demo.conftest import Demo, LoadDemo
from tests.demo.probe import Edit, probed

SPECS = [
    DemoModelSpec(),
    DemoModelSpec(num_layers=2, num_heads=2, num_kv_heads=2, dtype="float32"),
    DemoModelSpec(num_layers=5, num_heads=4, num_kv_heads=1),
    DemoModelSpec(num_layers=3, num_heads=4, num_kv_heads=4, head_size=128, dtype="float16"),
]
NEEDLE = 48
LENGTH = 112
PAGE = 16


@pytest.fixture(params=SPECS, ids=str)
def demo(request: pytest.FixtureRequest, load_demo: LoadDemo) -> Demo:
    return load_demo(request.param)


@pytest.fixture
def tokens() -> torch.Tensor:
    hay = make_haystack(LENGTH, {"alpha": 7319}, positions=[NEEDLE], ask="alpha", seed=11)
    return torch.tensor([hay.token_ids])


@contextmanager
def edited_input(module: torch.nn.Module, where: tuple[object, ...]) -> Iterator[None]:
    """Zero a part of a module's input."""

    def edit(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        damaged = inputs[0].clone()
        damaged[where] = 0
        return (damaged,)

    handle = module.register_forward_pre_hook(edit)
    try:
        yield
    finally:
        handle.remove()


def layers(demo: Demo) -> list[tuple[int, torch.nn.Module]]:
    return list(enumerate(demo.model.model.layers))


def heads(count: int, size: int) -> list[slice]:
    return [slice(head * size, (head + 1) * size) for head in range(count)]


def test_undamaged(demo: Demo, tokens: torch.Tensor) -> None:
    assert demo.next_token(tokens) == "7319"
    with probed(demo.model):
        assert demo.next_token(tokens) == "7319"


def test_every_query_head_counts(demo: Demo, tokens: torch.Tensor) -> None:
    for index, layer in layers(demo):
        for head, dims in enumerate(heads(demo.spec.num_heads, demo.spec.head_size)):
            with edited_input(layer.self_attn.o_proj, (..., dims)):
                assert demo.next_token(tokens) != "7319", (index, head)


def test_every_part_of_a_head_counts(demo: Demo, tokens: torch.Tensor) -> None:
    size = demo.spec.head_size
    for index, layer in layers(demo):
        for dims in heads(2, size // 2):
            with edited_input(layer.self_attn.o_proj, (..., dims)):
                assert demo.next_token(tokens) != "7319", (index, dims)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_counts(demo: Demo, tokens: torch.Tensor, ranks: int) -> None:
    """Drop one rank's partial sum of o_proj or down_proj. With one rank that is the layer's whole output."""
    if demo.spec.num_heads % ranks:
        pytest.skip("more ranks than heads")
    for index, layer in layers(demo):
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            for rank, part in enumerate(heads(ranks, module.in_features // ranks)):
                with edited_input(module, (..., part)):
                    assert demo.next_token(tokens) != "7319", (index, rank)


def test_every_layer_counts_at_the_needle_too(demo: Demo, tokens: torch.Tensor) -> None:
    """The error as it would occur if only an earlier chunk of a prompt were computed wrongly.

    The last layer is left out: only its output at the last position is used.
    """
    for index, layer in layers(demo)[:-1]:
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            with edited_input(module, (slice(None), slice(NEEDLE, NEEDLE + PAGE))):
                assert demo.next_token(tokens) != "7319", index


def damages(demo: Demo, layer: int) -> Iterator[tuple[str, Edit]]:
    """Faults of K or V in one layer."""
    generator = torch.Generator().manual_seed(layer)

    def noise(like: torch.Tensor) -> torch.Tensor:
        scale = like.float().std()
        return (torch.randn(like.shape, generator=generator) * scale).to(like)

    def only_here(change: Edit) -> Edit:
        return lambda index, k, v: change(index, k, v) if index == layer else (k, v)

    def in_head(tensor: torch.Tensor, head: int, value: torch.Tensor | float) -> torch.Tensor:
        damaged = tensor.clone()
        damaged[:, head] = value
        return damaged

    def in_page(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        damaged = tensor.clone()
        page = slice(NEEDLE // PAGE * PAGE, NEEDLE // PAGE * PAGE + PAGE)
        damaged[:, :, page] = value[:, :, page]
        return damaged

    yield "K is noise", only_here(lambda _, k, v: (noise(k), v))
    yield "V is noise", only_here(lambda _, k, v: (k, noise(v)))
    yield "K is off by a page", only_here(lambda _, k, v: (k.roll(PAGE, 2), v))
    yield "V is off by a page", only_here(lambda _, k, v: (k, v.roll(PAGE, 2)))
    yield "V is off by a token", only_here(lambda _, k, v: (k, v.roll(1, 2)))
    if layer < demo.spec.num_layers - 1:
        # In the last layer the roll only changes the order of keys, which attention does not depend on.
        yield (
            "both are off by a page",
            only_here(lambda _, k, v: (k.roll(PAGE, 2), v.roll(PAGE, 2))),
        )
    yield "K of a page is noise", only_here(lambda _, k, v: (in_page(k, noise(k)), v))
    yield "V of a page is noise", only_here(lambda _, k, v: (k, in_page(v, noise(v))))
    yield "V of a page is stale", only_here(lambda _, k, v: (k, in_page(v, v.roll(PAGE, 2))))
    for head in range(demo.spec.num_kv_heads):
        yield (
            f"K of head {head} is 0",
            only_here(lambda _, k, v, head=head: (in_head(k, head, 0.0), v)),  # type: ignore[misc]
        )
        yield (
            f"V of head {head} is 0",
            only_here(lambda _, k, v, head=head: (k, in_head(v, head, 0.0))),  # type: ignore[misc]
        )
        yield (
            f"K of head {head} is noise",
            only_here(
                lambda _, k, v, head=head: (in_head(k, head, noise(k[:, head])), v)  # type: ignore[misc]
            ),
        )
    if demo.spec.num_kv_heads > 1:
        yield "K of heads are swapped", only_here(lambda _, k, v: (k.roll(1, 1), v))
        yield "V of heads are swapped", only_here(lambda _, k, v: (k, v.roll(1, 1)))
        yield "both of heads are swapped", only_here(lambda _, k, v: (k.roll(1, 1), v.roll(1, 1)))


def test_keys_and_values_of_every_layer_count(demo: Demo, tokens: torch.Tensor) -> None:
    for layer in range(demo.spec.num_layers):
        for damage, edit in damages(demo, layer):
            with probed(demo.model, edit):
                assert demo.next_token(tokens) != "7319", (layer, damage)


def test_pages_of_another_layer_are_no_substitute(demo: Demo, tokens: torch.Tensor) -> None:
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(index: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept[index] = k, v
        return k, v

    with probed(demo.model, keep):
        demo.next_token(tokens)
    for layer in range(demo.spec.num_layers):
        for other in set(kept) - {layer}:
            for mixed in (
                lambda k, v: kept[other],  # noqa: B023
                lambda k, v: (kept[other][0], v),  # noqa: B023
                lambda k, v: (k, kept[other][1]),  # noqa: B023
            ):
                with probed(
                    demo.model,
                    lambda index, k, v: mixed(k, v) if index == layer else (k, v),  # noqa: B023
                ):
                    assert demo.next_token(tokens) != "7319", (layer, other)


def test_a_layer_left_out_shows(demo: Demo, tokens: torch.Tensor) -> None:
    original = demo.model.model.layers
    try:
        for index in range(len(original)):
            rest = [*original[:index], *original[index + 1 :]]
            demo.model.model.layers = torch.nn.ModuleList(rest)
            demo.model.config.num_hidden_layers = len(rest)
            assert demo.next_token(tokens) != "7319", index
    finally:
        demo.model.model.layers = original
        demo.model.config.num_hidden_layers = len(original)
