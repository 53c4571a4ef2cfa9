"""Reads what the compiler made of a kernel: registers, spills, and how wide its loads are.

Machine code tells how wide an access is, and by its line information which ``tl.load`` it came
from; only Triton's GPU intermediate code (TTGIR) knows what is loaded: a 1-byte load of a boolean
mask is no fault, a 2-byte load of bfloat16 is. Pure text in, dataclasses out.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

Position = tuple[str, int, int]  # file name, line, column
Chain = tuple[Position, ...]  # innermost call first


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes of the machine."""

    registers: int
    spills: int  # bytes of stack and local memory on NVIDIA; spilled registers and scratch on AMD
    spill_detail: str = ""
    # Spilled scalar registers of AMD's: into lanes of a vector register, not into memory, or the
    # kernel would have scratch.
    scalar_spills: int = 0


@dataclass(frozen=True)
class Access:
    """A global load or store of the machine code."""

    kind: str  # "load" | "store"
    width: int  # bytes per thread
    line: int  # in the assembly, from 1
    text: str
    where: Chain
    loop: int | None = None  # an innermost loop; None outside of every loop, or in an outer one


@dataclass(frozen=True)
class Operand:
    """A global load or store of the intermediate code."""

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


@dataclass
class _Block:
    """Straight-line code: its accesses, and where it goes next."""

    labels: list[str] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    instructions: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    falls_through: bool = True


def basename(path: str) -> str:
    return path.replace("\\", "/").rsplit("/", 1)[-1]


def parse_amdgcn_usage(text: str) -> Usage:
    """The kernel's metadata at the end of its assembly."""

    def value(name: str) -> int:
        found = re.findall(rf"^\s*-?\s*\.{name}:\s*(\d+)", text, re.MULTILINE)
        if not found:
            raise ValueError(f"no .{name} in the assembly's metadata")
        return max(map(int, found))

    names = ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    counts = {name: value(name) for name in names}
    detail = " ".join(f".{name}:{count}" for name, count in counts.items() if count)
    scalars = counts.pop("sgpr_spill_count")
    return Usage(value("vgpr_count"), sum(counts.values()), detail, scalars)


_LABEL = re.compile(r"^\s*([$.\w]+):\s*(?:(?://|;).*)?$")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"')
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_INLINED_AT = re.compile(r"inlined_at (\d+) (\d+) (\d+)")
_COMMENT_POSITION = re.compile(r"([^\s\[\]:]+):(\d+):(\d+)")
_PTX_ACCESS = re.compile(r"(?:^|\s)(ld|st)((?:\.[\w:]+)*)\s")
_PTX_COPY = re.compile(
    r"\bcp\.async\.c[ag]\.shared[\w:.]*\.global\S*\s+\[[^\]]*\],\s*\[[^\]]*\],\s*(\w+)"
)
_PTX_BRANCH = re.compile(r"^\s*(@!?%\w+\s+)?bra(?:\.uni)?\s+([$\w]+)")
_PTX_END = re.compile(r"^\s*(?:ret|exit|trap)\s*;")
_AMD_ACCESS = re.compile(r"^\s*(?:global|buffer|flat)_(load|store)_(?:lds_)?(\w+)")
_AMD_BRANCH = re.compile(r"^\s*s_(c?)branch(?:_\w+)?\s+([.\w]+)")
_AMD_END = re.compile(r"^\s*s_endpgm\b")
_AMD_WIDTHS = {"dword": 4, "short": 2, "ushort": 2, "sshort": 2, "byte": 1, "ubyte": 1, "sbyte": 1}


def _ptx_access(line: str) -> tuple[str, int] | None:
    if m := _PTX_COPY.search(line):
        return "load", int(m.group(1), 0)
    m = _PTX_ACCESS.search(line)
    if not m:
        return None
    parts = m.group(2).split(".")
    if "global" not in parts:
        return None
    bits = re.fullmatch(r"[a-z]+(\d+)", parts[-1])
    vector = next((int(p[1:]) for p in parts if re.fullmatch(r"v\d", p)), 1)
    if not bits:
        return None
    return ("load" if m.group(1) == "ld" else "store"), vector * int(bits.group(1)) // 8


def _amd_access(line: str) -> tuple[str, int] | None:
    m = _AMD_ACCESS.match(line)
    if not m:
        return None
    size = m.group(2)
    if x := re.match(r"dwordx(\d)", size):
        return m.group(1), 4 * int(x.group(1))
    if x := re.match(r"(?:[bui]|d16_\w*?)(\d+)", size):  # the names of later generations
        return m.group(1), int(x.group(1)) // 8
    width = _AMD_WIDTHS.get(size.split("_")[0])
    return (m.group(1), width) if width else None


def _position_chain(line: str, files: dict[str, str]) -> Chain:
    """A ``.loc`` directive's position, and its callers as far as the directive tells."""
    m = _LOC.match(line)
    assert m
    head: Position = (files.get(m.group(1), "?"), int(m.group(2)), int(m.group(3)))
    if caller := _INLINED_AT.search(line):
        number, row, column = caller.groups()
        return head, (files.get(number, "?"), int(row), int(column))
    comment = re.split(r"//|;", line, maxsplit=1)[-1]
    callers = [(basename(f), int(r), int(c)) for f, r, c in _COMMENT_POSITION.findall(comment)]
    return head, *callers[1:]


def parse_assembly(text: str, backend: str) -> list[Access]:
    """Every global access of PTX (``backend="cuda"``) or amdgcn ("hip"), with its loop."""
    cuda = backend == "cuda"
    access_of = _ptx_access if cuda else _amd_access
    branch, end = (_PTX_BRANCH, _PTX_END) if cuda else (_AMD_BRANCH, _AMD_END)
    # NVPTX puts the table of files after the code.
    files = {m.group(1): basename(m.group(2)) for m in map(_FILE.match, text.splitlines()) if m}
    where: Chain = ()
    blocks, in_assembly = [_Block()], False
    for number, line in enumerate(text.splitlines(), start=1):
        if label := _LABEL.match(line):
            if blocks[-1].accesses or blocks[-1].targets or not blocks[-1].falls_through:
                blocks.append(_Block())
            blocks[-1].labels.append(label.group(1))
        elif _LOC.match(line):
            # Within a multi-line inline assembly LLVM counts the source line up per line.
            if not in_assembly:
                where = _position_chain(line, files)
        elif "begin inline asm" in line or "end inline asm" in line:
            in_assembly = "begin" in line
        elif jump := branch.match(line):
            blocks[-1].targets.append(jump.group(2))
            blocks[-1].falls_through = bool(jump.group(1))
            blocks.append(_Block())
        elif end.match(line):
            blocks[-1].falls_through = False
            blocks.append(_Block())
        elif found := access_of(line):
            blocks[-1].accesses.append(Access(*found, number, line.strip(), where))
    return list(_with_loops(blocks))


def _with_loops(blocks: list[_Block]) -> Iterator[Access]:
    """The accesses, those in an innermost loop with its number."""
    edges = _edges(blocks)
    busy = {i for i, block in enumerate(blocks) if block.accesses}
    loop_of = {
        node: number
        for number, nodes in enumerate(_innermost(set(edges), edges, busy))
        for node in nodes
    }
    for i, block in enumerate(blocks):
        for a in block.accesses:
            yield Access(a.kind, a.width, a.line, a.text, a.where, loop_of.get(i))


def _edges(blocks: list[_Block]) -> dict[int, set[int]]:
    """Where each block goes next."""
    at = {label: i for i, block in enumerate(blocks) for label in block.labels}
    return {
        i: {at[t] for t in block.targets if t in at}
        | ({i + 1} if block.falls_through and i + 1 < len(blocks) else set())
        for i, block in enumerate(blocks)
    }


def _innermost(nodes: set[int], edges: dict[int, set[int]], busy: set[int]) -> list[set[int]]:
    """The loops with accesses that hold no smaller loop with accesses.

    A loop is a strongly connected component; without its header it falls apart into what it holds.
    """
    loops = []
    for component in _components(nodes, edges):
        if not component & busy:
            continue
        if len(component) == 1 and not edges[min(component)] & component:
            continue
        entries = {t for n in nodes - component for t in edges[n] & component}
        header = min(entries or component)
        loops += _innermost(component - {header}, edges, busy) or [component]
    return loops


def _components(nodes: set[int], edges: dict[int, set[int]]) -> list[set[int]]:
    """Strongly connected components of the subgraph on ``nodes`` (Kosaraju)."""
    reverse: dict[int, set[int]] = {n: set() for n in nodes}
    for n in nodes:
        for t in edges[n] & nodes:
            reverse[t].add(n)
    order = [n for tree in _forest(sorted(nodes), edges, nodes) for n in tree]
    return [set(tree) for tree in _forest(reversed(order), reverse, nodes)]


def _forest(
    roots: Iterable[int], edges: dict[int, set[int]], nodes: set[int]
) -> Iterator[list[int]]:
    """Depth-first trees from the roots, each in postorder."""
    seen: set[int] = set()
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        tree, stack = [], [(root, iter(sorted(edges[root] & nodes)))]
        while stack:
            node, successors = stack[-1]
            new = next((s for s in successors if s not in seen), None)
            if new is None:
                tree.append(node)
                stack.pop()
            else:
                seen.add(new)
                stack.append((new, iter(sorted(edges[new] & nodes))))
        yield tree


@dataclass(frozen=True)
class Loop:
    """An innermost loop that reads or writes global memory, or a body without one: its
    instructions per thread, and bytes."""

    instructions: int
    moved: int  # bytes; those of accesses under a condition only where there are few others
    in_flight: int  # the most bytes that are asked for before one of them is used

    @property
    def instructions_per_byte(self) -> float:
        return self.instructions / self.moved


_SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?P<condition>@!?U?P\w+\s+)?(?P<code>[^;]*?)\s*;")
_SASS_JUMP = re.compile(r"^(?:BRA|JMP|CALL|BREAK)\b[^`]*`\((\.L_\w+)\)")
_SASS_END = re.compile(r"^(?:EXIT|RET|BRX|JMX|KILL)\b")
_SASS_ACCESS = re.compile(r"^(LDG|STG|LDGSTS|REDG?|ATOMG)((?:\.\w+)*)\s+(.*)$")
_REGISTERS = re.compile(r"\bR(\d+)\b")
_WAIT = re.compile(r"^DEPBAR\.LE SB0, 0x([0-9a-f]+)")
_AMD_WAIT = re.compile(r"^s_waitcnt\b.*\bvmcnt\((\d+)\)")
_ROUNDS = 4  # as many as a loop's copies run ahead
_AMD_CODE = re.compile(r"^\s+(?:s|v|ds|global|buffer|flat|scratch)_\w+")


def _sass_width(modifiers: str) -> int:
    for part in modifiers.split("."):
        if part.isdigit():
            return int(part) // 8
        if part in ("U16", "S16", "U8", "S8"):
            return int(part[1:]) // 8
    return 4


def parse_loops(text: str, backend: str) -> list[Loop]:
    """The innermost loops of machine code (nvdisasm's for "cuda", amdgcn for "hip") that access
    global memory; its whole body as one where none does."""
    cuda = backend == "cuda"
    blocks = [_Block()]
    for line in text.splitlines():
        if label := _LABEL.match(line):
            if blocks[-1].instructions or blocks[-1].labels:
                blocks.append(_Block())
            blocks[-1].labels.append(label.group(1))
        elif cuda:
            if not (m := _SASS.match(line)):
                continue
            code, condition = m.group("code"), bool(m.group("condition"))
            blocks[-1].instructions.append(("@ " if condition else "") + code)
            if jump := _SASS_JUMP.match(code):
                blocks[-1].targets.append(jump.group(1))
                # A branch with an operand before its target is taken on that: `BRA.U !UP0, …`.
                blocks[-1].falls_through = condition or "," in code or code.startswith("CALL")
                blocks.append(_Block())
            elif _SASS_END.match(code) and not condition:
                blocks[-1].falls_through = False
                blocks.append(_Block())
        elif _AMD_CODE.match(line):
            blocks[-1].instructions.append(line.strip())
            if jump := _AMD_BRANCH.match(line):
                blocks[-1].targets.append(jump.group(2))
                blocks[-1].falls_through = bool(jump.group(1))
                blocks.append(_Block())
            elif _AMD_END.match(line):
                blocks[-1].falls_through = False
                blocks.append(_Block())
    edges = _edges(blocks)
    width = _sass_bytes if cuda else _amd_bytes
    busy = {i for i, block in enumerate(blocks) if any(map(width, block.instructions))}
    found = []
    for nodes in _innermost(set(edges), edges, busy) or [set(edges)]:
        code = [line for i in sorted(nodes) for line in blocks[i].instructions]
        every = sum(map(width, code))
        always = sum(width(line) for line in code if not line.startswith("@"))
        # Most of a body's accesses are under a condition; in a loop those few are exceptions.
        moved = always if 2 * always >= every else every
        if moved:
            in_flight = _most_in_flight(code) if cuda else _most_in_flight_on_amd(code)
            found.append(Loop(len(code), moved, in_flight))
    return found


def _sass_bytes(code: str) -> int:
    m = _SASS_ACCESS.match(code.removeprefix("@ "))
    return _sass_width(m.group(2)) if m else 0


def _amd_bytes(code: str) -> int:
    access = _amd_access(code)
    return access[1] if access else 0


def _most_in_flight(code: list[str]) -> int:
    """Of a loop's loads, walked several times since a round may use what an earlier one asked for.

    A load into registers is in flight until one of them is read or written; a copy into shared
    memory until a wait leaves fewer groups of copies open.
    """
    waiting: dict[int, tuple[int, int]] = {}  # by first register: bytes, registers
    groups, copied, most = list[int](), 0, 0
    for line in code * _ROUNDS:
        line = line.removeprefix("@ ")
        used = {int(number) for number in _REGISTERS.findall(line)}
        for first, (_, count) in list(waiting.items()):
            if used & set(range(first, first + count)):
                del waiting[first]
        if line.startswith("LDGDEPBAR"):
            groups, copied = [*groups, copied], 0
        elif wait := _WAIT.match(line):
            groups = groups[max(0, len(groups) - int(wait.group(1), 16)) :]
        m = _SASS_ACCESS.match(line)
        if m and m.group(1) == "LDG" and (register := _REGISTERS.match(m.group(3))):
            nbytes = _sass_width(m.group(2))
            waiting[int(register.group(1))] = nbytes, max(1, nbytes // 4)
        elif m and m.group(1) == "LDGSTS":
            copied += _sass_width(m.group(2))
        most = max(most, sum(size for size, _ in waiting.values()) + sum(groups) + copied)
    return most


def _most_in_flight_on_amd(code: list[str]) -> int:
    """The same of amdgcn, where a wait leaves so many of the latest accesses open. Stores are among
    those, but ask for nothing."""
    open_accesses, most = list[int](), 0
    for line in code * _ROUNDS:
        if wait := _AMD_WAIT.match(line):
            left = int(wait.group(1))
            open_accesses = open_accesses[max(0, len(open_accesses) - left) :]
        elif access := _amd_access(line):
            open_accesses.append(access[1] if access[0] == "load" else 0)
        most = max(most, sum(open_accesses))
    return most


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
