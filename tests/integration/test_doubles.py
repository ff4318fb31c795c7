"""What stands in for vLLM's objects in tests has no attribute that the installed vLLM's own class lacks.

A double with a made-up attribute makes a test pass that vLLM would fail. The doubles are found in the sources of these
tests: by the name under which vLLM's objects hold each other (``model_config=SimpleNamespace(...)``), or by the table
of variables, functions and classes below.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm
from packaging.version import Version

from tests.integration.genuine import attributes_of

HERE = Path(__file__).parent
EVERYWHERE = {
    "vllm_config": "vllm.config:VllmConfig",
    "model_config": "vllm.config:ModelConfig",
    "draft_model_config": "vllm.config:ModelConfig",
    "cache_config": "vllm.config:CacheConfig",
    "parallel_config": "vllm.config:ParallelConfig",
    "scheduler_config": "vllm.config:SchedulerConfig",
    "speculative_config": "vllm.config:SpeculativeConfig",
    "compilation_config": "vllm.config:CompilationConfig",
    "attention_config": "vllm.config:AttentionConfig",
    "load_config": "vllm.config:LoadConfig",
    "moe_config": "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig",
    "scheduled_cached_reqs": "vllm.v1.core.sched.output:CachedRequestData",
    "logger_manager": "vllm.v1.metrics.loggers:StatLoggerManager",
    "output_processor": "vllm.v1.engine.output_processor:OutputProcessor",
    "pynccl_comm": "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator",
    "ca_comm": "vllm.distributed.device_communicators.custom_all_reduce:CustomAllreduce",
    "device_communicator": "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator",
}
"""By the name that holds the double."""
COMMON = "vllm.v1.attention.backend:CommonAttentionMetadata"
LAYER = "vllm.model_executor.layers.attention:Attention"
EXECUTOR = "vllm.v1.executor.multiproc_executor:MultiprocExecutor"
RAY_EXECUTOR = "vllm.v1.executor.ray_executor_v2:RayExecutorV2"
CLIENT = "vllm.v1.engine.async_llm:AsyncLLM"
NAMED = {
    ("cuda/test_flash.py", "COMMON"): COMMON,
    ("cuda/test_volta.py", "LAYER"): LAYER,
    ("cuda/test_volta.py", "cache"): "vllm.config:CacheConfig",
    ("cuda/test_volta.py", "spec"): "vllm.v1.kv_cache_interface:FullAttentionSpec",
    ("cpu/test_backend.py", "parallel"): "vllm.config:ParallelConfig",
    ("cpu/stand_ins/test_linear_attention.py", "context"): "vllm.forward_context:ForwardContext",
    ("cpu/stand_ins/test_linear_attention.py", "conv1d"): "vllm.model_executor.layers.linear:ColumnParallelLinear",
    ("host_layers/test_decode_graph.py", "scheduled"): "vllm.v1.core.sched.output:SchedulerOutput",
    ("host_layers/test_decode_graph.py", "config_of"): "vllm.config:VllmConfig",
    ("host_layers/test_placing.py", "common"): COMMON,
    ("host_layers/test_placing.py", "config_of"): "vllm.config:VllmConfig",
    ("serving/fakes.py", "Engine"): CLIENT,
    ("serving/fakes.py", "model"): "vllm.config:ModelConfig",
    ("serving/fakes.py", "gpu_config"): "vllm.config:VllmConfig",
    ("serving/test_engine_end.py", "Client"): CLIENT,
    ("serving/test_engine_end.py", "workers"): "vllm.v1.executor.ray_executor_v2:RayWorkerHandle",
    ("serving/test_engine_stats.py", "client"): CLIENT,
    ("serving/test_ray_cluster.py", "Executor"): RAY_EXECUTOR,
    ("serving/test_server_end.py", "Engine"): "vllm.v1.engine.core_client:AsyncMPClient",
    ("test_drafter.py", "config"): "vllm.config:VllmConfig",
    ("test_drafter.py", "model"): "vllm.config:ModelConfig",
    ("test_drafter.py", "parallel"): "vllm.config:ParallelConfig",
    ("test_drafter.py", "speculative"): "vllm.config:SpeculativeConfig",
    ("tiling/test_row_parallel.py", "config"): "vllm.config:VllmConfig",
    ("tiling/test_small_sums.py", "group"): "vllm.distributed.parallel_state:GroupCoordinator",
    ("tiling/test_small_sums.py", "parallel"): "vllm.config:ParallelConfig",
}
"""By file, and the variable, function or class. A function's double is what it returns."""
OWN = {
    ("serving/fakes.py", "Engine"): {"answers", "free", "asked"},
    ("serving/test_ray_cluster.py", "Executor"): {"called", "constant", "variable"},
    ("serving/test_server_end.py", "Engine"): {"outputs", "read", "reader"},
}
"""Attributes by which a double tells its test something. No code of the package may read them."""
OLDER = {
    ("vllm.config:CacheConfig", "calculate_kv_scales"),
    ("vllm.model_executor.layers.fused_moe.config:FusedMoEConfig", "disable_inplace"),
}
"""Attributes of vLLM 0.19.1, which the V100 needs, that 0.32 has no more."""


@dataclasses.dataclass(frozen=True)
class Double:
    place: str
    genuine: str
    attributes: frozenset[str]


def doubles(file: Path, text: str) -> Iterator[Double]:
    name = file.relative_to(HERE).as_posix()
    for node in ast.walk(ast.parse(text)):
        for holder, value in _held(node):
            genuine = NAMED.get((name, holder)) or EVERYWHERE.get(holder)
            attributes = _attributes(value) - OWN.get((name, holder), set())
            if genuine and attributes:
                yield Double(f"{name}:{value.lineno} {holder}", genuine, frozenset(attributes))


def _held(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Names with what they hold: keywords, keys, variables, attributes, and the values that functions return."""
    match node:
        case ast.keyword(arg=str(name), value=value):
            yield name, value
        case ast.Dict(keys=keys, values=values):
            yield from ((key.value, value) for key, value in zip(keys, values, strict=True) if _is_text(key))
        case ast.Assign(targets=targets, value=value):
            yield from ((_name(target), value) for target in targets)
        case ast.AnnAssign(target=target, value=value) if value is not None:
            yield _name(target), value
        case ast.FunctionDef(name=name, body=body):
            returned = [one.value for line in body for one in ast.walk(line) if isinstance(one, ast.Return)]
            yield from ((name, value) for value in returned if value is not None)
        case ast.ClassDef(name=name):
            yield name, node


def _is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _name(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _attributes(value: ast.AST) -> set[str]:
    """The names that a double has; empty for what is none."""
    match value:
        case ast.Call(func=func, keywords=keywords) if _name(func) == "SimpleNamespace":
            return {word.arg for word in keywords if word.arg}
        case ast.IfExp(body=body):
            return _attributes(body)
        case ast.ListComp(elt=ast.Call() as each):
            return _attributes(each)
        case ast.ClassDef():
            own = {one.name for one in value.body if isinstance(one, ast.FunctionDef)}
            own |= {one.attr for one in ast.walk(value) if isinstance(one, ast.Attribute) and _is_set_on_self(one)}
            return {name for name in own if not name.startswith("__")}
    return set()


def _is_set_on_self(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


FOUND = [double for file in sorted(HERE.rglob("*.py")) for double in doubles(file, file.read_text())]


@pytest.mark.parametrize("double", FOUND, ids=lambda double: double.place)
def test_vllms_own_class_has_every_attribute_of_its_double(double: Double) -> None:
    if double.genuine == RAY_EXECUTOR and importlib.util.find_spec("ray") is None:
        pytest.skip("not run: vLLM's executor needs Ray")
    lacking = double.attributes - attributes_of(double.genuine)
    older = {name for genuine, name in OLDER if genuine == double.genuine and name in double.attributes}
    installed = Version(vllm.__version__)
    assert lacking <= (older if installed > Version("0.19.1") else set()), double.genuine
    if installed >= Version("0.32"):
        assert lacking == older, double.genuine


def test_every_row_of_the_table_finds_its_double() -> None:
    found = {(double.place.split(":")[0], double.place.split()[-1]) for double in FOUND}
    assert NAMED.keys() - found == set()
    assert OWN.keys() <= NAMED.keys()


def test_made_up_attributes_are_found() -> None:
    """As one double of the executor had them."""
    text = "model_config = SimpleNamespace(dtype=1, made_up=2)\n"
    text += "def common():\n    return SimpleNamespace(seq_lens=3, b=4)"
    config, metadata = doubles(HERE / "host_layers" / "test_placing.py", text)
    assert config.attributes - attributes_of(config.genuine) == {"made_up"}
    assert metadata.attributes - attributes_of(metadata.genuine) == {"b"}
    assert {"_k_scale_float", "_k_scale", "kv_cache", "impl"} <= attributes_of(LAYER)
    assert {"is_failed", "failure_callback", "workers", "world_size"} <= attributes_of(EXECUTOR)
