"""``push_all_reduce``: vLLM's small tensor-parallel sums on GPUs by push, where that is faster than NCCL.

vLLM asks the communicator's ``ca_comm`` before NCCL. That is its own kernel for such sums, which it does not have for
more than two GPUs without NVLink between all of them, nor for two that cannot access each other. Then this one takes
its place, for the sizes for which it was measured to be faster at start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.tiling.row_parallel import exchange
from fastattention_vllm.parallel import push_sums
from fastattention_vllm.parallel.agreement import agreed
from fastattention_vllm.parallel.named_collectives import machine, reaches_all
from fastattention_vllm.parallel.push_launch import MOST_RANKS
from fastattention_vllm.parallel.push_sums import PushSums
from fastattention_vllm.parallel.shared_segment import Exchange

logger = init_logger("vllm.fastattention")

VLLMS_OWN = ("ca_comm", "fi_pcie_ipc_ar_comm", "fi_ar_comm")
"""Of the communicator: its kernels for small sums. The last two are FlashInfer's, in newer versions, and come first."""


class PushCommunicator:
    """What vLLM expects of its ``ca_comm``."""

    disabled = False

    def __init__(self, sums: PushSums, max_bytes: int) -> None:
        """``max_bytes``: of a tensor. Larger ones are left to vLLM."""
        self.sums, self.max_bytes = sums, max_bytes

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        return inp.nbytes <= self.max_bytes and self.sums.can_sum(inp)

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
        return self.sums.sum(input) if self.should_custom_ar(input) else None

    def custom_all_gather(self, inp: torch.Tensor) -> None:
        """vLLM then gathers by NCCL."""

    def custom_reduce_scatter(self, inp: torch.Tensor) -> None:
        """The same."""

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Nothing has to be registered for graphs: only boards are written to, and these are open on all ranks."""
        yield

    def close(self) -> None:
        pass


def asked_for(vllm_config: VllmConfig) -> bool:
    return options_of(vllm_config).push_all_reduce == "auto" and vllm_config.parallel_config.tensor_parallel_size > 1


def set_up(vllm_config: VllmConfig) -> None:
    """Have :func:`enable` called once the weights are loaded, if it is asked for."""
    if asked_for(vllm_config):
        compat.before_gpu_profiling(enable)


def enable(vllm_config: VllmConfig, model: torch.nn.Module) -> None:
    """Test and time sums by push, use them where they are faster, and log the choice.

    All ranks of a tensor-parallel group call this, before the first graph is captured.
    """
    if not asked_for(vllm_config):
        return
    group = get_tp_group()
    communicator: Any = group.device_communicator
    if vllm_config.parallel_config.use_ubatching:
        chosen: PushCommunicator | str = "microbatches sum on two streams at a time"
    elif envs.VLLM_BATCH_INVARIANT:
        chosen = "it takes sums up to a size only, and VLLM_BATCH_INVARIANT is set"
    else:
        chosen = _choose(group, vllm_config.model_config.dtype)
    if isinstance(chosen, str):
        logger.info_once("Push all-reduce: not used, because %s.", chosen)
    else:
        communicator.ca_comm = chosen


def _choose(group: Any, dtype: torch.dtype) -> PushCommunicator | str:
    """All ranks get the same: a communicator, or why there is none, as the end of a sentence without a full stop.

    Raises:
        Refusal: another rank failed.
    """
    with agreed(exchange, Refusal) as among:
        return _chosen(group, dtype, among)


def _chosen(group: Any, dtype: torch.dtype, exchange: Exchange) -> PushCommunicator | str:
    found = [getattr(group.device_communicator, name, None) for name in VLLMS_OWN]
    if any(exchange(any(one is not None and not one.disabled for one in found))):
        return "vLLM's own kernel for small sums is enabled"
    if group.world_size > MOST_RANKS:
        return f"it sums over at most {MOST_RANKS} ranks, not {group.world_size}"
    if len(set(exchange(machine()))) > 1:
        return "the ranks are on different machines"
    if dtype not in push_sums.NAMES:
        return f"it has no kernel for {dtype}"
    peer_to_peer = all(exchange(reaches_all(exchange(torch.cuda.current_device()))))
    sums = push_sums.open_sums(group.rank_in_group, group.world_size, exchange, peer_to_peer)
    if isinstance(sums, str):
        return sums
    where = "GPU memory" if peer_to_peer else "host memory"
    if not sums.works(dtype, exchange):
        return f"a test through {where} gave wrong sums, or none in time"
    timed = push_sums.measure(sums, group._all_reduce_out_place, dtype, exchange)
    limit = push_sums.limit(timed)
    microseconds = ", ".join(
        f"{one.bytes >> 10} KiB {one.seconds * 1e6:.1f} and {one.peer_seconds * 1e6:.1f}" for one in timed
    )
    logger.info_once("Push all-reduce: microseconds of a sum through %s, and of vLLM's: %s.", where, microseconds)
    if not limit:
        return "vLLM's sums are as fast"
    logger.info_once("Push all-reduce: used for sums of up to %d KiB.", limit >> 10)
    return PushCommunicator(sums, limit)
