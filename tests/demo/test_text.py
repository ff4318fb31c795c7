"""Tokenizer and haystacks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fastattention_vllm.demo import build_tokenizer, make_haystack
from fastattention_vllm.demo.codes import name_codes, number_codes
from fastattention_vllm.demo.vocabulary import NAMES, NUMBERS, WORDS

TOKENIZER: Tokenizer = build_tokenizer()

known = st.sampled_from([*NAMES, *NUMBERS[::501], *WORDS, " ", "\n", ".", "=", ": ", "?", "\t"])
texts = st.one_of(st.text(), st.lists(st.one_of(known, st.text(max_size=4))).map("".join))


@given(texts)
def test_any_text_survives(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", ["alpha", "Omega", " topaz"])
@pytest.mark.parametrize("link", ["=", ":", " is", " =", " |", '":', " ->"])
@pytest.mark.parametrize("number", ["0", "42", "0042", " 7319"])
def test_number_is_the_second_token_after_its_name(name: str, link: str, number: str) -> None:
    encoding = TOKENIZER.encode(f"{name}{link}{number}.", add_special_tokens=False)
    assert len(encoding) == 4


def test_known_words_are_one_token() -> None:
    text = "The old captain carried the heavy basket across the bridge. Then we returned."
    assert len(TOKENIZER.encode(text, add_special_tokens=False)) == 15


@pytest.mark.parametrize("length", [32, 64])
def test_codewords_are_far_apart(length: int) -> None:
    names, numbers = name_codes(length), number_codes(length)
    assert (names @ names.T - length * names.new_ones(len(names)).diag()).abs().max() == 0
    assert (names[:, 0] == 1).all()
    assert (numbers[:, 0] == 1).all()
    sample = numbers[::97]
    likeness = sample @ numbers.T
    for row, index in enumerate(range(0, len(numbers), 97)):
        likeness[row, index] = 0
    assert likeness.max() <= length / 2
    assert (names @ numbers.T).max() < length


@given(
    num_tokens=st.integers(30, 700),  # a fifth of the text is between the needles, which is enough for one of them
    seed=st.integers(0, 99),
    depths=st.tuples(st.floats(0, 0.4), st.floats(0.6, 1)),
    ask=st.sampled_from([None, "alpha"]),
)
def test_haystacks_are_exact(num_tokens: int, seed: int, depths: tuple[float, float], ask: str | None) -> None:
    needles = {"alpha": 7319, "beta": "007"}
    hay = make_haystack(num_tokens, needles, depths=depths, ask=ask, seed=seed)
    ids = TOKENIZER.encode(hay.text, add_special_tokens=False).ids
    assert tuple(ids) == hay.token_ids
    assert len(ids) == num_tokens
    for name, position in hay.positions.items():
        words = TOKENIZER.decode(ids[position : position + 4])
        assert words.strip() == f"{name}={needles[name]}."
    assert not set(hay.distractors) & {"alpha", "beta"}
    assert not set(hay.distractors.values()) & {"7319", "007"}


def test_haystack_positions_and_seed() -> None:
    hay = make_haystack(2000, {"jade": 1}, positions=[777])
    assert hay.positions == {"jade": 777}
    assert hay.text == make_haystack(2000, {"jade": 1}, positions=[777]).text
    assert hay.text != make_haystack(2000, {"jade": 1}, positions=[777], seed=1).text
    assert not make_haystack(2000, {}, distractors=False).distractors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"needles": {"nobody": 1}}, "is not a name"),
        ({"needles": {"alpha": 12345}}, "up to 4 digits"),
        ({"needles": {"alpha": -1}}, "up to 4 digits"),
        ({"needles": {}, "ask": "nobody"}, "is not a name"),
        ({"needles": {"alpha": 1}, "depths": [1.5]}, "from 0 to 1"),
        ({"needles": {"alpha": 1}, "depths": [0.1], "positions": [3]}, "pass only one of them"),
        ({"needles": {"alpha": 1}, "positions": [97]}, "do not fit"),
        ({"needles": {"alpha": 1}, "positions": [-1]}, "do not fit"),
        ({"needles": {"alpha": 1, "beta": 2}, "positions": [5, 8]}, "overlap"),
        ({"needles": {"alpha": 1, "beta": 2}, "positions": [5]}, "2 needles but 1 positions"),
    ],
)
def test_haystack_refuses(options: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        make_haystack(100, **options)
