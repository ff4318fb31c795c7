"""What torch.compile needs of this machine: a cache that can be written, and no files that an interrupted start left.

Otherwise a worker would fail after minutes, with a traceback that names no folder. A start that ends while a library
is linked leaves an empty file, which torch takes for the library at every later start ("file too short").
"""

from __future__ import annotations

import os
import resource
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from fastattention_vllm.integration.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.fastattention")

LINKING_S = 10
"""Seconds. A linker that another start runs writes its file sooner than that."""
MOST_ENTRIES = 200_000
"""Files and folders. In a larger cache, the rest is not searched for empty libraries."""
NEEDED_BYTES = 8 << 20
"""Free space for the cache of a small model. The cache of a large one takes more."""
NEEDED_FILES = 128
"""Open files. With 64, vLLM's engine process ends without a reason."""


def prepare(vllm_config: VllmConfig) -> None:
    """Remove what interrupted starts left, and check that the cache can be written.

    Raises:
        Refusal: nothing was compiled yet, and the cache's folder cannot be written.
    """
    if not _compiles(vllm_config):
        return
    folder = _folder(vllm_config)
    for place in (folder, Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or folder)):
        remove_empty_libraries(place)
    _check_writable(folder)


def _compiles(vllm_config: VllmConfig) -> bool:
    """Before vLLM has set its defaults there may be no mode, and the level of optimisation decides."""
    from vllm.config import CompilationMode

    mode = vllm_config.compilation_config.mode
    if vllm_config.model_config.enforce_eager or mode == CompilationMode.NONE:
        return False
    return mode is not None or bool(vllm_config.optimization_level)


def remove_empty_libraries(folder: Path) -> None:
    """Remove this user's libraries without content below ``folder``, if no linker can be at work on them."""
    removed = 0
    for path in _empty_libraries(folder):
        try:
            path.unlink()
            removed += 1
        except OSError as error:
            logger.warning(
                "%s is empty and could not be removed (%s). Every start that loads it will fail. Remove it.",
                path,
                error.strerror,
            )
    if removed:
        logger.info("Removed empty libraries that an interrupted start left in %s: %d.", folder, removed)


def _empty_libraries(folder: Path) -> Iterator[Path]:
    seen = 0
    for parent, folders, names in os.walk(folder):  # follows no links
        seen += len(folders) + len(names)
        if seen > MOST_ENTRIES:
            return
        folders[:] = [name for name in folders if _is_own(Path(parent, name))]
        for name in names:
            path = Path(parent, name)
            if path.suffix != ".so":
                continue
            try:
                found = path.lstat()
            except OSError:  # it is gone, or its folder may be listed and not entered
                continue
            own = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
            if own and not found.st_size and time.time() - found.st_mtime > LINKING_S:
                yield path


def _is_own(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.getuid()
    except OSError:
        return False


def _folder(vllm_config: VllmConfig) -> Path:
    """As vLLM names it: the user's, or one below VLLM_CACHE_ROOT."""
    from vllm import envs

    return Path(vllm_config.compilation_config.cache_dir or Path(envs.VLLM_CACHE_ROOT) / "torch_compile_cache")


def _check_writable(folder: Path) -> None:
    try:
        compiled = any(folder.iterdir()) if folder.is_dir() else False
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, NEEDED_BYTES)
    except OSError as error:
        if not compiled:
            raise Refusal(
                f"{folder}, where vLLM keeps what torch.compile makes, cannot be written ({error.strerror}); free "
                f"{NEEDED_BYTES >> 20} MiB or more, set VLLM_CACHE_ROOT to another folder, or pass --enforce-eager."
            ) from error
        logger.warning(
            "%s, where vLLM keeps what torch.compile makes, cannot be written (%s). If this model was not compiled "
            "before, the start will fail: set VLLM_CACHE_ROOT to another folder.",
            folder,
            error.strerror,
        )


def check_open_files() -> None:
    """Raises:
    Refusal: the limit of open files is too low for vLLM's processes.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < NEEDED_FILES:
        raise Refusal(
            f"this process may open {limit} files, too few for vLLM's processes; raise the limit, for example with "
            "`ulimit -n 65536` or LimitNOFILE= of a systemd unit."
        )
