"""Images of the Volta kernels from other code are never loaded, and the launcher's structs match the header's."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastattention_vllm import cuda_driver
from fastattention_vllm.attention.volta import delta_kernels
from fastattention_vllm.attention.volta import images as volta_images
from fastattention_vllm.attention.volta import kernels as volta
from fastattention_vllm.attention.volta import launch as volta_kernels
from fastattention_vllm.attention.volta.images import MANIFEST, ImageError
from fastattention_vllm.attention.volta.launch import Variant
from fastattention_vllm.integration.cuda import volta as backend_volta
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.linear.volta import launch as linear
from kernels.volta import manifest as build_manifest
from kernels.volta import variants

VARIANT = variants.decode(64)
FILES = ("decode_d64.sm_70.cubin", "decode_d64.sm_70.ptx")
OTHER = "were compiled for another version of this package"
FIX = r"; run `make volta`, or reinstall the wheel\.$"


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the images of one variant, separate sources, and a driver that must not be called by default."""
    folder, sources = tmp_path / "images", tmp_path / "src"
    folder.mkdir()
    shutil.copytree(volta_images.SOURCES, sources)
    for name in FILES:
        (folder / name).write_text(name)
    monkeypatch.setattr(volta_images, "SOURCES", sources)
    monkeypatch.setattr(volta_images, "IMAGES", folder)
    build_manifest.write(folder, [VARIANT], "NVRTC 12.9", sources)
    monkeypatch.setattr(volta, "_described", volta_images.variants)
    return folder


def launched(suffix: str, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Load the image through a fake driver; returns what reaches the driver."""
    given: list[bytes] = []
    monkeypatch.setattr(cuda_driver, "load", lambda image, name, shared: given.append(image))
    volta._loaded.__wrapped__(volta._variant("decode", 64), suffix)
    return given


@pytest.mark.parametrize("suffix", ["cubin", "ptx"])
def test_compiled_images_are_loaded_unchanged(suffix: str, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(suffix, monkeypatch) == [f"decode_d64.sm_70.{suffix}\0".encode()]
    manifest = json.loads((images / MANIFEST).read_text())
    assert manifest["compiler"] == "NVRTC 12.9"
    assert {name: image["architecture"] for name, image in manifest["images"].items()} == dict(
        zip(FILES, ("sm_70", "compute_70"), strict=True)
    )


def test_unused_images_may_be_missing(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for newer GPUs has only the PTX, with the whole manifest."""
    (images / FILES[0]).unlink()
    assert launched("ptx", monkeypatch)
    with pytest.raises(ImageError, match=rf"not built: there is no .*/{re.escape(FILES[0])}{FIX}"):
        launched("cubin", monkeypatch)


def spoil(images: Path, how: str) -> None:
    manifest = images / MANIFEST
    content = json.loads(manifest.read_text())
    if how == "no manifest":
        manifest.unlink()
    elif how == "cut off":
        manifest.write_text(manifest.read_text()[:100])
    elif how == "another format":
        manifest.write_text(json.dumps(content | {"format": 1}))
    elif how == "no manifest at all":
        manifest.write_text("[]")
    elif how == "another structure":
        content["attention"]["structures"]["Split"]["rows"] = [200, 4]
        manifest.write_text(json.dumps(content))
    elif how == "a structure more":
        content["attention"]["structures"]["More"] = {"": [0, 4], "one": [0, 4]}
        manifest.write_text(json.dumps(content))
    elif how == "no structures":
        del content["attention"]["structures"]
        manifest.write_text(json.dumps(content))
    elif how == "longer parts":
        content["attention"]["constants"]["longest_part"] = 2048
        manifest.write_text(json.dumps(content))
    elif how == "a kernel without its tile":
        del content["attention"]["variants"][0]["tile"]
        manifest.write_text(json.dumps(content))
    elif how == "changed":
        (images / FILES[1]).write_text("something else")
    elif how == "not listed":
        del content["images"][FILES[1]]
        manifest.write_text(json.dumps(content))
    elif how == "a source edited":
        path = volta_images.SOURCES / "decode.cu"
        path.write_text(path.read_text() + "\n")
    elif how == "a source added":
        (volta_images.SOURCES / "new.cuh").touch()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no manifest", r"have no manifest\.json, so their version is unknown"),
        ("cut off", r"manifest\.json is not JSON \(.*\)"),
        ("another format", r"manifest\.json is not a manifest of format 5"),
        ("no manifest at all", r"manifest\.json is not a manifest of format 5"),
        ("another structure", rf"{OTHER} \(difference: Split\)"),
        ("a structure more", rf"{OTHER} \(difference: More\)"),
        ("no structures", rf"{OTHER} \(difference: structures\)"),
        ("longer parts", rf"{OTHER} \(difference: longest_part\)"),
        ("a kernel without its tile", r"manifest\.json does not have the expected form \(.*'tile'\)"),
        ("changed", r"decode_d64\.sm_70\.ptx does not match its checksum in manifest\.json"),
        ("not listed", r"decode_d64\.sm_70\.ptx does not match its checksum in manifest\.json"),
        ("a source edited", r"/src have changed since the Volta kernels in .* were compiled \(decode\.cu\)"),
        ("a source added", r"/src have changed since the Volta kernels in .* were compiled \(new\.cuh\)"),
    ],
)
def test_images_of_other_code_are_not_loaded(
    how: str, said: str, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(images, how)
    given: list[Any] = []
    monkeypatch.setattr(cuda_driver, "load", lambda *image: given.append(image))
    with pytest.raises(ImageError, match=said + FIX) as refusal:
        volta._loaded.__wrapped__(volta._variant("decode", 64), "ptx")
    assert str(images) in str(refusal.value)
    assert not given


def test_a_wheel_without_sources_is_not_compared(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volta_images, "SOURCES", images / "none")
    assert launched("ptx", monkeypatch)


def test_unusable_images_stop_the_start_with_one_sentence(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(images, "another structure")
    config = SimpleNamespace(additional_config={}, compilation_config=SimpleNamespace(static_forward_context={}))
    monkeypatch.setattr(backend_volta, "get_current_vllm_config_or_none", lambda: config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    volta.target.cache_clear()
    try:
        with pytest.raises(Refusal, match=r"another version of this package \(difference: Split\)" + FIX):
            backend_volta.FastAttentionVoltaImpl(8, 64, 0.125, 2).process_weights_after_loading(torch.float16)
    finally:
        volta.target.cache_clear()


def test_missing_images_are_reported(images: Path) -> None:
    for path in images.iterdir():
        path.unlink()
    with pytest.raises(ImageError, match=rf"not built: there is no {images}/manifest\.json{FIX}"):
        volta._variant("decode", 64)


def test_the_launcher_reads_the_built_images(images: Path) -> None:
    read = volta._variant("decode", 64)
    assert read == Variant(**variants.describe(VARIANT))
    assert (read.threads, read.rows, read.shared_bytes) == (VARIANT.threads, VARIANT.rows, VARIANT.shared_bytes)
    assert [read.image(suffix) for suffix in ("cubin", "ptx")] == list(FILES)
    assert {VARIANT.image(suffix) for suffix in ("cubin", "ptx")} == set(FILES)


# --- layouts ----------------------------------------------------------------------------------------------------------


class Wider(ctypes.Structure):
    """``Split`` with one more field."""

    _fields_ = [*volta_kernels.Split._fields_, ("more", ctypes.c_int64)]  # type: ignore[misc]


def test_a_launcher_with_other_structures_loads_no_images(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Wider.__name__ = "Split"
    others = [one for one in volta_kernels.STRUCTURES if one is not volta_kernels.Split]
    monkeypatch.setattr(volta_kernels, "STRUCTURES", (*others, Wider))
    with pytest.raises(ImageError, match=rf"{OTHER} \(difference: Split\){FIX}"):
        volta._variant("decode", 64)


@pytest.mark.parametrize("name", volta_kernels.CONSTANTS)
def test_a_launcher_with_another_workspace_loads_no_images(
    name: str, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(volta_kernels.CONSTANTS, name, 2 * volta_kernels.CONSTANTS[name])
    with pytest.raises(ImageError, match=rf"{OTHER} \(difference: {name}\){FIX}"):
        volta._variant("decode", 64)


def test_the_constants_are_those_that_the_functions_use() -> None:
    constants = volta_kernels.CONSTANTS
    assert volta_kernels.part_length(1, 2) == constants["shortest_part"]
    assert volta_kernels.part_length(constants["max_parts"] * constants["longest_part"], 1) == constants["longest_part"]
    assert (
        volta_kernels.part_length(constants["max_parts"] * constants["longest_part"] + 1, 1) > constants["longest_part"]
    )
    assert volta_kernels.bytes_of_means(64, 3) == constants["bytes_of_mean"] * 3 * 64
    floats = volta_kernels.floats_of_parts(64, 3)
    assert 4 * floats == 3 * (64 * constants["bytes_of_mean"] + constants["bytes_of_lse"])


@pytest.mark.parametrize("field", ["short one;", "Other one;", "int one[4];", "double one;"])
def test_an_unparsable_header_stops_the_build(field: str) -> None:
    with pytest.raises(ValueError, match=r"^One has a field .*: '(short|Other|int|double) one"):
        build_manifest.structures(f"struct One {{\n  {field}\n}};")


def fields_of(header: str) -> dict[str, list[str]]:
    """The fields of each structure in a C++ header, in order."""
    header = re.sub(r"//[^\n]*", "", header)
    found = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\n?\};", header, re.DOTALL):
        declared = [line.strip() for line in body.split(";") if line.strip()]
        found[name] = [re.findall(r"\w+$", part.strip())[0] for line in declared for part in line.split(",")]
    return found


@pytest.mark.parametrize(
    ("name", "structures"),
    [
        ("problem.h", volta_kernels.STRUCTURES),
        ("gated_delta.h", delta_kernels.STRUCTURES),
        ("linear.h", linear.STRUCTURES),
    ],
)
def test_the_launchers_structures_equal_the_headers(
    name: str, structures: tuple[type[ctypes.Structure], ...], tmp_path: Path
) -> None:
    """Names and order as in the header; offsets and sizes as a C++ compiler computes them."""
    header = volta_images.SOURCES / name
    names = fields_of(header.read_text())
    ours = {structure.__name__: volta_kernels.layout(structure) for structure in structures}
    assert {name: [field for field in layout if field] for name, layout in ours.items()} == names
    lines = [
        f'std::printf("%s %s %zu %zu\\n", "{name}", "{field}", offsetof(T, {field}), sizeof(T::{field}));'
        for name, fields in names.items()
        for field in fields
    ]
    includes = "".join(f"#include {name}\n" for name in ("<cstddef>", "<cstdio>", f'"{name}"'))
    program = f"{includes}using namespace fastattention;\nint main() {{\n"
    for one in names:
        own = "\n".join(line for line in lines if f'"{one}", ' in line)
        program += f'{{ using T = {one}; std::printf("{one}  0 %zu\\n", sizeof(T));\n{own} }}\n'
    source, binary = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text(program + "}\n")
    subprocess.run(["g++", "-std=c++17", f"-I{header.parent}", str(source), "-o", str(binary)], check=True)
    printed = subprocess.run([str(binary)], capture_output=True, text=True, check=True).stdout
    compiled: dict[str, dict[str, tuple[int, int]]] = {name: {} for name in names}
    for line in printed.splitlines():
        name, field, offset, size = line.split(" ")
        compiled[name][field] = int(offset), int(size)
    assert compiled == ours
    assert build_manifest.structures(header.read_text()) == compiled
