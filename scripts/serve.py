"""The real `vllm serve` with configs/cpu-demo.yaml in the foreground, and one request that shows that it works.

Run by: users as `make serve`.
Needs: `make setup`, which `make serve` runs first.
Reads: PORT (default 8000).

Ctrl-C, or the end of this process for any reason, leaves no server behind.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import FrameType
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "cpu-demo.yaml"
MODEL = ROOT / "models" / "demo"
BIN = Path(sys.executable).parent
HOST = "127.0.0.1"
START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 20
DEMO_TOKENS = 16_000
# The server is on this machine, so proxies from the environment are ignored.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
KERNEL_LINE = re.compile(r"Attention kernel: (.*)")


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        port = wanted_port()
        build_model_if_needed()
        server = Server(port)
    except ValueError as error:
        print(f"fastattention serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nfastattention serve: stopped.", file=sys.stderr)
        return 130
    if server.wait_until_healthy():
        show(server)
    return server.wait()


def wanted_port() -> int:
    text = os.environ.get("PORT", "8000")
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ValueError(f"PORT={text} is not a port number; use one from 1 to 65535.")
    port = int(text)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ValueError(
                f"port {port} on {HOST} cannot be used ({error.strerror}); stop the other server, or choose another "
                f"port: `PORT={port + 1} make serve`."
            ) from None
    return port


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def build_model_if_needed() -> None:
    """Build the demo model if it does not exist, or if its sources have changed."""
    MODEL.parent.mkdir(exist_ok=True)
    with (MODEL.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two at once would overwrite each other's files
        _build_model_if_needed()


def _build_model_if_needed() -> None:
    sources = sorted((ROOT / "fastattention_vllm" / "demo").glob("*.py"))
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    built = MODEL / "built-from"
    if built.exists() and built.read_text() == wanted:
        return
    print(f"Building the demo model in {MODEL.relative_to(ROOT)} ...", flush=True)
    shutil.rmtree(MODEL, ignore_errors=True)
    if subprocess.run([sys.executable, "-m", "fastattention_vllm.demo", str(MODEL)], cwd=ROOT).returncode:
        raise ValueError("the demo model could not be built; the message above says why.")
    built.write_text(wanted)


class Server:
    """The `vllm serve` process group: starts, watches, and stops all of its processes."""

    def __init__(self, port: int) -> None:
        self.url = f"http://{HOST}:{port}"
        self.command = [str(BIN / "vllm"), "serve", "--config", str(CONFIG), "--host", HOST, "--port", str(port)]
        self.kernel = "unknown"
        self.stopping = False
        self.failed = False
        self.started = time.monotonic()
        self.pid: int | None = None
        # Before the first output, because a reader of "Starting" may stop this process at once.
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self.stop_on_signal)
        print(f"Starting: vllm {' '.join(self.command[1:])}".replace(str(ROOT) + "/", ""), flush=True)
        # A separate process group, so that Ctrl-C reaches only this process, which then stops the server in order.
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self.pid = self.process.pid
        if self.stopping:
            self._signal_group(signal.SIGINT, leader_only=True)
        assert self.process.stdout is not None
        self.reader = threading.Thread(target=self._forward_output, args=[self.process.stdout], daemon=True)
        self.reader.start()

    def _forward_output(self, output: IO[bytes]) -> None:
        for line in output:
            text = line.decode(errors="replace")
            found = KERNEL_LINE.search(text)
            if found:
                self.kernel = found.group(1)
            # vLLM lists forty routes at start, and its libraries report every object still alive at the end.
            if " Route: " not in text and not self.stopping:
                sys.stdout.write(text)
                sys.stdout.flush()

    def wait_until_healthy(self) -> bool:
        while self.process.poll() is None and not self.stopping:
            try:
                self.get("/health")
                return True
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
            if time.monotonic() - self.started > START_TIMEOUT_S:
                print(f"fastattention serve: not healthy after {START_TIMEOUT_S} s; stopping.", file=sys.stderr)
                self.failed = True
                self.stop()
        return False

    def get(self, path: str) -> bytes:
        with OPENER.open(self.url + path, timeout=30) as answer:
            content: bytes = answer.read()
            return content

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with OPENER.open(request, timeout=600) as answer:
            result: dict[str, Any] = json.load(answer)
            return result

    def stop_on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.stop()

    def stop(self) -> None:
        if self.stopping:
            return
        self.stopping = True
        print("\nStopping the server ...", flush=True)
        self._signal_group(signal.SIGINT, leader_only=True)

    def wait(self) -> int:
        """Wait for the server to end, then make sure that all of its processes have ended."""
        deadline: float | None = None
        while self.process.poll() is None:
            time.sleep(0.2)
            if self.stopping:
                deadline = deadline or time.monotonic() + STOP_TIMEOUT_S
                if time.monotonic() > deadline:
                    break
        self._signal_group(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while self._group_alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._signal_group(signal.SIGKILL)
        self.reader.join(5)
        if self.failed:
            return 1
        return 0 if self.stopping else self.process.wait()

    def _signal_group(self, signum: signal.Signals, leader_only: bool = False) -> None:
        if self.pid is None:
            return
        try:
            if leader_only:
                os.kill(self.pid, signum)
            else:
                os.killpg(self.pid, signum)
        except ProcessLookupError:
            pass

    def _group_alive(self) -> bool:
        self.process.poll()
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True


def _die_with_parent() -> None:
    """Runs in the child before exec: get SIGTERM when the parent ends for any reason (Linux PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def show(server: Server) -> None:
    """Print what runs, ask one long question, and print a command to try."""
    model = json.loads(server.get("/v1/models"))["data"][0]
    print(f"\n  healthy after   {time.monotonic() - server.started:.0f} s")
    print(f"  model           {model['id']} (up to {model['max_model_len']:,} tokens), {server.url}/v1")
    print(f"  kernel          {server.kernel}", flush=True)
    prompt, value = demo_prompt()
    started = time.monotonic()
    try:
        result = server.post(
            "/v1/completions", {"model": model["id"], "prompt": prompt, "max_tokens": 4, "temperature": 0}
        )
    except (urllib.error.URLError, OSError) as error:
        print(f"  demo            failed: {error}", file=sys.stderr)
        return
    text = result["choices"][0]["text"].strip()
    tokens = result["usage"]["prompt_tokens"]
    verdict = "right" if text == value else f"WRONG, expected {value}"
    seconds = time.monotonic() - started
    print(f"  demo            {tokens:,} tokens with 'alpha={value}' in the middle, then 'alpha='")
    print(f"                  -> {text!r} ({verdict}, {seconds:.1f} s)")
    body = {"model": model["id"], "messages": [{"role": "user", "content": "beta=2718. What is the value of beta?"}]}
    print("\n  Try it:\n")
    print(f"  curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' \\")
    print(f"    -d '{json.dumps(body)}'\n")
    print("  Ctrl-C stops the server.\n", flush=True)


def demo_prompt() -> tuple[str, str]:
    from fastattention_vllm.demo.haystack import make_haystack

    value = "7319"
    return make_haystack(DEMO_TOKENS, {"alpha": value}, depths=[0.5], ask="alpha").text, value


if __name__ == "__main__":
    sys.exit(main())
