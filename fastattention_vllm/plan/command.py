"""`fastattention plan`. It needs typer and rich, but neither torch nor vLLM."""

from __future__ import annotations

import math
import re
from typing import Annotated

import typer
from rich.console import Console

from fastattention_vllm.plan import hardware, model, refused, render
from fastattention_vllm.plan.errors import DoesNotFitError, PlanError
from fastattention_vllm.plan.memory import Request, plan_memory
from fastattention_vllm.plan.report import PlanReport, report

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def tokens_of(text: str) -> int:
    """131072, 128K or 1M."""
    found = re.fullmatch(r"(\d+)([KM]?)", text.strip(), re.IGNORECASE)
    if not found or not int(found[1]):
        raise PlanError(f"--context is {text!r}; write a number of tokens above 0, as in 131072, 128K or 1M.")
    return int(found[1]) * UNITS[found[2].upper()]


def check_finite(**options: float | None) -> None:
    for name, value in options.items():
        if value is not None and not math.isfinite(value):
            raise PlanError(f"--{name.replace('_', '-')} is {value}; pass a finite number.")


@app.command()
def plan(
    folder: Annotated[str, typer.Argument(metavar="MODEL", help="Folder with the model's config.json.")],
    gpu: Annotated[str, typer.Option(help="Name of the GPU or NPU, as in v100-32g. An unknown name lists all.")],
    context: Annotated[str, typer.Option(help="Tokens of one request, as in 256K. Default: the model's maximum.")] = "",
    tp: Annotated[int, typer.Option(min=1, help="Number of devices (tensor parallelism).")] = 1,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests of that length at once.")] = 1,
    kv_dtype: Annotated[str, typer.Option(help="Same as vLLM's --kv-cache-dtype.")] = "auto",
    host_kv_dtype: Annotated[
        str, typer.Option(help="Same as the option host_kv_dtype: auto, fp8_e4m3, fp8_e5m2 or int8.")
    ] = "auto",
    resident_kv_gib: Annotated[float, typer.Option(min=0, help="Same as the option resident_kv_gib, per device.")] = 0,
    batched_tokens: Annotated[int, typer.Option(min=1, help="Same as vLLM's --max-num-batched-tokens.")] = 8192,
    utilization: Annotated[float, typer.Option(min=0.01, max=1, help="Same as vLLM's --gpu-memory-utilization.")] = 0.9,
    weights_gib: Annotated[
        float | None, typer.Option(min=0.001, help="Size of all weights, if it cannot be calculated.")
    ] = None,
    kv_cache_gib: Annotated[float | None, typer.Option(min=0.001, help="Limit of the KV cache per device.")] = None,
    host: Annotated[
        str | None, typer.Option(help="Name of the host, as in dgx-1. Default: the device's usual host.")
    ] = None,
    host_gib: Annotated[float | None, typer.Option(min=1, help="Memory of the host.")] = None,
    host_gb_per_s: Annotated[
        float | None, typer.Option(min=1, help="Memory bandwidth of the host, as `fastattention doctor` measures it.")
    ] = None,
    host_cores: Annotated[int | None, typer.Option(min=1, help="Physical cores of the host.")] = None,
    link_gb_per_s: Annotated[
        float | None, typer.Option(min=0.1, help="Rate of copies from the host to one device.")
    ] = None,
    host_kv_gib: Annotated[
        float | None, typer.Option(min=0.001, help="Same as the option host_kv_gib, per rank.")
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the layers and the memory.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Predict what a model needs on a machine, from its config.json alone.

    Shows which layers' KV caches are on the device and which are on the host, the memory of both, the longest context,
    the largest batch, and the speed with its limit. Prints the `vllm serve` command at the end.

    Exit code: 0 if the plan fits, 1 if it does not, 2 for bad input and for what the engine refuses.
    """
    try:
        check_finite(
            weights_gib=weights_gib,
            resident_kv_gib=resident_kv_gib,
            kv_cache_gib=kv_cache_gib,
            host_gib=host_gib,
            host_gb_per_s=host_gb_per_s,
            link_gb_per_s=link_gb_per_s,
            host_kv_gib=host_kv_gib,
            utilization=utilization,
        )
        shape = model.read(folder)
        machine = hardware.machine(
            gpu,
            tp,
            host,
            memory_gib=host_gib,
            read_gb_per_s=host_gb_per_s,
            cores=host_cores,
            link_gb_per_s=link_gb_per_s,
        )
        refused.check(shape, machine)
        request = Request(
            context=tokens_of(context) if context else shape.max_positions,
            requests=requests,
            kv_dtype=kv_dtype,
            host_kv_dtype=host_kv_dtype,
            resident_kv_gib=resident_kv_gib,
            batched_tokens=batched_tokens,
            utilization=utilization,
            weights_gib=weights_gib,
            kv_cache_gib=kv_cache_gib,
            host_kv_gib=host_kv_gib,
        )
        found = report(plan_memory(shape, machine, request), folder)
    except PlanError as error:
        typer.echo(f"fastattention plan: {error}", err=True)
        raise typer.Exit(1 if isinstance(error, DoesNotFitError) else 2) from None
    print_report(found, plot=plot, as_json=json)


def print_report(found: PlanReport, *, plot: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        render.show(Console(), found, plot)
