"""What the engine refuses at start on a device: models, and on a V100, where this package's kernels read quantised
weights, some formats of these weights.

vLLM and ``integration/`` decide. Tests give both the same checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from fastattention_vllm.plan.errors import PlanError
from fastattention_vllm.plan.hardware import Machine
from fastattention_vllm.plan.matrices import Matrix, full_names
from fastattention_vllm.plan.model import ModelShape
from fastattention_vllm.plan.weights import Stored

INSTEAD = (
    "serve the model as an AWQ, GPTQ (4 or 8 bits), compressed-tensors (int4, int8 or FP8 weights) or FP8 checkpoint, "
    "or unquantised in float16"
)
OTHERS = "plan another model or device"
FEWER_RANKS = "use a smaller --tp"
UNSTABLE_IN_FLOAT16 = {
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
}
"""Architectures that vLLM refuses in float16, each with its model type in vLLM's list."""
VLLMS = {"fbgemm-fp8": "8.0", "modelopt": "8.9", "mxfp4": "8.0", "torchao": "7.5"}
"""Methods that only vLLM's kernels read, with the compute capability that they need."""
VLLMS_OWN = ("", "gguf", "bitsandbytes", "unknown", "an unnamed method")
"""Methods that vLLM's kernels read on these GPUs, none among them, and what the planner cannot name."""
BLOCK = 128
"""Rows and columns of a block of FP8 weights that has a scale."""
TILE = 8
"""Inputs and outputs of a rank are a multiple of this."""
SMALLEST_GROUP = {4: 32, 8: 16}
"""By the bits of integers. Other groups are a power of two times as large."""
PACKED = "pack-quantized"
FLOATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True)
class Reason:
    what: str
    """What the layer has, as in "FP8 weights in blocks of [64, 64]"."""
    why: str
    instead: str = INSTEAD


@dataclass(frozen=True)
class Layer:
    """vLLM's layer with one or several matrices of a checkpoint, as ``ranks`` ranks divide it."""

    parts: tuple[Matrix, ...]
    stored: Stored
    """Of the first part."""
    ranks: int

    @property
    def inputs(self) -> int:
        """Of one rank."""
        return self.parts[0].inputs_of(self.ranks)

    @property
    def inputs_divided(self) -> bool:
        return self.inputs != self.parts[0].inputs

    @property
    def widths(self) -> tuple[int, ...]:
        """Outputs of each part on one rank."""
        return tuple(width for part in self.parts for width in part.widths_of(self.ranks))

    @property
    def outputs_divided(self) -> bool:
        return self.ranks > 1 and not self.parts[0].inputs_divided


def _awq(form: Stored) -> Reason | None:
    if form.bits == 4 and form.zero_points and form.form == "gemm":
        return None
    zeros = "with" if form.zero_points else "without"
    return Reason(
        f"AWQ weights of {form.bits} bits {zeros} zero points in the version {form.form!r}",
        "the kernels read 4 bits with zero points in the version 'gemm'",
    )


def _gptq(form: Stored) -> Reason | None:
    if form.bits in SMALLEST_GROUP:
        return None
    return Reason(f"GPTQ weights of {form.bits} bits", "the kernels read 4 and 8 bits")


def _fp8(form: Stored) -> Reason | None:
    if form.scales != "block" or form.block == (BLOCK, BLOCK):
        return None
    return Reason(
        f"FP8 weights in blocks of {list(form.block)}", f"the kernels read {[BLOCK, BLOCK]} and scales per tensor"
    )


def _compressed(form: Stored) -> Reason | None:
    if form.transformed:
        return Reason("transforms or sparsity of compressed-tensors", "no kernel computes them")
    said = f"compressed-tensors weights of {form.bits} bits ({form.kind}, a scale per {form.scales}, {form.form})"
    if form.activations and form.kind == "int":
        return Reason(
            f"{said} with activations of {form.activations} bits", "the kernels multiply by activations in fp16"
        )
    if not form.static:
        return Reason(f"{said} that are quantised at run time", "the kernels read scales from the checkpoint")
    if (
        form.kind == "int"
        and form.form == PACKED
        and form.bits in SMALLEST_GROUP
        and form.scales in ("group", "channel")
    ):
        return None
    if (
        form.kind == "float"
        and form.form in FLOATS
        and form.bits == 8
        and form.scales in ("tensor", "channel", "block")
    ):
        return _fp8(form)
    return Reason(said, "no kernel reads them")


def _vllms(form: Stored) -> Reason | None:
    needed = VLLMS.get(form.method)
    if form.method in VLLMS_OWN:
        return None
    if needed is None:
        why = "vLLM accepts them, but whether its kernels have code for this device was not checked"
        return Reason(f"weights of the method {form.method!r}", why)
    return Reason(f"weights of the method {form.method!r}", f"vLLM's kernels for them need compute capability {needed}")


FORMATS: Mapping[str, Callable[[Stored], Reason | None]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
}
"""By method: why a format is refused in any layer."""


def _order(layer: Layer) -> Reason | None:
    if not layer.stored.ordered or not layer.inputs_divided:
        return None
    without, instead = ("desc_act", "desc_act: false")
    if layer.stored.method == "compressed-tensors":
        without, instead = ("actorder: group", "actorder: weight")
    return Reason(
        f"activation order ({without})",
        f"{layer.ranks} ranks divide the inputs of this layer",
        f"use --tp 1, or a checkpoint with {instead}",
    )


def _groups(layer: Layer) -> Reason | None:
    group, inputs = layer.stored.group, layer.inputs
    if layer.stored.kind != "int" or not group:
        return None
    if layer.inputs_divided and inputs % group:
        why = f"each of {layer.ranks} ranks has {inputs} inputs, which is not a multiple of {group}"
        return Reason(f"groups of {group} inputs", why, FEWER_RANKS)
    smallest = SMALLEST_GROUP[layer.stored.bits]
    times, rest = divmod(group, smallest)
    if group < inputs and (rest or times & (times - 1)):
        why = f"the kernels read {smallest} times a power of two, and scales per channel"
        return Reason(f"groups of {group} inputs", why, f"use a checkpoint with groups of {BLOCK}")
    return None


def _tiles(layer: Layer) -> Reason | None:
    for what, size in (("inputs", layer.inputs), ("outputs", sum(layer.widths))):
        if not size or size % TILE:
            instead = FEWER_RANKS if layer.ranks > 1 else INSTEAD
            return Reason(f"{size} {what} on each rank", f"the kernels need a multiple of {TILE}", instead)
    return None


def _words(layer: Layer) -> Reason | None:
    """Zero points of neighbouring outputs share a word of 32 bits, as do AWQ's and GPTQ's weights."""
    form = layer.stored
    if form.kind != "int" or (form.method == "compressed-tensors" and not form.zero_points):
        return None
    per_word = 32 // form.bits
    for width in layer.widths:
        if width % per_word:
            what = f"a part of {width} outputs on each rank"
            return Reason(what, f"the {per_word} numbers in a word cannot be divided", FEWER_RANKS)
    return None


def _blocks(layer: Layer) -> Reason | None:
    """Parts and ranks begin with a block."""
    if layer.stored.scales != "block":
        return None
    sizes = [*(layer.widths if layer.outputs_divided else layer.widths[:-1])]
    sizes += [layer.inputs] if layer.inputs_divided else []
    for size in sizes:
        if size % BLOCK:
            what = f"a part of {size} inputs or outputs on each rank"
            return Reason(what, f"blocks of scales have {BLOCK}", FEWER_RANKS)
    return None


SIZES: Sequence[Callable[[Layer], Reason | None]] = (_order, _groups, _tiles, _words, _blocks)
"""Why a layer of these sizes is refused, if its format is not."""


def reason_of(layer: Layer, formats: Sequence[Stored]) -> Reason | None:
    """Why the layer is refused.

    Args:
        formats: those of its parts.
    """
    if len(set(formats)) > 1:
        names = " and ".join(part.name.rpartition(".")[2] for part in layer.parts)
        return Reason(
            f"parts of different formats ({names})", "vLLM merges them", "use a checkpoint that stores them alike"
        )
    if layer.stored.torn:
        what = "a rule for single matrices (dynamic)"
        return Reason(
            what, "vLLM merges them and matches the merged layer's name", "use a checkpoint without that rule"
        )
    if layer.stored.method not in FORMATS:
        return _vllms(layer.stored)
    found = FORMATS[layer.stored.method](layer.stored)
    return found or next((reason for rule in SIZES if (reason := rule(layer))), None)


def layers_of(shape: ModelShape, ranks: int) -> Iterator[tuple[str, Layer, list[Stored]]]:
    """vLLM's layers: the name, the layer and the formats of its parts."""
    for index, formats in enumerate(shape.stored):
        parts = zip(shape.matrices(index), formats, strict=True)
        for name, group in groupby(parts, key=lambda part: part[0].layer):
            found = list(group)
            matrices, stored = [part[0] for part in found], [part[1] for part in found]
            yield full_names(shape.architecture, index, name)[0], Layer(tuple(matrices), stored[0], ranks), stored


def refusal(shape: ModelShape, ranks: int) -> tuple[str, Reason] | None:
    """The first layer that is refused, and the reason."""
    for name, layer, formats in layers_of(shape, ranks):
        reason = reason_of(layer, formats)
        if reason is not None:
            return name, reason
    return None


def serving_dtype(shape: ModelShape, machine: Machine) -> str:
    """The dtype in which vLLM serves the model on this device.

    Raises:
        PlanError: it refuses each dtype that the device has.
    """
    unstable = UNSTABLE_IN_FLOAT16.get(shape.architecture)
    possible = [name for name in machine.kernels.dtypes if not (unstable and name == "float16")]
    if not possible:
        raise PlanError(
            f"model type {unstable!r} does not run in float16, because it is numerically unstable there, and "
            f"{machine.device.name} has no bfloat16; plan a model that runs in float16 (Llama, Qwen2.5, Qwen3, "
            "Mistral), or a device with bfloat16."
        )
    return shape.dtype if shape.dtype in possible else possible[0]


def _unserved(shape: ModelShape, machine: Machine) -> str | None:
    """Why the engine refuses the model on this device."""
    kernels, sizes = machine.kernels, machine.kernels.head_sizes
    by_kernels = f"is not supported by {kernels.name} on {machine.device.name}"
    if shape.head_size % sizes if isinstance(sizes, int) else shape.head_size not in sizes:
        possible = f"a multiple of {sizes}" if isinstance(sizes, int) else f"one of {', '.join(map(str, sizes))}"
        return f"this model's head size of {shape.head_size} {by_kernels}: it must be {possible}"
    if shape.soft_cap and not kernels.soft_caps:
        return f"this model's soft cap of {shape.soft_cap:g} (attn_logit_softcapping) {by_kernels}"
    if shape.serves_text_alone and not kernels.text_of_two_way_images:
        return (
            f"this model, in which the tokens of an image attend to each other in both directions, {by_kernels}, and "
            "the vLLM there cannot serve its text alone"
        )
    return None


def check(shape: ModelShape, machine: Machine) -> None:
    """
    Raises:
        PlanError: the engine would refuse the model or its weights at start on this machine. One sentence.
    """
    serving_dtype(shape, machine)
    if why := _unserved(shape, machine):
        raise PlanError(f"{why}; {OTHERS}.")
    if not machine.kernels.quantised_weights or (found := refusal(shape, machine.ranks)) is None:
        return
    name, reason = found
    raise PlanError(
        f"{name} has {reason.what}, which the engine refuses at start on {machine.device.name}: {reason.why}; "
        f"{reason.instead}."
    )
