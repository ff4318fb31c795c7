"""deploy/kubernetes: what can be checked of manifests without a cluster.

`make test-full` also checks them against Kubernetes' schemas (test_wheel.py).
"""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from fastattention_vllm import __version__
from fastattention_vllm.doctor.memory import SHM_NEEDED
from fastattention_vllm.integration.options import KEY, Options
from fastattention_vllm.plan import hardware
from fastattention_vllm.plan.memory import Request, plan_memory
from tests.packaging.manifests import FILES, ROOT, documents, of_kind, template
from tests.packaging.test_configs import DEVICES, SHAPES, load
from tests.packaging.test_dockerfiles import USER_ID, instructions

GIB = 1 << 30
RAY = [file for file in FILES if file.stem.startswith("ray")]
BY_FILE = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
BY_RAY_FILE = pytest.mark.parametrize("file", RAY, ids=lambda file: file.stem)


def container(file: Path) -> dict[str, Any]:
    (found,) = template(file)["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def commands(file: Path) -> list[list[str]]:
    """What the container runs, a list of words for each command."""
    words = container(file)["args"]
    if words[0] == "bash":
        return [shlex.split(line) for line in words[-1].splitlines()]
    return [words]


def serve(file: Path) -> list[str]:
    """The words after `vllm serve`."""
    found = commands(file)[-1]
    begin = found.index("vllm")
    assert found[begin : begin + 2] == ["vllm", "serve"]
    return found[begin + 2 :]


def config_of(file: Path) -> str:
    words = serve(file)
    return Path(words[words.index("--config") + 1]).stem


def bytes_of(text: str) -> int:
    found = re.fullmatch(r"(\d+)Gi", text)
    assert found, text
    return int(found[1]) * GIB


def shared(file: Path) -> int:
    volumes = {volume["name"]: volume for volume in template(file)["spec"]["volumes"]}
    (name,) = [mount["name"] for mount in container(file)["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    assert volumes[name]["emptyDir"]["medium"] == "Memory"
    return bytes_of(volumes[name]["emptyDir"]["sizeLimit"])


def test_all_are_here() -> None:
    assert {file.stem for file in FILES} == {"cpu", "gpu", "ray-v100", "ray-ascend"}


@BY_FILE
def test_every_object_has_a_kind_and_a_name_of_its_own(file: Path) -> None:
    names = [(one["apiVersion"], one["kind"], one["metadata"]["name"]) for one in documents(file)]
    assert len(names) == len(set(names)) >= 3


@BY_FILE
def test_vllm_parses_the_arguments(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    parsed = parser.parse_args(["serve", *serve(file)])
    assert parsed.attention_backend.lower() == "fastattention"
    assert parsed.host == "0.0.0.0"
    assert parsed.port == container(file)["ports"][0]["containerPort"]
    assert (parsed.distributed_executor_backend == "ray") == (file in RAY)
    Options.model_validate((parsed.additional_config or {}).get(KEY, {}))


@BY_FILE
def test_the_image_is_one_of_ours_in_this_version(file: Path) -> None:
    found = re.fullmatch(rf"fastattention:{re.escape(__version__)}-(\w+)", container(file)["image"])
    assert found, "the image is not pinned"
    recipe = ROOT / "deploy" / "docker" / f"Dockerfile.{found[1]}"
    assert f"-t {container(file)['image']} ." in recipe.read_text()
    assert any(name == "COPY" and "configs" in rest.split() for name, rest in instructions(recipe))
    assert (ROOT / "configs" / f"{config_of(file)}.yaml").is_file()


@BY_FILE
def test_probes_ask_for_the_servers_health(file: Path) -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container(file)[probe]["httpGet"]
        assert asked == {"path": "/health", "port": "http"}
    start = container(file)["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 3600, "the model is downloaded at the first start"


@BY_FILE
def test_it_has_no_rights_that_it_does_not_need(file: Path) -> None:
    spec, inside = template(file)["spec"], container(file)["securityContext"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == USER_ID
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert inside["allowPrivilegeEscalation"] is False
    assert inside["readOnlyRootFilesystem"] is True
    assert inside["capabilities"]["drop"] == ["ALL"]
    assert inside["capabilities"].get("add", []) in ([], ["SYS_NICE"])
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert "privileged" not in inside


@BY_FILE
def test_everything_that_the_server_writes_to_is_a_volume(file: Path) -> None:
    mounts = {mount["mountPath"]: mount["name"] for mount in container(file)["volumeMounts"]}
    assert {"/home/serve", "/tmp", "/dev/shm"} <= set(mounts)
    volumes = {volume["name"]: volume for volume in template(file)["spec"]["volumes"]}
    assert set(volumes) == set(mounts.values())
    claim = volumes["home"]["persistentVolumeClaim"]["claimName"]
    assert claim == of_kind(file, "PersistentVolumeClaim")["metadata"]["name"]


@BY_FILE
def test_requests_are_limits_so_that_cpus_can_be_exclusive(file: Path) -> None:
    resources = container(file)["resources"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["cpu"].isdigit()


@BY_FILE
def test_selectors_find_the_pods(file: Path) -> None:
    labels = template(file)["metadata"]["labels"].items()
    service = of_kind(file, "Service")["spec"]
    assert service["selector"].items() <= labels
    assert service["ports"][0]["targetPort"] == container(file)["ports"][0]["name"]
    for one in documents(file):
        spec = one["spec"]
        for selector in ("selector", "podSelector"):
            if "matchLabels" in spec.get(selector, {}):
                assert spec[selector]["matchLabels"].items() <= labels


@BY_FILE
def test_memory_is_enough(file: Path) -> None:
    """For the model on a CPU, or the host pool of one request on every device that the config is for."""
    config, limit = load(config_of(file)), bytes_of(container(file)["resources"]["limits"]["memory"])
    ranks = config.get("tensor-parallel-size", 1)
    processes = ranks * int(hardware.measured().server_gib.value * GIB)
    shape, words = SHAPES[config["model"]], serve(file)
    assert shared(file) >= SHM_NEEDED
    if config_of(file) not in DEVICES:
        need = shape.parameters * 2 + config["kv-cache-memory-bytes"]
        assert processes + need + shared(file) <= limit
        return
    options = {}
    if "--additional-config" in words:
        options = json.loads(words[words.index("--additional-config") + 1])[KEY]
    pool = options.get("host_kv_gib")
    for device in DEVICES[config_of(file)]:
        found = plan_memory(
            shape.planned(config["dtype"]),
            hardware.machine(device, ranks),
            Request(context=config["max-model-len"], batched_tokens=8192, host_kv_gib=pool),
        )
        assert bool(found.placement.host) == (pool is not None), "host layers need a limit here, and others do not"
    assert processes + int((pool or 0) * ranks * GIB) + shared(file) <= limit


@BY_FILE
def test_the_pod_asks_for_the_devices_of_its_ranks(file: Path) -> None:
    limits = container(file)["resources"]["limits"]
    devices = [number for name, number in limits.items() if "/" in name]
    expected = [] if file.stem == "cpu" else [load(config_of(file)).get("tensor-parallel-size", 1)]
    assert devices == expected


@BY_RAY_FILE
def test_ray_has_the_pods_resources_and_only_the_servers_port_is_open(file: Path) -> None:
    start, limits = commands(file)[0], container(file)["resources"]["limits"]
    assert start[:3] == ["ray", "start", "--head"]
    option = dict(pairwise(start))
    assert option["--num-cpus"] == limits["cpu"]
    count = json.loads(option["--resources"])["NPU"] if "--resources" in option else int(option["--num-gpus"])
    assert count == load(config_of(file))["tensor-parallel-size"]
    assert int(option["--object-store-memory"]) + SHM_NEEDED <= shared(file)
    (rule,) = of_kind(file, "NetworkPolicy")["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == [container(file)["ports"][0]["containerPort"]]


@BY_RAY_FILE
def test_the_version_of_ray_is_the_images(file: Path) -> None:
    version = of_kind(file, "RayCluster")["spec"]["rayVersion"]
    recipe = ROOT / "deploy" / "docker" / f"Dockerfile.{container(file)['image'].rpartition('-')[2]}"
    assert f"'ray[default]=={version}'" in recipe.read_text()


@BY_RAY_FILE
def test_ray_accepts_the_options(file: Path) -> None:
    from ray.scripts.scripts import start

    start.make_context("ray start", commands(file)[0][2:])


@BY_FILE
def test_it_says_that_it_was_not_run(file: Path) -> None:
    assert "Not yet run in a cluster" in file.read_text()
