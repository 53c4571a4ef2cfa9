"""Whether a kernel's main loops live up to what is expected of them (`benchmarks.ops.Expect`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.ops import Expect
from tests.aot.isa import Access, Operand


@dataclass(frozen=True)
class Widths:
    """The widest and the narrowest access of a kind in a kernel's main loop."""

    widest: int
    narrowest: int

    def __str__(self) -> str:
        both = (self.widest, self.narrowest)
        return str(both[0]) if both[0] == both[1] else f"{both[0]}/{both[1]}"


@dataclass(frozen=True)
class Verdict:
    """What the main loop does, and what is wrong with it."""

    loads: Widths | None
    stores: Widths | None
    faults: tuple[str, ...]
    lines: tuple[str, ...]  # the assembly lines at fault


_KINDS = ("load", "store")
Pairs = Sequence[tuple[Access, Operand | None]]
Spans = Mapping[str, tuple[str, range]]  # a function's file and lines


def judge(
    accesses: Sequence[Access],
    operands: Sequence[Operand],
    threads: int,
    expect: Expect,
    spans: Spans | None = None,
) -> Verdict:
    """Judge the float accesses of the innermost loops, or of the whole body where none loops.

    Peeled first and last tiles lie outside of the innermost loops and may be narrow. Boolean masks
    and integers are not judged: their widths follow from their own element sizes. ``spans`` tells
    where exempt functions are.
    """
    exempt = [span for name, span in (spans or {}).items() if name in expect.exempt]
    # Of what cannot be traced, nothing is known to be harmless.
    floats = [(a, o) for a, o in _trace(accesses, operands) if o is None or o.is_float]
    judged = [(a, o) for a, o in floats if o is not None and not _is_exempt(o, expect, exempt)]
    tiles = [o for o in operands if o.elements >= threads]
    if not tiles or not all(_is_exempt(o, expect, exempt) for o in tiles):
        # An untraced access belongs to one of the kernel's tiles: to one that counts, perhaps.
        judged += [(a, o) for a, o in floats if o is None]
    loads, stores = (
        _region([(a, o) for a, o in judged if a.kind == kind], threads) for kind in _KINDS
    )
    if any(access.loop is not None for access, _ in loads):
        # What such a kernel stores past its loop are results, or its peeled tiles.
        stores = [(a, o) for a, o in stores if a.loop is not None]
    faults: list[str] = []
    lines: list[str] = []
    demands = (expect.load_bytes, expect.store_bytes)
    for kind, region, demand in zip(_KINDS, (loads, stores), demands, strict=True):
        bad = _too_narrow(region, threads, demand, expect.any_tile)
        of_tiles = [a for a, o in floats if a.kind == kind and o and o.elements >= threads]
        if bad:
            access, operand = min(bad, key=lambda pair: pair[0].width)
            place = "in the main loop" if access.loop is not None else "in a body without loops"
            faults.append(f"{access.width}-byte {kind}s {place} ({_origin(access, operand)})")
            lines += [f"{a.line}: {a.text}  # {_origin(a, o)}" for a, o in bad]
        elif demand and of_tiles and not region and not expect.any_tile:
            faults.append(f"no {kind}s but those of {', '.join(sorted(expect.exempt))}")
    return Verdict(_widths(loads), _widths(stores), tuple(faults), tuple(lines))


def _is_exempt(operand: Operand, expect: Expect, spans: Sequence[tuple[str, range]]) -> bool:
    """Named by its pointer, or within a named function at any depth of its calls."""
    return operand.pointer in expect.exempt or any(
        file == position[0] and position[1] in lines
        for position in operand.where
        for file, lines in spans
    )


def _trace(accesses: Sequence[Access], operands: Sequence[Operand]) -> Pairs:
    """Each access with the load or store that it came from, as far as that can be told."""
    pairs = [(access, _operand_of(access, operands)) for access in accesses]
    # Merged accesses (three scalars in one) lose their line: theirs are the operands left over.
    traced = {operand for _, operand in pairs}
    left = [operand for operand in operands if operand not in traced]
    return [(a, o or _strictest(left, a.kind, a.width)) for a, o in pairs]


def _operand_of(access: Access, operands: Sequence[Operand]) -> Operand | None:
    here = [
        operand
        for operand in operands
        if access.where
        and all(mine == its for mine, its in zip(access.where, operand.where, strict=False))
    ]
    return _strictest(here, access.kind, access.width)


def _strictest(operands: Sequence[Operand], kind: str, width: int) -> Operand | None:
    """Of those that an access of this width could be, the one of which most is demanded."""
    candidates = [o for o in operands if o.kind == kind and o.element_bytes <= width]
    return max(candidates, key=lambda o: (o.is_float, o.elements), default=None)


def _region(pairs: Pairs, threads: int) -> Pairs:
    """The accesses to judge: tiles in loops, else anything in loops, else all tiles.

    A tile has an element for each thread; less is a value per row or per program.
    """
    tiles = [(a, o) for a, o in pairs if o is None or o.elements >= threads]
    return (
        [(a, o) for a, o in tiles if a.loop is not None]
        or [(a, o) for a, o in pairs if a.loop is not None]
        or tiles
    )


def _too_narrow(region: Pairs, threads: int, demand: int, any_tile: bool) -> Pairs:
    widest = max((access.width for access, _ in region), default=demand)
    if widest < demand and not any_tile:
        return region
    return [(a, o) for a, o in region if a.width < _possible(o, threads, demand)]


def _possible(operand: Operand | None, threads: int, demand: int) -> int:
    """A tile of few elements per thread cannot fill the demanded width."""
    if operand is None:
        return demand
    return min(demand, operand.element_bytes * max(1, operand.elements // threads))


def _widths(region: Pairs) -> Widths | None:
    widths = [access.width for access, _ in region]
    return Widths(max(widths), min(widths)) if widths else None


def _origin(access: Access, operand: Operand | None) -> str:
    """Which argument, and where in the source."""
    file, line, _ = access.where[0] if access.where else ("unknown source line", 0, 0)
    place = f"{file}:{line}" if line else file
    return f"{operand.pointer}, {place}" if operand and operand.pointer else place
