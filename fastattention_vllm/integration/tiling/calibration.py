"""The fastest way to split a layer's rows on this machine, from vLLM's cache folder or measured and saved there."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import vllm.envs as envs
from vllm.logger import init_logger

from fastattention_vllm import __version__
from fastattention_vllm.parallel import calibrate, calibration_file, fused_linear
from fastattention_vllm.parallel.choice import Choice
from fastattention_vllm.parallel.collective import Collective
from fastattention_vllm.parallel.layer_timer import LayerTimer
from fastattention_vllm.parallel.plan import MIN_GAIN
from fastattention_vllm.parallel.tiled_linear import Linear

logger = init_logger("vllm.fastattention")


def of(
    weight: torch.Tensor,
    collectives: Mapping[str, Collective],
    plain: Linear,
    min_rows: int,
    max_rows: int,
    fused_linears: Mapping[str, Linear],
) -> Choice:
    """The choice for a layer, the same on every rank. It is measured unless all ranks have it on disk.

    All ranks must call this with the same arguments.

    Args:
        weight: [outputs, inputs of this rank].
        collectives: those to choose from, by name.
        plain: the layer without blocks.
        max_rows: tokens of the longest step.
        fused_linears: what does the whole layer in one call, by name.
    """
    first = next(iter(collectives.values()))
    path, key = file(), key_of(weight, collectives, min_rows, max_rows, fused_linears)
    try:
        known = calibration_file.read(path, key)
        unknown = {trial.collective for trial in known.trials if trial.collective} if known else set()
        if unknown := unknown.difference(collectives, fused_linears):
            raise ValueError(f"{path} names {', '.join(sorted(unknown))}, which is not open here")
    except ValueError as error:
        logger.warning_once("Tiling-AllReduce: %s; measuring the layer again.", error)
        known = None
    if _all_alike(known, weight.device, first) and known is not None:
        return known
    outputs, inputs = weight.shape
    logger.info_once("Tiling-AllReduce: measuring a layer of %d inputs per rank and %d outputs.", inputs, outputs)
    began = time.perf_counter()

    def say(line: str) -> None:
        logger.info_once("Tiling-AllReduce: %s, %.1f s.", line, time.perf_counter() - began)

    measured = calibrate.measure(collectives, plain, weight, min_rows, max_rows, say=say)
    for name, layer in fused_linears.items() if measured.trials else []:
        timer = LayerTimer(collectives, plain, weight, measured.trials[-1].rows, calibrate.BUDGET)
        measured = fused_linear.contest(measured, timer, name, layer)
        say(f"{name} is timed too")
    logger.info_once("Tiling-AllReduce: finished measuring the layer after %.1f s.", time.perf_counter() - began)
    try:
        calibration_file.write(path, key, measured)
    except OSError as error:
        logger.warning_once("Tiling-AllReduce: the measurements could not be saved for the next start: %s.", error)
    return measured


def file() -> Path:
    return Path(envs.VLLM_CACHE_ROOT) / "fastattention" / "tiling.json"


def key_of(
    weight: torch.Tensor,
    collectives: Mapping[str, Collective],
    min_rows: int,
    max_rows: int,
    fused_linears: Mapping[str, Linear],
) -> str:
    """A text with everything that the measured times, the candidates and the choice depend on."""
    if weight.device.type == "cpu":
        device = f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} CPUs"
        device += f", {torch.get_num_threads()} threads"
    else:
        device = torch.get_device_module(weight.device).get_device_name(weight.device)
        # Which devices, too: those of one machine may be linked in several ways.
        says = ("NCCL_", "HCCL_", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
        told = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(says))
        device += "".join(f", {one}" for one in told)
    outputs, inputs = weight.shape
    dtype = str(weight.dtype).removeprefix("torch.")
    calibrated = calibrate.row_counts(max_rows)[-1]
    ranks = next(iter(collectives.values())).size
    return (
        f"{inputs} to {outputs} {dtype}, {ranks} ranks by {' '.join([*collectives, *fused_linears])}, "
        f"{min_rows} to {calibrated} tokens, "
        f"{device} of {platform.node()}, "
        f"gains of {MIN_GAIN:.0%}, {calibrate.SURE_GAIN:.0%} or {calibrate.MIN_HIDDEN:.0%} hidden, "
        f"torch {torch.__version__}, fastattention {__version__}"
    )


def _all_alike(choice: Choice | None, device: torch.device, collective: Collective) -> bool:
    """Whether all ranks have the same choice. Other machines have separate files, and files may be missing."""
    digest = hashlib.sha256(repr(choice).encode()).digest()
    own = int.from_bytes(digest[:6], "big")  # 48 bits, which float64 holds exactly
    digests = collective.totals([own if rank == collective.rank else 0 for rank in range(collective.size)], device)
    return len(set(digests)) == 1
