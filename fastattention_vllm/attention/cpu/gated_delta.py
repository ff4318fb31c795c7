"""Gated DeltaNet layers on CPUs (arXiv 2412.06464): all that one computes between its projections, and its norm.

``kernels/cpu/include/fastattention_cpu.h`` defines the arithmetic. It is fp32 for all dtypes.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_size_t, c_void_p

import torch

from fastattention_vllm.attention.cpu.kernels import HEAD_SIZE_MULTIPLE, MAX_HEAD_SIZE, check_index, row_strides
from fastattention_vllm.attention.cpu.library import check, library

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_CPU = torch.device("cpu")
ACTIVATIONS = {"silu": 1, "swish": 1, None: 0}
WIDTHS = (2, 3, 4)


class _Delta(ctypes.Structure):
    """``fa_gated_delta`` of ``fastattention_cpu.h``, field by field."""

    _fields_ = [
        ("num_requests", c_int32),
        ("key_heads", c_int32),
        ("value_heads", c_int32),
        ("key_size", c_int32),
        ("value_size", c_int32),
        ("width", c_int32),
        ("dtype", c_int32),
        ("inputs_dtype", c_int32),
        ("states_dtype", c_int32),
        ("silu", c_int32),
        ("query_start_loc", c_void_p),
        ("slots", c_void_p),
        ("begun", c_void_p),
        ("num_tokens", c_int64),
        ("num_slots", c_int64),
        ("verified", c_void_p),
        ("state_slots", c_void_p),
        ("states_per_request", c_int32),
        ("inputs_per_slot", c_int32),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("a_log", c_void_p),
        ("dt_bias", c_void_p),
        ("x", c_void_p),
        ("a", c_void_p),
        ("b", c_void_p),
        ("out", c_void_p),
        ("inputs", c_void_p),
        ("states", c_void_p),
        ("x_token_stride", c_int64),
        ("a_token_stride", c_int64),
        ("b_token_stride", c_int64),
        ("out_token_stride", c_int64),
        ("inputs_slot_stride", c_int64),
        ("inputs_token_stride", c_int64),
        ("inputs_channel_stride", c_int64),
        ("states_slot_stride", c_int64),
    ]


class _Norm(ctypes.Structure):
    """``fa_gated_norm`` of ``fastattention_cpu.h``, field by field."""

    _fields_ = [
        ("num_rows", c_int64),
        ("size", c_int32),
        ("dtype", c_int32),
        ("sigmoid", c_int32),
        ("epsilon", c_float),
        ("weight", c_void_p),
        ("x", c_void_p),
        ("gate", c_void_p),
        ("out", c_void_p),
        ("x_row_stride", c_int64),
        ("gate_row_stride", c_int64),
        ("out_row_stride", c_int64),
    ]


class GatedDeltaLayer:
    """One layer's parameters, converted once, and its computation. :meth:`has` says whether they are still the same.

    Args:
        weight: of the causal convolution, ``[channels, width]`` with a width of 2, 3 or 4; channels are those of the
            queries, keys and values, ``2 * key_heads * key_size + value_heads * value_size``.
        bias: ``[channels]``.
        a_log, dt_bias: ``[value_heads]``.
        key_heads, value_heads: the second is a multiple of the first.
        key_size, value_size: of a head, multiples of 8 up to 256.
        activation: of the convolution, ``"silu"``, ``"swish"`` or ``None``.

    Raises ``ValueError`` for a value or shape that is not supported.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        *,
        key_heads: int,
        value_heads: int,
        key_size: int,
        value_size: int,
        activation: str | None = "silu",
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}, but must be 'silu', 'swish' or None.")
        for name, size in (("key_size", key_size), ("value_size", value_size)):
            if size % HEAD_SIZE_MULTIPLE != 0 or not 0 < size <= MAX_HEAD_SIZE:
                raise ValueError(
                    f"{name} is {size}, but must be a multiple of {HEAD_SIZE_MULTIPLE} up to {MAX_HEAD_SIZE}."
                )
        if key_heads <= 0 or value_heads <= 0 or value_heads % key_heads != 0:
            raise ValueError(
                f"value_heads is {value_heads}, but must be a positive multiple of key_heads ({key_heads})."
            )
        channels = 2 * key_heads * key_size + value_heads * value_size
        if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] not in WIDTHS:
            raise ValueError(f"weight must be [{channels}, 2 to 4], not {list(weight.shape)}.")
        for name, vector, length in (
            ("bias", bias, channels),
            ("a_log", a_log, value_heads),
            ("dt_bias", dt_bias, value_heads),
        ):
            if vector is not None and vector.shape != (length,):
                raise ValueError(f"{name} must be [{length}], not {list(vector.shape)}.")
        self._channels, self._value_heads = channels, value_heads
        self._key_size, self._value_size, self._width = key_size, value_size, weight.shape[1]
        # Copies, also of what needs no conversion: the parameters may be written to, or get other memory.
        self._read = (_copy(weight), None if bias is None else _copy(bias), _copy(a_log), _copy(dt_bias))
        copied_weight, copied_bias, copied_a_log, copied_dt_bias = self._read
        self._weight = copied_weight.float().T.contiguous()
        self._bias = None if copied_bias is None else copied_bias.float()
        self._a_log, self._dt_bias = copied_a_log.float(), copied_dt_bias.float()
        self._arguments = _Delta(
            key_heads=key_heads,
            value_heads=value_heads,
            key_size=key_size,
            value_size=value_size,
            width=self._width,
            silu=ACTIVATIONS[activation],
            weight=self._weight.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            a_log=self._a_log.data_ptr(),
            dt_bias=self._dt_bias.data_ptr(),
        )

    def has(self, weight: torch.Tensor, bias: torch.Tensor | None, a_log: torch.Tensor, dt_bias: torch.Tensor) -> bool:
        """Whether these parameters, on the CPU, have the bytes that this layer was made from.

        Whoever reloads weights writes them into the old tensors. Torch does not count what is written through
        ``parameter.data``, so the bytes themselves are compared, which takes a few microseconds.
        """
        return all(map(_same_bytes, self._read, (weight, bias, a_log, dt_bias)))

    def run(
        self,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        query_start_loc: torch.Tensor,
        slots: torch.Tensor,
        begun: torch.Tensor,
        inputs: torch.Tensor,
        states: torch.Tensor,
        verified: torch.Tensor | None = None,
        state_slots: torch.Tensor | None = None,
    ) -> None:
        """Compute all tokens of all requests, and advance their states in place. One call at a time.

        Args:
            x: ``[num_tokens, channels]``: the projected queries, keys and values.
            a, b: ``[num_tokens, value_heads]``: the projections that decide decay and rate.
            out: ``[num_tokens, value_heads, value_size]``. These four have one dtype: fp32, fp16 or bf16.
            query_start_loc: ``[num_requests + 1]`` int32: request ``r`` has the rows from its entry to the next.
            slots: ``[num_requests]`` int32: where its inputs and its state are; all different.
            begun: ``[num_requests]`` bool: False where the slot's content is old and counts as zero.
            inputs: ``[num_slots, at least width - 1, channels]``: the convolution's last inputs, oldest first.
            states: ``[num_slots, value_heads, key_size, value_size]``, contiguous in a slot. Like ``inputs`` fp32, fp16
                or bf16.
            verified: ``[num_requests]`` int32: for a request with draft tokens, how many tokens of its last step were
                accepted; 0 for others. Such a request begins with inputs of row ``verified - 1`` and with the state of
                column ``verified - 1`` of ``state_slots``.
            state_slots: ``[num_requests, columns]`` int32: where the state after each token of such a request goes.

        Raises ``ValueError`` for tensors that do not match, with one sentence that names the value.
        """
        tokens, heads, requests = len(x), self._value_heads, len(slots)
        for name, tensor, shape in (
            ("x", x, (tokens, self._channels)),
            ("a", a, (tokens, heads)),
            ("b", b, (tokens, heads)),
            ("out", out, (tokens, heads, self._value_size)),
        ):
            _check(name, tensor, shape, x.dtype)
        rows = max(inputs.shape[1], self._width - 1)
        _check("inputs", inputs, (len(inputs), rows, self._channels), inputs.dtype)
        _check("states", states, (len(inputs), heads, self._key_size, self._value_size), states.dtype)
        if not out[:1].is_contiguous() or not states[:1].is_contiguous():
            raise ValueError("out must be contiguous in each token, and states in each slot.")
        check_index(query_start_loc, "query_start_loc", (requests + 1,))
        check_index(slots, "slots", (requests,))
        if begun.shape != (requests,) or begun.dtype != torch.bool or not begun.is_contiguous():
            raise ValueError(f"begun must be [{requests}] bool, contiguous, not {list(begun.shape)} {begun.dtype}.")
        arguments, columns = self._arguments, 0
        arguments.verified = arguments.state_slots = None
        if verified is not None and state_slots is not None:
            columns = state_slots.shape[1]
            check_index(verified, "verified", (requests,))
            check_index(state_slots, "state_slots", (requests, columns))
            if not state_slots.is_contiguous():
                raise ValueError("state_slots must be contiguous.")
            arguments.verified, arguments.state_slots = verified.data_ptr(), state_slots.data_ptr()
        arguments.states_per_request, arguments.inputs_per_slot = columns, rows
        arguments.num_requests, arguments.num_tokens, arguments.num_slots = requests, tokens, len(inputs)
        arguments.dtype = _DTYPES[x.dtype]
        arguments.inputs_dtype, arguments.states_dtype = _DTYPES[inputs.dtype], _DTYPES[states.dtype]
        arguments.query_start_loc, arguments.slots = query_start_loc.data_ptr(), slots.data_ptr()
        arguments.begun = begun.data_ptr()
        arguments.x, arguments.a, arguments.b = x.data_ptr(), a.data_ptr(), b.data_ptr()
        arguments.out, arguments.inputs, arguments.states = out.data_ptr(), inputs.data_ptr(), states.data_ptr()
        (arguments.x_token_stride,) = row_strides(x, "x")
        (arguments.a_token_stride,) = row_strides(a, "a")
        (arguments.b_token_stride,) = row_strides(b, "b")
        arguments.out_token_stride, arguments.states_slot_stride = out.stride(0), states.stride(0)
        (
            arguments.inputs_slot_stride,
            arguments.inputs_token_stride,
            arguments.inputs_channel_stride,
        ) = inputs.stride()
        check(_functions().fa_cpu_gated_delta(arguments))


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float, activation: str = "silu"
) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * weight * activation(gate)`` for each row.

    Args:
        x, gate: ``[..., size]`` in one dtype, fp32, fp16 or bf16; the size is a multiple of 8 up to 256.
        weight: ``[size]``.
        activation: ``"silu"``, ``"swish"`` or ``"sigmoid"``.

    Returns a tensor like ``x``. Raises ``ValueError`` for tensors that do not match.
    """
    if activation not in ("silu", "swish", "sigmoid"):
        raise ValueError(f"activation is {activation!r}, but must be 'silu', 'swish' or 'sigmoid'.")
    size = x.shape[-1]
    _check("gate", gate, tuple(x.shape), x.dtype)
    if weight.shape != (size,) or weight.device != _CPU:
        raise ValueError(f"weight must be [{size}] on cpu, not {list(weight.shape)} on {weight.device}.")
    out = torch.empty(x.shape, dtype=x.dtype)
    rows, gates, scale = x.reshape(-1, size), gate.reshape(-1, size), weight.detach().float().contiguous()
    arguments = _Norm(
        num_rows=len(rows),
        size=size,
        dtype=_DTYPES[x.dtype],
        sigmoid=activation == "sigmoid",
        epsilon=epsilon,
        weight=scale.data_ptr(),
        x=rows.data_ptr(),
        gate=gates.data_ptr(),
        out=out.data_ptr(),
        out_row_stride=size,
    )
    (arguments.x_row_stride,) = row_strides(rows, "x")
    (arguments.gate_row_stride,) = row_strides(gates, "gate")
    check(_functions().fa_cpu_gated_norm(arguments))
    return out


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().clone()


def _same_bytes(copy: torch.Tensor | None, tensor: torch.Tensor | None) -> bool:
    """Whether ``tensor`` equals a copy by :func:`_copy`, NaN included."""
    if copy is None or tensor is None:
        return copy is tensor
    if tensor.shape != copy.shape or tensor.dtype != copy.dtype:
        return False
    tensor = tensor.detach().contiguous()
    return bool(_libc().memcmp(copy.data_ptr(), tensor.data_ptr(), copy.nbytes) == 0)


@functools.cache
def _libc() -> ctypes.CDLL:
    loaded = ctypes.CDLL(None)
    loaded.memcmp.argtypes = [c_void_p, c_void_p, c_size_t]
    return loaded


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != _CPU:
        raise ValueError(
            f"{name} must be {list(shape)} {dtype} on cpu, not {list(tensor.shape)} {tensor.dtype} on {tensor.device}."
        )
    if dtype not in _DTYPES:
        raise ValueError(f"{name} has dtype {dtype}, but must have float32, float16 or bfloat16.")


@functools.cache
def _functions() -> ctypes.CDLL:
    loaded = library()
    loaded.fa_cpu_gated_delta.argtypes = [ctypes.POINTER(_Delta)]
    loaded.fa_cpu_gated_norm.argtypes = [ctypes.POINTER(_Norm)]
    return loaded
