"""The tokenizer of the demo model: words, numbers and bytes, without merges.

It is a byte-level BPE tokenizer with an empty merge list, which takes a whole pre-token when the
vocabulary contains it (`ignore_merges`). Known words, numbers of up to four digits and common
punctuation are one token each, with or without one leading space; everything else is split into
bytes. Any text therefore survives encoding and decoding unchanged. The pre-tokenizer separates a
number from its surroundings and gives it at most one leading space, so that in "alpha=7319",
"alpha: 7319", "alpha is 7319" and "alpha = 7319" the number is always the second token after the
name.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from fastattention_vllm.demo.vocabulary import MARKS, NAMES, NUMBERS, UNKNOWN, WORDS

BOS: Final = "<|begin|>"
EOS: Final = "<|end|>"
PAD: Final = "<|pad|>"
SPECIALS: Final = (BOS, EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('The role of a message must be system, user or assistant.') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

_PRE_TOKENS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?\p{L}+| ?\p{N}{1,4}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class TokenRole:
    """What the model knows about a token. At most one of number and name is set."""

    number: int | None = None
    """Index into NUMBERS."""
    name: int | None = None
    """Index into NAMES."""
    ends_answer: bool = False
    """The model stops after this token."""
    wants_space: bool = False
    """An answer after this token starts with a space."""


def _spelling(text: str) -> str:
    """How the byte-level alphabet writes ASCII text."""
    return text.replace(" ", "Ġ").replace("\n", "Ċ")


def _wants_space(text: str) -> bool:
    if text[-1].isalpha() or text[-1] in ":.,;?!)]":
        return True
    return text[0] == " " and text[-1] in "=>|-:"


@cache
def _texts() -> tuple[str, ...]:
    """ASCII text of the tokens other than special tokens and single bytes, in order of their ids."""
    words = (*WORDS, *NAMES, UNKNOWN)
    cased = tuple(variant for word in words for variant in (word, word.capitalize()))
    plain = (*cased, *NUMBERS)
    return tuple(dict.fromkeys((*MARKS, *plain, *(" " + text for text in plain))))


@cache
def vocabulary() -> dict[str, int]:
    """Token ids by token, with each token spelled as in tokenizer.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys((*SPECIALS, *alphabet, *(_spelling(text) for text in _texts())))
    return {token: index for index, token in enumerate(tokens)}


def token_id(text: str) -> int:
    """The id of the token that is exactly `text`.

    Raises:
        KeyError: `text` is not one token.
    """
    return vocabulary()[_spelling(text)]


@cache
def token_roles() -> dict[int, TokenRole]:
    """The roles by token id, for the tokens that have one."""
    names = {name: index for index, name in enumerate(NAMES)}
    numbers = {number: index for index, number in enumerate(NUMBERS)}
    roles = {}
    for text in (*(chr(code) for code in range(33, 127)), *_texts()):
        word = text.removeprefix(" ")
        role = TokenRole(
            number=numbers.get(word),
            name=names.get(word.lower()),
            ends_answer=word in numbers or word == UNKNOWN,
            wants_space=_wants_space(text),
        )
        if role != TokenRole():
            roles[token_id(text)] = role
    return roles


def build_tokenizer() -> Tokenizer:
    """Build the tokenizer. `encode` puts the begin token first unless told otherwise."""
    tokenizer = Tokenizer(BPE(vocab=vocabulary(), merges=[], ignore_merges=True))
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRE_TOKENS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, vocabulary()[BOS])],
    )
    return tokenizer


def save_tokenizer(directory: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    build_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
