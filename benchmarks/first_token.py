"""Time to the first token of long prompts on 1, 2 and 4 GPUs: tiling off and on, with and without peer-to-peer access.

    python benchmarks/first_token.py --links nvlink host --json FILE     # on GPUs of one machine
    python benchmarks/first_token.py --links gloo --tiny --json FILE     # anywhere

Real engines (vLLM's LLM) of a model with the layers of an 8B or 70B Llama, random weights, and fewer of those layers
(--layers), so that what is outside them weighs more than it would in the whole model. One prompt at a time, in one
step; the time is from asking to the answer of one token. The engines of a link, which are

    off     tiling_all_reduce "off", on each number of GPUs
    auto    "auto"
    full    "auto" with tiling_full_form
    host    "off", half of the layers on the host
    both    as full and host together

are all there at once and asked in turns, each with another prompt every time; medians. "host" sets NCCL_P2P_DISABLE=1.
An engine that is not there after --limit seconds is ended; where its processes were is in its log (--logs).

Rows of 2, 4 and 8 devices that say "predicted" were not run: from the matmuls of such a rank and the sums of two, both
measured here without an engine, parallel/plan.py says what a layer takes. A sum over n ranks takes, as in a ring,
2 (n - 1) / n times the bytes of its rows in as many steps as 2 (n - 1). The rest of a step is what engines on 1 and 2
GPUs took beyond that without tiling: a part that every rank has whole, and a part that is divided among them. "full"
hides sums behind gate_up_proj and down_proj, but behind no attention. Those of 2 devices with tiling stand beside what
was run, and show how good that is.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
from tiling_all_reduce import LINKS, collectives_of, join, why_not

from fastattention_vllm.bench import machine
from fastattention_vllm.bench import ranks as rank_processes
from fastattention_vllm.parallel import calibrate
from fastattention_vllm.parallel.layer_timer import LayerTimer
from fastattention_vllm.parallel.pipeline import Pipeline, Times
from fastattention_vllm.parallel.plan import even, plan

MODELS = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
    },
}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
}
OF_THE_MODEL = {"8B": 32, "70B": 80}
"""Layers of the whole one."""
WAYS: dict[str, dict[str, Any]] = {
    "off": {"tiling_all_reduce": "off"},
    "auto": {"tiling_all_reduce": "auto"},
    "full": {"tiling_all_reduce": "auto", "tiling_full_form": True},
    "host": {"tiling_all_reduce": "off", "host_kv_layers": "half"},
    "both": {"tiling_all_reduce": "auto", "tiling_full_form": True, "host_kv_layers": "half"},
}
PREDICTED = (2, 4, 8)
WARM_UP = 2
ENDING = 5.0
"""Seconds for an engine to end by itself."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=["nvlink", "host"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="GPUs of an engine")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["off", "auto", "full"])
    parser.add_argument("--model", choices=list(MODELS), default="8B")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--min-tokens", type=int, default=2048, help="tiling_min_tokens")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--graphs", action="store_true", help="torch.compile and CUDA graphs, else eager")
    parser.add_argument("--no-prediction", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a small model in fp32, to try the benchmark itself")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for an engine to start, and to answer")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", nargs=2, metavar=("SOCKET", "SETTINGS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve(options.engine[0], json.loads(options.engine[1]))
        return 0
    if reason := why_not(options.links, max(options.ranks)):
        print(f"first_token: {reason}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    all_parts: dict[str, dict[str, Any]] = {}
    complete = True
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        for link in options.links:
            try:
                took = measure(link, Path(folder), logs, options)
            except EngineError as error:
                print(f"first_token: {error}", flush=True)
                complete = False
                continue
            found = rows_of(link, took, options)
            if not options.no_prediction and (1, "off") in took:
                raw = measured_parts(link, options)
                complete &= raw is not None
                if raw is not None:
                    all_parts[link] = raw
                    found += predicted_rows(link, took, parts_of(raw), options)
            for row in found:
                print(json.dumps(row), flush=True)
            rows += found
            if options.json:
                content = report(rows, complete) | {"parts": all_parts}
                options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if complete else 1


def report(rows: list[dict[str, Any]], complete: bool) -> dict[str, Any]:
    hardware = machine.hardware(os.cpu_count() or 1)
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}; {hardware}"
    return {
        "hardware": hardware,
        "versions": machine.versions(),
        "date": datetime.date.today().isoformat(),
        "complete": complete,
        "rows": rows,
    }


# --- engines ----------------------------------------------------------------------------------------------------------


class EngineError(Exception):
    """An engine has ended or does not answer."""


def serve(address: str, settings: dict[str, Any]) -> None:
    """An engine in a process of its own: takes prompts from a socket, and gives the seconds that they took."""
    from vllm import LLM, SamplingParams

    with Client(address, "AF_UNIX") as parent:
        llm = LLM(**settings)
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        parent.send("ready")
        while (prompt := parent.recv()) is not None:
            began = time.perf_counter()
            (answer,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            took = time.perf_counter() - began
            parent.send((took, answer.outputs[0].token_ids[0]))


class Engine:
    def __init__(self, name: str, settings: dict[str, Any], environment: Mapping[str, str], folder: Path, log: Path):
        self.name, self._log, self._told = name, log, 0
        address = str(folder / f"{name.replace(' ', '-')}.socket")
        self._listener = Listener(address, "AF_UNIX")
        self._connection: Connection | None = None
        command = [sys.executable, __file__, "--engine", address, json.dumps(settings)]
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment, "PYTHONFAULTHANDLER": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self, until: float) -> None:
        """
        Raises:
            EngineError: it has ended, or is not there in time.
        """
        self._listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        while self._connection is None:
            try:
                self._connection = self._listener.accept()
            except TimeoutError:
                self._look(until)
        self._answer(until)

    def ask(self, prompt: Sequence[int], limit: float) -> float:
        """Seconds to the first token."""
        assert self._connection is not None
        self._connection.send(list(prompt))
        seconds, _ = self._answer(time.monotonic() + limit)
        return float(seconds)

    def end(self) -> None:
        if self._connection is not None and self._process.poll() is None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._connection.send(None)
                self._process.wait(ENDING)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._listener.close()

    def _answer(self, until: float) -> Any:
        assert self._connection is not None
        while not self._connection.poll(1.0):
            self._look(until)
        try:
            return self._connection.recv()
        except EOFError:
            raise EngineError(self._failure("has ended")) from None

    def _look(self, until: float) -> None:
        """What it says of tiling, and whether there is still hope."""
        lines = self._log.read_text(errors="replace").splitlines()
        for line in lines[self._told :]:
            if "Tiling-AllReduce" in line:
                print(f"{self.name}: {line[line.index('Tiling-AllReduce') :]}", flush=True)
        self._told = len(lines)
        if self._process.poll() is not None:
            raise EngineError(self._failure(f"has ended with {self._process.returncode}"))
        if time.monotonic() > until:
            self._signal(signal.SIGABRT)  # each of its processes says where it is
            time.sleep(3)
            raise EngineError(self._failure("did not answer in time"))

    def _failure(self, what: str) -> str:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-60:])
        return f"the engine {self.name} {what}; the end of its log {self._log}:\n{tail}"

    def _signal(self, number: int) -> None:
        """All processes of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def measure(link: str, folder: Path, logs: Path, options: argparse.Namespace) -> dict[tuple[int, str], list[float]]:
    """Seconds of each round, by number of ranks and way. All engines are asked in turns.

    Raises:
        EngineError: see there.
    """
    model = save_config(folder / "model", options)
    kinds = [(ranks, way) for ranks in options.ranks for way in options.ways if ranks > 1 or way == "off"]
    # Whoever measures the layers does so alone, and what it has found is there for the rest.
    kinds.sort(key=lambda kind: kind[1] != "auto")
    engines: dict[tuple[int, str], Engine] = {}
    began = time.monotonic()

    def start(kind: tuple[int, str]) -> None:
        name = f"{link} {kind[0]} {kind[1]}"
        environment = LINKS[link] | {"VLLM_CACHE_ROOT": str(folder / "cache")}
        settings = settings_of(model, *kind, options)
        engines[kind] = Engine(name, settings, environment, folder, logs / f"{name.replace(' ', '-')}.log")

    def ready(kind: tuple[int, str]) -> None:
        engines[kind].wait_until_ready(time.monotonic() + options.limit)
        print(f"{engines[kind].name} is ready after {time.monotonic() - began:.0f} s", flush=True)

    try:
        first = [kind for kind in kinds if kind[1] == "auto"]
        for kind in first:
            start(kind)
            ready(kind)
        for kind in kinds[len(first) :]:
            start(kind)
        for kind in kinds[len(first) :]:
            ready(kind)
        took: dict[tuple[int, str], list[float]] = {kind: [] for kind in kinds}
        numbers = random.Random(0)
        for turn in range(WARM_UP + options.rounds):
            prompt = [numbers.randrange(10, 900) for _ in range(options.tokens)]
            for kind in kinds if turn % 2 else kinds[::-1]:
                seconds = engines[kind].ask(prompt, options.limit)
                if turn >= WARM_UP:
                    took[kind].append(seconds)
        middle = {kind: f"{1e3 * statistics.median(times):.1f} ms" for kind, times in took.items()}
        print(f"{link}: {middle}, after {time.monotonic() - began:.0f} s", flush=True)
        return took
    finally:
        for engine in engines.values():
            engine.end()


def save_config(folder: Path, options: argparse.Namespace) -> Path:
    """A model's folder without weights: vLLM makes them up."""
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": options.layers,
        "max_position_embeddings": 2 * options.tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32" if options.tiny else "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config | (TINY if options.tiny else MODELS[options.model])))
    return folder


def settings_of(model: Path, ranks: int, way: str, options: argparse.Namespace) -> dict[str, Any]:
    room = options.tokens + 64
    section = {"host_kv_layers": 0, "tiling_min_tokens": options.min_tokens} | WAYS[way]
    if section["host_kv_layers"] == "half":
        section |= {"host_kv_layers": options.layers // 2, "host_kv_gib": 8.0}
    return {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_backend": "fastattention",
        "dtype": "float32" if options.tiny else "float16",
        "tensor_parallel_size": ranks,
        "max_model_len": room,
        "max_num_batched_tokens": options.tokens,
        "max_num_seqs": 2,
        "enable_prefix_caching": False,
        "enforce_eager": not options.graphs,
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": (64 << 20) if options.tiny else (2 << 30),
        "additional_config": {"fastattention": section},
        "seed": 0,
    }


# --- what was measured ------------------------------------------------------------------------------------------------


def rows_of(
    link: str, took: Mapping[tuple[int, str], Sequence[float]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Each engine against the same number of GPUs without tiling, and that against one GPU."""
    middle = {kind: 1e3 * statistics.median(times) for kind, times in took.items()}
    rows = []
    for (ranks, way), ours in middle.items():
        peer = (1, "off") if way == "off" else (ranks, "off")
        row = _row(f"{_case(link, ranks, options)}, tiling {way}", ours, peer, middle.get(peer) if ranks > 1 else None)
        row |= {"kind": "measured", "rounds ms": [round(1e3 * seconds, 3) for seconds in took[ranks, way]]}
        rows.append(row)
    return rows


def _case(link: str, ranks: int, options: argparse.Namespace) -> str:
    model = "tiny" if options.tiny else options.model
    of = "" if options.tiny else f" of {OF_THE_MODEL[model]}"
    return (
        f"{model} layers, {options.layers}{of}, {options.tokens} tokens, {ranks} ranks, {link}, "
        f"{'graphs' if options.graphs else 'eager'}"
    )


def _row(case: str, ours: float, peer_kind: tuple[int, str], peer: float | None) -> dict[str, Any]:
    ranks, way = peer_kind
    name = f"{ranks} rank{'s' if ranks > 1 else ''}, tiling {way}"
    return {
        "case": case,
        "metric": "overlap time to first token",
        "unit": "ms",
        "ours": round(ours, 3),
        "peer_name": name if peer else None,
        "peer": round(peer, 3) if peer else None,
        "ratio": round(peer / ours, 4) if peer else None,
        "limit": None,
        "fraction_of_limit": None,
    }


# --- what is predicted ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """Of one layer, without an engine."""

    matmul: Mapping[tuple[str, int], Times]
    """By o_proj, down_proj or gate_up and ranks: that of one rank."""
    sums: Mapping[str, Times]
    """Of two ranks, by collective; the first is the one that is used without tiling."""
    slowdown: Mapping[str, float]
    """How many times as long matmul and sum take beside each other."""


def over(ranks: int, of_two: Times) -> Times:
    """Sums over ``ranks`` from those over two, as in a ring: 2 (n - 1) / n times the bytes, 2 (n - 1) steps instead of
    2. What a sum of no rows would take is taken to be its steps."""
    points = of_two.points
    per_row = (points[-1][1] - points[0][1]) / max(1, points[-1][0] - points[0][0])
    step = max(0.0, points[0][1] - per_row * points[0][0])
    steps, volume = ranks - 1, 2 * (ranks - 1) / ranks
    return Times.measured([(rows, step * steps + max(0.0, seconds - step) * volume) for rows, seconds in points])


def predicted(parts: Parts, measured: Mapping[int, float], layers: int, tokens: int, ranks: int) -> dict[str, float]:
    """Seconds to the first token, by way.

    Args:
        measured: by number of ranks, those of 1 and perhaps of 2 among them: without tiling.
    """
    linear = ("o_proj", "down_proj")

    def tiled(count: int) -> float:
        """What of a step is row-parallel layers, one after the other with their sums."""
        plain_sum = over(count, next(iter(parts.sums.values())))(tokens) if count > 1 else 0.0
        return layers * sum(parts.matmul[name, count](tokens) + plain_sum for name in linear)

    rest = measured[1] - tiled(1)
    divided = min(rest, 2 * (rest - (measured[2] - tiled(2)))) if 2 in measured else rest
    sums = {collective: over(ranks, times) for collective, times in parts.sums.items()}

    def saved(matmul: Times) -> float:
        cuts = [
            plan(tokens, Pipeline(matmul, times, parts.slowdown[collective], parts.slowdown[collective])).seconds
            for collective, times in sums.items()
        ]
        return max(0.0, matmul(tokens) + next(iter(sums.values()))(tokens) - min(cuts))

    o, down = (parts.matmul[name, ranks] for name in linear)
    off = rest - divided + divided / ranks + tiled(ranks)
    mlp = together(parts.matmul["gate_up", ranks], down)
    return {
        "off": off,
        "auto": off - layers * (saved(o) + saved(down)),
        "full": off - layers * (saved(o) + saved(mlp)),
    }


def together(one: Times, other: Times) -> Times:
    """One after the other; measured at the same numbers of rows."""
    return Times.measured([(rows, seconds + other(rows)) for rows, seconds in one.points])


def predicted_rows(
    link: str, took: Mapping[tuple[int, str], Sequence[float]], parts: Parts, options: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = []
    measured = {ranks: statistics.median(times) for (ranks, way), times in took.items() if way == "off"}
    one_gpu = measured[1]
    for ranks in PREDICTED:
        found = predicted(parts, measured, options.layers, options.tokens, ranks)
        for way, ours in found.items():
            peer, kind = (one_gpu, (1, "off")) if way == "off" else (found["off"], (ranks, "off, predicted"))
            row = _row(f"{_case(link, ranks, options)}, tiling {way}, predicted", 1e3 * ours, kind, 1e3 * peer)
            rows.append(row | {"kind": "predicted"})
    return rows


def measured_parts(link: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """What :func:`measure_parts` tells, on two ranks; None if they did not come to their end."""
    found: list[dict[str, Any]] = []
    if not rank_processes.run(measure_parts, 2, (link, options), LINKS[link], options.limit, found.append):
        print(f"first_token: the parts of a layer were not measured within {options.limit:.0f} s.", flush=True)
        return None
    (row,) = [one for one in found if "sums" in one]
    return row


def parts_of(raw: Mapping[str, Any]) -> Parts:
    def times(points: Sequence[Sequence[float]]) -> Times:
        return Times.measured([(int(rows), seconds) for rows, seconds in points])

    return Parts(
        {(name, ranks): times(points) for name, ranks, points in raw["matmul"]},
        {collective: times(points) for collective, points in raw["sums"]},
        dict(raw["slowdown"]),
    )


def measure_parts(rank: int, folder: str, said: tuple[str, argparse.Namespace]) -> None:
    """One rank."""
    link, options = said
    here = join(rank, folder, link, collectives_of(link), 2)
    shape = TINY if options.tiny else MODELS[options.model]
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    attended = shape["num_attention_heads"] * shape["head_dim"]
    numbers = [rows for rows in calibrate.row_counts(options.tokens) if rows <= options.tokens]
    dtype = torch.float32 if here.device == "cpu" else torch.float16
    matmuls = []
    for ranks in (1, *PREDICTED):
        shapes = {"o_proj": (hidden, attended // ranks), "down_proj": (hidden, wide // ranks)}
        for name, size in (shapes | {"gate_up": (2 * wide // ranks, hidden)}).items():
            weight = torch.empty(*size, dtype=dtype, device=here.device).uniform_(-1, 1)
            timer = LayerTimer(here.collectives, rank_processes.plain_layer, weight, options.tokens)
            seconds = timer.seconds([timer.matmul(rows) for rows in numbers], 3)
            matmuls.append((name, ranks, list(zip(numbers, seconds, strict=True))))
            if (name, ranks) == ("down_proj", 2):
                matmul = Times.measured(matmuls[-1][2])
                sums, slow = [], []
                blocks = even(options.tokens, 4)
                for collective in here.collectives:
                    seconds = timer.seconds([timer.all_reduce(collective, rows) for rows in numbers], 3)
                    sums.append((collective, list(zip(numbers, seconds, strict=True))))
                    alone = Times.measured(sums[-1][1])
                    (took,) = timer.seconds([timer.cut(collective, blocks)])
                    part = took / (matmul(options.tokens) + alone(options.tokens))
                    slow.append((collective, calibrate.slowdown(matmul, alone, blocks, part)))
    here.tell({"matmul": matmuls, "sums": sums, "slowdown": slow})
    rank_processes.leave(here)


if __name__ == "__main__":
    sys.exit(main())
