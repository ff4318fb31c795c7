"""What the host layers of one worker have done since it started. The server's metrics show these numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Counters:
    """Totals over all host layers. Each step adds to them layer by layer, in less than a microsecond per layer."""

    cpu_seconds: float = 0.0
    """Time of attention on the CPU, until its result was there."""
    cpu_bytes: int = 0
    """Bytes of keys and values that attention on the CPU has read."""
    decode_streamed_bytes: int = 0
    """Bytes of keys and values that the device read over the link, for requests that the CPU shares with it."""
    prefill_streamed_bytes: int = 0
    """Bytes of keys and values that were copied to the device for prompts."""
    resident_bytes: int = 0
    """Bytes of keys and values of host layers that the device read from its own copies (``resident.py``), outside of
    graphs."""
    device_wait_seconds: float = 0.0
    """Time between the arrival of a layer's queries on the host and the return of its outputs. The device has nothing
    else to do meanwhile than the part of the attention that it computes itself."""

    saturated_numbers: int = 0
    """Numbers beyond the largest fp8 number, which host layers with an fp8 cache have stored as that number."""

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))
