"""Latencies computed from the arrival of streamed tokens, and the client that measures them."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastattention_vllm.bench import serving
from fastattention_vllm.bench.serving import Server, ServerError, foreign_share, inter_token_seconds

SERVE = """
import sys
sys.path.insert(0, {folder!r})
from tests.bench.test_serving import serve
serve(int(sys.argv[sys.argv.index("--port") + 1]))
"""


class Fake(http.server.BaseHTTPRequestHandler):
    """A minimal OpenAI server: one event without tokens, one with one token, then two tokens per event."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(400 if asked["prompt"] == [0] else 200)
        self.end_headers()
        for count in [0, 1, *range(3, asked["max_tokens"] - len(asked["prompt"]) + 2, 2)]:
            self.wfile.write(b"data: " + json.dumps({"usage": {"completion_tokens": count}}).encode() + b"\n\n")
        self.wfile.write(b'data: {"choices": []}\n\ndata: [DONE]\n\n')

    def log_message(self, *arguments: Any) -> None:
        pass


def serve(port: int) -> None:
    http.server.ThreadingHTTPServer((serving.HOST, port), Fake).serve_forever()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    code = SERVE.format(folder=str(Path(__file__).parents[2]))
    log = tmp_path_factory.mktemp("fake") / "log"
    running = Server("fake", [sys.executable, "-c", code], {}, log)
    running.wait_until_healthy()
    yield running
    running.stop()
    assert running.process.poll() is not None


def test_tokens_are_counted_as_they_arrive(server: Server) -> None:
    arrivals = server.stream([1], 5)
    assert [count for _, count in arrivals] == [1, 3, 5]
    assert arrivals == sorted(arrivals)


def test_requests_are_sent_concurrently(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    barriers: list[threading.Barrier] = []

    def stream(prompt: list[int], tokens: int, started: threading.Barrier, temperature: float) -> serving.Arrivals:
        barriers.append(started)
        started.wait(60)
        return [(0.0, 1), (3.0, tokens)]

    monkeypatch.setattr(server, "stream", stream)
    assert server.decode([[1], [2], [3]], 4) == pytest.approx(1.0)
    assert len(barriers) == 3


def test_too_few_tokens_are_an_error(server: Server) -> None:
    with pytest.raises(ServerError, match="sent 3 tokens instead of 5"):
        server.stream([1, 1, 1], 5)


def test_a_refusal_is_an_error(server: Server) -> None:
    with pytest.raises(ServerError, match="answered 400"):
        server.stream([0], 5)


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    code = "raise SystemExit('no such model')"
    failing = Server("fake", [sys.executable, "-c", code], {}, tmp_path / "log")
    with pytest.raises(ServerError, match="did not get ready; the end of its log:\nno such model"):
        failing.wait_until_healthy()
    failing.stop()


def test_the_median_is_over_tokens_not_events() -> None:
    """A late event with two tokens counts as two gaps. One slow token does not move the median."""
    assert inter_token_seconds([[(0.0, 1), (1.0, 2), (5.0, 4), (15.0, 5)]]) == pytest.approx(2.0)


def test_only_the_time_when_all_streams_overlap_counts() -> None:
    alone, together = 0.1, 1.0
    first = [
        (0.0, 1),
        (alone, 2),
        (2 * alone, 3),
        (3 * alone, 4),
        (5.0, 5),
        (5.0 + together, 6),
        (5.0 + 2 * together, 7),
    ]
    second = [(5.0, 1), (5.0 + together, 2), (5.0 + 2 * together, 3), (7.0 + alone, 4), (7.0 + 2 * alone, 5)]
    assert inter_token_seconds([first, second]) == pytest.approx(together)


def test_streams_that_never_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="ask for more tokens"):
        inter_token_seconds([[(0.0, 1), (1.0, 2)], [(2.0, 1), (3.0, 2)]])


def test_cpu_time_of_other_processes() -> None:
    assert foreign_share(3.0, 2.5, 2.0) == pytest.approx(0.25)
    assert foreign_share(2.0, 2.1, 2.0) == 0.0, "the system's CPU accounting is coarser than our clock"


def test_cpu_time_covers_a_servers_usage(server: Server) -> None:
    before, own, everyone = server.cpu_seconds(), serving.own_cpu_seconds(), serving.machine_cpu_seconds()
    used = 0.0
    for _ in range(2000):  # a few hundred requests suffice
        server.stream([1], 401)
        used = server.cpu_seconds() - before
        if used > 0.1:  # the clock's resolution is 0.01
            break
    assert used > 0.1
    assert serving.own_cpu_seconds() > own
    assert serving.machine_cpu_seconds() - everyone >= 0.5 * used
