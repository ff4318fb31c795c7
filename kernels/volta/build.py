"""Compile all variants of the kernels for V100 and Turing, each as a cubin and as PTX for newer GPUs.

    python -m kernels.volta.build FOLDER

Prints registers, spills and shared memory of each kernel. Exits with 1 if a kernel spills more than its limit, or uses
so many registers that fewer CTAs than intended fit on an SM. The manifest is written last, and only if there was no
error. The launcher loads no kernel without it. Needs only Python's standard library and NVRTC.
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels.volta import gated_delta_variants, linear_variants, manifest, push_variants, variants
from kernels.volta.gated_delta_variants import GatedDeltaVariant
from kernels.volta.linear_variants import LinearVariant, UnpackVariant
from kernels.volta.manifest import MANIFEST, SOURCES
from kernels.volta.nvrtc import compile_cuda, version
from kernels.volta.push_variants import PushVariant
from kernels.volta.variants import COMPILER_OPTIONS, HEAD_SIZES, Variant

Compiled = Variant | GatedDeltaVariant | LinearVariant | UnpackVariant | PushVariant
VARIANTS: tuple[Compiled, ...] = (
    *variants.VARIANTS,
    *gated_delta_variants.ALL,
    *linear_variants.ALL,
    *push_variants.ALL,
)
MAX_SPILLED = {
    "prefill_d112_e4m3.sm_70": 8,
    "prefill_d112_e5m2.sm_70": 8,
    "prefill_d112_int8.sm_70": 8,
    "prefill_d128_e4m3.sm_70": 12,
    "prefill_d128_e5m2.sm_70": 12,
    "prefill_d128_int8.sm_70": 12,
    "prefill_d128.sm_75": 104,
    "prefill_d192.sm_75": 4,
    "prefill_d256.sm_75": 228,
    "prefill_d128_adjusted.sm_75": 144,
    "prefill_d128_e4m3.sm_75": 128,
    "prefill_d128_e5m2.sm_75": 144,
    "prefill_d128_int8.sm_75": 64,
    "prefill_d192_adjusted.sm_75": 16,
    "prefill_d256_adjusted.sm_75": 196,
    "prefill_d256_e4m3.sm_75": 124,
    "prefill_d256_e5m2.sm_75": 88,
    "prefill_d256_int8.sm_75": 88,
    "prefill_d128_adjusted_e4m3.sm_75": 20,
    "prefill_d128_adjusted_e5m2.sm_75": 12,
    "prefill_d128_adjusted_int8.sm_75": 12,
    "prefill_d256_adjusted_e4m3.sm_75": 72,
    "prefill_d256_adjusted_e5m2.sm_75": 96,
    "prefill_d256_adjusted_int8.sm_75": 96,
    "decode_d256.sm_75": 240,
}
"""Allowed spills in bytes; 0 for all others. Prefill on the V100 saves the spilled values before its loops and restores
them afterwards (tests/kernels/volta/test_cache.py). Decoding on Turing at head size 256 spills within its loop. Launch
bounds limit the registers."""


def build(variant: Compiled, folder: Path) -> str:
    """Compile one variant. Returns the compiler's log."""
    source = (SOURCES / variant.source).read_text()
    log = ""
    for kind, suffix in (("sm", "cubin"), ("compute", "ptx")):
        options = [*COMPILER_OPTIONS, *(["--ptxas-options=-v"] if suffix == "cubin" else [])]
        compiled = compile_cuda(
            source,
            architecture=f"{kind}_{variant.architecture}",
            name=variant.source,
            defines=variant.defines,
            include=[SOURCES],
            options=options,
        )
        (folder / variant.image(suffix)).write_bytes(compiled.binary)
        log += compiled.log
    return log


def max_registers(variant: Compiled) -> int:
    """Maximum registers per thread for ``ctas_per_sm`` CTAs within an SM's 65536, allocated in multiples of eight."""
    threads = variant.threads or max(HEAD_SIZES) // 8  # each thread of combine handles eight numbers of a head
    return min(255, 65536 // (threads * variant.ctas_per_sm) // 8 * 8)


def main() -> int:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)  # it describes images that are about to be replaced
    with ThreadPoolExecutor() as pool:
        logs = list(pool.map(lambda variant: build(variant, folder), VARIANTS))
    failed = False
    for variant, log in zip(VARIANTS, logs, strict=True):
        registers = max(map(int, re.findall(r"Used (\d+) registers", log)))
        spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", log)))
        name = f"{variant.name}.sm_{variant.architecture}"
        allowed = MAX_SPILLED.get(name, 0)
        fitting = max_registers(variant)
        failed |= spilled > allowed or registers > fitting
        note = f", more than {allowed}" if spilled > allowed else ""
        crowded = f", more than the {fitting} that {variant.ctas_per_sm} CTAs per SM leave" * (registers > fitting)
        print(f"{name:<34} {registers:>3} registers{crowded} {spilled:>4} bytes spilled{note} "
              f"{variant.shared_bytes:>6} bytes shared")  # fmt: skip
    if not failed:
        manifest.write(folder, VARIANTS, compiler="NVRTC {}.{}".format(*version()), sources=SOURCES)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
