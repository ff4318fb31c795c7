"""A start does not fail in torch.compile over a file or a folder that no message names."""

from __future__ import annotations

import ctypes
import inspect
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import vllm.compilation.backends
from vllm.engine.arg_utils import EngineArgs

from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.serving import compile_cache
from tests.other_user import NOBODY, as_another_user, needs_another_user
from tests.reference_models import llama, save_random


@contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def old(path: Path, content: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (time.time() - 3600,) * 2)
    return path


def engine_config(folder: Path, **named: Any) -> Any:
    model = llama(4, 2, 64)
    model.architectures = ["LlamaForCausalLM"]
    save_random(model, folder)
    settings: dict[str, Any] = {
        "model": str(folder),
        "attention_backend": "fastattention",
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "kv_cache_memory_bytes": 64 << 20,
    }
    return EngineArgs(**(settings | named)).create_engine_config()


def test_libraries_that_an_interrupted_start_left_are_removed(tmp_path: Path) -> None:
    empty = old(tmp_path / "hash" / "rank_0_0" / "inductor_cache" / "ab" / "cab.main.so")
    with pytest.raises(OSError, match="file too short"):
        ctypes.CDLL(str(empty))
    whole, other = old(tmp_path / "whole.so", b"\x7fELF"), old(tmp_path / "graph.json")
    being_linked = old(tmp_path / "new.so")
    being_linked.touch()
    elsewhere = old(tmp_path.parent / f"{tmp_path.name}-elsewhere" / "linked.so")
    (tmp_path / "link.so").symlink_to(elsewhere)
    (tmp_path / "folder").symlink_to(elsewhere.parent)
    compile_cache.remove_empty_libraries(tmp_path)
    assert not empty.exists()
    assert all(path.exists() for path in (whole, other, being_linked, elsewhere, tmp_path / "link.so"))
    compile_cache.remove_empty_libraries(tmp_path / "none")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_another_users_files_stay(tmp_path: Path) -> None:
    path = old(tmp_path / "others.so")
    os.chown(path, NOBODY, NOBODY)
    compile_cache.remove_empty_libraries(tmp_path)
    assert path.exists()


@needs_another_user
def test_folders_that_may_not_be_entered_are_passed_over() -> None:
    """One with mode 0744 may be listed, and each look at a file in it fails."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        path = old(Path(name, "listed", "a.so"))
        path.parent.chmod(0o744)
        as_another_user(lambda: compile_cache.remove_empty_libraries(Path(name)))
        as_another_user(lambda: compile_cache.remove_empty_libraries(path.parent))
        assert path.exists()


@needs_another_user
def test_folders_of_other_users_are_not_searched(tmp_path: Path) -> None:
    path = old(tmp_path / "theirs" / "own.so")
    os.chown(path.parent, NOBODY, NOBODY)
    compile_cache.remove_empty_libraries(tmp_path)
    assert path.exists()


def test_a_huge_folder_is_not_searched_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "MOST_ENTRIES", 3)
    path = old(tmp_path / "a" / "b" / "c" / "d" / "e.so")
    compile_cache.remove_empty_libraries(tmp_path)
    assert path.exists()


@pytest.mark.parametrize("why", ["a full disk", "no folder"])
def test_a_cache_that_cannot_be_written_is_named(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cache"
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(root))
    if why == "no folder":
        root.write_text("a file")
    # Without space for what is compiled, but with space for the model.
    with limited(resource.RLIMIT_FSIZE, 6 << 20), pytest.raises(ValueError, match="VLLM_CACHE_ROOT") as caught:
        engine_config(tmp_path / "model")
    assert f"{root}/torch_compile_cache, where vLLM keeps what torch.compile makes, cannot be written" in str(
        caught.value
    )
    with limited(resource.RLIMIT_FSIZE, 6 << 20):
        engine_config(tmp_path / "model", enforce_eager=True)


def test_what_was_compiled_before_may_be_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(compile_cache.logger, "warning", lambda text, *values: lines.append(text % values))
    old(tmp_path / "hash" / "computation_graph.py", b"graph")
    with limited(resource.RLIMIT_FSIZE, 1 << 20):
        compile_cache._check_writable(tmp_path)
    assert lines[0].startswith(f"{tmp_path}, where vLLM keeps what torch.compile makes, cannot be written (File too ")


def test_the_folder_is_vllms() -> None:
    assert 'envs.VLLM_CACHE_ROOT, "torch_compile_cache", ' in inspect.getsource(vllm.compilation.backends)


def test_too_few_open_files_are_refused() -> None:
    compile_cache.check_open_files()
    with (
        limited(resource.RLIMIT_NOFILE, 64),
        pytest.raises(Refusal, match=r"^this process may open 64 files, .*ulimit -n"),
    ):
        compile_cache.check_open_files()
