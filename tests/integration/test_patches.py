"""The registry lists every statement of the package that replaces something in vLLM, and nothing else."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastattention_vllm import integration
from fastattention_vllm.integration.patches import PATCHES, Patch

FOLDER = Path(integration.__file__).parent
REPLACING_CALLS = {"setattr", "delattr", "register_oot", "register_kernels", "Library", "impl", "cache_clear"}
REPLACING_METHODS = {"sys.meta_path.insert", "sys.meta_path.append", "op_registry_oot.pop"}
NOT_VLLMS = {
    "ascend/device:AscendRuntime.prepare:get_ascend_config().enable_cpu_binding": "an option of vllm-ascend's",
    "ascend/platform:check_model:apply_config_platform_defaults._fastattention": "a mark on our own function",
    "ascend/platform:_honouring:get_attn_backend_cls._fastattention": "a mark on our own function",
    "ascend/row_parallel:_tiling:_get_row_parallel_op._fastattention": "a mark on our own function",
    "cuda/graph_steps:choose_whole_steps.noting_the_step.execute_model:step.whole": "a note of our own",
    "cuda/graph_steps:choose_whole_steps.noting_the_step.execute_model:step.runner": "a note of our own",
    "cuda/graph_steps:choose_whole_steps.noting_the_step.execute_model:step.has_grammars": "a note of our own",
    "cuda/graph_steps:fill_ngram_drafts:batch_propose._fastattention": "a mark on our own function",
    "cuda/graph_steps:choose_whole_steps.dispatch_second:given.arguments['uniform_token_count']": "arguments of a call",
    "cuda/gated_delta:_Known.of:self.known[place]": "a table of our own",
    "cuda/decode_graph:GraphMetadataBuilder.build_for_cudagraph_capture:metadata.graph_batch": "our own metadata",
    "checkpoint/reload:check_first:reload_weights._fastattention": "a mark on our own function",
    "claims:owning.decorate:setattr": "attributes of our own classes",
    "compat:without_fp8_cache:cache.cache_dtype": "an option of vLLM's, for the time of one call",
    "compat:add_shared_caches_before_layout:update_with_shared_caches._fastattention": "a mark on our own function",
    "compat:keep_block_size:vllm_config.cache_config.user_specified_block_size": "a mark on vLLM's configuration",
    "compat:same_block_size:cache.block_size": "an option of vLLM's",
    "compat:set_kv_bytes:cache.kv_cache_memory_bytes": "an option of vLLM's",
    "compat:set_kv_bytes:cache.cpu_kvcache_space_bytes": "an option of vLLM's",
    "compat:set_max_model_len:cache.mamba_block_size": "an option of vLLM's",
    "compat:set_max_model_len:model.max_model_len": "an option of vLLM's",
    "cpu/prompt_logprobs:refuse_with_adapters:process_inputs._fastattention": "a mark on our own function",
    "cpu/platform:FastAttentionCpuPlatform._bind_cpus:os.environ[binding.OWN_BIND]": "an environment variable",
    "cpu/platform:FastAttentionCpuPlatform._bind_cpus:os.environ[binding.THREADS_BIND]": "the same",
    "cpu/stand_ins/linear:_define:torch.library.Library": "an op in our own namespace",
    "cpu/stand_ins/linear:_define:_library.impl": "an op in our own namespace",
    "cpu/stand_ins/lora:CpuPunicaWrapper.add_shrink:"
    "rank_wide.view(-1, rank_wide.shape[-1])[self.token_lora_indices < 0]": "a tensor",
    "cuda/device:CudaRuntime.settle_block_size:cache.block_size": "an option of vLLM's",
    "cuda/flash:BlockedMetadataBuilder.build:metadata.row_blocks": "an attribute of our own on a step's metadata",
    "cuda/flash:BlockedMetadataBuilder.build_for_cudagraph_capture:metadata.row_blocks": "the same",
    "cuda/quantised/experts:experts_method:config.linear_quant_method": "an option of the configuration of one layer",
    "cuda/quantised/auto_round:AutoRoundConfig.from_config:made.checkpoint": "an attribute of our own class",
    "cuda/quantised/awq:AwqConfig.from_config:made.checkpoint": "the same",
    "cuda/quantised/compressed_tensors:CompressedTensorsCheckpointConfig.from_config:made.checkpoint": "the same",
    "cuda/quantised/experts:CheckedZeroPoints.create_weights:held.weight_loader": "an attribute of our own parameter",
    "cuda/quantised/fp8:Fp8CheckpointConfig.from_config:made.checkpoint": "the same",
    "cuda/quantised/gptq:GptqConfig.from_config:made.checkpoint": "the same",
    "cuda/quantised/fp8_method:Fp8Method.add_parameters:layer.weight_block_size": "what vLLM's linear methods set",
    "cuda/quantised/linear_method:QuantisedLinearMethod.add:self.loadings[name]": "our own",
    "cuda/quantised/linear_method:QuantisedLinearMethod.process_weights_after_loading:"
    "delattr": "parameters that the same object has added",
    "cuda/quantised/loading:Loading.wrap.load:self.numbers[which]": "our own",
    "cuda/start:refuse_float16:_check_valid_dtype._fastattention": "a mark on our own function",
    "cuda/start:check_and_set_defaults:apply_config_platform_defaults._fastattention": "a mark on our own function",
    "cuda/start:prefer_whole_graphs:compilation.mode": "an option of vLLM's",
    "cuda/start:prefer_whole_graphs:compilation.cudagraph_mode": "an option of vLLM's",
    "cuda/xformers:XformersMetadata.mask:self.masks[window]": "our own",
    "host_layers/layers:HostLayers.set_stream_split:self.group.stream_split": "our own",
    "host_layers/layers:HostLayerImpl.forward:self.host_layers.rehearsed": "our own",
    "host_layers/layers:rehearse:group.prefetcher": "our own",
    "host_layers/layers:HostLayers._divide_copies:self.graph_calls.copies": "our own",
    "host_layers/layers:HostLayers._divide_copies:self.group.resident": "our own",
    "cuda/decode_graph:GraphMetadataBuilder.build_for_cudagraph_capture:found.graph_calls.copies.table": "our own",
    "drafter:seen_alone:alone.model_config": "our own copy",
    "drafter:seen_alone:alone.speculative_config": "our own copy",
    "drafter:use_this_backend:speculative.attention_backend": "an option of vLLM's",
    "host_layers/layers:set_up:setattr": "a mark on vLLM's configuration",
    "options:decide_host_layers:config.additional_config": "an option of vLLM's",
    "options:decide_host_layers:config.additional_config[KEY]": "an option of vLLM's",
    "serving/nan_logits:count_logits:kind._fastattention": "a mark on vLLM's class",
    "refusal:install_excepthook:sys.excepthook": "Python's, in the vllm command's own process",
    "serving/engine_end:_record_at_shutdown:shutdown._fastattention": "a mark on our own function",
    "serving/engine_end:make_pipe:os.environ[PIPE]": "our own variable, for the processes that this one starts",
    "serving/engine_end:note_stops:shutdown._fastattention_notes": "a mark on our own function",
    "serving/engine_end:fail_with_the_engine:shutdown._fastattention_fails": "a mark on our own function",
    "serving/ray_cluster:change_executor:_init_executor._fastattention": "a mark on our own function",
    "serving/server_end:tell_requests:shutdown._fastattention": "a mark on our own function",
    "serving/server_end:stop_reading:get_output_async._fastattention": "a mark on our own function",
    "serving/shared_names:free_names_of_queues:wait_until_ready._fastattention": "a mark on our own function",
    "serving/server_end:limit_waiting:shutdown._fastattention": "a mark on our own function",
    "serving/server_start:attach_at_start:startup._fastattention": "a mark on our own function",
    "serving/server_start:add_routes:config.loaded_app": "an attribute of uvicorn's",
    "serving/server_end:limit_waiting.shutdown:self.config.timeout_graceful_shutdown": "an option of uvicorn's",
}
"""Statements of the same form that replace nothing, and what they set."""


def statements(source: str, module: str) -> Iterator[str]:
    """``module:function:statement`` of each statement that sets an attribute or item of something other than self."""

    def visit(node: ast.AST, where: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inside = where
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside = (*where, child.name)
            for text in found(child):
                yield f"{module}:{'.'.join(where)}:{text}"
            yield from visit(child, inside)

    yield from visit(ast.parse(source), ())


def found(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name.rpartition(".")[2] in REPLACING_CALLS or name in REPLACING_METHODS:
            yield name
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    for target in (one for some in targets for one in ([*some.elts] if isinstance(some, ast.Tuple) else [some])):
        if isinstance(target, ast.Attribute):
            if ast.unparse(target.value) not in ("self", "cls"):
                yield ast.unparse(target)
        elif isinstance(target, ast.Subscript) and not isinstance(target.value, ast.Name):
            yield ast.unparse(target)


def in_the_package() -> set[str]:
    files = sorted(FOLDER.rglob("*.py"))
    assert len(files) > 30
    names = {file: file.relative_to(FOLDER).with_suffix("").as_posix() for file in files}
    return {site for file, name in names.items() for site in statements(file.read_text(), name)}


def test_every_replacing_statement_is_in_the_registry() -> None:
    listed = Counter(site for patch in PATCHES for site in patch.sites)
    assert max(listed.values()) == 1
    assert not set(listed) & set(NOT_VLLMS)
    assert in_the_package() == set(listed) | set(NOT_VLLMS)


@pytest.mark.parametrize(
    "line",
    [
        "Worker.execute_model = ours",
        "setattr(Worker, 'execute_model', ours)",
        "layer.__class__ = Ours",
        "PluggableLayer.register_oot(Ours, name='Theirs')",
        "vllm.registry.members['X'] = ours",
        "first.one, second.two = ours",
    ],
)
def test_an_unregistered_statement_is_detected(line: str) -> None:
    (site, *_) = statements(f"def install():\n    {line}\n", "new")
    assert site.startswith("new:install:")
    assert site not in in_the_package()


def test_statements_that_set_attributes_of_self_are_ignored() -> None:
    assert not list(
        statements("class A:\n    def f(self):\n        self.a = 1\n        b = {}\n        b[1] = 2\n", "new")
    )


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.names[0])
def test_every_entry_gives_its_reason_and_its_end(patch: Patch) -> None:
    assert patch.why.endswith(".")
    assert patch.remove_when
    assert patch.versions


@pytest.mark.parametrize("name", [n for p in PATCHES for n in p.names if n.startswith("vllm.")])
def test_the_replaced_names_exist(name: str) -> None:
    """Names that the installed vLLM does not have are not replaced there."""
    parts = name.split(".")
    depth = next(i for i in range(len(parts), 0, -1) if is_module(".".join(parts[:i])))
    thing = importlib.import_module(".".join(parts[:depth]))
    for part in parts[depth:]:
        thing = getattr(thing, part)


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
