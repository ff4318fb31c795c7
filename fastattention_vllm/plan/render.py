"""The plan in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fastattention_vllm.placement.plan import indices_text
from fastattention_vllm.plan.hardware import GIB
from fastattention_vllm.plan.report import PlanReport, Speed

LAYERS_PER_LINE = 32
BAR = 60
DEVICE, HOST = "█", "░"
DEVICE_STYLE, HOST_STYLE = "green", "yellow"


def show(console: Console, report: PlanReport, plot: bool) -> None:
    console.print(_heading(report))
    for part in (_places(report), _memory(report), _capacity(report), _speeds(report)):
        console.print(part)
    if plot:
        console.print(picture(report))
    for note in report.notes:
        console.print(f"- {note}", highlight=False)
    console.print()
    # Not wrapped, because a line break would be pasted as well.
    console.print(report.serve_command, soft_wrap=True, markup=False, highlight=False)


def _heading(report: PlanReport) -> str:
    model, asked, hardware = report.model, report.asked, report.hardware
    return (
        f"{model.folder}: {model.architecture}, {model.parameters / 1e9:.2f}B parameters, {model.layers} layers, "
        f"{model.kv_bytes_per_token / 1024:.0f} KiB of KV cache per token ({asked.kv_dtype})\n"
        f"{hardware.devices} x {hardware.device} in {hardware.host}; {asked.requests} request(s) of {asked.context} "
        "tokens\n"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _places(report: PlanReport) -> RenderableType:
    table = Table(title="KV cache", title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    for column in ("chosen by", "on the device", "on the host"):
        table.add_column(column)
    table.add_row(
        'the server with "auto"',
        f"{len(report.auto.device_layers)} layers: {indices_text(report.auto.device_layers)}",
        f"{len(report.auto.host_layers)} layers: {indices_text(report.auto.host_layers)}",
    )
    paper = report.paper
    table.add_row("the paper's formula*", f"{paper.device_layers} layers", f"{paper.host_layers} layers")
    return Group(table, Text(f"* {paper.label}\n"))


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _memory(report: PlanReport) -> RenderableType:
    device, host = report.device, report.host
    table = _table("Memory, GiB", "", "each device", "host")
    for name, size in device_parts(report):
        table.add_row(name, _gib(size), "")
    table.add_row("KV cache of device layers", _gib(device.kv), "")
    table.add_row("  of which the request(s) need", _gib(device.kv_needed), "")
    table.add_row("KV cache of host layers", "", _gib(host.pool))
    table.add_row("  of which the request(s) need", "", _gib(host.kv_needed))
    table.add_row("free or for other programs", _gib(device.free), _gib(host.total - host.pool))
    table.add_row("total", _gib(device.total), _gib(host.total))
    return Group(table, Text())


def device_parts(report: PlanReport) -> list[tuple[str, int]]:
    """Everything on a device except KV cache."""
    device = report.device
    return [
        ("weights", device.weights),
        ("activations", device.activations),
        ("driver, workspaces, staging", device.driver + device.workspace + device.staging),
    ]


def _capacity(report: PlanReport) -> RenderableType:
    found = report.capacity
    table = _table("Capacity", "", "")
    table.add_row(f"longest context of {report.asked.requests} request(s), tokens", str(found.longest_context))
    table.add_row("longest context of 1 request without host layers", str(found.longest_context_on_device))
    table.add_row(
        f"requests of {report.asked.context} tokens at once (at most --max-num-seqs)", str(found.largest_batch)
    )
    table.add_row(f"requests of {report.asked.context} tokens without host layers", str(found.largest_batch_on_device))
    return Group(table, Text())


def _speeds(report: PlanReport) -> RenderableType:
    table = _table("Predicted speed", "", "tokens/s", "time", "limited by")
    table.add_row("prefill", *_speed(report.prefill))
    table.add_row("decode", *_speed(report.decode))
    return Group(table, Text())


def _speed(found: Speed) -> Sequence[str]:
    share = found.parts[found.limited_by] / found.seconds
    seconds = f"{found.seconds:.3g} s" if found.seconds >= 1 else f"{1e3 * found.seconds:.3g} ms"
    rate = f"{found.tokens_per_second:,.0f}" if found.tokens_per_second >= 100 else f"{found.tokens_per_second:.3g}"
    return rate, seconds, f"{found.limited_by} ({share:.0%})"


def picture(report: PlanReport) -> RenderableType:
    """Layers by place, and memory as bars."""
    host = set(report.auto.host_layers)
    lines = [Text("Layers by place of their KV cache", style="bold")]
    for begin in range(0, report.model.layers, LAYERS_PER_LINE):
        line = Text(f"{begin:>4} ")
        for index in range(begin, min(begin + LAYERS_PER_LINE, report.model.layers)):
            on_host = index in host
            line.append(HOST if on_host else DEVICE, style=HOST_STYLE if on_host else DEVICE_STYLE)
            line.append(" ")
        lines.append(line)
    legend = Text("     ")
    legend.append(DEVICE, style=DEVICE_STYLE).append(" device   ").append(HOST, style=HOST_STYLE).append(" host\n")
    return Group(*lines, legend, *_bars(report), Text())


def _bars(report: PlanReport) -> Iterator[Text]:
    device, host = report.device, report.host
    others = sum(size for _, size in device_parts(report))
    yield _bar("each device", device.total, [("▒", "blue", others), (DEVICE, DEVICE_STYLE, device.kv)])
    yield _bar("host", host.total, [(HOST, HOST_STYLE, host.pool)])
    yield Text("            ▒ weights and buffers   █ KV cache of device layers   ░ KV cache of host layers   · free")


def _bar(name: str, total: int, parts: Sequence[tuple[str, str, int]]) -> Text:
    line = Text(f"{name:>11} ")
    used = 0
    for character, style, size in parts:
        count = round(BAR * size / total)
        line.append(character * count, style=style)
        used += count
    return line.append("·" * (BAR - used)).append(f" {total / GIB:.0f} GiB")
