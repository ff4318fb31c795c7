"""Opens the status page in Chromium and prints what it sees as JSON.

test_page.py runs it in an environment with playwright:

    python browse.py CHROMIUM URL FOLDER [KEY]

Screenshots are stored in FOLDER: light, dark and phone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

VIEWS: dict[str, tuple[int, int, Any]] = {
    "light": (1100, 900, "light"),
    "dark": (1100, 900, "dark"),
    "phone": (375, 812, "light"),
}
SECOND_POLL_MS = 5000
"""Until there are two reports, between which rates are computed."""


def enter(page: Page, key: str) -> str:
    """The page's answer to a wrong key; afterwards the right one is given."""
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button").click()
    page.wait_for_selector("#key-note.bad")
    refused = page.inner_text("#key-note")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button").click()
    return refused


def main() -> None:
    chromium, url, folder = sys.argv[1:4]
    key = sys.argv[4] if len(sys.argv) > 4 else ""
    seen: dict[str, Any] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (width, height, scheme) in VIEWS.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            errors: list[str] = []
            hosts: set[str] = set()
            page.on("console", lambda message, found=errors: found.append(message.text))
            page.on("pageerror", lambda error, found=errors: found.append(str(error)))
            page.on("request", lambda request, found=hosts: found.add(request.url.split("/")[2]))
            page.goto(url)
            refused = enter(page, key) if key else ""
            page.wait_for_selector("#summary dd")
            page.wait_for_timeout(SECOND_POLL_MS)
            stored = "[localStorage.length, sessionStorage.length, document.cookie]"
            seen[name] = {
                "errors": errors,
                "hosts": sorted(hosts),
                "refused": refused,
                "state": page.inner_text("#state"),
                "layers": [item.get_attribute("aria-label") for item in page.locator("#layers li").all()],
                "sections": {name: page.inner_text(f"#{name}") for name in ("pool", "rates", "plan", "requests")},
                "unnamed": page.locator("svg:not([aria-label]), [role=meter]:not([aria-label])").count(),
                "overflow": page.evaluate("document.documentElement.scrollWidth - innerWidth"),
                "ground": page.evaluate("getComputedStyle(document.body).backgroundColor"),
                "stored": page.evaluate(stored),
            }
            page.screenshot(path=str(Path(folder) / f"status-{name}.png"), full_page=True)
            page.close()
        browser.close()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
