"""``push_all_reduce``: when vLLM's communicator gets sums by push, and that vLLM's own code then uses them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from fastattention_vllm.integration.tiling import small_sums
from fastattention_vllm.integration.tiling.small_sums import PushCommunicator
from fastattention_vllm.parallel import push_sums
from fastattention_vllm.parallel.push_sums import PushSums, Timed

KIB = 1024


class Doubling(PushSums):
    """A sum over two ranks that have the same numbers."""

    def __init__(self, *given: Any) -> None:
        self.max_bytes = push_sums.MAX_BYTES

    def sum(self, x: torch.Tensor, looks: int = 0) -> torch.Tensor:
        return 2 * x

    def works(self, *given: Any) -> bool:
        return True


class WithNcclAlone(CudaCommunicator):  # type: ignore[misc]
    """vLLM's own code, without other ways of summing than NCCL, which here gives zeros."""

    def __init__(self, ca_comm: PushCommunicator) -> None:
        self.ca_comm, self.world_size = ca_comm, 2
        self.pynccl_comm = SimpleNamespace(disabled=False, world_size=2, all_reduce=torch.zeros_like)

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_comm"):
            return None
        if name.startswith("use_"):
            return False
        raise AttributeError(name)


def test_vllms_communicator_uses_it_for_small_sums() -> None:
    theirs = WithNcclAlone(PushCommunicator(Doubling(), 8 * KIB))
    small, large = torch.ones(4 * KIB).half(), torch.ones(4 * KIB + 4).half()
    assert torch.equal(theirs.all_reduce(small), 2 * small)
    assert torch.equal(theirs.all_reduce(large), 0 * large), "left to NCCL"
    with theirs.ca_comm.capture():
        assert torch.equal(theirs.all_reduce(small), 2 * small)
    for name in ("custom_all_gather", "custom_reduce_scatter"):
        if hasattr(theirs, name):
            assert getattr(theirs, name)(small) is None
    theirs.ca_comm.close()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of two GPUs that reach each other. Sums by push take 5 us, and 5 us more for each step of size."""
    monkeypatch.setattr(small_sums, "exchange", lambda value: [value, value])
    monkeypatch.setattr(small_sums, "reaches_all", lambda devices: True)
    monkeypatch.setattr(push_sums, "open_sums", Doubling)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    timed = [Timed(size, 5e-6 * (at + 1), 20e-6) for at, size in enumerate(push_sums.SIZES)]
    monkeypatch.setattr(push_sums, "measure", lambda *given: timed)
    return SimpleNamespace(
        world_size=2, rank_in_group=0, device_communicator=SimpleNamespace(ca_comm=None), _all_reduce_out_place=None
    )


def test_it_is_used_up_to_the_size_for_which_it_is_faster(group: Any) -> None:
    chosen = small_sums._choose(group, torch.float16)
    assert isinstance(chosen, PushCommunicator)
    assert chosen.max_bytes == 16 * KIB
    assert chosen.should_custom_ar(torch.zeros(8 * KIB).half())
    assert not chosen.should_custom_ar(torch.zeros(8 * KIB + 4).half())


@pytest.mark.parametrize(
    ("of_group", "dtype", "replaced", "reason"),
    [
        ({"device_communicator": SimpleNamespace(ca_comm=SimpleNamespace(disabled=False))}, torch.float16, {}, "own"),
        (
            {"device_communicator": SimpleNamespace(fi_pcie_ipc_ar_comm=SimpleNamespace(disabled=False))},
            torch.float16,
            {},
            "own",
        ),
        ({"world_size": 16}, torch.float16, {}, "at most 8 ranks, not 16"),
        ({}, torch.float64, {}, "no kernel for torch.float64"),
        (
            {},
            torch.float16,
            {"exchange": lambda said: [said, ("", ("another", "machine")) if isinstance(said[1], tuple) else said]},
            "on different machines",
        ),
    ],
    ids=["vLLM's own", "vLLM's over PCIe", "ranks", "dtype", "machines"],
)
def test_reasons_against_it(
    of_group: dict[str, Any],
    dtype: torch.dtype,
    replaced: dict[str, Any],
    reason: str,
    group: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in replaced.items():
        monkeypatch.setattr(small_sums, name, value)
    group.__dict__.update(of_group)
    found = small_sums._choose(group, dtype)
    assert isinstance(found, str)
    assert reason in found
    assert not found.endswith(".")


def test_wrong_sums_and_slow_ones_are_not_used(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    disabled = SimpleNamespace(disabled=True)
    group.device_communicator.ca_comm = disabled
    monkeypatch.setattr(small_sums, "get_tp_group", lambda: group)
    parallel = SimpleNamespace(use_ubatching=False, tensor_parallel_size=2)
    asked = {"fastattention": {"push_all_reduce": "auto"}}
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float16), parallel_config=parallel, additional_config=asked
    )
    monkeypatch.setattr(push_sums, "measure", lambda *given: [Timed(4096, 20e-6, 20e-6)])
    assert small_sums._choose(group, torch.float16) == "vLLM's sums are as fast"
    small_sums.enable(config, torch.nn.Module())
    assert group.device_communicator.ca_comm is disabled
    monkeypatch.setattr(push_sums, "measure", lambda *given: [Timed(4096, 10e-6, 20e-6)])
    for given, name, value in (
        (parallel, "use_ubatching", True),
        (small_sums, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True)),
        (config, "additional_config", {}),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(given, name, value)
            small_sums.enable(config, torch.nn.Module())
        assert group.device_communicator.ca_comm is disabled
    small_sums.enable(config, torch.nn.Module())
    assert isinstance(group.device_communicator.ca_comm, PushCommunicator)
    group.device_communicator.ca_comm = disabled
    monkeypatch.setattr(Doubling, "works", lambda *given: False)
    assert "wrong sums" in str(small_sums._choose(group, torch.float16))
    monkeypatch.setattr(push_sums, "open_sums", lambda *given: "rank 1: no memory")
    assert small_sums._choose(group, torch.float16) == "rank 1: no memory"
