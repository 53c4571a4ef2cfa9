"""What a cubin says of its kernel: registers, stack, and its instructions as text.

nvdisasm takes ten times as long to start as to read a kernel, so that one run of it reads all
kernels of a target: it is given bare instructions, one kernel after the other, and prints where a
branch goes as an address. Here those become labels, as it prints them itself for a whole file.
"""

import re
import struct
import subprocess
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from tests.aot.isa import Usage

INSTRUCTION = 16  # bytes, since Volta
_REGISTERS, _FRAME = 0x2F, 0x11  # attributes of `.nv.info`
_NUMBERED = 0x04  # the format of an attribute with a payload of its own length
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s")
_BRANCH = re.compile(r"^(.*\b(?:BRA|JMP|BREAK)\b[^;`]*?)\b0x([0-9a-f]+)(\s*;.*)$")


def usage_of(cubin: bytes) -> Usage:
    """Registers, and as spills the stack and local memory, of the function that takes most.

    Raises:
        ValueError: the cubin does not tell.
    """
    found = {_REGISTERS: 0, _FRAME: 0}
    local = 0
    for name, content in _sections(cubin):
        if name == b".nv.info":
            for attribute, number in _numbers(content):
                if attribute in found:
                    found[attribute] = max(found[attribute], number)
        elif name.startswith(b".nv.local."):
            local = max(local, len(content))
    if not found[_REGISTERS]:
        raise ValueError("the cubin's .nv.info has no number of registers")
    stack = found[_FRAME]
    detail = f"STACK:{stack} LOCAL:{local}" if stack + local else ""
    return Usage(found[_REGISTERS], stack + local, detail)


def disassemble(cubins: Sequence[bytes], arch: int) -> list[str]:
    """The assembly of each cubin's functions.

    Args:
        arch: 80, 90 …; from 90 on the variant with a suffix, which Triton compiles for.

    Raises:
        RuntimeError: the tool has not printed every instruction.
    """
    codes = [
        b"".join(content for name, content in _sections(cubin) if name.startswith(b".text."))
        for cubin in cubins
    ]
    ends = list(accumulate(map(len, codes)))
    if not ends or not ends[-1]:
        return ["" for _ in codes]
    printed = _nvdisasm(b"".join(codes), "-ndf", "-b", f"SM{arch}{'a' * (arch >= 90)}")
    parts: list[list[tuple[int, str]]] = [[] for _ in codes]
    for line in printed.splitlines():
        if m := _LINE.match(line):
            address = int(m.group(1), 16)
            parts[bisect_right(ends, address)].append((address, line))
    count, expected = sum(map(len, parts)), ends[-1] // INSTRUCTION
    if count != expected:
        raise RuntimeError(f"nvdisasm printed {count} of {expected} instructions")
    return [labelled(lines) for lines in parts]


def labelled(lines: Sequence[tuple[int, str]]) -> str:
    """Lines with their addresses, the targets of branches as labels `.L_x`."""
    here = {address for address, _ in lines}
    found = [(address, line, _BRANCH.match(line)) for address, line in lines]
    targets = {int(m.group(2), 16) for *_, m in found if m} & here
    text = []
    for address, line, m in found:
        if address in targets:
            text.append(f".L_{address:x}:")
        if m and int(m.group(2), 16) in targets:
            line = f"{m.group(1)}`(.L_{int(m.group(2), 16):x}){m.group(3)}"
        text.append(line)
    return "\n".join(text)


def _sections(elf: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Name and content of each section that has a content in the file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + size * i) for i in range(count)]
    names = headers[of_names][4]
    for name, kind, _, _, offset, length in headers:
        start = names + name
        content = bytes(length) if kind == 8 else elf[offset : offset + length]  # 8: zeros
        yield elf[start : elf.index(b"\0", start)], content


def _numbers(info: bytes) -> Iterator[tuple[int, int]]:
    """(attribute, number) of each entry that gives a function's symbol and a number."""
    at = 0
    while at < len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _NUMBERED:
            if length == 8:
                yield attribute, struct.unpack_from("<II", info, at)[1]
            at += length


def _nvdisasm(code: bytes, *options: str) -> str:
    """Of triton's wheel: a CUDA toolkit's may be too old for the code."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(path), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
