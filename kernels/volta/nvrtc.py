"""Compiles CUDA C++ with NVIDIA's run-time compiler: no GPU, no CUDA toolkit, no host compiler.

The compiler is the PyPI package nvidia-cuda-nvrtc-cu12, release 12.9, the last release that supports sm_70. It contains
no headers. Kernels that include ``cuda_fp16.h`` need the headers of nvidia-cuda-runtime-cu12, given by ``include``.

Reads:  NVRTC_LIBRARY (path of libnvrtc.so.12, instead of the package's).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "nvidia-cuda-nvrtc-cu12"
RELEASE = (12, 9)
SUCCESS = 0


class CompileError(Exception):
    """The compiler's log, or one sentence that explains why there is no compiler."""


@dataclass(frozen=True, slots=True)
class Compiled:
    binary: bytes
    """A cubin for a real architecture, PTX text for a virtual one."""
    log: str
    """Warnings; with the option ``--ptxas-options=-v`` registers and spills too."""


def compile_cuda(
    source: str,
    *,
    architecture: str = "sm_70",
    name: str = "kernel.cu",
    defines: Mapping[str, str | int] | None = None,
    include: Sequence[Path] = (),
    options: Sequence[str] = (),
) -> Compiled:
    """Compile to a cubin for ``sm_NN``, or to PTX for ``compute_NN``. ``name``: the source's name in the log.

    Raises :class:`CompileError` with the compiler's log.
    """
    library = _library()
    arguments = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        *(f"--define-macro={macro}={value}" for macro, value in (defines or {}).items()),
        *(f"--include-path={folder}" for folder in include),
        *options,
    ]
    program = c_void_p()
    _check(library, library.nvrtcCreateProgram(program, source.encode(), name.encode(), 0, None, None))
    try:
        encoded = (c_char_p * len(arguments))(*(argument.encode() for argument in arguments))
        status = library.nvrtcCompileProgram(program, len(arguments), encoded)
        log = _without_deprecation(_text(library, "ProgramLog", program).decode().strip("\0\n"))
        if status != SUCCESS:
            raise CompileError(f"{name} does not compile for {architecture}:\n{log or _reason(library, status)}")
        kind = "CUBIN" if architecture.startswith("sm_") else "PTX"
        return Compiled(_text(library, kind, program), log)
    finally:
        library.nvrtcDestroyProgram(program)


def _without_deprecation(log: str) -> str:
    """Every compilation warns that sm_70 is deprecated, which is why this release was chosen."""
    lines = (line for line in log.splitlines() if not line.startswith("nvrtc: warning: Architectures prior to"))
    return "\n".join(lines).strip()


def version() -> tuple[int, int]:
    """The compiler's version, like (12, 9)."""
    major, minor = c_int(), c_int()
    library = _library()
    _check(library, library.nvrtcVersion(major, minor))
    return major.value, minor.value


def _text(library: ctypes.CDLL, what: str, program: c_void_p) -> bytes:
    size = c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, size))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _reason(library: ctypes.CDLL, status: int) -> str:
    text: bytes = library.nvrtcGetErrorString(status)
    return text.decode()


def _check(library: ctypes.CDLL, status: int) -> None:
    if status != SUCCESS:
        raise CompileError(f"NVRTC failed: {_reason(library, status)}.")


@functools.cache
def _library() -> ctypes.CDLL:
    path = _path()
    builtins = path.with_name("libnvrtc-builtins.so.12.9")
    if builtins.exists():
        # NVRTC opens this library by its bare name, which the loader resolves if the library is already loaded.
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    library.nvrtcVersion.argtypes = [POINTER(c_int), POINTER(c_int)]
    library.nvrtcGetErrorString.restype = c_char_p
    library.nvrtcCreateProgram.argtypes = [POINTER(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p]
    library.nvrtcCompileProgram.argtypes = [c_void_p, c_int, POINTER(c_char_p)]
    library.nvrtcDestroyProgram.argtypes = [POINTER(c_void_p)]
    for what in ("ProgramLog", "CUBIN", "PTX"):
        getattr(library, f"nvrtcGet{what}Size").argtypes = [c_void_p, POINTER(c_size_t)]
        getattr(library, f"nvrtcGet{what}").argtypes = [c_void_p, c_char_p]
    return library


def _path() -> Path:
    if os.environ.get("NVRTC_LIBRARY"):
        return Path(os.environ["NVRTC_LIBRARY"])
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise CompileError(f"{PACKAGE} is not installed; run `make setup-dev`, or set NVRTC_LIBRARY.") from None
    found = tuple(int(part) for part in package.version.split(".")[:2])
    if found != RELEASE:
        raise CompileError(
            f"{PACKAGE} {package.version} is installed, but the kernels need version 12.9; install that one."
        )
    for file in package.files or ():
        if file.name == "libnvrtc.so.12":
            return Path(str(file.locate()))
    raise CompileError(f"{PACKAGE} {package.version} has no libnvrtc.so.12; reinstall it.")
