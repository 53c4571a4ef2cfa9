"""Reads what the compiler made of a kernel: registers, spills, and how wide its loads are.

Pure text in, dataclasses out; needs neither torch nor triton.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from benchmarks.aot_ttgir import Chain, Position, basename


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes of the machine."""

    registers: int
    spills: int  # bytes of stack and local memory on NVIDIA; spilled registers, scratch on AMD
    spill_detail: str = ""


@dataclass(frozen=True)
class Access:
    """A global load or store of the machine code."""

    kind: str  # "load" | "store"
    width: int  # bytes per thread
    line: int  # in the assembly, from 1
    text: str
    where: Chain
    loop: int | None = None  # an innermost loop; None outside of every loop, or in an outer one


@dataclass
class _Block:
    """Straight-line code: its accesses, and where it goes next."""

    labels: list[str] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    falls_through: bool = True


# --- resources -----------------------------------------------------------------------------------


def parse_cuobjdump(text: str) -> Usage:
    """``cuobjdump -res-usage`` of a cubin with one kernel (its largest function otherwise)."""
    found = [
        {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", line)}
        for line in text.splitlines()
        if "REG:" in line
    ]
    if not found:
        raise ValueError(f"no resource usage in the output of cuobjdump:\n{text}")
    worst = {name: max(f.get(name, 0) for f in found) for name in ("REG", "STACK", "LOCAL")}
    spills = worst["STACK"] + worst["LOCAL"]
    detail = f"STACK:{worst['STACK']} LOCAL:{worst['LOCAL']}" if spills else ""
    return Usage(worst["REG"], spills, detail)


def parse_amdgcn_usage(text: str) -> Usage:
    """The kernel's metadata at the end of its assembly.

    Spilled scalar registers are reported but do not count: they move into lanes of a vector
    register, and what reaches memory shows in the private segment.
    """

    def value(name: str) -> int:
        found = re.findall(rf"^\s*-?\s*\.{name}:\s*(\d+)", text, re.MULTILINE)
        if not found:
            raise ValueError(f"no .{name} in the assembly's metadata")
        return max(map(int, found))

    names = ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    counts = {name: value(name) for name in names}
    detail = " ".join(f".{name}:{count}" for name, count in counts.items() if count)
    in_memory = counts["vgpr_spill_count"] + counts["private_segment_fixed_size"]
    return Usage(value("vgpr_count"), in_memory, detail)


# --- the machine code ----------------------------------------------------------------------------

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


# --- loops ---------------------------------------------------------------------------------------


def _with_loops(blocks: list[_Block]) -> Iterator[Access]:
    """The accesses, those in an innermost loop with its number."""
    at = {label: i for i, block in enumerate(blocks) for label in block.labels}
    edges = {
        i: {at[t] for t in block.targets if t in at}
        | ({i + 1} if block.falls_through and i + 1 < len(blocks) else set())
        for i, block in enumerate(blocks)
    }
    busy = {i for i, block in enumerate(blocks) if block.accesses}
    loop_of = {
        node: number
        for number, nodes in enumerate(_innermost(set(edges), edges, busy))
        for node in nodes
    }
    for i, block in enumerate(blocks):
        for a in block.accesses:
            yield Access(a.kind, a.width, a.line, a.text, a.where, loop_of.get(i))


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
