"""The CPU image is built, without a registry, and its container answers as a user without rights.

Debian's packages take the place of the base image: Debian 12 has the Python version of the base, with the same headers.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.environment import USER_ENVIRONMENT
from tests.server.conftest import free_port

ROOT = Path(__file__).resolve().parents[2]
BASE = "localhost/debian-python"
IMAGE = "localhost/fastattention-cpu"
PACKAGES = "python3,python3-venv,python3-dev,ca-certificates"
START_S = 400
CERTIFICATES = Path("/etc/ssl/certs")
PROGRAMS = ("buildah", "mmdebstrap")
LACKS = [name for name in PROGRAMS if not shutil.which(name)]

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(bool(LACKS), reason=f"needs {', '.join(LACKS)} (Debian: apt-get install {' '.join(LACKS)})"),
    pytest.mark.skipif(os.getuid() != 0, reason="needs root: chroot isolation"),
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the image has Python 3.11"),
]


class Builder:
    """buildah with a storage of its own."""

    def __init__(self, folder: Path) -> None:
        self.own = ["buildah", "--root", str(folder / "store"), "--runroot", str(folder / "run")]
        self.own += ["--storage-driver", "vfs"]

    def __call__(self, *words: str) -> str:
        done = subprocess.run([*self.own, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout.strip()


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    folder = tmp_path_factory.mktemp("image")
    try:
        yield Builder(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pip_settings(folder: Path) -> list[str]:
    """Options that give the build this machine's certificates and pip settings, and the folders that these name."""
    shown = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    settings = dict(re.findall(r"^(?:global|:env:)\.([\w.-]+)='(.*)'$", shown, re.MULTILINE))
    settings = {name.lstrip("."): text for name, text in settings.items()}
    file = folder / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{name} = {text}\n" for name, text in settings.items()))
    mounts = {str(file): "/etc/pip.conf", str(CERTIFICATES): str(CERTIFICATES)}
    for word in " ".join(settings.values()).split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists() and CERTIFICATES not in path.parents:
            mounts[str(path)] = str(path)
    return [word for here, there in mounts.items() for word in ("--volume", f"{here}:{there}:ro")]


def test_the_cpu_image_builds_and_answers(builder: Builder, tmp_path: Path) -> None:
    base = tmp_path / "base.tar"
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(base)]
    subprocess.run(command, check=True)
    container = builder("from", "scratch")
    builder("add", "--quiet", container, str(base), "/")
    base.unlink()
    builder("run", "--isolation", "chroot", container, "--", "ln", "-s", "python3", "/usr/bin/python")
    builder("commit", "--quiet", "--rm", container, BASE)

    # Only what git knows, as in a fresh clone.
    context = tmp_path / "context"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(context)], check=True)
    file = str(context / "deploy" / "docker" / "Dockerfile.cpu")
    # Docker's own format, as OCI's has no health checks.
    options = ["--isolation", "chroot", "--layers=false", "--format", "docker", "--from", BASE, *pip_settings(tmp_path)]
    builder("build", *options, "--file", file, "--tag", IMAGE, str(context))

    port = free_port()
    container = builder("from", IMAGE)
    serve = "vllm serve --config configs/cpu-demo.yaml --host 127.0.0.1 --port"
    run = [*builder.own, "run", "--isolation", "chroot", container, "--", *serve.split(), str(port)]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            run, env=USER_ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        assert builder("run", "--isolation", "chroot", container, "--", "id", "-u") == "10001"
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        body = {"model": "demo", "prompt": "alpha=7319. The weather is fine. alpha=", "max_tokens": 4}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body | {"temperature": 0}, timeout=120)
        assert answer.json()["choices"][0]["text"].strip() == "7319"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
