"""``--attention-backend fastattention`` in genuine vLLM and vllm-ascend, in fresh processes and several orders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = "fastattention_vllm.integration.ascend.backend.FastAttentionAscendBackend"
DENSE = "vllm_ascend.attention.attention_v1.AscendAttentionBackend"

# /dev/null replaces an NPU's device node, so that this package's CPU platform does not activate.
BEGIN = """
import json
import fastattention_vllm.integration.plugin as plugin
plugin.NPU_DEVICES = ("/dev/null",)
import vllm_ascend.utils
vllm_ascend.utils._ascend_device_type = vllm_ascend.utils.AscendDeviceType.A2
from vllm.plugins import load_general_plugins
"""
CHOOSE = """
from vllm.platforms import current_platform
from vllm.config import AttentionConfig
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum
import torch
import vllm_ascend.platform as P

def config(**more):
    return selector.AttentionSelectorConfig(128, torch.bfloat16, "auto", None, **more)

def chosen(backend, **more):
    return current_platform.get_attn_backend_cls(backend, config(**more), 8)

member = AttentionConfig(backend="fastattention").backend
found = {
    "device": current_platform.device_type,
    "ours": chosen(member),
    "class": selector._cached_get_attn_backend(member, config(), 8).__module__,
    "none": chosen(None),
    "custom": chosen(AttentionBackendEnum.CUSTOM),
    "mla": chosen(member, use_mla=True),
    "sparse": chosen(member, use_mla=True, use_sparse=True),
}
# How a row-parallel layer is to run, asked through what vllm-ascend's layers have imported.
from types import SimpleNamespace
from vllm.config import vllm as C
from vllm_ascend.ops import linear, linear_op
for name in ("oproj_tp_enable", "mlp_tp_enable", "matmul_allreduce_enable", "flashcomm2_enable", "enable_sp",
             "enable_dsa_cp_with_layer_shard"):
    setattr(linear_op, name, lambda: False)
linear_op.get_tp_group = lambda: SimpleNamespace(rank_in_group=0, world_size=2)

class Worker:
    def determine_available_memory(self):
        return 1

def operation(blocks):
    C._current_vllm_config = SimpleNamespace(
        additional_config={"fastattention": {"tiling_all_reduce": blocks}},
        parallel_config=SimpleNamespace(tensor_parallel_size=2, worker_cls="__main__.Worker"),
    )
    op = linear.get_parallel_op(False, "model.layers.0.self_attn.o_proj", None, "row")[0]
    C._current_vllm_config = None
    return type(op).__name__

found["tiling off"] = operation("off")
found["tiling"] = operation(2)
found["hooked"] = hasattr(Worker, "_fastattention_before_profiling")

P.is_310p = lambda: True
found["310p"] = chosen(member)

from packaging.specifiers import SpecifierSet
from fastattention_vllm.integration.ascend import platform as ascend; from fastattention_vllm.integration import refusal
ascend.SUPPORTED_VLLM_ASCEND = SpecifierSet("<0.1")
try:
    chosen(member)
except refusal.Refusal as error:
    found["refusal"] = str(error).partition(",")[0]
print("FOUND " + json.dumps(found))
"""
ORDERS = {
    "vllm-ascend's attention first": """
import vllm_ascend.ops, vllm_ascend.attention.attention_v1
load_general_plugins()
""",
    "vllm-ascend's attention last, all twice": """
plugin.register()
load_general_plugins()
import vllm_ascend.ops, vllm_ascend.attention.attention_v1
plugin.register()
""",
    "chosen before": """
from vllm.v1.attention import selector
from fastattention_vllm.integration import compat
import torch, vllm_ascend.ops
asked = selector.AttentionSelectorConfig(128, torch.bfloat16, "auto", None)
selector._cached_get_attn_backend(compat.ensure_backend_member(), asked, 8)
load_general_plugins()
""",
}


def run(tmp_path: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run in a new process in which this package's entry points are installed."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path / "fastattention_vllm-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fastattention-vllm\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in own.items()) for group, own in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", BEGIN + code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=1000,
    )


@pytest.mark.timeout(1200)  # each imports all of vLLM and vllm-ascend
@pytest.mark.parametrize("order", ORDERS)
def test_the_choice_is_honoured_in_any_import_order(tmp_path: Path, order: str) -> None:
    result = run(tmp_path, ORDERS[order] + "\n" + CHOOSE)
    lines = [line for line in result.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, result.stdout[-2000:] + result.stderr[-3000:]
    assert json.loads(lines[0].removeprefix("FOUND ")) == {
        "device": "npu",
        "ours": OURS,
        "class": OURS.rpartition(".")[0],
        "none": DENSE,
        "custom": DENSE,
        "mla": "vllm_ascend.attention.mla_v1.AscendMLABackend",
        "sparse": "vllm_ascend.attention.sfa_v1.AscendSFABackend",
        "tiling off": "NoneType",
        "tiling": "TiledRowParallelOp",
        "hooked": True,
        "310p": "vllm_ascend._310p.attention.attention_v1.AscendAttentionBackend310",
        "refusal": "vllm-ascend 0.23.0 is installed",
    }
