"""Are the answers right on an Ascend 910B, and how fast is it? Not yet run on hardware.

Writes a hardware report (docs/hardware-reports.md) to send back.

    python benchmarks/ascend_910b.py --json ascend-910b.json

Run by: owners of an Ascend 910B.
Needs: CANN, torch_npu and this package; no vLLM.

First every kind of step is compared with float64 (the exit status is 1 if one is off), then a layer whose keys and
values are in host memory. Then the read rates of host memory are measured, and prefill and decoding are timed next to
the same operator with a whole mask, to this package's Triton kernels where triton-ascend is installed, and to attention
written in torch, with the memory that each takes. A case that fails is kept with its message.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import platform
import sys
from importlib import metadata
from pathlib import Path

import torch
from ascend_910b_host import host_layer, host_rates
from ascend_910b_speed import fast_steps, speed
from ascend_910b_steps import check, right_steps

from fastattention_vllm.attention import ascend
from fastattention_vllm.attention.ascend_triton import kernels as ascend_triton
from fastattention_vllm.bench.hardware_report import SEND, Check, hardware_report
from fastattention_vllm.bench.report import Row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="write the result to this file")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="npu:0")
    options = parser.parse_args()
    ascend.operator()
    device = torch.device(options.device)
    rows = [row for step in right_steps() if (row := check(step, device)) is not None]
    missing = triton_missing()
    if missing:
        print(f"The Triton kernels are left out: {missing}", flush=True)
    else:
        rows += [row for step in right_steps() if (row := check(step, device, ascend_triton, ", Triton")) is not None]
    rows += host_layer(device)
    numbers = [as_check(row) for row in rows]
    wrong = [one for one in numbers if not one.right]
    print(f"{len(numbers) - len(wrong)} of {len(numbers)} kinds of step are right", flush=True)
    rows = [host_rates(device)]
    for step in fast_steps():
        rows += speed(step, device, options.repeats)
    name = hardware(device)
    hardware_report(name, {"npu": name}, versions(), numbers, rows).write(options.json)
    print(f"wrote {options.json}. {SEND}")
    return 1 if wrong else 0


def triton_missing() -> str | None:
    """Why the Triton kernels cannot run at all, in one sentence."""
    return None if importlib.util.find_spec("triton") else "triton-ascend is not installed."


def as_check(row: Row) -> Check:
    error = row.ours if row.ours == row.ours else None
    note = getattr(row, "failed", "" if error == row.ours else "the answer contains NaN.")
    return Check(case=row.case, error=error, allowed=row.limit or 0.0, right=row.right, note=note)  # type: ignore[attr-defined]


def hardware(device: torch.device) -> str:
    return str(torch.npu.get_device_name(device)) if device.type == "npu" else device.type  # type: ignore[attr-defined]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "torch-npu", "triton-ascend", "fastattention-vllm", "vllm", "vllm-ascend"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    cann = Path("/usr/local/Ascend/ascend-toolkit/latest/version.cfg")
    if cann.exists():
        found["cann"] = cann.read_text()[:300]
    return found


if __name__ == "__main__":
    sys.exit(main())
