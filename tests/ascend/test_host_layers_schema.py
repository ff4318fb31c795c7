"""All names and arguments that an NPU's host layers use exist in genuine torch_npu and CANN.

The steps run on the CPU. Each call of the fused operator also goes through its genuine schema and Meta kernel, and
every torch operator on the way must be one that torch_npu implements for its device.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch.utils._python_dispatch import TorchDispatchMode

from fastattention_vllm.attention import ascend
from fastattention_vllm.placement import host_attention, link, npu, pinning
from fastattention_vllm.placement.host_attention import HostLayerGroup, StreamSplit
from tests.ascend import operator as ascend_operator
from tests.ascend.streams import stand_in
from tests.ascend.test_schema import meta
from tests.placement.scenario import Model, Scenario, Work

CHECK = """
#include <stdint.h>
#include <stddef.h>
#include "acl/acl_rt.h"
aclError (*register_)(void *, uint64_t, uint32_t) = aclrtHostRegisterV2;
aclError (*unregister)(void *) = aclrtHostUnregister;
_Static_assert(sizeof(aclError) == sizeof(int), "what is returned");
_Static_assert(ACL_HOST_REG_PINNED == PINNED, "the flag");
"""
DEVICE = "PrivateUse1"


class Used(TorchDispatchMode):
    """Names of the operators that were dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.names.add(function._schema.name + ("." + name if (name := function._schema.overload_name) else ""))
        return function(*arguments, **(named or {}))


def has_kernel(name: str) -> bool:
    keys = (DEVICE, "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("window", [None, 50])
def test_a_step_uses_only_operators_that_torch_npu_has(
    window: int | None, head_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill in chunks and after a prefix, decode with a stream fraction, and a prefix computed in the same step."""
    calls = []

    def checked(**given: Any) -> Any:
        out, lse = ascend_operator.npu_fused_infer_attention_score(**given)
        shapes = torch_npu.npu_fused_infer_attention_score(**meta(given))
        assert [(each.shape, each.dtype) for each in shapes] == [(each.shape, each.dtype) for each in (out, lse)]
        calls.append(given["sparse_mode"])
        return out, lse

    stand_in(monkeypatch)
    monkeypatch.setattr(ascend, "operator", lambda: checked)
    monkeypatch.setattr(host_attention, "MIN_STREAMED_BYTES", 1)
    monkeypatch.setattr(Scenario, "compare", lambda *_: None)
    model = Model(8, 2, head_size, 16, torch.bfloat16, window)
    scenario = Scenario(
        model, 2, 100, HostLayerGroup(npu.NpuLink(torch.device("cpu")), npu, stream_split=StreamSplit(0.5)), 0
    )
    one = scenario.request(200)
    other = scenario.request(300, one, 6)
    used = Used()
    steps = [[Work(one, 0, 60)], [Work(one, 60, 80)], [Work(one, 140, 1), Work(other, 96, 90)], [Work(one, 141, 2)]]
    scenario.attend(steps[0])  # the first step creates what is then reused
    attend = type(scenario.layers[0]).attend

    def watched(*given: Any) -> None:
        with used:
            attend(*given)

    monkeypatch.setattr(type(scenario.layers[0]), "attend", watched)
    for works in steps[1:]:
        scenario.attend(works)
    together = [scenario.work(scenario.request(40), 40)]
    sharing = scenario.request(80, together[0].request, 2)
    scenario.attend([*together, Work(sharing, 32, 20)])
    assert set(calls) == ({0, 3} if window is None else {0, 4})
    missing = sorted(name for name in used.names if not has_kernel(name))
    assert not missing
    assert {"aten::logaddexp.out", "aten::lerp_.Tensor", "aten::cat", "aten::copy_", "aten::index.Tensor"} <= used.names
    assert not has_kernel("aten::_sparse_csr_sum.dim_dtype"), "the check can fail"


def test_streams_and_events_come_from_torch_npu() -> None:
    runtime = torch.get_device_module("npu")
    assert runtime is torch.npu
    for name in ("Stream", "Event", "stream", "current_stream", "current_device", "mem_get_info"):
        assert callable(getattr(runtime, name))
    for name in ("wait_event", "wait_stream", "record_event", "synchronize"):
        assert callable(getattr(runtime.Stream, name))
    for name in ("record", "synchronize"):
        assert callable(getattr(runtime.Event, name))
    assert issubclass(npu.NpuLink, link.StreamLink)


def test_pinning_is_canns_own_call(tmp_path: Path) -> None:
    """The call is compiled against the header that torch_npu ships."""
    include = Path(torch_npu.__file__).parent / "include" / "third_party" / "acl" / "inc"
    source = tmp_path / "check.c"
    source.write_text(CHECK)
    command = ["gcc", "-std=c11", "-fsyntax-only", "-Werror", "-I", str(include)]
    for flag, works in ((pinning.ACL_HOST_REG_PINNED, True), (2, False)):
        result = subprocess.run([*command, f"-DPINNED={flag}", str(source)], capture_output=True, text=True)
        assert (result.returncode == 0) == works, result.stderr


def test_torch_npu_asks_cann_whether_memory_is_pinned() -> None:
    """Otherwise copies from our memory would not be asynchronous."""
    library = (Path(torch_npu.__file__).parent / "lib" / "libtorch_npu.so").read_bytes()
    assert b"aclrtPointerGetAttributes" in library
    assert b"The memory is registered." in library
