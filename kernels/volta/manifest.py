"""``manifest.json`` beside the compiled images: to which code they belong, and what a launch of each takes.

A launch hands over a block of bytes and a workspace whose layouts are compiled into the kernels. The manifest says what
these are, read from ``problem.h``; the launcher compares it with what it hands over and refuses images that differ.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from kernels.volta.variants import CHUNK, DECODE_ROWS, Variant, describe

MANIFEST = "manifest.json"
FORMAT = 2
"""Of the manifest itself."""
SUFFIXES = ("cubin", "ptx")
SOURCES = Path(__file__).resolve().parent / "src"
SCALARS = {"int": 4, "unsigned": 4, "float": 4, "long long": 8}
"""Bytes, which are their alignment, too."""
POINTER = 8
CONSTANTS = {
    "chunk": CHUNK,
    "decode_rows": DECODE_ROWS,
    "shortest_part": 128,
    "longest_part": 1024,
    "max_parts": 64,
    "bytes_of_mean": 2,
    "bytes_of_lse": 4,
}
"""Of the workspace and of how sequences are cut into parts: ``part_length`` and ``Split`` of ``problem.h``."""

Layout = dict[str, tuple[int, int]]
"""Of each field its offset and size in bytes; under "" those of the whole structure."""


def write(folder: Path, variants: Iterable[Variant], compiler: str, sources: Path = SOURCES) -> None:
    """Of the images of ``variants`` that lie in ``folder``, all of them compiled from ``sources`` as they are now."""
    variants = tuple(variants)
    images = {}
    for variant in variants:
        for suffix in SUFFIXES:
            content = (folder / variant.image(suffix)).read_bytes()
            images[variant.image(suffix)] = {
                "architecture": f"{'sm' if suffix == 'cubin' else 'compute'}_{variant.architecture}",
                "sha256": hashlib.sha256(content).hexdigest(),
            }
    manifest = {
        "format": FORMAT,
        "compiler": compiler,
        "constants": CONSTANTS,
        "structures": structures((sources / "problem.h").read_text()),
        "variants": [describe(variant) for variant in variants],
        "sources": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(sources.iterdir())},
        "images": images,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def structures(header: str) -> dict[str, Layout]:
    """Of each structure in a header, in which there are numbers, pointers and earlier structures alone.

    Raises:
        ValueError: a field of another type.
    """
    header = re.sub(r"//[^\n]*", "", header)
    found: dict[str, Layout] = {}
    alignments: dict[str, int] = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\n?\};", header, re.DOTALL):
        layout: Layout = {}
        end, widest = 0, 1
        for declaration in filter(None, (" ".join(text.split()) for text in body.split(";"))):
            match = re.fullmatch(r"(?:const )?((?:unsigned |long )?\w+)(\*?) (\w+(?:, \w+)*)", declaration)
            if match is None:
                raise ValueError(f"{name} has a field with an unknown layout: {declaration!r}.")
            kind, pointer, fields = match.groups()
            if pointer:
                size = alignment = POINTER
            elif kind in found:
                size, alignment = found[kind][""][1], alignments[kind]
            elif kind in SCALARS:
                size = alignment = SCALARS[kind]
            else:
                raise ValueError(f"{name} has a field of an unknown type: {declaration!r}.")
            for field in fields.split(", "):
                offset = -(-end // alignment) * alignment
                layout[field] = offset, size
                end, widest = offset + size, max(widest, alignment)
        found[name] = {"": (0, -(-end // widest) * widest)} | layout
        alignments[name] = widest
    return found
