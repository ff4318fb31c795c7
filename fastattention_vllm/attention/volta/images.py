"""The compiled Volta kernels on disk, and the manifest that ties them to this code. Needs no GPU and no torch.

A launch passes a block of bytes and a workspace whose layouts are compiled into the kernels. An image from other
sources would access wrong addresses. So an image is loaded only if the manifest in its folder has this launcher's
layouts and the image's checksum. Images that are never requested may be missing.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastattention_vllm import cuda_driver
from fastattention_vllm.attention.volta import launch
from fastattention_vllm.attention.volta.launch import Variant, layout

IMAGES = Path(__file__).resolve().parents[2] / "lib" / "volta"
"""Folder with the manifest and, for each variant, ``NAME.sm_70.cubin`` and ``NAME.sm_70.ptx`` (or ``sm_75``)."""
MANIFEST = "manifest.json"
FORMAT = 5
"""The version of the manifest's format."""
SOURCES = Path(__file__).resolve().parents[3] / "kernels" / "volta" / "src"
"""The sources in a checkout. A wheel has none."""
FIX = "run `make volta`, or reinstall the wheel."


class ImageError(RuntimeError):
    """One sentence: which image is missing or does not match this code, and what to do."""


class Image(Protocol):
    """A compiled kernel of any launcher."""

    @property
    def kernel(self) -> str:
        """The name of its function."""

    @property
    def shared_bytes(self) -> int:
        """Maximum shared memory of a CTA."""

    def image(self, suffix: str) -> str:
        """The file name of its image. ``suffix``: ``cubin`` or ``ptx``."""


Kind = TypeVar("Kind")


def variants(folder: Path) -> dict[tuple[str, int, bool, str, int], Variant]:
    """The compiled attention kernels in ``folder``, by kind, head size, adjusted, cache and architecture.

    Raises:
        ImageError: the manifest is missing, or the kernels do not match this launcher.
    """
    found = described(folder, "attention", Variant, launch.STRUCTURES, launch.CONSTANTS)
    return {(one.kind, one.head_size, one.adjusted, one.cache, one.architecture): one for one in found}


def described(
    folder: Path,
    part: str,
    kind: type[Kind],
    structures: tuple[type[ctypes.Structure], ...],
    constants: Mapping[str, int],
) -> list[Kind]:
    """The kernels of one launcher, from their entries in the manifest.

    Args:
        part: ``attention``, ``gated_delta``, ``linear`` or ``push``.
        kind: the dataclass of an entry.
        structures: those that this launcher passes.
        constants: those that its grids and workspaces depend on.

    Raises:
        ImageError: the manifest is missing, or the kernels do not match this launcher.
    """
    entry = manifest_of(folder)[part]
    different = _disagreement(entry, structures, constants)
    if different:
        raise ImageError(
            f"The Volta kernels in {folder} were compiled for another version of this package "
            f"(difference: {different}); {FIX}"
        )
    try:
        return [kind(**one) for one in entry["variants"]]
    except (KeyError, TypeError) as error:
        raise ImageError(f"{folder / MANIFEST} does not have the expected form ({error}); {FIX}") from error


def load(folder: Path, variant: Image, suffix: str) -> cuda_driver.Kernel:
    """The kernel of ``variant``, checked against the manifest. ``suffix``: ``cubin`` or ``ptx``.

    Raises:
        ImageError: the image is missing, or does not match this code.
        DriverError: the driver cannot load it.
    """
    return cuda_driver.load(read(folder, variant, suffix) + b"\0", variant.kernel, variant.shared_bytes)


def read(folder: Path, variant: Image, suffix: str) -> bytes:
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
        ImageError: it is missing or damaged.
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
    kinds = {"sources": dict, "images": dict, "attention": dict, "gated_delta": dict, "linear": dict}
    whole = isinstance(manifest, dict) and all(isinstance(manifest.get(part), kind) for part, kind in kinds.items())
    if not whole or manifest.get("format") != FORMAT:
        raise ImageError(f"{path} is not a manifest of format {FORMAT}; {FIX}")
    checked: dict[str, Any] = manifest
    return checked


def _disagreement(
    entry: Mapping[str, object], structures: tuple[type[ctypes.Structure], ...], constants: Mapping[str, int]
) -> str:
    """The name of a constant or structure in which a manifest differs from a launcher; empty if none differs.

    Images that were compiled for other arguments or another workspace would access wrong addresses.
    """
    ours = {structure.__name__: {name: [*at] for name, at in layout(structure).items()} for structure in structures}
    pairs: tuple[tuple[str, Mapping[str, Any]], ...] = (("constants", constants), ("structures", ours))
    for kind, here in pairs:
        there = entry.get(kind)
        if not isinstance(there, dict):
            return kind
        for name in sorted({*here, *there}):
            if here.get(name) != there.get(name):
                return str(name)
    return ""
