"""vLLM's message queues work without a name, and progress bars in processes of vLLM make none."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from pathlib import Path

import pytest
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from fastattention_vllm.integration.serving import shared_names


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MessageQueue, "wait_until_ready", MessageQueue.wait_until_ready)
    for _ in range(2):
        shared_names.free_names_of_queues(shm_broadcast)


def test_a_queue_that_is_ready_works_without_a_name(capfd: pytest.CaptureFixture[str]) -> None:
    writer = MessageQueue(n_reader=1, n_local_reader=1, max_chunk_bytes=1000, max_chunks=2)
    name = Path("/dev/shm", writer.buffer.shared_memory.name)
    assert name.exists()
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    waiting = threading.Thread(target=reader.wait_until_ready)
    waiting.start()
    writer.wait_until_ready()
    waiting.join(60)
    assert not name.exists()
    for message in ("first", "x" * 2000, "last"):  # what is too large for a chunk goes through a socket
        sending = threading.Thread(target=writer.enqueue, args=(message,))
        sending.start()
        assert reader.dequeue(timeout=60) == message
        sending.join(60)
    del writer, reader, sending, waiting
    gc.collect()
    assert "FileNotFoundError" not in capfd.readouterr().err


def locks() -> list[str]:
    """The locks of a progress bar in a process that loads this package as a plugin."""
    import tqdm

    shared_names.install()
    return [type(lock).__name__ for lock in [tqdm.tqdm.get_lock()]]


@pytest.mark.parametrize("child", [True, False])
def test_only_processes_that_vllm_starts_get_another_lock(child: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not child:
        monkeypatch.setattr(shared_names, "lock_threads_only", pytest.fail)
        shared_names.install()
        return
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(locks) == ["RLock"]
