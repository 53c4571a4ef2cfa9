"""Instructions in which the lanes of a warp take part together."""

from collections.abc import Callable

import numpy as np

from tests.ptx.faults import Fault
from tests.ptx.formats import Array, halves, widened
from tests.ptx.instructions import instruction
from tests.ptx.lanes import WARP, Lanes, parts
from tests.ptx.program import Statement


def whole_warps(lanes: Lanes) -> Array:
    """Which warps are active.

    Raises:
        Fault: a part of one.
    """
    active = lanes.active.reshape(-1, WARP)
    there = active.any(1)
    if not active[there].all():
        raise Fault("only a part of a warp has come to what needs all of it")
    return there


@instruction("shfl", "sync up down bfly idx b32")
def _shuffle(lanes: Lanes, s: Statement) -> None:
    kind, (result, *holds) = s.words[2], parts(s.operands[0])
    x = lanes.read(s.operands[1], "b32")
    distance = lanes.read(s.operands[2], "u32").astype(np.int64) & 31
    bounds = lanes.read(s.operands[3], "u32").astype(np.int64)
    clamp, segment = bounds & 31, bounds >> 8 & 31
    lane = (lanes.thread % WARP).astype(np.int64)
    first, last = lane & segment, (lane & segment) | (clamp & ~segment)
    if kind == "up":
        source = lane - distance
        there = source >= last
    else:
        source = {
            "down": lane + distance,
            "bfly": lane ^ distance,
            "idx": first | (distance & ~segment),
        }[kind]
        there = source <= last
    source = np.arange(lanes.count) - lane + np.where(there, source, lane)
    if not lanes.active[source[lanes.active]].all():
        raise Fault("a shuffle from a lane that has not come to it")
    lanes.write(result, x[source])
    for each in holds:
        lanes.write(each, there)


_REDUCTIONS: dict[str, Callable[..., Array]] = {
    **{"add": np.add.reduce, "min": np.minimum.reduce, "max": np.maximum.reduce},
    **{"and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce, "xor": np.bitwise_xor.reduce},
}


@instruction("redux", "sync add min max and or xor s32 u32 b32")
def _reduce(lanes: Lanes, s: Statement) -> None:
    whole_warps(lanes)
    x = lanes.read(s.operands[1], s.type)
    found = _REDUCTIONS[s.words[2]](x.reshape(-1, WARP), axis=1).astype(x.dtype)
    lanes.write(s.operands[0], np.repeat(found, WARP))


@instruction("vote", "sync ballot any all b32 pred")
def _vote(lanes: Lanes, s: Statement) -> None:
    voting = lanes.active.reshape(-1, WARP)
    votes = lanes.read(s.operands[1], "pred").reshape(-1, WARP)
    if "ballot" in s.words:
        bits = (votes & voting).astype(np.uint64) << np.arange(WARP, dtype=np.uint64)
        found = bits.sum(1).astype(np.uint32)
    else:
        found = (votes & voting).any(1) if "any" in s.words else (votes | ~voting).all(1)
    lanes.write(s.operands[0], np.repeat(found, WARP))


@instruction("mma", "sync aligned m16n8k16 row col f32 f16 bf16")
def _multiply_tiles(lanes: Lanes, s: Statement) -> None:
    """[16, 16] @ [16, 8] + [16, 8], in fp64 and rounded once to fp32."""
    whole_warps(lanes)
    kind, warps = s.words[7], lanes.count // WARP
    row, column = np.arange(WARP) // 4, np.arange(WARP) % 4
    a, b = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8))
    c = np.zeros((warps, 16, 8))
    for i, part in enumerate(parts(s.operands[1])):
        for j, half in enumerate(halves(lanes.read(part, "b32"))):
            values = widened(half, kind).reshape(warps, WARP)
            a[:, row + 8 * (i % 2), 2 * column + j + 8 * (i // 2)] = values
    for i, part in enumerate(parts(s.operands[2])):
        for j, half in enumerate(halves(lanes.read(part, "b32"))):
            values = widened(half, kind).reshape(warps, WARP)
            b[:, 2 * column + j + 8 * i, row] = values
    places = [(row + 8 * (i // 2), 2 * column + i % 2) for i in range(4)]
    for (at, beside), part in zip(places, parts(s.operands[3]), strict=True):
        c[:, at, beside] = lanes.read(part, "f32").reshape(warps, WARP)
    product = (a @ b + c).astype(np.float32)
    for (at, beside), part in zip(places, parts(s.operands[0]), strict=True):
        lanes.write(part, product[:, at, beside].ravel())
