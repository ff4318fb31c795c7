"""Cubins: ELF files with the machine code of kernels. nvdisasm shows the names of their sections."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

from kernels.volta.sim.failure import SimulationError

MACHINE_CUDA = 190
SECTION_WITHOUT_BYTES = 8  # SHT_NOBITS
PARAMETERS_AT = 0x160
"""Offset of the parameters in constant bank 0, on sm_70."""
STACK_TOP_AT = 0x28
"""Offset in constant bank 0 of the number of bytes of local memory that a thread has."""

# An entry of an .nv.info section: format, attribute, and a value. The format determines the value's size.
FORMAT_WITH_SIZE = 0x04
ATTRIBUTE_PARAMETER_BYTES = 0x19  # EIATTR_CBANK_PARAM_SIZE


@dataclass(frozen=True, slots=True)
class Section:
    content: bytes
    size: int
    info: int


@dataclass(frozen=True, slots=True)
class KernelImage:
    name: str
    code: bytes
    registers: int
    """Per thread."""
    shared_bytes: int
    """Static shared memory of a CTA."""
    parameter_bytes: int
    constants: dict[int, bytes]
    """Contents of constant banks by number, without bank 0."""


class Cubin:
    """A cubin for sm_70. Raises :class:`SimulationError` for any other content."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        if content[:5] != b"\x7fELF\x02" or len(content) < 64:
            raise SimulationError("this is not a cubin: it is not a 64-bit ELF file.")
        machine, flags = struct.unpack_from("<H", content, 18)[0], struct.unpack_from("<I", content, 48)[0]
        if machine != MACHINE_CUDA or flags & 0xFF != 70:
            raise SimulationError("this is not a cubin for sm_70.")

    @cached_property
    def sections(self) -> dict[str, Section]:
        content = self._content
        (table,) = struct.unpack_from("<Q", content, 40)
        entry_size, count, names_index = struct.unpack_from("<HHH", content, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", content, table + i * entry_size) for i in range(count)]
        names_at = headers[names_index][4]
        found = {}
        for name, kind, _, _, offset, size, _, info, _, _ in headers:
            end = content.index(b"\0", names_at + name)
            data = b"" if kind == SECTION_WITHOUT_BYTES else content[offset : offset + size]
            found[content[names_at + name : end].decode()] = Section(data, size, info)
        return found

    @property
    def kernels(self) -> list[str]:
        return [name.removeprefix(".text.") for name in self.sections if name.startswith(".text.")]

    def kernel(self, name: str) -> KernelImage:
        """``name``: the kernel's name in the cubin, or a part of it that occurs in no other kernel's name."""
        matches = [k for k in self.kernels if k == name] or [k for k in self.kernels if name in k]
        if len(matches) != 1:
            raise SimulationError(f"{name!r} is not one of the kernels of this cubin: {', '.join(self.kernels)}.")
        name = matches[0]
        for relocations in (f".rel.text.{name}", f".rela.text.{name}"):
            if relocations in self.sections:
                raise SimulationError(f"the code of {name} needs linking, which is not implemented.")
        text = self.sections[f".text.{name}"]
        shared = self.sections.get(f".nv.shared.{name}")
        # Bank 4 is left out: it holds addresses of global variables, which only a loader knows.
        banks = {1: f".nv.constant1.{name}", 2: f".nv.constant2.{name}", 3: ".nv.constant3"}
        return KernelImage(
            name,
            text.content,
            registers=text.info >> 24,
            shared_bytes=shared.size if shared else 0,
            parameter_bytes=self._parameter_bytes(name),
            constants={n: self.sections[s].content for n, s in banks.items() if s in self.sections},
        )

    def _parameter_bytes(self, name: str) -> int:
        section = self.sections.get(f".nv.info.{name}")
        content, at = section.content if section else b"", 0
        while at + 4 <= len(content):
            form, attribute, value = struct.unpack_from("<BBH", content, at)
            if attribute == ATTRIBUTE_PARAMETER_BYTES:
                return int(value)
            at += 4 + (value if form == FORMAT_WITH_SIZE else 0)
        return 0
