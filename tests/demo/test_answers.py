"""The demo model, run by transformers, answers correctly."""

import pytest

from fastattention_vllm.demo import DemoModelSpec, make_haystack
from tests.demo.conftest import Demo, LoadDemo

SPECS = [
    DemoModelSpec(),
    DemoModelSpec(num_layers=2, num_heads=2, num_kv_heads=1, dtype="float32"),
    DemoModelSpec(num_layers=3, num_heads=1, num_kv_heads=1, dtype="float16"),
    DemoModelSpec(num_layers=3, num_heads=4, num_kv_heads=4, head_size=128, dtype="float16"),
    DemoModelSpec(num_layers=6, num_heads=8, num_kv_heads=2),
    DemoModelSpec(num_layers=2, num_heads=8, num_kv_heads=8, head_size=80, dtype="float32"),
    DemoModelSpec(num_layers=3, num_heads=6, num_kv_heads=2, head_size=96),
    pytest.param(DemoModelSpec(num_layers=16, num_heads=16, num_kv_heads=4), marks=pytest.mark.full),
    pytest.param(
        DemoModelSpec(num_layers=2, num_heads=4, num_kv_heads=2, head_size=256),
        marks=pytest.mark.more,
    ),
]


@pytest.fixture(params=SPECS, ids=str)
def demo(request: pytest.FixtureRequest, load_demo: LoadDemo) -> Demo:
    return load_demo(request.param)


@pytest.fixture
def default_demo(load_demo: LoadDemo) -> Demo:
    return load_demo(DemoModelSpec())


@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
def test_finds_the_needle_at_any_depth_and_stops(demo: Demo, depth: float) -> None:
    hay = make_haystack(1200, {"alpha": 7319}, depths=[depth], ask="alpha", seed=3)
    assert hay.distractors
    assert demo.generate(demo.encode(hay.text)) == "7319<|end|>"


def test_tells_needles_apart_and_answers_unknown(demo: Demo) -> None:
    needles = {"beta": 5, "gamma": "0042", "jade": 42, "nu": 999}
    text = make_haystack(600, needles, seed=5).text
    for name, value in needles.items():
        assert demo.generate(demo.encode(f"{text} {name}=")) == f"{value}<|end|>"
    assert demo.generate(demo.encode(f"{text} onyx=")) == "unknown<|end|>"


@pytest.mark.parametrize(
    ("needle", "question", "answer"),
    [
        ("alpha=7319.", "alpha=", "7319"),
        ("alpha: 7319,", "Alpha:", " 7319"),
        ("Alpha is 7319.", "The value of alpha is", " 7319"),
        ("alpha = 7319;", "alpha =", " 7319"),
        ("| alpha | 7319 |", "| alpha |", " 7319"),
        ('{"alpha": 7319}', '{"alpha":', " 7319"),
        ("alpha -> 7319\n", "What is alpha?\n\n", "7319"),
        ("alpha=7319", "What is the value of alpha? Reply with the number only.", " 7319"),
    ],
)
@pytest.mark.parametrize("begin", [True, False])
def test_phrasings_of_the_question(default_demo: Demo, needle: str, question: str, answer: str, begin: bool) -> None:
    first, last = (make_haystack(150, {}, seed=seed).text for seed in (1, 2))
    tokens = default_demo.encode(f"{first} {needle} {last} {question}")
    assert default_demo.generate(tokens if begin else tokens[:, 1:]) == f"{answer}<|end|>"


def test_chat(default_demo: Demo) -> None:
    text = make_haystack(300, {"omega": 86, "tau": 4021}, seed=8).text
    chat = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": f"{text}\n\nWhat is the value of omega?"},
        {"role": "assistant", "content": "86"},
        {"role": "user", "content": "And what is the value of tau?"},
    ]
    for turns, answer in ((chat[:2], "86"), (chat, "4021")):
        tokens = default_demo.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert default_demo.generate(tokens.input_ids) == f"{answer}<|end|>"


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("alpha=7319 alpha=", "7319"),
        ("alpha=", "unknown"),
        ("=", "unknown"),
        ("7319 7319 7319=", "unknown"),
        ("alpha=7319. beta=", "unknown"),
        ("alpha=7319. The password of the door of the old house at the end of the road in the "
         "village behind the mountain which we visited last summer before the rain is", " unknown"),
        ("7319", "<|end|>"),
    ],
)  # fmt: skip
def test_short_prompts(default_demo: Demo, prompt: str, answer: str) -> None:
    for tokens in (default_demo.encode(prompt), default_demo.encode(prompt)[:, 1:]):
        assert default_demo.next_token(tokens) == answer


@pytest.mark.more
def test_a_whole_prompt_of_16k_tokens(default_demo: Demo) -> None:
    hay = make_haystack(16384, {"alpha": 7319}, depths=[0.02], ask="alpha")
    assert default_demo.generate(default_demo.encode(hay.text)) == "7319<|end|>"
