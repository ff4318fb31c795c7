"""Host layers, requests, and the expected result of attention over everything written for them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.placement import step as steps
from fastattention_vllm.placement.host_attention import HostAttention, HostLayerGroup
from fastattention_vllm.placement.prefetch import Visit
from fastattention_vllm.placement.resident import ResidentBlocks
from fastattention_vllm.placement.step import Batch, Step, divide
from fastattention_vllm.placement.stored_rows import page_shape
from tests.attention import oracle

F32 = torch.float32
NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Model:
    """Attributes of the layers."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    page_size: int = 4
    dtype: torch.dtype = F32
    window: int | None = None
    softcap: float = 0.0
    has_sinks: bool = False
    has_alibi: bool = False
    stored: torch.dtype | None = None
    """The 8-bit dtype of the caches; None for ``dtype``."""

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.stored or self.dtype

    def scales(self) -> tuple[float, float]:
        return (0.5, 2.0) if self.stored in (torch.float8_e4m3fn, torch.float8_e5m2) else (1.0, 1.0)

    def returned(self, rows: torch.Tensor, scale: float) -> torch.Tensor:
        """``rows`` as a cache returns them, computed by another way than the code under test."""
        if self.stored is None:
            return rows
        if self.stored == torch.int8:
            numbers, factors = oracle.rounded_rows(rows)
            return (numbers * factors[..., None]).to(self.dtype)
        largest = torch.finfo(self.stored).max
        return ((rows.float() / scale).clamp(-largest, largest).to(self.stored).float() * scale).to(self.dtype)

    def merges(self) -> bool:
        return not self.has_alibi

    def problem(self, **parts: Any) -> AttentionProblem:
        heads = torch.arange(self.num_heads, dtype=F32)
        own = {
            "scale": self.head_size**-0.5,
            "window": (-1 if self.window is None else self.window, -1),
            "softcap": self.softcap,
            "sinks": (heads / 2 - 1).to(parts["query"].device) if self.has_sinks else None,
            "alibi_slopes": 2.0 ** -(heads + 1) if self.has_alibi else None,
        }
        return AttentionProblem(**(own | parts))


@dataclass
class Request:
    blocks: list[int] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)
    """One tensor per layer, ``[tokens, num_kv_heads, head_size]``, with all tokens."""
    values: list[torch.Tensor] = field(default_factory=list)
    done: int = 0
    """Number of tokens whose keys and values are in the cache, or will be after this step."""

    @property
    def tokens(self) -> int:
        return len(self.keys[0])


@dataclass(frozen=True)
class Work:
    """A request's part of one step."""

    request: Request
    context: int
    new: int


class Scenario:
    """Layers of one block table, with their caches and requests.

    ``unwritten``: fill value of caches and of everything that may be overwritten, so that reading it shows.
    ``new_cache``: allocates the host memory of a cache from its shape and dtype. ``num_heads``: query heads of each
    layer; None for the model's. ``resident_rows``: number of blocks that also lie on the device.
    """

    def __init__(
        self,
        model: Model,
        num_layers: int,
        num_blocks: int,
        group: HostLayerGroup,
        seed: int,
        *,
        device: str = "cpu",
        unwritten: float = math.nan,
        new_cache: Callable[..., torch.Tensor] = torch.empty,
        num_heads: Sequence[int] | None = None,
        resident_rows: int = 0,
    ) -> None:
        self.model = model
        self.models = [replace(model, num_heads=heads) for heads in num_heads or [model.num_heads] * num_layers]
        self.random = torch.Generator().manual_seed(seed)
        self.group = group
        self.device = torch.device(device)
        self.unwritten = unwritten
        shape = page_shape(num_blocks, model.num_kv_heads, model.page_size, model.head_size, model.cache_dtype)
        caches = [new_cache(shape, dtype=model.cache_dtype) for _ in range(num_layers)]
        for cache in caches:
            if model.stored:  # NaN in fp8; as int8, the largest number with a factor of 3e38
                cache.view(torch.uint8).fill_(0x7F)
            else:
                cache.fill_(unwritten)
        if resident_rows:
            group.resident = ResidentBlocks(num_blocks, resident_rows)
        shape = [resident_rows, *shape[1:]]
        self.layers = [
            HostAttention(
                self.group,
                layer,
                cache,
                layer.window,
                torch.full(shape, unwritten, dtype=model.dtype, device=device) if resident_rows else None,
            )
            for layer, cache in zip(self.models, caches, strict=True)
        ]
        self.free = torch.randperm(num_blocks, generator=self.random).tolist()

    def rows(self, count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, self.model.head_size, generator=self.random).to(self.model.dtype)

    def request(self, tokens: int, like: Request | None = None, shared_blocks: int = 0) -> Request:
        """A request of ``tokens`` tokens, whose first ``shared_blocks`` blocks are those of ``like``."""
        shared = shared_blocks * self.model.page_size
        request = Request(done=shared)
        for index in range(len(self.layers)):
            new = [self.rows(tokens - shared, self.model.num_kv_heads) for _ in range(2)]
            before = [kept[index][:shared] for kept in (like.keys, like.values)] if like else [new[0][:0], new[1][:0]]
            request.keys.append(torch.cat([before[0], new[0]]))
            request.values.append(torch.cat([before[1], new[1]]))
        own = -(-tokens // self.model.page_size) - shared_blocks
        request.blocks = [*(like.blocks[:shared_blocks] if like else []), *(self.free.pop() for _ in range(own))]
        return request

    def work(self, request: Request, new: int) -> Work:
        request.done += new
        assert request.done <= request.tokens
        return Work(request, request.done - new, new)

    def batch(self, works: Sequence[Work]) -> Batch:
        page = self.model.page_size
        width = max(len(work.request.blocks) for work in works) + 1
        table = torch.tensor([work.request.blocks + [0] * (width - len(work.request.blocks)) for work in works])
        slots = [
            work.request.blocks[position // page] * page + position % page
            for work in works
            for position in range(work.context, work.context + work.new)
        ]
        mapping = torch.tensor(slots, dtype=torch.int64)
        starts = torch.tensor([0, *(work.new for work in works)]).cumsum(0)
        lengths = torch.tensor([work.context + work.new for work in works])
        return Batch(starts.int(), lengths.int(), table.int(), mapping, mapping.to(self.device))

    def attend(self, works: Sequence[Work], padding: int = 2) -> Step:
        """One step through all layers, compared with the oracle."""
        step = self.divide(works)
        for index in range(len(self.layers)):
            self.visit(index, step, works, padding)
        self.assert_at_rest()
        return step

    def divide(self, works: Sequence[Work]) -> Step:
        model = self.model
        return divide(self.batch(works), model.page_size, steps.MAX_CPU_TOKENS if model.merges() else NO_LIMIT)

    def visit(
        self,
        index: int,
        step: Step,
        works: Sequence[Work],
        padding: int = 2,
        upcoming: Callable[[], Iterable[Visit]] | None = None,
    ) -> None:
        """Run one layer with ``step``, which contains ``works``, and compare it with the oracle."""
        model = self.models[index]
        total = sum(work.new for work in works)
        query = self.rows(total + padding, model.num_heads).to(self.device)
        key, value = (
            torch.cat(
                [getattr(work.request, part)[index][work.context : work.context + work.new] for work in works]
                + [torch.full((padding, model.num_kv_heads, model.head_size), math.nan, dtype=model.dtype)]
            ).to(self.device)
            for part in ("keys", "values")
        )
        output = torch.full_like(query, 7.0)
        self.layers[index].attend(step, query, key, value, output, upcoming)
        assert (output[total:] == 7.0).all(), "padding rows must not be touched"
        for rows in (key, value):  # the next layer reuses this memory
            rows.fill_(self.unwritten)
        self.compare(index, works, query[:total].cpu(), output[:total].cpu())

    def rows_of(self, part: str, index: int, works: Sequence[Work], lengths: Sequence[int]) -> torch.Tensor:
        rows = torch.cat([getattr(w.request, part)[index][:length] for w, length in zip(works, lengths, strict=True)])
        return self.model.returned(rows, self.model.scales()[part == "values"])

    def assert_at_rest(self) -> None:
        prefetcher = self.group.prefetcher
        assert not prefetcher.waiting
        assert not prefetcher.coming
        assert not prefetcher.expected
        assert len(prefetcher.free) == len(prefetcher.buffers) == 2

    def compare(self, index: int, works: Sequence[Work], query: torch.Tensor, output: torch.Tensor) -> None:
        lengths = [work.context + work.new for work in works]
        problem = self.models[index].problem(
            query=query,
            key=self.rows_of("keys", index, works, lengths),
            value=self.rows_of("values", index, works, lengths),
            query_start_loc=torch.tensor([0, *(work.new for work in works)]).cumsum(0).int(),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            kv_start_loc=torch.tensor([0, *lengths[:-1]]).cumsum(0).int(),
            causal=True,
        )
        expected, _ = oracle.attention(problem)
        # Each merged part is rounded to the output's dtype, and so is the result. In fp32 any bound will do: here the
        # size of the largest value.
        size = problem.value.double().abs().max()
        if self.model.dtype != torch.float32:
            size, _ = oracle.attention(replace(problem, value=problem.value.abs()))
        rtol, atol = oracle.OUTPUT_TOLERANCE[self.model.dtype]
        weights = oracle.weight_rounding(problem)[:, None, None] * size  # those of the CPU, with its instruction set
        excess = (output.double() - expected).abs() - rtol * (expected.abs() + size) - weights - 2 * atol
        assert float(excess.max()) <= 0, f"layer {index} is off by {float(excess.max()):.3g} more than allowed"


def some_steps(scenario: Scenario, numbers: random.Random, *, rounds: int, chunk: int, firsts: Sequence[int]) -> None:
    """Requests arrive, share prefixes that others have computed or are computing, and continue.

    ``chunk``: maximum tokens of a continued step. ``firsts``: tokens of first steps; the last one is the longest
    prompt.
    """
    requests: list[Request] = []
    for _ in range(rounds):
        works = []
        for request in requests:
            left = request.tokens - request.done
            if left:
                works.append(scenario.work(request, min(left, numbers.choice([1, 1, 5, chunk]))))
        if len(works) < 3:
            like = numbers.choice(requests) if requests and numbers.random() < 0.5 else None
            shared = like.done // scenario.model.page_size if like else 0
            request = scenario.request(shared * scenario.model.page_size + numbers.randint(1, firsts[-1]), like, shared)
            requests.append(request)
            works.append(scenario.work(request, min(request.tokens - request.done, numbers.choice(firsts))))
        numbers.shuffle(works)
        scenario.attend(works)


class Pins:
    """Pins nothing, and keeps the addresses that were released."""

    def __init__(self) -> None:
        self.released: list[int] = []

    def register(self, address: int, size: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        self.released.append(address)
