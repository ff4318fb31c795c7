"""The H200's part of ablation.py: rows of saved runs of tiling_layer.py, first_token.py and host_layers.py.

Used by: ablation.py. Each row names its file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ablation_row import ALL_REDUCE, HOST, row

from fastattention_vllm.bench.report import Row

Saved = Mapping[str, Any]
"""A row as it is stored in its file."""


def stored_rows(folder: Path) -> list[Row]:
    """The latest rows for real engines and single layers on H200. Empty where there is none."""
    found: dict[tuple[str, str], Row] = {}
    for pattern, read in (
        ("*-tiling-layer-*.json", tiling_layer_rows),
        ("*-first-token-*.json", first_token_rows),
        ("*-host-layers-h200-head-start.json", host_layer_rows),
    ):
        for path in sorted(folder.glob(pattern)):
            for one in read(json.loads(path.read_text())["rows"]):
                found[one.strategy, one.case] = one.model_copy(update={"source": path.name})
    return list(found.values())


def tiling_layer_rows(rows: Sequence[Saved]) -> list[Row]:
    plain = {(one["model"], one["tokens"]): one["ms"] for one in rows if one["way"] == "plain"}
    forms = {"linear": "row-parallel layers", "full": "full form"}
    return [
        row(
            f"{ALL_REDUCE} ({forms[one['way']]})",
            f"{one['ranks']} H200, {one['link']}",
            f"one {one['model']} layer, {one['tokens']} tokens",
            "overlap layer",
            "ms",
            plain[one["model"], one["tokens"]],
            one["ms"],
            "measured",
        )
        for one in rows
        if one["way"] in forms
    ]


def first_token_rows(rows: Sequence[Saved]) -> list[Row]:
    """Rows of real engines that were run; predictions are left out."""
    names = {
        "auto": f"{ALL_REDUCE} (row-parallel layers)",
        "full": f"{ALL_REDUCE} (full form)",
        "host": f"{HOST} (half of them)",
        "both": f"{ALL_REDUCE} (full form) and {HOST} (half of them)",
    }
    found = []
    for one in rows:
        case, _, way = one["case"].rpartition(", tiling ")
        if one["kind"] == "measured" and way in names:
            metric = "overlap time to first token"
            found.append(row(names[way], "H200", case, metric, "ms", one["peer"], one["ours"], "measured"))
    return found


def host_layer_rows(rows: Sequence[Saved]) -> list[Row]:
    """The capacity of one request, and the decoding speed compared with a GPU that reads all layers over the link."""
    held = [one for one in rows if one["metric"] == "cooperative needles" and one["ours"] == one["limit"]]

    def most(of: Callable[[str], bool]) -> int:
        return max(int(one["case"].split(" tokens")[0].split()[-1]) for one in held if of(one["case"]))

    alone, ours = most(lambda case: "vLLM alone" in case), most(lambda case: "host layers" in case)
    found = [
        row(
            f"{HOST} (31 of 32)",
            "H200, 4 GiB for KV",
            "one request, all needles found",
            "cooperative tokens held",
            "tokens",
            alone,
            ours,
            "measured",
        )
    ]
    for one in rows:
        if one["metric"] == "cooperative decode" and one["case"].endswith("host layers, auto"):
            case = one["case"].removesuffix(", auto")
            name = f"{HOST}' CPU share (else the GPU reads all)"
            metric = "cooperative decode"
            found.append(
                row(name, "H200, 4 GiB for KV", case, metric, "tokens/s", one["peer"], one["ours"], "measured")
            )
    return found
