"""``--additional-config '{"fastattention": {...}}'``: every option this plugin has, in one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fastattention_vllm.integration.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "fastattention"


class Options(BaseModel):
    """The ``fastattention`` section of vLLM's additional config. Unknown keys are refused, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    cpu_threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Attention threads per rank on the CPU path. None: every CPU of the rank (VLLM_CPU_OMP_THREADS_BIND)."""


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
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            raise Refusal(f'additional-config "{KEY}" has no option {key!r}; valid options: {valid}.') from error
        raise Refusal(
            f'additional-config "{KEY}": {key} = {problem["input"]!r} is not valid '
            f"({problem['msg'].lower()}); valid options: {valid}."
        ) from error
