"""Reads the loads and stores of Triton's GPU intermediate code (TTGIR).

Machine code tells how wide an access is, and by its line information which ``tl.load`` it came
from; only the intermediate code knows what is loaded: a 1-byte load of a boolean mask is no fault,
a 2-byte load of bfloat16 is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Position = tuple[str, int, int]  # file name, line, column
Chain = tuple[Position, ...]  # innermost call first


@dataclass(frozen=True)
class Operand:
    """A global load or store."""

    kind: str  # "load" | "store"
    element: str  # "bf16", "f32", "i1", …
    elements: int  # of the whole tile; 0 for a scalar
    where: Chain
    pointer: str = ""  # the kernel's argument; empty where it cannot be told

    @property
    def is_float(self) -> bool:
        return self.element.startswith(("f", "bf"))

    @property
    def element_bytes(self) -> int:
        digits = re.search(r"\d+", self.element)
        return max(1, int(digits.group()) // 8) if digits else 1


_LOC_DEFINITION = re.compile(r"^#(loc\d*) = loc\((.*)\)\s*$")
_POSITION = re.compile(r'^"([^"]*)":(\d+):(\d+)')
_NAMED = re.compile(r'^"[^"]*"\(#(loc\d*)\)')
_CALLSITE = re.compile(r"^callsite\(#(loc\d*) at #(loc\d*)\)")
_OPERATION = re.compile(
    r"\b(?:tt\.(?P<plain>load|store)|\w+\.buffer_(?P<buffer>load|store)\w*"
    r"|ttg\.(?P<copy>async_copy_global_to_local))\b(?P<rest>.*)loc\(#(?P<loc>loc\d*)\)\s*$"
)
_TENSOR = re.compile(r"tensor<((?:\d+x)+)(?:!tt\.ptr<)?(\w+)")
_ARGUMENT = re.compile(r'(%\w+): !tt\.ptr<[^>]*>(?: \{[^}]*\})? loc\("(\w+)"')
_DERIVED = re.compile(
    r"^\s*(%\w+) = (?:tt\.(?:addptr|splat|broadcast|expand_dims|reshape|bitcast)"
    r"|ttg\.convert_layout) (%\w+)"
)
_DEFINED = re.compile(r"^\s*(%\w+)(?::\d+)? = ")
_CARRIED = re.compile(r"iter_args\(([^)]*)\)")
_PAIR = re.compile(r"(%\w+) = (%\w+)")
_VALUE = re.compile(r"%\w+")
_POINTER = re.compile(r"!tt\.ptr<(\w+)")


def basename(path: str) -> str:
    return path.replace("\\", "/").rsplit("/", 1)[-1]


def _chains(ttgir: str) -> dict[str, Chain]:
    """Each location of the module as the chain of calls that it stands for."""
    raw = {m.group(1): m.group(2) for m in map(_LOC_DEFINITION.match, ttgir.splitlines()) if m}

    def resolve(name: str) -> Chain:
        body = raw.get(name, "")
        if m := _POSITION.match(body):
            return ((basename(m.group(1)), int(m.group(2)), int(m.group(3))),)
        if m := _NAMED.match(body):
            return resolve(m.group(1))
        if m := _CALLSITE.match(body):
            return resolve(m.group(1)) + resolve(m.group(2))
        return ()

    return {name: resolve(name) for name in raw}


def _follow(line: str, arguments: dict[str, str]) -> None:
    """Update which values are a kernel's pointer argument plus offsets, after one line.

    Line by line, because a value's name is used again in another region for something else.
    """
    arguments.update(_ARGUMENT.findall(line))
    pairs = _DERIVED.findall(line)
    if carried := _CARRIED.search(line):
        pairs += _PAIR.findall(carried.group(1))
    derived = {new: arguments[old] for new, old in pairs if old in arguments}
    if defined := _DEFINED.match(line):
        arguments.pop(defined.group(1), None)
    arguments.update(derived)


def parse_ttgir(ttgir: str) -> list[Operand]:
    """Every global load and store of the module, with its element type and tile size."""
    chains, arguments = _chains(ttgir), dict[str, str]()
    operands = []
    for line in ttgir.splitlines():
        _follow(line, arguments)
        m = _OPERATION.search(line)
        if not m:
            continue
        kind = "load" if m.group("copy") else m.group("plain") or m.group("buffer")
        types = m.group("rest").rpartition(" : ")[2]
        where = chains.get(m.group("loc"), ())
        # Of a load's values only the pointer is one; of a store's, a stored pointer would be too.
        named = (arguments.get(value, "") for value in _VALUE.findall(m.group("rest")))
        pointer = next(filter(None, named), "")
        if tensor := _TENSOR.search(types):
            elements = 1
            for extent in tensor.group(1).rstrip("x").split("x"):
                elements *= int(extent)
            operands.append(Operand(kind, tensor.group(2), elements, where, pointer))
        elif scalar := _POINTER.search(types):
            operands.append(Operand(kind, scalar.group(1), 0, where, pointer))
    return operands
