"""Whether a shared library can be loaded here at all, from its ELF header.

The dynamic linker says of a library for another CPU that there is no such file, and dies of one that was cut short.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from kernel_loader.host import normal_cpu

# e_machine of the ELF specification.
_MACHINES: Final = {0x3E: "x86_64", 0xB7: "aarch64", 0x03: "x86", 0x28: "arm", 0xF3: "riscv64", 0x15: "ppc64le"}

_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT: Final = struct.Struct("<IIQQQQQQ")
_LOAD: Final = 1


def fault(library: Path, cpu: str) -> str | None:
    """What keeps a library from being loaded on a CPU; None where nothing is seen, or it is no 64-bit ELF file."""
    size = library.stat().st_size
    with library.open("rb") as stream:
        head = stream.read(_HEADER.size)
        if head[:6] != b"\x7fELF\x02\x01":
            return None if head[:4] == b"\x7fELF" and len(head) == _HEADER.size else "it is no ELF file"
        if len(head) < _HEADER.size:
            return "it was cut short"
        _, _, machine, _, _, segments, _, _, _, length, count, *_ = _HEADER.unpack(head)
        built_for = _MACHINES.get(machine, f"machine {machine}")
        if normal_cpu(cpu) != built_for:
            return f"it was built for {built_for}, and this is {cpu}"
        stream.seek(segments)
        table = stream.read(length * count)
    if len(table) < length * count or length < _SEGMENT.size:
        return "it was cut short"
    for index in range(count):
        kind, _, offset, _, _, in_file, *_ = _SEGMENT.unpack_from(table, index * length)
        if kind == _LOAD and offset + in_file > size:
            return "it was cut short"
    return None
