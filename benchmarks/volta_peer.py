"""PyTorch's memory-efficient attention on V100 as machine code; xformers uses the same kernels there.

Used by: volta_sim.py and volta_launches.py.

The cubin is extracted from the wheel of torch 2.10.0 and cached in `build/volta-peer/`, which git ignores: it is never
part of this repository. Its kernels are CUTLASS's fused attention. PyTorch chooses 64x64_rf up to a head size of 64,
32x128_rf up to 128 and 32x128_gmem above (fp16, strides that are multiples of 8).
"""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

WHEEL = "torch==2.10.0"
SHA256 = "3abd6b97e5ce43c5ee4ed10197641e7a60081e4ced27e763a612fc4956942cde"
SIZE = 445488
"""Bytes of the cubin with fp16's aligned kernels."""
CACHE = Path(__file__).resolve().parents[1] / "build" / "volta-peer"

CONTAINER, CONTAINER_HEADER = 0xBA55ED50, 16
ELF_KIND, SM_70, RAW_LZ4 = 2, 70, 0x2000


@dataclass(frozen=True, slots=True)
class PeerKernel:
    name: str
    """A part of its name that is unique in the cubin."""
    rows: int
    """Queries per CTA."""
    shared_bytes: int
    threads: tuple[int, int, int] = (32, 4, 1)


def kernel_for(head_size: int) -> PeerKernel:
    """The kernel that PyTorch chooses on compute capability 7.0."""
    if head_size <= 64:
        return PeerKernel("f16_aligned_64x64_rf_sm70", 64, 17920)
    if head_size <= 128:
        return PeerKernel("f16_aligned_32x128_rf_sm70", 32, 25600)
    return PeerKernel("f16_aligned_32x128_gmem_sm70", 32, 33920)


def parameter_block(
    size: int,
    *,
    query: int,
    key: int,
    value: int,
    out: int,
    sums: int,
    batch: int,
    tokens: int,
    heads: int,
    head_size: int,
    causal: bool,
) -> bytes:
    """Parameters of ``size`` bytes, for contiguous ``[batch, tokens, heads, head_size]`` fp16 at these addresses.

    ``sums``: fp32 of the same shape, used only by the gmem kernel.
    """
    block = bytearray(size)
    row = heads * head_size
    struct.pack_into("<3Q", block, 0, query, key, value)
    struct.pack_into("<2Q", block, 64, out, sums)
    struct.pack_into("<if", block, 88, 0, head_size**-0.5)  # no window
    struct.pack_into("<5i", block, 96, head_size, head_size, tokens, tokens, tokens)
    block[116] = int(causal)
    struct.pack_into("<3i", block, 120, row, row, row)
    struct.pack_into("<i", block, 136, row)
    struct.pack_into("<3i", block, 140, head_size, head_size, head_size)
    struct.pack_into("<3q", block, 160, *[tokens * row] * 3)
    struct.pack_into("<2i", block, 192, batch, heads)
    return bytes(block)


def cubin(libtorch: Path | None = None) -> bytes:
    """The cubin from the cache, else from ``libtorch``, else from the wheel (915 MB).

    ``libtorch`` is the wheel's libtorch_cuda.so.

    Raises:
        RuntimeError: The file does not contain the cubin that the published figures were measured with.
    """
    cached = CACHE / "fmha_f16_aligned_sm70.cubin"
    if cached.exists() and _is_it(cached.read_bytes()):
        return cached.read_bytes()
    if libtorch is not None:
        found = extract(libtorch)
    else:
        with tempfile.TemporaryDirectory(dir=_made(CACHE)) as folder:
            found = extract(_download(Path(folder)))
    _made(CACHE)
    cached.write_bytes(found)
    return found


def extract(library: Path) -> bytes:
    """Extract the cubin from the fat binaries of a libtorch_cuda.so, by its checksum."""
    content = library.read_bytes()
    at = content.find(struct.pack("<I", CONTAINER))
    while at >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", content, at)
        if version == 1 and header == CONTAINER_HEADER and at + header + size <= len(content):
            found = _search(content, at + header, at + header + size)
            if found is not None:
                return found
        at = content.find(struct.pack("<I", CONTAINER), at + 4)
    raise RuntimeError(f"{library} has no cubin with SHA-256 {SHA256}; give the one of the PyPI wheel {WHEEL}.")


def _search(content: bytes, at: int, end: int) -> bytes | None:
    while at < end:
        (kind,) = struct.unpack_from("<H", content, at)
        (header,) = struct.unpack_from("<I", content, at + 4)
        (padded,) = struct.unpack_from("<Q", content, at + 8)
        (compressed,) = struct.unpack_from("<I", content, at + 16)
        (architecture,) = struct.unpack_from("<I", content, at + 28)
        (flags,) = struct.unpack_from("<Q", content, at + 40)
        (unpacked,) = struct.unpack_from("<Q", content, at + 56)
        body = at + header
        if kind == ELF_KIND and architecture == SM_70:
            if flags & RAW_LZ4 and 0 <= unpacked - SIZE < 64:
                found = unpack_lz4(content[body : body + compressed])[:SIZE]
            else:
                found = content[body : body + SIZE]
            if _is_it(found):
                return found
        at = body + padded
    return None


def unpack_lz4(block: bytes) -> bytes:
    """Unpack a raw LZ4 block: literals, and copies of earlier output."""
    out, at = bytearray(), 0

    def length(short: int) -> int:
        nonlocal at
        if short < 15:
            return short
        more = 255
        while more == 255:
            more = block[at]
            short += more
            at += 1
        return short

    while at < len(block):
        token = block[at]
        at += 1
        literals = length(token >> 4)
        out += block[at : at + literals]
        at += literals
        if at >= len(block):
            break  # the last sequence has literals only
        distance = int.from_bytes(block[at : at + 2], "little")
        at += 2
        count = length(token & 15) + 4
        begin = len(out) - distance
        if not 0 <= begin < len(out):
            raise ValueError(f"a copy from {distance} bytes before byte {len(out)} is no LZ4.")
        while count > 0:
            piece = out[begin : begin + count]
            out += piece
            begin += len(piece)
            count -= len(piece)
    return bytes(out)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version", "3.11"]
    command += ["--platform", "manylinux_2_28_x86_64", "--dest", str(folder), WHEEL]
    if subprocess.run(command, check=False).returncode:
        raise RuntimeError(f"pip cannot download {WHEEL}; give its libtorch_cuda.so with --libtorch.")
    (wheel,) = folder.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract("torch/lib/libtorch_cuda.so", folder))


def _is_it(content: bytes) -> bool:
    return hashlib.sha256(content).hexdigest() == SHA256


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
