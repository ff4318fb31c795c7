"""``GET /fastattention`` and its files: what is sent, and what the files may load."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from fastattention_vllm.integration.serving import metrics, page, routes
from tests.integration.serving.fakes import Engine, application, get, worker


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    registry = CollectorRegistry()
    monkeypatch.setattr(routes, "REGISTRY", registry)
    monkeypatch.setattr(metrics, "REGISTRY", registry)
    app = application(Engine(worker(0)), registry, ["key"])
    return routes.attach(app, app)


@pytest.mark.parametrize("path", page.FILES)
def test_each_file_is_sent_with_a_strict_policy(server: Any, path: str) -> None:
    """The files contain no numbers, so they need no key."""
    answer = asyncio.run(get(server, path))
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(page.FILES[path][1])
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_every_file_that_the_page_names_is_served_and_none_is_elsewhere(server: Any) -> None:
    texts = {path: asyncio.run(get(server, path)).text for path in page.FILES}
    named = {f"/{name}" for name in re.findall(r'(?:href|src)="([^"]+)"', texts[page.PAGE])} - {routes.STATUS}
    for text in texts.values():
        named |= {f"{page.PAGE}/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
    assert named | {page.PAGE} == set(page.FILES)
    for path, text in texts.items():
        addresses = re.findall(r"https?://[^\"'\s)]+", text)
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, path
        assert "innerHTML" not in text
        assert not re.search(r"<script>|<style>|style=|onclick", text), f"{path}: the policy would not allow it"


def test_every_part_of_the_page_has_its_place(server: Any) -> None:
    html = asyncio.run(get(server, page.PAGE)).text
    scripts = "".join(asyncio.run(get(server, f"{page.PAGE}/{name}")).text for name in ("page.js", "sections.js"))
    used = set(re.findall(r'(?:show|element|getElementById)\("([\w-]+)"', scripts))
    assert used
    assert used <= set(re.findall(r'id="([\w-]+)"', html))


def test_the_page_names_only_fields_that_the_status_has(server: Any) -> None:
    """A field that is renamed would leave a gap in the page."""
    headers = {"Authorization": "Bearer key"}
    schema = asyncio.run(get(server, "/openapi.json", headers=headers)).json()["components"]["schemas"]
    fields = {name for part in schema.values() for name in part.get("properties", {})}
    scripts = "".join(asyncio.run(get(server, f"{page.PAGE}/{name}")).text for name in ("page.js", "sections.js"))
    used = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", scripts))
    assert "used_fraction" in used
    assert used <= fields
