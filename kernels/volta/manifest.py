"""Writes ``manifest.json`` next to the compiled images: the code they match, and the parameters of their launches.

A launch passes a block of bytes and a workspace whose layouts are compiled into the kernels. The manifest contains
these layouts, read from the headers, for each launcher. A launcher compares them with its own layouts and refuses
images that differ.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from kernels.volta import gated_delta_variants, linear_variants, push_variants, variants
from kernels.volta.gated_delta_variants import GatedDeltaVariant
from kernels.volta.linear_variants import LinearVariant, UnpackVariant
from kernels.volta.push_variants import PushVariant
from kernels.volta.variants import CHUNK, DECODE_ROWS, WIDE_ROWS, Variant

MANIFEST = "manifest.json"
FORMAT = 5
"""The version of the manifest's format."""
SUFFIXES = ("cubin", "ptx")
SOURCES = Path(__file__).resolve().parent / "src"
SCALARS = {"int": 4, "unsigned": 4, "float": 4, "long long": 8}
"""Size in bytes, which is also the alignment."""
POINTER = 8
CONSTANTS = {
    "chunk": CHUNK,
    "decode_rows": DECODE_ROWS,
    "wide_rows": WIDE_ROWS,
    "shortest_part": 128,
    "longest_part": 1024,
    "max_parts": 64,
    "bytes_of_mean": 2,
    "bytes_of_lse": 4,
}
"""Constants of the workspace and of the parts of sequences: ``part_length`` and ``Split`` in ``problem.h``."""

Layout = dict[str, tuple[int, int]]
"""Offset and size of each field in bytes. The key "" holds those of the whole structure."""


def write(
    folder: Path,
    compiled: Iterable[Variant | GatedDeltaVariant | LinearVariant | UnpackVariant | PushVariant],
    compiler: str,
    sources: Path = SOURCES,
) -> None:
    """The manifest for the images of ``compiled`` in ``folder``, which were compiled from the current ``sources``."""
    compiled = tuple(compiled)
    images = {}
    for variant in compiled:
        for suffix in SUFFIXES:
            content = (folder / variant.image(suffix)).read_bytes()
            images[variant.image(suffix)] = {
                "architecture": f"{'sm' if suffix == 'cubin' else 'compute'}_{variant.architecture}",
                "sha256": hashlib.sha256(content).hexdigest(),
            }
    manifest = {
        "format": FORMAT,
        "compiler": compiler,
        "attention": {
            "constants": CONSTANTS,
            "structures": structures((sources / "problem.h").read_text()),
            "variants": [variants.describe(one) for one in compiled if isinstance(one, Variant)],
        },
        "gated_delta": {
            "constants": gated_delta_variants.CONSTANTS,
            "structures": structures((sources / "gated_delta.h").read_text()),
            "variants": [gated_delta_variants.describe(one) for one in compiled if isinstance(one, GatedDeltaVariant)],
        },
        "linear": {
            "constants": linear_variants.CONSTANTS,
            "structures": structures((sources / "linear.h").read_text()),
            "variants": [
                linear_variants.describe(one) for one in compiled if isinstance(one, LinearVariant | UnpackVariant)
            ],
        },
        "push": {
            "constants": push_variants.CONSTANTS,
            "structures": structures((sources / "push.h").read_text()),
            "variants": [push_variants.describe(one) for one in compiled if isinstance(one, PushVariant)],
        },
        "sources": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(sources.iterdir())},
        "images": images,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def structures(header: str) -> dict[str, Layout]:
    """The layout of each structure in a header. Fields may be numbers, pointers and earlier structures.

    Raises:
        ValueError: a field has another type.
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
