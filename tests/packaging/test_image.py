"""The images are built without a registry, and their containers run as a user without rights.

Debian 12's packages take the place of the base images. The CPU's server answers. The other images need their hardware
to answer, so what they installed is looked at.
"""

from __future__ import annotations

import contextlib
import json
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
PACKAGES = "python3,python3-venv,python3-pip,python3-dev,ca-certificates"
USER = "10001"
START_S = 400
INSTALLED = """
import sys
from importlib.metadata import version
from pathlib import Path

import fastattention_vllm
from fastattention_vllm.attention.volta import images
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum

try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser

assert images.variants(Path(fastattention_vllm.__file__).parent / "lib" / "volta")
load_general_plugins()
# Each configuration is read by the parser of its own vLLM.
parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers())
for name in sys.argv[1:]:
    read = parser.parse_args(["serve", "--config", f"/fastattention/configs/{name}.yaml"])
    assert str(read.attention_backend) == "fastattention", read
print(version("vllm"), version("torch").partition("+")[0], AttentionBackendEnum["FASTATTENTION"].get_class().__name__)
"""
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
    """With ``BASE`` in its storage."""
    folder = tmp_path_factory.mktemp("image")
    try:
        builder = Builder(folder)
        files = folder / "base.tar"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(files)]
        subprocess.run(command, check=True)
        container = builder("from", "scratch")
        builder("add", "--quiet", container, str(files), "/")
        files.unlink()
        # As in the base images: `python` exists, and pip may install beside the system's packages.
        prepare = "ln -s python3 /usr/bin/python && rm /usr/lib/python3*/EXTERNALLY-MANAGED"
        builder("run", "--isolation", "chroot", container, "--", "sh", "-c", prepare)
        builder("commit", "--quiet", "--rm", container, BASE)
        yield builder
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
        if word.startswith("file://"):  # an index, whose pages may link to a folder beside it
            path = path.parent
        if path.is_absolute() and path.exists() and CERTIFICATES not in path.parents:
            mounts[str(path)] = str(path)
    return [word for here, there in mounts.items() for word in ("--volume", f"{here}:{there}:ro")]


@contextlib.contextmanager
def container_of(hardware: str, builder: Builder, folder: Path) -> Iterator[str]:
    """A container of the image that the Dockerfile of this hardware makes; both are removed in the end."""
    # Only what git knows, as in a fresh clone.
    context = folder / "context"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(context)], check=True)
    file, image = str(context / "deploy" / "docker" / f"Dockerfile.{hardware}"), f"localhost/fastattention-{hardware}"
    # Docker's own format, as OCI's has no health checks.
    options = ["--isolation", "chroot", "--layers=false", "--format", "docker", "--from", BASE, *pip_settings(folder)]
    builder("build", *options, "--file", file, "--tag", image, str(context))
    container = builder("from", image)
    try:
        yield container
    finally:
        builder("rm", container)
        builder("rmi", image)


def test_the_cpu_image_builds_and_answers(builder: Builder, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    serve = "vllm serve --config configs/cpu-demo.yaml --host 127.0.0.1 --port"
    with container_of("cpu", builder, tmp_path) as container:
        run = [*builder.own, "run", "--isolation", "chroot", container, "--", *serve.split(), str(port)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                run, env=USER_ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            assert builder("run", "--isolation", "chroot", container, "--", "id", "-u") == USER
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


@pytest.mark.parametrize(
    ("hardware", "vllm", "torch", "configs"),
    [
        ("v100", "0.19.1", "2.10.0", ["v100-16g", "v100-32g", "v100-8x32g-256k"]),
        ("gpu", "0.23.0", "2.11.0", ["t4-16g", "ampere-24g-256k", "ascend-910b-8x-128k"]),
    ],
    ids=["v100", "gpu"],
)
def test_the_images_of_gpus_contain_the_pair_and_the_kernels(
    hardware: str, vllm: str, torch: str, configs: list[str], builder: Builder, tmp_path: Path
) -> None:
    with container_of(hardware, builder, tmp_path) as container:
        # Not in the working directory, where the sources are.
        run = ("run", "--isolation", "chroot", "--workingdir", "/", container, "--")
        assert builder(*run, "id", "-u") == USER
        shown = builder(*run, "python", "-c", INSTALLED, *configs).splitlines()
        # Without a GPU, our CPU platform is used.
        assert shown[-1].split() == [vllm, torch, "FastAttentionBackend"]


def test_the_image_of_npus_builds_on_a_base_with_python(builder: Builder, tmp_path: Path) -> None:
    """Without CANN, torch_npu and vLLM: the real base has them, and no registry is at hand."""
    with container_of("ascend", builder, tmp_path) as container:
        shown = json.loads(builder("inspect", "--type", "container", container))
        run = ("run", "--isolation", "chroot", container, "--", *shown["Docker"]["config"]["Entrypoint"])
        assert builder(*run, "id", "-u") == USER
        assert "libfastattention_cpu" in builder(*run, "python3", "-m", "pip", "show", "--files", "fastattention-vllm")
        assert "2.60.0" in builder(*run, "ray", "--version")
