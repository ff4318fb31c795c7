"""MkDocs hook: make links that leave docs/ work on the site.

Used by: mkdocs.yml, which `make docs` builds.

A page of docs/ links to other files of the repository, which readers on a code host can open. The site holds docs/
only. There a picture outside docs/ is copied beside the pages, and any other link becomes the path in plain text.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"(?P<picture>!?)\[(?P<text>[^]]*)\]\(\.\./(?P<path>[^)#]+)(#[^)]*)?\)")
PICTURES = "pictures"


def on_page_markdown(markdown: str, *, config: Any, files: Any, **_: object) -> str:
    def on_site(link: re.Match[str]) -> str:
        source = ROOT / link["path"]
        if not source.exists():
            return link[0]  # the strict build reports it
        if not link["picture"]:
            named = f"`{link['path']}`"
            return named if link["text"].strip("`") == link["path"] else f"{link['text']} ({named})"
        target = str(PurePosixPath(PICTURES) / source.name)
        if target not in files.src_uris:
            files.append(File.generated(config, target, abs_src_path=str(source)))
        return f"![{link['text']}]({target})"

    return OUTSIDE.sub(on_site, markdown)
