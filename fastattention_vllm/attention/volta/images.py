"""The compiled Volta kernels on disk, and the manifest that ties them to this code. Needs no GPU and no torch.

A launch passes a block of bytes and a workspace whose layouts are compiled into the kernels. An image from other
sources would access wrong addresses. So an image is loaded only if the manifest in its folder has this launcher's
layouts and the image's checksum. Images that are never requested may be missing.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from fastattention_vllm.attention.volta.launch import Variant, disagreement

MANIFEST = "manifest.json"
FORMAT = 2
"""The version of the manifest's format."""
SOURCES = Path(__file__).resolve().parents[3] / "kernels" / "volta" / "src"
"""The sources in a checkout. A wheel has none."""
FIX = "run `make volta`, or reinstall the wheel."


class ImageError(RuntimeError):
    """One sentence: which image is missing or does not match this code, and what to do."""


def variants(folder: Path) -> dict[tuple[str, int, bool, str, int], Variant]:
    """The compiled kernels in ``folder``, by kind, head size, adjusted, cache and architecture.

    Raises:
        ImageError: the manifest is missing, or the kernels do not match this launcher.
    """
    found = {}
    for entry in manifest_of(folder)["variants"]:
        try:
            one = Variant(**entry)
        except TypeError as error:
            raise ImageError(f"{folder / MANIFEST} does not have the expected form ({error}); {FIX}") from error
        found[one.kind, one.head_size, one.adjusted, one.cache, one.architecture] = one
    return found


def read(folder: Path, variant: Variant, suffix: str) -> bytes:
    """The image of ``variant``, checked against the manifest.

    Raises:
        ImageError: it is missing, or does not match this code.
    """
    path = folder / variant.image(suffix)
    try:
        image = path.read_bytes()
    except OSError as error:
        raise ImageError(f"The Volta kernels are not built: there is no {path}; {FIX}") from error
    manifest = manifest_of(folder)
    changed = sorted(_changed(manifest["sources"]))
    if changed:
        raise ImageError(
            f"The sources in {SOURCES} have changed since the Volta kernels in {folder} were compiled "
            f"({', '.join(changed)}); {FIX}"
        )
    known = manifest["images"].get(path.name)
    if not isinstance(known, dict) or known.get("sha256") != hashlib.sha256(image).hexdigest():
        raise ImageError(f"{path} does not match its checksum in {MANIFEST}; {FIX}")
    return image


def checksums(sources: Path) -> dict[str, str]:
    """The checksum of each file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(sources.iterdir())}


def _changed(compiled: dict[str, str]) -> set[str]:
    """Source files that have changed since the images were compiled. Always empty in a wheel, which has no sources."""
    if not SOURCES.is_dir():
        return set()
    now = checksums(SOURCES)
    return {name for name in compiled.keys() | now.keys() if compiled.get(name) != now.get(name)}


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest that ``kernels/volta/manifest.py`` has written.

    Raises:
        ImageError: it is missing, or its kernels do not match this launcher.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        if not any(folder.glob("*.ptx")):
            raise ImageError(f"The Volta kernels are not built: there is no {path}; {FIX}") from error
        raise ImageError(
            f"The Volta kernels in {folder} have no {MANIFEST}, so their version is unknown; {FIX}"
        ) from error
    except ValueError as error:
        raise ImageError(f"{path} is not JSON ({error}); {FIX}") from error
    kinds = {"sources": dict, "images": dict, "variants": list}
    whole = isinstance(manifest, dict) and all(isinstance(manifest.get(part), kind) for part, kind in kinds.items())
    if not whole or manifest.get("format") != FORMAT:
        raise ImageError(f"{path} is not a manifest of format {FORMAT}; {FIX}")
    different = disagreement(manifest.get("constants"), manifest.get("structures"))
    if different:
        raise ImageError(
            f"The Volta kernels in {folder} were compiled for another version of this package "
            f"(difference: {different}); {FIX}"
        )
    checked: dict[str, Any] = manifest
    return checked
