"""Genuine torch_npu has what tiling-AllReduce uses on an NPU: schemas, Meta kernels and operators.

Meta kernels check little. The documented limits are checked by tests/ascend/mm_all_reduce.py.
"""

from __future__ import annotations

import pytest
import torch
import torch_npu

from fastattention_vllm.parallel import mm_all_reduce, tiled_linear

NAME = f"npu::{mm_all_reduce.NAME}"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", mm_all_reduce.DTYPES)
def test_schema_and_meta_kernel_accept_the_call(dtype: torch.dtype, bias: bool) -> None:
    x, weight, own = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((300, 64), (48, 64), (48,)))
    out = mm_all_reduce.layer(lambda: "group")(x, weight, own if bias else None)
    assert out.device.type == "meta"
    assert out.shape == (300, 48)
    assert out.dtype == dtype


def test_the_stand_in_has_the_genuine_schema() -> None:
    arguments = torch._C._get_schema(NAME, "").arguments
    assert [one.name for one in arguments[:3]] == ["x1", "x2", "hcom"]
    defaults = {one.name: one.default_value for one in arguments if one.kwarg_only}
    assert (defaults["reduce_op"], defaults["bias"], defaults["comm_turn"]) == ("sum", None, 0)
    meta = torch.empty(4, 4, device="meta")
    with pytest.raises(RuntimeError, match="turn"):
        torch_npu.npu_mm_all_reduce_base(meta, meta, "group", turn=1)


@pytest.mark.parametrize("name", [NAME, "aten::mm.out", "aten::addmm.out"])
def test_torch_npu_has_the_operators(name: str) -> None:
    """The last two write a block's product directly into the output."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1")


def test_the_tiled_layer_is_registered_for_npus() -> None:
    assert tiled_linear._library is not None
    assert torch._C._dispatch_has_kernel_for_dispatch_key("fastattention::tiled_linear_all_reduce", "PrivateUse1")


def test_torch_npu_has_the_timing_api() -> None:
    device = torch.get_device_module("npu")
    assert device is torch.npu
    assert {"record", "synchronize", "elapsed_time"} <= vars(device.Event).keys()
    assert callable(device.get_device_name)


def test_hccl_process_groups_report_their_name() -> None:
    assert callable(torch_npu._C._distributed_c10d.ProcessGroupHCCL.get_hccl_comm_name)
