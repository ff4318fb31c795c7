"""The compiled Volta kernels on disk, and the manifest that says to which code they belong. Needs no GPU and no torch.

A launch hands over a block of bytes and a workspace whose layouts are compiled into the kernels: an image of other
sources would read and write elsewhere. So an image is loaded only if the manifest beside it has this launcher's ABI and
the image's checksum. Some of the images may be missing, as long as nobody asks for them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastattention_vllm.attention.volta import launch as volta_kernels
from fastattention_vllm.attention.volta.launch import Variant

MANIFEST = "manifest.json"
FORMAT = 1
"""Of the manifest itself."""
SUFFIXES = ("cubin", "ptx")
SOURCES = Path(__file__).resolve().parents[3] / "kernels" / "volta" / "src"
"""In a checkout; a wheel has none."""
FIX = "run `make volta`, or install the wheel again."


class ImageError(RuntimeError):
    """One sentence: which image is not there or does not belong to this code, and what to do."""


def write_manifest(folder: Path, variants: Iterable[Variant], compiler: str, sources: Path = SOURCES) -> None:
    """Of the images of ``variants`` that lie in ``folder``, all of them compiled from ``sources`` as they are now."""
    images = {}
    for variant in variants:
        for suffix in SUFFIXES:
            content = (folder / variant.image(suffix)).read_bytes()
            images[variant.image(suffix)] = {
                "variant": variant.name,
                "architecture": f"{'sm' if suffix == 'cubin' else 'compute'}_{variant.architecture}",
                "sha256": hashlib.sha256(content).hexdigest(),
            }
    manifest = {
        "format": FORMAT,
        "abi": volta_kernels.abi(),
        "compiler": compiler,
        "sources": checksums(sources),
        "images": images,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def read(folder: Path, variant: Variant, suffix: str) -> bytes:
    """The image of ``variant`` that :func:`write_manifest` has described.

    Raises:
        ImageError: it is not there, or does not belong to this code.
    """
    path = folder / variant.image(suffix)
    try:
        image = path.read_bytes()
    except OSError as error:
        raise ImageError(f"The Volta kernels are not built: there is no {path}; {FIX}") from error
    manifest = _manifest(folder)
    if manifest.get("abi") != volta_kernels.abi():
        raise ImageError(
            f"The Volta kernels in {folder} were compiled for a launcher with other arguments or another workspace; "
            f"{FIX}"
        )
    changed = sorted(_changed(manifest["sources"]))
    if changed:
        raise ImageError(
            f"The Volta kernels in {folder} were compiled from other sources than {SOURCES} has now "
            f"({', '.join(changed)}); {FIX}"
        )
    known = manifest["images"].get(path.name)
    if not isinstance(known, dict) or known.get("sha256") != hashlib.sha256(image).hexdigest():
        raise ImageError(f"{path} is not the file that {MANIFEST} beside it describes; {FIX}")
    return image


def checksums(sources: Path) -> dict[str, str]:
    """Of each file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(sources.iterdir())}


def _changed(compiled: dict[str, str]) -> set[str]:
    """Files that are not what they were when the images were compiled; a wheel has none to compare."""
    if not SOURCES.is_dir():
        return set()
    now = checksums(SOURCES)
    return {name for name in compiled.keys() | now.keys() if compiled.get(name) != now.get(name)}


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise ImageError(
            f"The Volta kernels in {folder} have no {MANIFEST} that says to which code they belong; {FIX}"
        ) from error
    except ValueError as error:
        raise ImageError(f"{path} is not JSON ({error}); {FIX}") from error
    whole = isinstance(manifest, dict) and all(isinstance(manifest.get(part), dict) for part in ("sources", "images"))
    if not whole or manifest.get("format") != FORMAT:
        raise ImageError(f"{path} is not a manifest of format {FORMAT}; {FIX}")
    checked: dict[str, Any] = manifest
    return checked
