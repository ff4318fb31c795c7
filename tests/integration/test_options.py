from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastattention_vllm.integration.options import Options, options_of
from fastattention_vllm.integration.refusal import Refusal


def config(section: Any) -> Any:
    return SimpleNamespace(additional_config={} if section is None else {"fastattention": section})


def test_defaults_without_a_section() -> None:
    assert options_of(config(None)) == Options()


def test_valid_values_are_accepted() -> None:
    assert options_of(config({"cpu_threads": 3})).cpu_threads == 3


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"cpu_thread": 3}, "cpu_thread"),
        ({"cpu_threads": 0}, "0"),
        ({"cpu_threads": "four"}, "four"),
        ({"cpu_threads": True}, "True"),
        ({"tiling_all_reduce": 1}, "1"),
        ({"tiling_all_reduce": "on"}, "on"),
        ([1], "[1]"),
    ],
)
def test_bad_sections_are_refused_by_name_with_the_valid_keys(section: Any, named: str) -> None:
    with pytest.raises(Refusal) as caught:
        options_of(config(section))
    assert named in str(caught.value)
    assert all(option in str(caught.value) for option in Options.model_fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["fast_attention", "FastAttention", "fastatention", "fastattn", "fastattention_vllm"])
def test_a_misspelt_section_is_refused_with_the_right_name(name: str) -> None:
    misspelt = SimpleNamespace(additional_config={name: {"cpu_threads": 3}})
    with pytest.raises(Refusal, match=rf"^additional-config '{name}' has no effect; .* is 'fastattention': --add"):
        options_of(misspelt)


@pytest.mark.parametrize("name", ["ascend_scheduler_config", "flashattention", "flash_attn", "attention", "torchair"])
def test_sections_of_other_software_pass(name: str) -> None:
    assert options_of(SimpleNamespace(additional_config={name: {}})) == Options()


@pytest.mark.parametrize(
    ("option", "value", "ways"),
    [
        ("host_kv_layers", -1, ["'auto'", "greater than or equal to 0", "list"]),
        ("host_kv_layers", [1, -2], ["[1, -2]", "greater than or equal to 0"]),
        ("stream_fraction", 1.5, ["'auto'", "less than or equal to 1"]),
        ("tiling_all_reduce", 65, ["'auto' or 'off'", "less than or equal to 64"]),
    ],
)
def test_an_option_of_several_types_is_refused_with_all_of_them(option: str, value: Any, ways: list[str]) -> None:
    with pytest.raises(Refusal) as caught:
        options_of(config({option: value}))
    reason, _, _ = str(caught.value).partition("; valid options")
    assert f": {option} = {value!r} is not valid" in reason
    assert all(way in reason for way in ways)
