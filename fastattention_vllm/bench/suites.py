"""Named lists of cases.

Used by: command.py.
"""

from __future__ import annotations

from fastattention_vllm.bench.cases import DEFAULT_PAGE, Case, parse_case

PEER_HEADS = ("(32,8,128)", "(32,32,128)", "(8,1,64)")
ROOF_HEADS = ("(8,8,64)", "(32,8,64)", "(64,8,64)", "(8,8,128)", "(32,8,128)", "(64,8,128)")
CONTEXTS = ("4K", "8K", "16K", "32K", "64K", "128K")


def quick() -> list[str]:
    return [
        "decode bf16 (32,8,128) 32K b1",
        "decode fp16 (32,8,128) 32K b1",
        "decode bf16 (8,1,64) 4K b16",
        "prefill bf16 (32,8,128) 2K",
        "prefill fp16 (32,8,128) 2K",
    ]


def peers() -> list[str]:
    """The cases of the geometric means against other implementations."""
    decode = [
        f"decode {dtype} {heads} {context} b{batch}"
        for dtype in ("bf16", "fp16")
        for heads in PEER_HEADS
        for context in CONTEXTS
        for batch in (1, 16)
    ]
    prefill = [
        f"prefill {dtype} {heads} {tokens}"
        for dtype in ("bf16", "fp16")
        for heads in PEER_HEADS
        for tokens in ("512", "1K", "2K", "4K", "8K", "512 on 8K")
    ]
    return decode + prefill


def roofline() -> list[str]:
    """1, 4 and 8 query heads per KV head at head sizes 64 and 128, every dtype of the cache."""
    return [
        f"decode {dtype} {heads} {size}"
        for dtype in ("bf16", "fp16", "fp32", "bf16/fp8")
        for heads in ROOF_HEADS
        for size in ("4K b1", "32K b1", "128K b1", *(["32K b16"] if dtype in ("bf16", "fp16") else []))
    ]


def cores() -> list[str]:
    """For several --threads: what becomes faster with more cores, and what memory holds back."""
    return [
        "decode bf16 (32,8,128) 32K b1",
        "decode fp16 (32,8,128) 32K b1",
        "decode bf16 (8,1,64) 32K b1",
        "prefill bf16 (32,8,128) 2K",
    ]


SUITES = {"quick": quick, "peers": peers, "roofline": roofline, "cores": cores}


def cases_of(suite: str, page: int = DEFAULT_PAGE) -> list[Case]:
    """The cases of a named suite; ``ValueError`` naming the suites if there is none of that name."""
    if suite not in SUITES:
        raise ValueError(f"there is no suite {suite!r}; choose from {', '.join(SUITES)}.")
    return [parse_case(text, page) for text in SUITES[suite]()]
