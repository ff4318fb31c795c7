"""Serve the demo model under mixed load for a while, and check that nothing is wrong, lost or left.

    python -m scripts.soak --seconds 300 --server-arguments "--dtype bfloat16 --additional-config '{JSON}'"

Run by: contributors as `make soak`; 60 seconds of it are part of `make test-more`. On a machine with a GPU, the same
command with the server arguments of that GPU.
Needs: `make setup-dev`.

Clients ask for needles in texts of many lengths, at once and as streams, drop their connections, and send bad input.
Every answer must be right. Memory, file descriptors and threads of all server processes are counted twice while the
server is idle, after the first third and at the end; they must not have grown. Then SIGTERM comes while long requests
run: their clients must get an error, and within 10 seconds the server and everything that it made must be gone.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
from pathlib import Path

import psutil

from scripts.serve import CONFIG, HOST, build_model_if_needed, free_port
from scripts.soak_load import BAD, Load, bodies_that_vllm_itself_fails_on
from scripts.soak_report import Result, compare, report, say
from scripts.soak_server import count, end, healthy, nothing_runs, served, unless_it_dies

EXCERPT = 8000
"""Characters."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="duration of the load, without start and shutdown")
    parser.add_argument("--clients", type=int, default=8, help="number of clients at the same time")
    parser.add_argument("--tokens", type=int, default=8_000, help="length of the longest needle texts under load")
    parser.add_argument("--server-arguments", default="", help="additional arguments for `vllm serve`, as one string")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random requests")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--log", type=Path, help="write the server's log to this file")
    options = parser.parse_args()
    for name, minimum in [("seconds", 1), ("clients", 1), ("tokens", 64)]:
        if getattr(options, name) < minimum:
            parser.error(f"--{name} {getattr(options, name)} is too small; use {minimum} or more.")
    build_model_if_needed()
    command = ["serve", "--config", str(CONFIG), "--host", HOST, "--port", str(free_port())]
    command += shlex.split(options.server_arguments)
    with tempfile.TemporaryDirectory() as folder:
        log = options.log or Path(folder) / "serve.log"
        with served(command, log) as process:
            result = asyncio.run(soak(process, command, options))
        if result.failures:
            print(excerpt(log.read_text(errors="replace")))
    report(result, options, command)
    return 1 if result.failures else 0


def excerpt(log: str) -> str:
    """The first traceback of any process, with what follows it, and the end."""
    first = log.find("Traceback (most recent call last)")
    begin = log[first : first + EXCERPT] if first >= 0 else "The server's log has no traceback."
    return f"{begin}\n[... the log's last {EXCERPT} characters:]\n{log[-EXCERPT:]}"


async def soak(process: psutil.Popen, command: list[str], options: argparse.Namespace) -> Result:
    result = Result(options.seconds)
    url = f"http://{HOST}:{command[command.index('--port') + 1]}"
    if not await healthy(process, url):
        code = process.poll()
        why = "the server did not start in time" if code is None else f"the server died with exit code {code}"
        result.failures.append(why)
        return result
    unasked = await bodies_that_vllm_itself_fails_on(url)
    for _, body in unasked:
        print(f"This vLLM's own parser fails on {body!r} (status 500), so it is not part of the load.", flush=True)
    # The first third fills pools and caches, which must not grow after that.
    for number, part in enumerate((1 / 3, 2 / 3)):
        load = Load(url, options, result, seed=options.seed + number, bad=[one for one in BAD if one not in unasked])
        if not await unless_it_dies(process, load.run(part * options.seconds), result):
            return result
        if not await nothing_runs(url):
            result.failures.append("a request still runs though no client waits for one")
        result.quiet.append(count(process))
        say(result)
    compare(result)
    await end(process, url, result)
    return result


if __name__ == "__main__":
    sys.exit(main())
