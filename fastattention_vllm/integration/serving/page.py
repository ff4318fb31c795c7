"""``GET /fastattention``: the status as a page. Its files contain no numbers; the browser requests the status."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Response

PAGE = "/fastattention"
FILES = {
    PAGE: ("index.html", "text/html"),
    f"{PAGE}/icon.svg": ("icon.svg", "image/svg+xml"),
    f"{PAGE}/page.css": ("page.css", "text/css"),
    **{f"{PAGE}/{name}": (name, "text/javascript") for name in ("page.js", "sections.js", "draw.js")},
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def router() -> APIRouter:
    routes = APIRouter()
    for path, (name, media_type) in FILES.items():
        content = (resources.files(__package__) / "page" / name).read_bytes()
        answer = Response(content, media_type=media_type, headers=HEADERS)
        routes.add_api_route(path, lambda answer=answer: answer, include_in_schema=False)
    return routes
