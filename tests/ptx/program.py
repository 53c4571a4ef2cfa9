"""The text of a PTX kernel as a list of statements."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Register(NamedTuple):
    name: str
    type: str  # as declared: "pred", "b32" …


class Special(NamedTuple):
    """A register that a thread only reads, such as ``%tid.x``."""

    name: str


class Number(NamedTuple):
    text: str


class Name(NamedTuple):
    """A label, or something that the module declares."""

    text: str


class Address(NamedTuple):
    base: Operand
    offset: int


class Vector(NamedTuple):
    parts: tuple[Operand, ...]


class Pair(NamedTuple):
    """Two results, ``p|q``."""

    first: Operand
    second: Operand


Operand = Register | Special | Number | Name | Address | Vector | Pair
NOWHERE = Name("_")  # a result that nobody wants


class Statement(NamedTuple):
    """An instruction."""

    text: str
    guard: Register | None  # it is executed where this holds
    negated: bool  # or where it does not
    words: tuple[str, ...]  # its name, then modifiers and types: ("ld", "global", "b32")
    operands: tuple[Operand, ...]

    @property
    def type(self) -> str:
        return self.words[-1]


@dataclass
class Program:
    """A kernel: what it is given, what it does, and where its labels point to."""

    name: str = ""
    threads: int = 0
    parameters: dict[str, str] = field(default_factory=dict)  # their types by their names
    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse(text: str) -> Program:
    """The one kernel of a module.

    Raises:
        ValueError: a line that is not understood.
    """
    return _Parser(text).program


_ENTRY = re.compile(r"\.entry\s+(\w+)")
_PARAMETER = re.compile(r"\.param\s+(?:\.align \d+ )?\.(\w+)\s.*?(\w+_param_\d+)")
_THREADS = re.compile(r"\.reqntid\s+(\d+)")
_LABEL = re.compile(r"(\$\w+):\s*(.*)")
_DECLARED = re.compile(r"\.reg \.(\w+)\s+(.*)")
_NUMBERED = re.compile(r"(%\w+)<(\d+)>")
_GUARDED = re.compile(r"@(!?)(%?\w+)\s+(.*)")
_ADDRESS = re.compile(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\w+))?\s*\]")
_NUMBER = re.compile(r"-?\d|0[fdxFDX]")


class _Parser:
    def __init__(self, text: str) -> None:
        self.program = Program()
        self._numbered: dict[str, str] = {}  # types of registers by what stands before the number
        self._named: dict[str, str] = {}  # and of those that have a name
        in_body = False
        for line in text.splitlines():
            line = line.partition("//")[0].strip()
            if in_body and line.startswith(".section"):  # what debuggers read
                break
            if not in_body:
                self._head(line)
                in_body = line.startswith("{")
                line = line[1:] if in_body else ""
            for part in _parts(line):
                self._statement(part)

    def _head(self, line: str) -> None:
        if found := _ENTRY.search(line):
            self.program.name = found[1]
        if found := _PARAMETER.match(line):
            self.program.parameters[found[2]] = found[1]
        if found := _THREADS.match(line):
            self.program.threads = int(found[1])

    def _statement(self, text: str) -> None:
        if found := _LABEL.match(text):
            self.program.labels[found[1]] = len(self.program.statements)
            text = found[2]
        if not text:
            return
        if found := _DECLARED.match(text):
            self._declare(found[1], found[2])
            return
        if text.startswith("."):  # of debuggers and of the optimiser
            return
        whole, guard, negated = text, None, False
        if found := _GUARDED.match(text):
            guard, negated, text = self._register(found[2]), found[1] == "!", found[3]
        opcode, *rest = text.split(None, 1)
        operands = tuple(self._operand(x) for x in _split("".join(rest)))
        # "shared::cta" is what "shared" means.
        words = tuple(opcode.replace("::cta", "").split("."))
        self.program.statements.append(
            Statement(" ".join(whole.split()), guard, negated, words, operands)
        )

    def _declare(self, kind: str, names: str) -> None:
        for name in map(str.strip, names.split(",")):
            if found := _NUMBERED.fullmatch(name):
                self._numbered[found[1]] = kind
            else:
                self._named[name] = kind

    def _register(self, name: str) -> Register:
        kind = self._named.get(name) or self._numbered.get(name.rstrip("0123456789"))
        if kind is None:
            raise ValueError(f"{self.program.name} has no register {name}")
        return Register(name, kind)

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return Vector(tuple(self._operand(x) for x in _split(text.strip("{} "))))
        if found := _ADDRESS.fullmatch(text):
            return Address(self._operand(found[1]), int(found[2] or "0", 0))
        if "|" in text:
            first, _, second = text.partition("|")
            return Pair(self._operand(first), self._operand(second))
        if text in self._named or text.rstrip("0123456789") in self._numbered:
            return self._register(text)
        if text.startswith("%"):
            return Special(text)
        return Number(text) if _NUMBER.match(text) else Name(text)


def _parts(line: str) -> Iterator[str]:
    """A line's statements, without the braces of a scope: names differ where types do."""
    for part in map(str.strip, line.split(";")):
        while part == "}" or re.match(r"[{}]\s*(\.|$|@|[a-z])", part):
            part = part[1:].strip()
        if part:
            yield part


def _split(text: str) -> Iterator[str]:
    """Operands: commas within braces and brackets part none."""
    depth, start = 0, 0
    for i, each in enumerate(text + ","):
        depth += (each in "{[") - (each in "}]")
        if each == "," and depth == 0:
            if part := text[start:i].strip():
                yield part
            start = i + 1
