"""``--additional-config '{"fastattention": {...}}'``: all options of this plugin, in one model."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fastattention_vllm.integration.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "fastattention"
ALIKE = 0.9
"""How much of a section's name equals ours if it is a misspelling, as difflib counts. "flashattention" is .89 alike."""
BEGINNING = "fastatt"
"""How other ways to write the name begin, such as "fastattn" and "fastattention_vllm"."""


class Options(BaseModel):
    """The ``fastattention`` section of vLLM's additional config. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    cpu_threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Attention threads per rank. Not set: one thread for each CPU that VLLM_CPU_OMP_THREADS_BIND assigns to the rank;
    by default these are the rank's physical cores. With a GPU or NPU: one fewer than the rank's physical cores, or two
    fewer with several ranks on a machine and at least 8 cores for each."""

    host_kv_layers: Literal["auto"] | Annotated[int, Field(ge=0)] | list[Annotated[int, Field(ge=0)]] = "auto"
    """Layers whose KV cache is kept in host memory: a number of layers or a list of layer indices. "auto": as few as
    needed for host_kv_requests requests of --max-model-len tokens; none on machines without a GPU or NPU, where all
    memory is host memory."""

    host_kv_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Host memory for host layers, in GiB per rank. Not set: half of the free memory, divided among the ranks."""

    host_kv_requests: Annotated[int, Field(ge=1)] = 1
    """Number of concurrent requests of --max-model-len tokens that host_kv_layers "auto" makes room for."""

    host_kv_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2", "int8"] = "auto"
    """How host layers store keys and values. "auto": as --kv-cache-dtype says. The other values are 8 bits wide: host
    memory holds nearly twice as many tokens, decoding reads nearly half the bytes, and answers change slightly. "int8"
    has one factor for each token and KV head. The fp8 formats have no scale (it is 1), and store larger numbers as
    their largest one. Device layers keep the model's dtype. Not supported on NPUs, nor with an fp8 --kv-cache-dtype."""

    resident_kv_gib: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0
    """GPU memory, in GiB per rank, for copies of the first blocks of host layers. It is taken before vLLM sizes its KV
    cache. The GPU attends to these blocks, and the CPU to the rest; a decode step of requests that lie there as a whole
    does not wait for the CPU. Without effect if no layer is a host layer. Not supported on NPUs, with 8-bit caches, nor
    with ALiBi."""

    stream_fraction: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = "auto"
    """Fraction of a decoding request's host KV that the GPU or NPU reads over the link while the CPU attends to the
    rest. "auto": measured at start; 0 if the CPU alone already uses the full memory bandwidth."""

    tiling_all_reduce: Literal["auto", "off"] | Annotated[int, Field(ge=2, le=64)] = "off"
    """Number of token blocks into which row-parallel linear layers are split under tensor parallelism. While one block
    is summed over the ranks, the next is multiplied. "auto": measured at the first start on a machine; layers that
    gain nothing are not split."""

    tiling_full_form: bool = False
    """The paper's full form: attention (on GPUs) is computed in the blocks of the o_proj that follows it, and an MLP of
    two matmuls in the blocks of its second matmul. This leaves more computation to overlap with each sum. Not supported
    on NPUs."""

    tiling_min_tokens: Annotated[int, Field(ge=2)] = 2048
    """Steps with fewer tokens are not split, because their messages are already short."""

    push_all_reduce: Literal["auto", "off"] = "off"
    """"auto": small sums of tensor parallelism, as in decoding, are made by a kernel that writes to the other GPUs of
    the machine, where that was measured at start to be faster than NCCL. Without effect where vLLM's own kernels for
    such sums are enabled, as on two GPUs that can access each other. NVIDIA GPUs only; run on two and four H100."""

    volta_kernels: Literal["auto", "ptx", "ptx-sm_75"] = "auto"
    """"auto": the V100 or Turing kernels on GPUs below compute capability 8.0. "ptx": the V100 kernels on any newer
    GPU, compiled by its driver; for tests only, because they are slow there. "ptx-sm_75": the Turing kernels on compute
    capability 7.5 and newer, also for tests."""

    volta_fallback: Literal["xformers"] | None = None
    """"xformers" runs models that these kernels refuse (fp32, other head sizes) with an installed xformers, more
    slowly. Not set: such models are refused."""

    ascend_kernel: Literal["fused", "triton"] = "fused"
    """"fused": torch_npu's attention operator on NPUs. "triton": this package's Triton kernels, which have not yet run
    on hardware. They need eager mode or piecewise graphs, and head sizes 64, 128 or 256; other models are refused.
    Attention sinks and int8 caches stay with vllm-ascend's own code. Host layers use the operator in both cases."""


def decide_host_layers(vllm_config: VllmConfig, layers: list[int]) -> None:
    """Replace ``host_kv_layers`` with the chosen layers.

    A compiled graph fixes which layers write to vLLM's cache, and vLLM looks graphs up by a hash that includes the
    additional config. So this must happen before the first graph is traced.
    """
    config: Any = vllm_config
    config.additional_config = dict(config.additional_config or {})
    config.additional_config[KEY] = {**config.additional_config.get(KEY, {}), "host_kv_layers": layers}


def check_section_names(sections: Any) -> None:
    """Other software may have sections of its own, so only names that mean this one are refused.

    Raises:
        Refusal: a section whose name is nearly ours, such as "fast_attention", would have no effect.
    """
    for name in sections:
        letters = "".join(one for one in str(name).lower() if one.isalnum())
        alike = letters.startswith(BEGINNING) or get_close_matches(letters, (KEY,), cutoff=ALIKE)
        if name != KEY and alike:
            raise Refusal(
                f"additional-config {name!r} has no effect; the section of this plugin is {KEY!r}: "
                f"""--additional-config '{{"{KEY}": {{...}}}}'."""
            )


def options_of(vllm_config: VllmConfig) -> Options:
    """Parse this plugin's options in ``vllm_config``.

    Raises:
        Refusal: an unknown key or a bad value; lists the valid options.
    """
    sections = vllm_config.additional_config or {}
    check_section_names(sections)
    section = sections.get(KEY, {})
    valid = ", ".join(Options.model_fields)
    if not isinstance(section, dict):
        raise Refusal(
            f'additional-config "{KEY}" is {section!r}, but it must be an object; its valid keys are: {valid}.'
        )
    try:
        return Options.model_validate(section)
    except ValidationError as error:
        problems = error.errors()
        option = problems[0]["loc"][0]
        if problems[0]["type"] == "extra_forbidden":
            raise Refusal(f'additional-config "{KEY}" has no option {option!r}; valid options: {valid}.') from error
        # pydantic reports one error for each type that the option accepts. The message lists them all.
        messages = (found["msg"].lower() for found in problems if found["loc"][0] == option)
        reasons = "input should be " + " or ".join(
            dict.fromkeys(text.removeprefix("input should be ") for text in messages)
        )
        raise Refusal(
            f'additional-config "{KEY}": {option} = {section.get(option, problems[0]["input"])!r} is not valid '
            f"({reasons}); valid options: {valid}."
        ) from error
