from __future__ import annotations

import pytest

from fastattention_vllm.integration.options import Options
from scripts.docs import (
    ARCHITECTURES,
    BY_HAND,
    CONFIGURATION_PAGE,
    GENERATED,
    MODELS_PAGE,
    PLAN_PAGE,
    SUPPORTED_PAGE,
    code_quoted,
    configuration_page,
    models_page,
    option_meanings,
    plan_page,
    supported_page,
    values,
)


def test_the_supported_page_is_up_to_date() -> None:
    assert SUPPORTED_PAGE.read_text() == supported_page(), "run `make docs`"


def test_the_configuration_page_is_up_to_date() -> None:
    assert CONFIGURATION_PAGE.read_text() == configuration_page(), "run `make docs`"


def test_the_plan_page_is_up_to_date() -> None:
    assert GENERATED in PLAN_PAGE.read_text()
    assert PLAN_PAGE.read_text() == plan_page(), "run `make docs`"


def test_the_models_page_is_up_to_date() -> None:
    assert ARCHITECTURES in MODELS_PAGE.read_text()
    assert MODELS_PAGE.read_text() == models_page(), "run `make docs`"


def test_handwritten_text_is_kept() -> None:
    assert "## Environment variables" in CONFIGURATION_PAGE.read_text().partition(BY_HAND)[2]


def test_every_option_has_a_meaning() -> None:
    meanings = option_meanings()
    assert meanings.keys() == Options.model_fields.keys()
    assert all(meanings.values())


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "boolean"}, "`true`, `false`"),
        ({"type": "integer", "minimum": 2}, "an integer of at least 2"),
        ({"type": "integer", "minimum": 1, "maximum": 4096}, "an integer from 1 to 4096"),
        ({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}, "a number above 0"),
        ({"enum": ["auto", "ptx"], "type": "string"}, '`"auto"`, `"ptx"`'),
        ({"anyOf": [{"const": "auto"}, {"type": "array", "items": {}}]}, '`"auto"` or a list of layer indices'),
    ],
)
def test_values_in_words(schema: dict[str, object], words: str) -> None:
    assert values(schema) == words


def test_names_of_options_are_quoted_once() -> None:
    assert code_quoted("see host_kv_gib, --max-model-len and `stream_fraction`") == (
        "see `host_kv_gib`, `--max-model-len` and `stream_fraction`"
    )
