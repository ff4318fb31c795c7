"""Predictions against measurements: within 25 %, or with the reason in the table."""

from __future__ import annotations

import pytest

from fastattention_vllm.demo.tokenizer import vocabulary
from scripts.plan_table import (
    CLOSE,
    FILES,
    Compared,
    cell,
    first_token_rows,
    host_layer_rows,
    lines,
    needle_shape,
    signed,
)

ROWS = host_layer_rows()
PRESENT = FILES[:2]


def test_the_model_is_that_of_the_benchmark() -> None:
    assert needle_shape().vocab_size == len(vocabulary())


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if not row.reason],
    ids=lambda row: f"{row.file}-{row.tokens}x{row.requests}-{row.column}",
)
def test_predictions_are_close(row: Compared) -> None:
    assert abs(row.error) <= CLOSE == 0.25


def test_of_the_present_code_a_first_prompt_alone_may_miss() -> None:
    excused = [row for row in ROWS if row.file in PRESENT and row.reason]
    assert {row.column for row in excused} == {"prefill"}
    assert {row.placement for row in excused} == {"vLLM alone, KV on the device"}
    assert sum(not row.close for row in excused) == 1


def test_older_code_is_excused_where_the_cpu_attends_alone_or_with_the_link() -> None:
    older = [row for row in ROWS if row.file not in PRESENT and row.reason and "host layers" in row.placement]
    assert {row.column for row in older} == {"CPU alone", "auto"}
    assert all(row.error > 0 for row in older), "it was slower"


def test_every_decoding_row_is_there() -> None:
    counts = {file: sum(row.file == file and row.column in ("link", "stream all") for row in ROWS) for file in FILES}
    assert counts == dict(zip(FILES, (6, 1, 6, 3), strict=True))


def test_two_devices() -> None:
    for _, measured, predicted in first_token_rows():
        assert predicted == pytest.approx(measured, rel=CLOSE)


def test_misses_are_bold_and_have_a_reason() -> None:
    row = Compared(FILES[0], 1, 1, "31 host layers", "auto", 100.0, 126.0, "link")
    assert not row.close
    assert cell(row) == "100, 126 (**+26 %**)"
    assert cell(Compared(FILES[0], 1, 1, "31 host layers", "auto", 1.0, 0.9, "link")) == "1, 0.9 (-10 %)"
    assert signed(0.001) == signed(-0.001) == "0 %"
    text = "\n".join(lines())
    assert text.count("**") == 2 * sum(not row.close for row in ROWS)
    assert f"{len(ROWS)} in all" in text
