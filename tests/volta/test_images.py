"""Images of the Volta kernels that do not belong to this code are never loaded, and the launcher's structures are the
header's."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastattention_vllm import cuda_driver
from fastattention_vllm.attention.volta import images as volta_images
from fastattention_vllm.attention.volta import kernels as volta
from fastattention_vllm.attention.volta import launch as volta_kernels
from fastattention_vllm.attention.volta.images import MANIFEST, ImageError
from fastattention_vllm.integration.cuda import volta as backend_volta
from fastattention_vllm.integration.refusal import Refusal

VARIANT = volta_kernels.decode(64)
FILES = ("decode_d64.sm_70.cubin", "decode_d64.sm_70.ptx")
FIX = r"; run `make volta`, or install the wheel again\.$"


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the images of one variant, sources of its own, and a driver that must not be asked by default."""
    folder, sources = tmp_path / "images", tmp_path / "src"
    folder.mkdir()
    shutil.copytree(volta_images.SOURCES, sources)
    for name in FILES:
        (folder / name).write_text(name)
    monkeypatch.setattr(volta_images, "SOURCES", sources)
    monkeypatch.setattr(volta, "IMAGES", folder)
    volta_images.write_manifest(folder, [VARIANT], "NVRTC 12.9", sources)
    return folder


def launched(suffix: str, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What reaches the driver."""
    given: list[bytes] = []
    monkeypatch.setattr(cuda_driver, "load", lambda image, name, shared: given.append(image))
    volta._loaded.__wrapped__(VARIANT, suffix)
    return given


@pytest.mark.parametrize("suffix", ["cubin", "ptx"])
def test_images_as_they_were_compiled_are_loaded(suffix: str, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(suffix, monkeypatch) == [f"decode_d64.sm_70.{suffix}\0".encode()]
    manifest = json.loads((images / MANIFEST).read_text())
    assert manifest["compiler"] == "NVRTC 12.9"
    assert {name: image["architecture"] for name, image in manifest["images"].items()} == dict(
        zip(FILES, ("sm_70", "compute_70"), strict=True)
    )


def test_images_that_nobody_asks_for_may_be_missing(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy for newer GPUs has the PTX alone, under the whole manifest."""
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
        manifest.write_text(json.dumps(content | {"format": 2}))
    elif how == "no manifest at all":
        manifest.write_text("[]")
    elif how == "another ABI":
        manifest.write_text(json.dumps(content | {"abi": "0" * 64}))
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
        ("no manifest", r"have no manifest\.json that says to which code they belong"),
        ("cut off", r"manifest\.json is not JSON \(.*\)"),
        ("another format", r"manifest\.json is not a manifest of format 1"),
        ("no manifest at all", r"manifest\.json is not a manifest of format 1"),
        ("another ABI", "were compiled for a launcher with other arguments or another workspace"),
        ("changed", r"decode_d64\.sm_70\.ptx is not the file that manifest\.json beside it describes"),
        ("not listed", r"decode_d64\.sm_70\.ptx is not the file that manifest\.json beside it describes"),
        ("a source edited", r"were compiled from other sources than .*/src has now \(decode\.cu\)"),
        ("a source added", r"were compiled from other sources than .*/src has now \(new\.cuh\)"),
    ],
)
def test_images_of_other_code_are_not_loaded(
    how: str, said: str, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(images, how)
    given: list[Any] = []
    monkeypatch.setattr(cuda_driver, "load", lambda *image: given.append(image))
    with pytest.raises(ImageError, match=said + FIX) as refusal:
        volta._loaded.__wrapped__(VARIANT, "ptx")
    assert str(images) in str(refusal.value)
    assert not given


def test_a_wheel_has_no_sources_to_compare(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volta_images, "SOURCES", images / "none")
    assert launched("ptx", monkeypatch)


def test_the_start_ends_in_a_sentence(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(images, "another ABI")
    config = SimpleNamespace(additional_config={})
    monkeypatch.setattr(backend_volta, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    volta.target.cache_clear()
    try:
        for variant in (volta_kernels.write_kv(), volta_kernels.COMBINE):
            (images / variant.image("ptx")).touch()
        with pytest.raises(Refusal, match="another workspace" + FIX):
            backend_volta.FastAttentionVoltaImpl(8, 64, 0.125, 2).process_weights_after_loading(torch.float16)
    finally:
        volta.target.cache_clear()


# --- what the ABI is derived from ------------------------------------------------------------------------------------


class Wider(ctypes.Structure):
    """Split with one more number."""

    _fields_ = [*volta_kernels.Split._fields_, ("more", ctypes.c_int64)]  # type: ignore[misc]


CHANGES: dict[str, tuple[str, Any]] = {
    "a field more": ("STRUCTURES", (volta_kernels.Prefill, Wider)),
    "means of parts in fp32": ("bytes_of_means", lambda head_size, rows: 4 * rows * head_size),
    "a larger workspace": ("floats_of_parts", lambda head_size, rows: rows * (head_size + 1)),
    "longer parts": ("part_length", lambda kv_len, least: 256),
    "other tiles": ("VARIANTS", (replace(VARIANT, warps=4),)),
}


@pytest.mark.parametrize(("name", "value"), CHANGES.values(), ids=CHANGES)
def test_the_abi_changes_with_what_is_launched(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "VARIANTS":
        monkeypatch.setattr(volta_kernels, name, (VARIANT,))
    before = volta_kernels.abi()
    assert before == volta_kernels.abi()
    monkeypatch.setattr(volta_kernels, name, value)
    assert volta_kernels.abi() != before


def fields_of(header: str) -> dict[str, list[str]]:
    """Of each structure in a C++ header, its fields in their order."""
    header = re.sub(r"//[^\n]*", "", header)
    found = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\n?\};", header, re.DOTALL):
        declared = [line.strip() for line in body.split(";") if line.strip()]
        found[name] = [re.findall(r"\w+$", part.strip())[0] for line in declared for part in line.split(",")]
    return found


def test_the_launchers_structures_are_the_headers(tmp_path: Path) -> None:
    """Names and order as they are written there, offsets and sizes as a C++ compiler has them."""
    header = volta_images.SOURCES / "problem.h"
    names = fields_of(header.read_text())
    ours = {structure.__name__: volta_kernels.layout(structure) for structure in volta_kernels.STRUCTURES}
    assert {name: [field for field in layout if field] for name, layout in ours.items()} == names
    lines = [
        f'std::printf("%s %s %zu %zu\\n", "{name}", "{field}", offsetof(T, {field}), sizeof(T::{field}));'
        for name, fields in names.items()
        for field in fields
    ]
    includes = "".join(f"#include {name}\n" for name in ("<cstddef>", "<cstdio>", '"problem.h"'))
    program = f"{includes}using namespace fastattention;\nint main() {{\n"
    for name in names:
        own = "\n".join(line for line in lines if f'"{name}", ' in line)
        program += f'{{ using T = {name}; std::printf("{name}  0 %zu\\n", sizeof(T));\n{own} }}\n'
    source, binary = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text(program + "}\n")
    subprocess.run(["g++", "-std=c++17", f"-I{header.parent}", str(source), "-o", str(binary)], check=True)
    printed = subprocess.run([str(binary)], capture_output=True, text=True, check=True).stdout
    compiled: dict[str, dict[str, tuple[int, int]]] = {name: {} for name in names}
    for line in printed.splitlines():
        name, field, offset, size = line.split(" ")
        compiled[name][field] = int(offset), int(size)
    assert compiled == ours
