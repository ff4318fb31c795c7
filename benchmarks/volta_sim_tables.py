"""A report of volta_sim.py as tables and as a picture.

Used by: volta_sim.py.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from volta_launches import BATCH, HEADS, PAGE
from volta_sim_report import FEED, HEAD_SIZES, OURS, PEER, TITLE, TOKENS, against_peer, kind, label, length, musts

from fastattention_vllm.bench.report import Report, Row


def print_report(report: Report[Row], console: Console) -> None:
    rows = [row.model_dump() for row in report.rows]
    console.print(f"[bold]{TITLE}[/]: every figure below is simulated. {report.date}")
    ratios = {label(row): row for row in against_peer(rows)}
    table = Table(title=f"Prefill, batch {BATCH} x {HEADS} heads, pages of {PAGE}. {TITLE}")
    for name in ("head", "tokens", "", "ours TFLOPS", "static bound", "peer TFLOPS", "its bound", "ratio",
                 "error", "its error", "simulated"):  # fmt: skip
        table.add_column(name)
    order = sorted(
        (row for row in rows if row["kind"] == "prefill" and row["kernel"] == OURS),
        key=lambda row: (row["head_size"], row["causal"], row["tokens"]),
    )
    for row in order:
        peer = ratios.get(label(row), {}).get("peer")
        table.add_row(
            str(row["head_size"]), f"{row['tokens'] // 1024}K", kind(row["causal"]), f"{row['tflops']:.1f}",
            f"{row['bound_tflops']:.1f} {row['bound_unit']}", *(
                ("", "", "") if peer is None else
                (f"{peer['tflops']:.1f}", f"{peer['bound_tflops']:.1f} {peer['bound_unit']}",
                 f"{row['tflops'] / peer['tflops']:.2f}x")
            ), f"{row['error']:.1e}", "" if peer is None else f"{peer['error']:.1e}", row["simulated"],
        )  # fmt: skip
    console.print(table)
    decode = Table(title=f"Decode, fed at {FEED:.0f} GB/s. {TITLE}")
    for name in ("head", "keys", "new tokens", "batch", "GQA", "page", "GB/s", "of the feed", "static bound",
                 "sum of parts", "error"):  # fmt: skip
        decode.add_column(name)
    for row in rows:
        if row["kind"] == "decode":
            decode.add_row(
                str(row["head_size"]), length(row["tokens"]), str(row.get("queries", 1)), str(row["batch"]),
                str(row["group"]), str(row["page"]), f"{row['gbs']:.0f}", f"{100 * row['part_of_feed']:.1f} %",
                f"{row['bound_gbs']:.0f} {row['bound_unit']}",
                f"{100 * row['combine_milliseconds'] / row['milliseconds']:.1f} %", f"{row['error']:.1e}",
            )  # fmt: skip
    console.print(decode)
    masks = Table(
        "head", "", "cost", "against the same source", title=f"Masks and paging against compiled out, 4K. {TITLE}"
    )
    for row in rows:
        if row["kind"] == "masks":
            masks.add_row(str(row["head_size"]), kind(row["causal"]), f"{100 * row['cost']:.1f} %", row["against"])
    console.print(masks)
    method = Table("head", "tokens", "", "TFLOPS", "prototype's", "ratio", title=f"The peer, method check. {TITLE}")
    for row in rows:
        if row["kind"] == "method":
            method.add_row(
                str(row["head_size"]), str(row["tokens"]), row["what"], f"{row['tflops']:.1f}",
                f"{row['prototype']}", f"{row['ratio']:.3f}",
            )  # fmt: skip
    console.print(method)
    demands = Table("demand", "furthest from it", "", title=f"Demands. {TITLE}")
    for must in musts(rows):
        demands.add_row(must.text, must.value, "met" if must.met else "[red]missed[/]")
    console.print(demands)


def draw(report: Report[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row.model_dump() for row in report.rows]
    figure, panels = pyplot.subplots(1, len(HEAD_SIZES) + 1, figsize=(18, 4.6), layout="constrained")
    figure.suptitle(f"{TITLE}, nothing here is measured on one. Prefill: batch {BATCH} x {HEADS} heads. {report.date}")
    for axes, head_size in zip(panels, HEAD_SIZES, strict=False):
        for kernel, colour in ((OURS, "tab:blue"), (PEER, "tab:orange")):
            for causal, style in ((False, "-"), (True, "--")):
                points = sorted(
                    (row["tokens"], row["tflops"])
                    for row in rows
                    if row["kind"] == "prefill"
                    and (row["kernel"], row["head_size"], row["causal"]) == (kernel, head_size, causal)
                )
                if points:
                    axes.plot(*zip(*points, strict=True), style, color=colour, marker="o",
                              label=f"{kernel}, {kind(causal)}")  # fmt: skip
        axes.axhline(113, color="black", linestyle=":", linewidth=1, label="tensor cores' peak")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(TOKENS), [f"{count // 1024}K" for count in sorted(TOKENS)])
        axes.minorticks_off()
        axes.set_ylim(0, 120)
        axes.set_xlabel("tokens")
        axes.set_ylabel("simulated TFLOPS")
        axes.set_title(f"prefill, head size {head_size}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    axes = panels[-1]
    decode = [row for row in rows if row["kind"] == "decode" and row["tokens"] == 16384]
    if decode:
        names = [f"{row['head_size']}, GQA {row['group']}, page {row['page']}" for row in decode]
        axes.barh(names, [row["gbs"] for row in decode], color="tab:blue")
        axes.axvline(FEED, color="black", linestyle=":", label=f"feed, {FEED:.0f} GB/s")
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelsize=7)
        axes.set_xlabel("simulated GB/s, sum of parts included")
        axes.set_title("decode, 16K tokens, batch 16", fontsize=10)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)
