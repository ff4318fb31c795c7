from __future__ import annotations

from scripts.docs import SUPPORTED_PAGE, supported_page


def test_the_generated_page_is_up_to_date() -> None:
    assert SUPPORTED_PAGE.read_text() == supported_page(), "run `make docs`"
