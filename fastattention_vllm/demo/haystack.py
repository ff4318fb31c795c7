"""Long texts that contain needles and have an exact number of tokens."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastattention_vllm.demo.tokenizer import token_id
from fastattention_vllm.demo.vocabulary import (
    ADJECTIVES,
    ADVERBS,
    NAMES,
    NOUNS,
    NUMBERS,
    PREPOSITIONS,
    VERBS,
)

NEEDLE_TOKENS = 4
"""Tokens of a needle: name, "=", number, full stop."""

_DISTRACTOR_CHANCE = 0.02  # chance that a sentence is the needle of another name


@dataclass(frozen=True)
class Haystack:
    """A text and the positions of its needles.

    Attributes:
        text: The text. Encoding it without special tokens gives `token_ids`.
        token_ids: One id per token.
        positions: Index into `token_ids` of the name of each needle.
        distractors: Names and values that are also in the text, but were not requested.
    """

    text: str
    token_ids: tuple[int, ...]
    positions: Mapping[str, int]
    distractors: Mapping[str, str]


def make_haystack(
    num_tokens: int,
    needles: Mapping[str, int | str],
    *,
    depths: Sequence[float] | None = None,
    positions: Sequence[int] | None = None,
    ask: str | None = None,
    distractors: bool = True,
    seed: int = 0,
) -> Haystack:
    """English-like filler that contains `name=value.` needles.

    Args:
        num_tokens: Number of tokens in the text, without a begin token.
        needles: Value of each name; a value is a number or string of one to four digits.
        depths: Place of each needle, from 0 (start of the filler) to 1 (end of the filler).
        positions: Token index of each needle's name, instead of `depths`. Without either, the needles
            are spread evenly.
        ask: End the text with " name=", which is included in `num_tokens`.
        distractors: Mix in needles of other names, with other values.
        seed: Seed of the filler.

    Returns:
        The text, its tokens, and the positions of the needles.

    Raises:
        ValueError: A name or value is unknown to the model, or the needles do not fit.
    """
    values = {name: str(value) for name, value in needles.items()}
    _check_needles(values, ask)
    room = num_tokens - (2 if ask is not None else 0)
    if depths is not None and positions is not None:
        raise ValueError("Both depths and positions are given; pass only one of them.")
    if positions is None:
        if depths is None:
            depths = [(index + 0.5) / max(1, len(values)) for index in range(len(values))]
        if any(not 0 <= depth <= 1 for depth in depths):
            raise ValueError(f"The depths {list(depths)} must all be from 0 to 1.")
        positions = [round(depth * max(0, room - NEEDLE_TOKENS)) for depth in depths]
    if len(positions) != len(values):
        raise ValueError(
            f"There are {len(values)} needles but {len(positions)} positions; pass one position per needle."
        )
    order = sorted(zip(positions, values, strict=True))
    _check_places([position for position, _ in order], room)

    rng = random.Random(seed)
    spare = [name for name in NAMES if name not in values and name != ask] if distractors else []
    filler = _Filler(rng, spare, set(values.values()))
    pieces: list[str] = []
    for position, name in order:
        pieces += filler.take(position - len(pieces))
        pieces += [f" {name}", "=", values[name], "."]
    pieces += filler.take(room - len(pieces))
    if ask is not None:
        pieces += [f" {ask}", "="]
    if pieces:
        pieces[0] = pieces[0].removeprefix(" ")
    return Haystack(
        text="".join(pieces),
        token_ids=tuple(token_id(piece) for piece in pieces),
        positions={name: position for position, name in order},
        distractors=filler.distractors,
    )


def _check_needles(values: Mapping[str, str], ask: str | None) -> None:
    for name in (*values, *([ask] if ask is not None else [])):
        if name not in NAMES:
            raise ValueError(f"{name!r} is not a name that the model knows; choose from {', '.join(NAMES)}.")
    for name, value in values.items():
        if not (value.isascii() and value.isdigit() and len(value) <= 4):
            raise ValueError(f"The value of {name} is {value!r}, but it must be a number of up to 4 digits.")


def _check_places(places: Sequence[int], room: int) -> None:
    ends = [0, *(place + NEEDLE_TOKENS for place in places)]
    for place, earliest in zip([*places, room], ends, strict=True):
        if place < earliest:
            raise ValueError(
                f"The needles at {list(places)} ({NEEDLE_TOKENS} tokens each) overlap or do not fit into {room} tokens."
            )


class _Filler:
    """An endless sequence of text pieces of one token each."""

    def __init__(self, rng: random.Random, names: list[str], taken: set[str]) -> None:
        self._rng = rng
        self._names = names
        self._taken = taken
        self.distractors: dict[str, str] = {}

    def take(self, count: int) -> list[str]:
        """The next `count` pieces: whole sentences, except that the last one may be cut short."""
        pieces: list[str] = []
        while len(pieces) < count:
            if self._names and self._rng.random() < _DISTRACTOR_CHANCE:
                if count - len(pieces) >= NEEDLE_TOKENS:
                    pieces += self._distractor()
                continue
            sentence = self._sentence()
            left = count - len(pieces)
            pieces += sentence if len(sentence) <= left else [*sentence[: left - 1], "."]
        return pieces

    def _distractor(self) -> list[str]:
        name = self._names.pop(self._rng.randrange(len(self._names)))
        value = self._rng.choice(NUMBERS)
        while value in self._taken:
            value = self._rng.choice(NUMBERS)
        self._taken.add(value)
        self.distractors[name] = value
        return [f" {name}", "=", value, "."]

    def _sentence(self) -> list[str]:
        pick = self._rng.choice
        thing = [" the", f" {pick(ADJECTIVES)}", f" {pick(NOUNS)}"]
        place = [f" {pick(PREPOSITIONS)}", " the", f" {pick(NOUNS)}"]
        verb, adverb = f" {pick(VERBS)}", f" {pick(ADVERBS)}"
        number = f" {pick(NUMBERS).lstrip('0') or '0'}"
        words = pick(
            (
                [" The", f" {pick(NOUNS)}", verb, *thing, *place],
                [" The", f" {pick(ADJECTIVES)}", f" {pick(NOUNS)}", adverb, verb, *thing],
                [" He", verb, *thing, ",", " and", " she", f" {pick(VERBS)}", " it", *place],
                [" There", " were", number, " people", *place],
                [" In", number, " they", verb, *thing],
                [" On", " day", number, " we", adverb, verb, *thing, *place],
            )
        )
        return [*words, "."]
