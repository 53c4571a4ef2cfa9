"""Instructions that move numbers between registers and memory."""

import numpy as np

from tests.ptx.faults import UnknownInstruction
from tests.ptx.formats import BITS, DTYPES, SIZES, Array, halves, joined
from tests.ptx.instructions import instruction
from tests.ptx.lanes import WARP, Lanes, parts
from tests.ptx.program import Address, Name, Number, Operand, Statement
from tests.ptx.warps import whole_warps

_TYPES = "b8 b16 b32 b64 u8 u16 u32 u64 s8 s16 s32 s64 f32 f64"
_CACHES = "ca cg cs lu cv wb wt nc volatile relaxed weak gpu cta sys"
_HINTS = "L1::evict_first L1::evict_last L1::no_allocate L2::128B"


def _argument(lanes: Lanes, operand: Operand, kind: str) -> Array:
    """A number that the kernel was launched with, by the type that it is declared as."""
    assert isinstance(operand, Address), operand
    assert isinstance(operand.base, Name), operand
    name = operand.base.text
    declared = DTYPES[lanes.launch.program.parameters[name]]
    value = lanes.launch.arguments[name]
    if np.dtype(declared).kind == "f":
        number = np.array(value, declared)
    else:
        size = np.dtype(declared).itemsize
        number = np.array(int(value) % (1 << 8 * size), BITS[size])
    return np.broadcast_to(number.view(DTYPES[kind]), (lanes.count,))


@instruction("ld", f"param global shared v2 v4 {_CACHES} {_HINTS} {_TYPES}")
def _load(lanes: Lanes, s: Statement) -> None:
    results, place = parts(s.operands[0]), s.operands[1]
    if "param" in s.words:
        lanes.write(results[0], _argument(lanes, place, s.type))
        return
    size, count, by = SIZES[s.type], len(results), lanes.accesses()
    if "shared" in s.words:
        addresses = lanes.address(place, "u32")
        program = lanes.place[lanes.active]
        found = lanes.shared.load(addresses, size, count, program, by)
    elif "global" in s.words:
        addresses = lanes.address(place, "u64")
        found = lanes.launch.memory.load(addresses, size, count, by)
    else:
        raise UnknownInstruction(f"{s.text}: a load from no known memory")
    for result, values in zip(results, found, strict=True):
        lanes.write(result, lanes.spread(values).view(DTYPES[s.type]))


@instruction("st", f"global shared v2 v4 {_CACHES} {_HINTS} {_TYPES}")
def _store(lanes: Lanes, s: Statement) -> None:
    place, by, bits = s.operands[0], lanes.accesses(), BITS[SIZES[s.type]]
    values = [lanes.read(x, s.type).view(bits)[lanes.active] for x in parts(s.operands[1])]
    if "shared" in s.words:
        addresses = lanes.address(place, "u32")
        lanes.shared.store(addresses, values, lanes.place[lanes.active], by)
    elif "global" in s.words:
        lanes.launch.memory.store(lanes.address(place, "u64"), values, by)
    else:
        raise UnknownInstruction(f"{s.text}: a store to no known memory")


@instruction("atom", "global gpu sys relaxed acquire release acq_rel add u32 s32 u64")
def _add_atomically(lanes: Lanes, s: Statement) -> None:
    if not {"global", "add"} <= set(s.words):
        raise UnknownInstruction(f"{s.text}: an atomic operation that is no sum")
    addresses, by = lanes.address(s.operands[1], "u64"), lanes.accesses()
    acquires, releases = (bool({kind, "acq_rel"} & set(s.words)) for kind in ("acquire", "release"))
    for address, code in zip(addresses, by, strict=True):
        lanes.launch.order.atomic(int(code), int(address), acquires=acquires, releases=releases)
    values = lanes.read(s.operands[2], s.type)[lanes.active]
    before = lanes.launch.memory.add(addresses, values, by)
    lanes.write(s.operands[0], lanes.spread(before))


@instruction("cp", "async ca cg shared global commit_group wait_group wait_all L2::128B")
def _copy(lanes: Lanes, s: Statement) -> None:
    """``cp.async``: what is copied comes at the latest moment that it may."""
    if "commit_group" in s.words:
        lanes.copies.commit()
        return
    if "wait_all" in s.words:
        lanes.copies.commit()
        lanes.copies.wait(but=0)
        return
    if "wait_group" in s.words:
        lanes.copies.wait(but=int(lanes.read(s.operands[0], "u32")[0]))
        return
    target, source, size_operand, *given = s.operands
    assert isinstance(size_operand, Number), s.text
    size, active = int(size_operand.text, 0), lanes.active
    there = lanes.read(given[0] if given else size_operand, "u32")[active]
    if not np.isin(there, (0, size)).all():
        raise UnknownInstruction(f"{s.text}: a copy of a part of {size} bytes")
    by, program = lanes.accesses(), lanes.place[active]
    whole = there > 0  # the others become zeros
    addresses = lanes.address(source, "u64")[whole]
    element = min(size, 8)
    found = lanes.launch.memory.load(addresses, element, size // element, by[whole])
    values = []
    for each in found:
        filled = np.zeros(len(there), each.dtype)
        filled[whole] = each
        values.append(filled)
    shared, places = lanes.shared, lanes.address(target, "u32")
    # The bytes belong to the copy from here on; until it has come they hold what they held.
    held = shared.claim(places, values, program, by)
    lanes.copies.start(lambda: shared.settle(*held, values, by))


def _rows(lanes: Lanes, place: Operand, count: int) -> tuple[Array, Array, Array, Array]:
    """Addresses of ``count`` tiles' rows, [active warps · count · 8], which a warp's first lanes
    tell; their programs, their accesses, and which warps are active."""
    there = whole_warps(lanes)
    telling = lanes.active & (lanes.thread % WARP < 8 * count)
    chosen = telling[lanes.active]
    addresses = lanes.address(place, "u32")[chosen]
    return addresses, lanes.place[telling], lanes.accesses()[chosen], there


_PAIR = 2 * (np.arange(WARP) % 4)  # of a tile's row, which a lane holds
_ROW = np.arange(WARP) // 4


@instruction("ldmatrix", "sync aligned m8n8 x1 x2 x4 trans shared b16")
def _load_tiles(lanes: Lanes, s: Statement) -> None:
    results = parts(s.operands[0])
    addresses, program, by, there = _rows(lanes, s.operands[1], len(results))
    tiles = lanes.shared.load_rows(addresses, program, by).reshape(-1, len(results), 8, 8)
    if "trans" in s.words:
        tiles = tiles.transpose(0, 1, 3, 2)
    for i, result in enumerate(results):
        pairs = joined(tiles[:, i, _ROW, _PAIR], tiles[:, i, _ROW, _PAIR + 1])
        values = np.zeros((len(there), WARP), np.uint32)
        values[there] = pairs
        lanes.write(result, values.ravel())


@instruction("stmatrix", "sync aligned m8n8 x1 x2 x4 trans shared b16")
def _store_tiles(lanes: Lanes, s: Statement) -> None:
    sources = parts(s.operands[1])
    addresses, program, by, there = _rows(lanes, s.operands[0], len(sources))
    tiles = np.zeros((int(there.sum()), len(sources), 8, 8), np.uint16)
    for i, source in enumerate(sources):
        pairs = lanes.read(source, "b32").reshape(-1, WARP)[there]
        tiles[:, i, _ROW, _PAIR], tiles[:, i, _ROW, _PAIR + 1] = halves(pairs)
    if "trans" in s.words:
        tiles = tiles.transpose(0, 1, 3, 2)
    lanes.shared.store_rows(addresses, tiles.reshape(-1, 8), program, by)
