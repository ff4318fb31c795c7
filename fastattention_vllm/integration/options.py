"""``--additional-config '{"fastattention": {...}}'``: every option this plugin has, in one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fastattention_vllm.integration.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "fastattention"


class Options(BaseModel):
    """The ``fastattention`` section of vLLM's additional config. Unknown keys are refused, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    cpu_threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Attention threads per rank. None: one for every CPU that VLLM_CPU_OMP_THREADS_BIND gives the rank, which are its
    physical cores unless the user says otherwise. Beside a GPU, one for each physical core but one."""

    host_kv_layers: Literal["auto"] | Annotated[int, Field(ge=0)] | list[Annotated[int, Field(ge=0)]] = "auto"
    """Layers whose KV cache lies in host memory: how many, or which. "auto": as few as make host_kv_requests of
    --max-model-len tokens fit; none without a GPU or NPU, where all memory is the host's."""

    host_kv_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Host memory that each rank may take for them, in GiB. None: half of what is free, divided among the ranks."""

    host_kv_requests: Annotated[int, Field(ge=1)] = 1
    """Requests of --max-model-len tokens for which "auto" makes room at the same time."""

    stream_fraction: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = "auto"
    """Part of a decoding request's host KV that the GPU or NPU reads over the link while the CPU attends to the rest.
    "auto": measured at start; 0 where the CPU alone reads as fast as the memory is."""

    tiling_all_reduce: Literal["auto", "off"] | Annotated[int, Field(ge=2, le=64)] = "off"
    """Blocks of tokens into which row-parallel linear layers are cut under tensor parallelism, so that one block is
    summed over the ranks while the next is multiplied. "auto": as measured at the first start on a machine, and none
    where none are faster."""

    tiling_full_form: bool = False
    """The paper's full form: attention (on GPUs) is computed in the blocks of the o_proj behind it, and an MLP of two
    matmuls in those of its second, so that there is more to hide a block's sum behind. Not on NPUs."""

    tiling_min_tokens: Annotated[int, Field(ge=2)] = 2048
    """Steps of fewer tokens are not cut: their sums are short messages, which gain nothing by being shorter."""

    volta_kernels: Literal["auto", "ptx", "ptx-sm_75"] = "auto"
    """"auto": the V100's kernels, or Turing's, on GPUs below compute capability 8.0. "ptx": the V100's on any newer one
    too, compiled by its driver; for tests, for they are slow there. "ptx-sm_75": Turing's, from 7.5 on."""

    volta_fallback: Literal["xformers"] | None = None
    """What runs models that those kernels refuse (fp32, other head sizes): an installed xformers, slower. None: they
    are refused."""


def decide_host_layers(vllm_config: VllmConfig, layers: list[int]) -> None:
    """Put the decision in the place of the question.

    The additional config is part of the hash by which vLLM finds compiled graphs again, and a graph holds which layers
    write to vLLM's cache: this must happen before the first one is traced.
    """
    config: Any = vllm_config
    config.additional_config = dict(config.additional_config or {})
    config.additional_config[KEY] = {**config.additional_config.get(KEY, {}), "host_kv_layers": layers}


def options_of(vllm_config: VllmConfig) -> Options:
    """Parse this plugin's options out of ``vllm_config``.

    Raises:
        Refusal: an unknown key or a bad value, with the list of what is valid.
    """
    section = (vllm_config.additional_config or {}).get(KEY, {})
    valid = ", ".join(Options.model_fields)
    if not isinstance(section, dict):
        raise Refusal(
            f'additional-config "{KEY}" is {section!r}; it must be an object with any of these keys: {valid}.'
        )
    try:
        return Options.model_validate(section)
    except ValidationError as error:
        problems = error.errors()
        option = problems[0]["loc"][0]
        if problems[0]["type"] == "extra_forbidden":
            raise Refusal(f'additional-config "{KEY}" has no option {option!r}; valid options: {valid}.') from error
        # An option of several types has a problem for each of them: all are said, for any may be what was meant.
        said = (found["msg"].lower() for found in problems if found["loc"][0] == option)
        reasons = "input should be " + " or ".join(
            dict.fromkeys(text.removeprefix("input should be ") for text in said)
        )
        raise Refusal(
            f'additional-config "{KEY}": {option} = {section.get(option, problems[0]["input"])!r} is not valid '
            f"({reasons}); valid options: {valid}."
        ) from error
