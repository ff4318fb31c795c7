"""Random quantised matrices and their products in float64, from the tensors of a checkpoint alone."""

from __future__ import annotations

import torch

from fastattention_vllm.linear.weights import BLOCK, MIDDLE, PER_WORD, QuantisedMatrix, WeightFormat

FORMATS = [
    *(WeightFormat("int4", "group", size, zeros) for size in (32, 64, 128, 256) for zeros in (False, True)),
    *(WeightFormat(kind, "channel", zero_points=zeros) for kind in ("int4", "int8") for zeros in (False, True)),
    *(
        WeightFormat("int8", "group", size, zeros)
        for size, zeros in ((16, True), (32, False), (64, True), (128, False))
    ),
    *(WeightFormat("fp8_e4m3", scales) for scales in ("tensor", "channel", "block")),
]


def matrix(form: WeightFormat, k: int, n: int, *, scale: float = 0.01, seed: int = 0) -> QuantisedMatrix:
    """On the CPU. ``scale``: about the size of the scales."""
    random = torch.Generator().manual_seed(seed)
    shape = form.scale_shape(k, n)
    scales = (torch.rand(shape, generator=random) + 0.5) * scale
    numbers = torch.randint(-(1 << 31), 1 << 31, form.number_shape(k, n), generator=random).to(torch.int32)
    if form.kind == "fp8_e4m3":
        bits = torch.randint(0, 256, (n, k), generator=random, dtype=torch.int32).to(torch.uint8)
        bits[bits & 0x7F == 0x7F] = 0x38  # not NaN
        return QuantisedMatrix(form, k, n, bits.view(torch.float8_e4m3fn).t(), scales)
    zeros = torch.randint(0, 2 * MIDDLE[form.kind], shape, generator=random) if form.zero_points else None
    return QuantisedMatrix(form, k, n, numbers, scales.half(), zeros)


def weights(given: QuantisedMatrix) -> torch.Tensor:
    """float64 ``[k, n]``; of integers, what fp16 holds of them, as in a model with fp16 weights."""
    form, k, n = given.format, given.k, given.n
    rows = {"group": form.group_size, "block": BLOCK}.get(form.scales, k)
    columns = {"block": BLOCK, "tensor": n}.get(form.scales, 1)

    def spread(each: torch.Tensor) -> torch.Tensor:
        return each.double().repeat_interleave(rows, 0)[:k].repeat_interleave(columns, 1)[:, :n]

    if form.kind == "fp8_e4m3":
        return given.numbers.double() * spread(given.scales)
    bits = 32 // PER_WORD[form.kind]
    numbers = torch.empty(k, n, dtype=torch.float64)
    for place in range(PER_WORD[form.kind]):
        numbers[place :: PER_WORD[form.kind]] = (given.numbers.long() >> bits * place & (1 << bits) - 1).double()
    zeros = MIDDLE[form.kind] if given.zeros is None else spread(given.zeros)
    return ((numbers - zeros) * spread(given.scales)).half().double()


def check(found: torch.Tensor, x: torch.Tensor, of: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """fp16 rounds the result once. Sums are fp32: each product adds at most a rounding error of its size.

    ``of``: float64 weights ``[k, n]``.
    """
    expected = x.double() @ of
    sizes = x.double().abs() @ of.abs()
    if bias is not None:
        expected = expected + bias.double()
    tolerance = 2**-11 * expected.abs() + 2**-24 + 2**-20 * sizes
    worst = ((found.double() - expected).abs() / tolerance).max()
    assert float(worst) <= 1, f"an error is {float(worst):.2f} times the tolerance"
