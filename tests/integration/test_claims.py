"""No backend of ours inherits its answer to a question of vLLM's, in any version."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

from fastattention_vllm.integration import claims
from fastattention_vllm.integration.cpu import backend
from fastattention_vllm.integration.cuda import decode_graph
from fastattention_vllm.integration.cuda import flash as backend_flash
from fastattention_vllm.integration.cuda import volta as backend_volta
from fastattention_vllm.integration.cuda import xformers as backend_xformers
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.host_layers import metadata
from scripts import vllm_surface

KIND = {
    "AttentionBackend": "backend",
    "FlashAttentionBackend": "backend",
    "AttentionImplBase": "impl",
    "AttentionImpl": "impl",
    "FlashAttentionImpl": "impl",
    "AttentionMetadataBuilder": "builder",
    "FlashAttentionMetadataBuilder": "builder",
}
OURS: dict[str, tuple[type[Any], ...]] = {
    "backend": (
        backend.FastAttentionBackend,
        backend.HostLayerBackend,
        backend_flash.FastAttentionFlashBackend,
        backend_flash.HostLayerFlashBackend,
        backend_volta.FastAttentionVoltaBackend,
        backend_volta.HostLayerVoltaBackend,
        backend_xformers.FastAttentionXformersBackend,
    ),
    "impl": (
        backend.FastAttentionImpl,
        backend_flash.FastAttentionFlashImpl,
        backend_volta.FastAttentionVoltaImpl,
        backend_xformers.FastAttentionXformersImpl,
        host_layers.HostLayerImpl,
    ),
    "builder": (
        backend.FastAttentionMetadataBuilder,
        backend_flash.BlockedMetadataBuilder,
        backend_volta.VoltaMetadataBuilder,
        backend_xformers.XformersMetadataBuilder,
        metadata.HostMetadataBuilder,
        decode_graph.GraphMetadataBuilder,
    ),
}
HOST = tuple(one for one in OURS["backend"] if issubclass(one, claims.HostLayerClaims))
NOT_OF_HOST_LAYERS = (
    "supports_batch_invariance",
    "supports_dcp",
    "supports_device_cpu_query_lens_mismatch",
    "supports_kv_connector",
    "supports_mm_prefix",
    "supports_pcp",
    "supports_rswa",
)


def test_no_device_inherits_from_another_one() -> None:
    for ours in (one for classes in OURS.values() for one in classes):
        folders = {parts[2] for one in ours.__mro__ if len(parts := one.__module__.split(".")) > 3}
        assert len(folders & {"cpu", "cuda", "ascend"}) <= 1, ours


BASES = {"Backend", "Layer", "HostLayerMixin", "GraphHostLayerMixin"} | {
    name for name in vars(claims) if name.endswith(("Claims", "Own"))
}
ELSEWHERE = {"base", "ascend", "metadata"}
"""Modules whose classes belong to no single device, or are tested in test_classes_derived_from_vllm_ascends."""


def answering() -> Iterator[str]:
    """All classes of integration/ that derive from one of ``BASES``."""
    folder = Path(claims.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        if ELSEWHERE & set(path.relative_to(folder).with_suffix("").parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.ClassDef)
                and node.name not in BASES
                and BASES & {ast.unparse(base).split("[")[0] for base in node.bases}
            ):
                yield node.name


def test_every_backend_class_is_tested() -> None:
    found = set(answering())
    assert len(found) > 10
    assert found <= {one.__name__ for classes in OURS.values() for one in classes}


def unknown(surface: vllm_surface.Surface) -> list[str]:
    return [
        f"{owner}.{name}"
        for owner, kind in KIND.items()
        for name in surface[owner]
        if name not in claims.CLAIMS[kind] and name not in claims.WORKINGS[kind]
    ]


def not_its_own(ours: type[Any], kind: str) -> list[str]:
    """Questions that the class would answer with vLLM's implementation."""
    owners = {name: next((one for one in ours.__mro__ if name in vars(one)), None) for name in claims.CLAIMS[kind]}
    return [
        name
        for name, owner in owners.items()
        if owner is not None and not owner.__module__.startswith("fastattention_vllm.")
    ]


def test_every_question_of_the_installed_vllm_is_known() -> None:
    assert not unknown(vllm_surface.installed()), "add the backends' answers to claims.py"


@pytest.mark.parametrize("version", vllm_surface.versions())
def test_every_question_of_supported_vllms_is_known(version: str) -> None:
    recorded = vllm_surface.recorded(version)
    assert recorded is not None
    assert not unknown(recorded)


def test_a_new_question_is_detected() -> None:
    """The sources contain everything that the class has; the added name is not in the recorded surface."""
    found = vllm_surface.installed()
    assert set(found["AttentionBackend"]) <= set(dir(AttentionBackend))
    more = {**found, "AttentionBackend": [*found["AttentionBackend"], "supports_telepathy"]}
    assert unknown(more) == ["AttentionBackend.supports_telepathy"]


@pytest.mark.parametrize(
    ("ours", "kind"),
    [(one, kind) for kind, classes in OURS.items() for one in classes],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_every_answer_is_our_own(ours: type[Any], kind: str) -> None:
    base = {"backend": AttentionBackend, "impl": AttentionImpl, "builder": AttentionMetadataBuilder}[kind]
    assert issubclass(ours, base)
    assert not not_its_own(ours, kind)
    asked = [name for name in claims.CLAIMS[kind] if inspect.getattr_static(base, name, None) is not None]
    # Otherwise the name could be misspelt in our class and right in vLLM's.
    assert all(any(name in vars(one) for one in ours.__mro__ if "fastattention" in one.__module__) for name in asked)


@pytest.mark.parametrize("ours", [*HOST, backend_volta.FastAttentionVoltaBackend, backend.FastAttentionBackend])
def test_host_layers_do_not_claim_features_that_need_device_lengths(ours: type[Any]) -> None:
    for name in NOT_OF_HOST_LAYERS:
        assert getattr(ours, name)() is False, name


def test_device_layers_forward_flash_attentions_answers() -> None:
    ours = backend_flash.FastAttentionFlashBackend
    for name in NOT_OF_HOST_LAYERS:
        if hasattr(FlashAttentionBackend, name):
            assert getattr(ours, name)() is getattr(FlashAttentionBackend, name)(), name
    assert ours.supported_dtypes == FlashAttentionBackend.supported_dtypes
    assert ours.supports_head_size(64)
    assert not ours.supports_head_size(60)
    assert not hasattr(ours, "supports_telepathy")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("use_rswa", "R-SWA not supported"),
        ("use_batch_invariant", "batch invariance not supported"),
        ("use_kv_connector", "KV connector not supported"),
        ("use_dcp", "DCP not supported"),
        ("use_pcp", "PCP not supported"),
        ("use_adaptive_verification", "device-cpu query lens mismatch not supported"),
        ("use_mm_prefix", "partial multimodal token full attention not supported"),
    ],
)
def test_vllm_refuses_features_that_old_gpus_do_not_claim(asked: str, reason: str) -> None:
    ours = backend_volta.FastAttentionVoltaBackend
    if asked not in inspect.signature(ours.validate_configuration).parameters:
        pytest.skip(f"this vLLM does not ask for {asked}")
    plain: dict[str, Any] = {
        "head_size": 64,
        "dtype": torch.float16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(7, 0),
        "attn_type": "decoder",
        "has_sliding_window": True,
    }
    assert ours.validate_configuration(**plain) == []
    (found,) = ours.validate_configuration(**(plain | {asked: True}))
    assert reason in found


class Theirs(AttentionBackend):  # type: ignore[misc]
    """A stand-in for vllm-ascend's class, with the parts that matter here."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return TheirImpl

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [128]


class TheirImpl(AttentionImpl):  # type: ignore[misc, type-arg]
    pass


def test_classes_derived_from_vllm_ascends(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-ascend is not installed here; `make test-ascend` tests the genuine one."""
    theirs = {
        "vllm_ascend": {},
        "vllm_ascend.attention": {},
        "vllm_ascend.attention.attention_v1": {
            "AscendAttentionBackend": Theirs,
            "AscendAttentionBackendImpl": TheirImpl,
            "AscendMetadata": object,
        },
        "vllm_ascend.ascend_config": {"get_ascend_config": None},
    }
    for name, members in theirs.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    vars(sys.modules["vllm_ascend.attention"])["attention_v1"] = sys.modules["vllm_ascend.attention.attention_v1"]
    modules = ("fastattention_vllm.integration.ascend.device", "fastattention_vllm.integration.ascend.backend")
    for module in modules:
        monkeypatch.delitem(sys.modules, module, raising=False)
    try:
        ascend = importlib.import_module(modules[1])
        side = importlib.import_module(modules[0])
        assert not not_its_own(ascend.FastAttentionAscendBackend, "backend")
        assert not not_its_own(ascend.HostLayerAscendBackend, "backend")
        assert not not_its_own(ascend.FastAttentionAscendImpl, "impl")
        assert not not_its_own(side.AscendHostMetadataBuilder, "builder")
        assert ascend.FastAttentionAscendBackend.supports_block_size(128)
        for name in NOT_OF_HOST_LAYERS:
            assert getattr(ascend.HostLayerAscendBackend, name)() is False
    finally:
        for module in modules:
            sys.modules.pop(module, None)
