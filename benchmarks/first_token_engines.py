"""Engines of first_token.py, each in its own process, asked over a socket.

Used by: first_token.py. It starts this file as `first_token_engines.py SOCKET SETTINGS`, once per engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from tiling_ranks import LINKS

from fastattention_vllm.bench.sampling import in_turn

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
WAYS: dict[str, dict[str, Any]] = {
    "off": {"tiling_all_reduce": "off"},
    "auto": {"tiling_all_reduce": "auto"},
    "full": {"tiling_all_reduce": "auto", "tiling_full_form": True},
    "host": {"tiling_all_reduce": "off", "host_kv_layers": "half"},
    "both": {"tiling_all_reduce": "auto", "tiling_full_form": True, "host_kv_layers": "half"},
}
WARM_UP = 2
ENDING = 5.0
"""Seconds that an engine gets to end by itself."""
SETTLE = 0.1
"""Seconds between the resumption of an engine and its prompt."""


class EngineError(Exception):
    """An engine has ended or does not answer."""


def serve(address: str, settings: dict[str, Any]) -> None:
    """Run an engine in a separate process: reads prompts from a socket and returns the seconds that they took."""
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
        command = [sys.executable, __file__, address, json.dumps(settings)]
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment, "PYTHONFAULTHANDLER": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # Reads until this process ends, however it ends: paused processes would not notice.
        end_all = f"read _; kill -s KILL -- -{self._process.pid}"
        self._watch = subprocess.Popen(["sh", "-c", end_all], stdin=subprocess.PIPE, start_new_session=True)

    def wait_until_ready(self, until: float) -> None:
        """Wait until the engine is ready.

        Raises:
            EngineError: It has ended, or is not ready in time.
        """
        self._listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        while self._connection is None:
            try:
                self._connection = self._listener.accept()
            except TimeoutError:
                self._look(until)
        self._answer(until)
        self._print_new_lines()  # written since the last look

    def ask(self, prompt: Sequence[int], limit: float) -> float:
        """Seconds to the first token."""
        assert self._connection is not None
        try:
            self._connection.send(list(prompt))
        except OSError:
            raise EngineError(self._failure("has ended")) from None
        seconds, _ = self._answer(time.monotonic() + limit)
        return float(seconds)

    def pause(self) -> None:
        """Stop all of its processes. They spin while they wait for work, which slows the measured engine down."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        self.resume()
        if self._connection is not None and self._process.poll() is None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._connection.send(None)
                self._process.wait(ENDING)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._watch.kill()
        self._watch.wait()
        self._listener.close()

    def _answer(self, until: float) -> Any:
        assert self._connection is not None
        while not self._connection.poll(1.0):
            self._look(until)
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise EngineError(self._failure("has ended")) from None

    def _print_new_lines(self) -> None:
        """Print the engine's log lines about tiling."""
        lines = self._log.read_text(errors="replace").splitlines()
        for line in lines[self._told :]:
            if "Tiling-AllReduce" in line:
                print(f"{self.name}: {line[line.index('Tiling-AllReduce') :]}", flush=True)
        self._told = len(lines)

    def _look(self, until: float) -> None:
        """Print new lines. Raises if the engine has ended or is out of time."""
        self._print_new_lines()
        if self._process.poll() is not None:
            raise EngineError(self._failure(f"has ended with {self._process.returncode}"))
        if time.monotonic() > until:
            self._signal(signal.SIGABRT)  # makes each of its processes print its traceback
            time.sleep(3)
            raise EngineError(self._failure("did not answer in time"))

    def _failure(self, what: str) -> str:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-60:])
        return f"the engine {self.name} {what}; the end of its log {self._log}:\n{tail}"

    def _signal(self, number: int) -> None:
        """Send a signal to all processes of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def measure(link: str, folder: Path, logs: Path, options: argparse.Namespace) -> dict[tuple[int, str], list[float]]:
    """Seconds of each round, by number of ranks and variant. The engines are measured in turn; the others are paused.

    Raises:
        EngineError: An engine has ended or does not answer.
    """
    model = save_config(folder / "model", options)
    kinds = [(ranks, way) for ranks in options.ranks for way in options.ways if ranks > 1 or way == "off"]
    # Only one engine measures the layers; the others reuse its saved result.
    kinds.sort(key=lambda kind: kind[1] != "auto")
    engines: dict[tuple[int, str], Engine] = {}
    began = time.monotonic()
    ends = contextlib.ExitStack()

    def start(kind: tuple[int, str]) -> None:
        name = f"{link} {kind[0]} {kind[1]}"
        environment = LINKS[link] | {"VLLM_CACHE_ROOT": str(folder / "cache")}
        settings = settings_of(model, *kind, options)
        engines[kind] = Engine(name, settings, environment, folder, logs / f"{name.replace(' ', '-')}.log")
        ends.callback(engines[kind].end)

    def ready(kind: tuple[int, str]) -> None:
        engines[kind].wait_until_ready(time.monotonic() + options.limit)
        print(f"{engines[kind].name} is ready after {time.monotonic() - began:.0f} s", flush=True)

    with ends:
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
        for engine in engines.values():
            engine.pause()
        for turn in range(WARM_UP + options.rounds):
            prompt = [numbers.randrange(10, 900) for _ in range(options.tokens)]
            for kind in in_turn(kinds, turn + 1):
                engines[kind].resume()
                time.sleep(SETTLE)
                seconds = engines[kind].ask(prompt, options.limit)
                engines[kind].pause()
                if turn >= WARM_UP:
                    took[kind].append(seconds)
        middle = {kind: f"{1e3 * statistics.median(times):.1f} ms" for kind, times in took.items()}
        print(f"{link}: {middle}, after {time.monotonic() - began:.0f} s", flush=True)
        return took


def save_config(folder: Path, options: argparse.Namespace) -> Path:
    """A model's folder without weights: vLLM creates random ones."""
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


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
