"""Loads the kernel library of ``kernels/cpu`` on first use, and defines its structures and errors.

Environment: ``FASTATTENTION_CPU_LIBRARY`` names another library file, ``FASTATTENTION_CPU_ISA`` forces an instruction
set (``amx``, ``avx512_bf16``, ``avx512``, ``avx2``, ``neon`` or ``scalar``).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
from ctypes import c_char_p, c_float, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path

ABI_VERSION = 9
_LIBRARY_NAME = "libfastattention_cpu.so"
_OK, _OUT_OF_MEMORY = 0, 2


class AttentionArguments(ctypes.Structure):
    """``fa_attention_problem`` of ``fastattention_cpu.h``, field by field."""

    _fields_ = [
        ("num_seqs", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_size", c_int32),
        ("page_size", c_int32),
        ("dtype", c_int32),
        ("kv_dtype", c_int32),
        ("causal", c_int32),
        ("window_left", c_int32),
        ("window_right", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("key_scale", c_float),
        ("value_scale", c_float),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("kv_start_loc", c_void_p),
        ("alibi_slopes", c_void_p),
        ("sinks", c_void_p),
        ("num_tokens", c_int64),
        ("num_blocks", c_int64),
        ("block_table_width", c_int64),
        ("block_table_stride", c_int64),
        ("alibi_seq_stride", c_int64),
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("key_factors", c_void_p),
        ("value_factors", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("query_token_stride", c_int64),
        ("query_head_stride", c_int64),
        ("key_block_stride", c_int64),
        ("key_token_stride", c_int64),
        ("key_head_stride", c_int64),
        ("value_block_stride", c_int64),
        ("value_token_stride", c_int64),
        ("value_head_stride", c_int64),
        ("key_factor_block_stride", c_int64),
        ("key_factor_token_stride", c_int64),
        ("key_factor_head_stride", c_int64),
        ("value_factor_block_stride", c_int64),
        ("value_factor_token_stride", c_int64),
        ("value_factor_head_stride", c_int64),
        ("out_token_stride", c_int64),
        ("out_head_stride", c_int64),
        ("lse_token_stride", c_int64),
        ("lse_head_stride", c_int64),
    ]


class WriteArguments(ctypes.Structure):
    """``fa_kv_write`` of ``fastattention_cpu.h``, field by field."""

    _fields_ = [
        ("num_tokens", c_int64),
        ("num_blocks", c_int64),
        ("num_kv_heads", c_int32),
        ("head_size", c_int32),
        ("page_size", c_int32),
        ("dtype", c_int32),
        ("kv_dtype", c_int32),
        ("key_scale", c_float),
        ("value_scale", c_float),
        ("slot_mapping", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("key_factors", c_void_p),
        ("value_factors", c_void_p),
        ("saturated", c_void_p),
        ("key_token_stride", c_int64),
        ("key_head_stride", c_int64),
        ("value_token_stride", c_int64),
        ("value_head_stride", c_int64),
        ("key_cache_block_stride", c_int64),
        ("key_cache_token_stride", c_int64),
        ("key_cache_head_stride", c_int64),
        ("value_cache_block_stride", c_int64),
        ("value_cache_token_stride", c_int64),
        ("value_cache_head_stride", c_int64),
        ("key_factor_block_stride", c_int64),
        ("key_factor_token_stride", c_int64),
        ("key_factor_head_stride", c_int64),
        ("value_factor_block_stride", c_int64),
        ("value_factor_token_stride", c_int64),
        ("value_factor_head_stride", c_int64),
    ]


class GraphCounters(ctypes.Structure):
    """``fa_cpu_graph_counters`` of ``fastattention_cpu.h``."""

    _fields_ = [("calls", c_int64), ("nanoseconds", c_int64), ("kv_bytes", c_int64)]


def library_path() -> Path:
    """The path of the kernel library.

    It is ``FASTATTENTION_CPU_LIBRARY`` if set, otherwise ``lib/`` inside this package, otherwise ``lib/`` in the
    installed distribution ``fastattention-vllm``. The last one is for processes that import the package from a source
    checkout, such as Ray workers, while the library is installed in site-packages.

    Raises ``RuntimeError`` that names these places if there is no library.
    """
    forced = os.environ.get("FASTATTENTION_CPU_LIBRARY")
    if forced:
        if not Path(forced).is_file():
            raise RuntimeError(f"FASTATTENTION_CPU_LIBRARY is {forced}, but there is no such file; unset it or fix it.")
        return Path(forced)
    tried = [Path(__file__).resolve().parents[2] / "lib" / _LIBRARY_NAME]
    for distribution in importlib.metadata.distributions(name="fastattention-vllm"):
        installed = distribution.locate_file(f"fastattention_vllm/lib/{_LIBRARY_NAME}")
        tried.append(Path(str(installed)))
    for path in tried:
        if path.is_file():
            return path
    places = ", ".join(str(path) for path in dict.fromkeys(tried))
    raise RuntimeError(
        f"The CPU kernel library was not found at {places}; run `make build`, or set FASTATTENTION_CPU_LIBRARY to "
        "its path."
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded kernel library. ``RuntimeError`` if it is not built, damaged, or of the wrong version."""
    path = library_path()
    try:
        _check_whole(path)
        loaded = ctypes.CDLL(str(path))
        found = loaded.fa_cpu_abi_version()
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            f"{path} cannot be loaded as the CPU kernel library ({error}); run `make build`, or reinstall the wheel."
        ) from error
    if found != ABI_VERSION:
        raise RuntimeError(
            f"{path} has version {found} of the CPU kernel interface, but this package needs version {ABI_VERSION}; "
            "run `make build`."
        )
    for name in ("fa_cpu_last_error", "fa_cpu_usable_isas", "fa_cpu_isa"):
        getattr(loaded, name).restype = c_char_p
    loaded.fa_cpu_set_isa.argtypes = [c_char_p]
    loaded.fa_cpu_set_num_threads.argtypes = [c_int32, ctypes.POINTER(c_int32), c_int32]
    loaded.fa_cpu_attention.argtypes = [ctypes.POINTER(AttentionArguments)]
    loaded.fa_cpu_attention_start.argtypes = [ctypes.POINTER(AttentionArguments)]
    loaded.fa_cpu_write_kv.argtypes = [ctypes.POINTER(WriteArguments)]
    loaded.fa_cpu_graph_open.argtypes = [c_int32, ctypes.POINTER(c_void_p), ctypes.POINTER(c_void_p)]
    loaded.fa_cpu_graph_add.argtypes = [
        c_void_p,
        ctypes.POINTER(WriteArguments),
        ctypes.POINTER(AttentionArguments),
        ctypes.POINTER(c_uint32),
    ]
    loaded.fa_cpu_graph_wake.argtypes = loaded.fa_cpu_graph_close.argtypes = [c_void_p]
    loaded.fa_cpu_graph_count.argtypes = [c_void_p, ctypes.POINTER(GraphCounters)]
    forced = os.environ.get("FASTATTENTION_CPU_ISA")
    if forced and loaded.fa_cpu_set_isa(forced.encode()) != _OK:
        usable = loaded.fa_cpu_usable_isas().decode().replace(",", ", ")
        raise RuntimeError(f"FASTATTENTION_CPU_ISA is {forced!r}, but this machine supports: {usable}.")
    return loaded


def _check_whole(path: Path) -> None:
    """Raise ``OSError`` for a file that was cut off. To load it would end the process with SIGBUS.

    The section headers are the last part of a library. Byte 40 of a 64-bit ELF file tells where they begin; bytes 58
    and 60 tell their size and number.
    """
    with path.open("rb") as file:
        head = file.read(64)
    if head[:5] == b"\x7fELF\x02":
        begin, size, count = (
            int.from_bytes(head[at : at + width], "little") for at, width in ((40, 8), (58, 2), (60, 2))
        )
        if path.stat().st_size < begin + size * count:
            raise OSError("the file is cut off")


def check(status: int) -> None:
    """Raise the error that a call of the library reports."""
    if status != _OK:
        message = library().fa_cpu_last_error().decode()
        raise MemoryError(message) if status == _OUT_OF_MEMORY else ValueError(message)
