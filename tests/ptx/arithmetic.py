"""Instructions that make numbers of numbers, each lane for itself."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.faults import Fault
from tests.ptx.formats import (
    BITS,
    DTYPES,
    SIZES,
    Array,
    approximated,
    flushed,
    halves,
    is_float,
    joined,
    narrowed,
    widened,
)
from tests.ptx.instructions import instruction
from tests.ptx.lanes import Lanes, parts
from tests.ptx.program import Pair, Statement, Vector

_BITS = "b16 b32 b64"
_INTEGERS = "s16 s32 s64 u16 u32 u64"
_NARROW = "f16 bf16 f16x2 bf16x2"
_FLOATS = f"f32 f64 {_NARROW}"
_ROUNDINGS = "rn ftz"
_WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}

Compute = Callable[..., Array]


def _applied(compute: Compute, values: list[Array], kind: str, words: tuple[str, ...]) -> Array:
    """A function of numbers of one type, rounded to that type."""
    if kind.endswith("x2"):
        lower, upper = zip(*map(halves, values), strict=True)
        half = kind.removesuffix("x2")
        return joined(*(_applied(compute, list(x), half, words) for x in (lower, upper)))
    if kind in ("f16", "bf16"):
        return narrowed(compute(*(widened(x, kind) for x in values)), kind)
    flush = "ftz" in words and kind == "f32"
    result = compute(*(map(flushed, values) if flush else values))
    result = np.asarray(result).astype(DTYPES[kind], copy=False)
    return flushed(result) if flush else result


def _elementwise(name: str, words: str, compute: Compute) -> None:
    """An instruction of operands of one type."""

    @instruction(name, words)
    def execute(lanes: Lanes, s: Statement) -> None:
        values = [lanes.read(x, s.type) for x in s.operands[1:]]
        lanes.write(s.operands[0], _applied(compute, values, s.type, s.words))


def _fused(x: Array, y: Array, z: Array) -> Array:
    exact = x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
    return exact.astype(np.float32)


_elementwise("add", f"{_ROUNDINGS} {_INTEGERS} {_FLOATS}", np.add)
_elementwise("sub", f"{_ROUNDINGS} {_INTEGERS} {_FLOATS}", np.subtract)
_elementwise("neg", f"ftz {_INTEGERS} {_FLOATS}", lambda x: -x)
_elementwise("abs", f"ftz {_INTEGERS} {_FLOATS}", np.abs)
_elementwise("fma", f"{_ROUNDINGS} f32 {_NARROW}", _fused)
_elementwise("and", f"pred {_BITS}", np.bitwise_and)
_elementwise("or", f"pred {_BITS}", np.bitwise_or)
_elementwise("xor", f"pred {_BITS}", np.bitwise_xor)
_elementwise("not", f"pred {_BITS}", np.invert)


def _widely(lanes: Lanes, s: Statement) -> Array:
    """A product that has room."""
    wide = DTYPES[_WIDE[s.type]]
    return lanes.read(s.operands[1], s.type).astype(wide) * lanes.read(
        s.operands[2], s.type
    ).astype(wide)


@instruction("mul", f"lo hi wide {_ROUNDINGS} {_INTEGERS} {_FLOATS}")
def _multiply(lanes: Lanes, s: Statement) -> None:
    if "wide" in s.words:
        lanes.write(s.operands[0], _widely(lanes, s))
        return
    x, y = (lanes.read(each, s.type) for each in s.operands[1:])
    if "hi" not in s.words:
        lanes.write(s.operands[0], _applied(np.multiply, [x, y], s.type, s.words))
        return
    bits = 8 * SIZES[s.type]
    if bits == 64:
        high: Any = [int(p) * int(q) >> 64 for p, q in zip(x, y, strict=True)]
        lanes.write(s.operands[0], np.array(high, DTYPES[s.type]))
    else:
        product = _widely(lanes, s)
        lanes.write(s.operands[0], (product >> product.dtype.type(bits)).astype(x.dtype))


@instruction("mad", f"lo wide {_INTEGERS}")
def _multiply_and_add(lanes: Lanes, s: Statement) -> None:
    if "wide" in s.words:
        total = _widely(lanes, s) + lanes.read(s.operands[3], _WIDE[s.type])
    else:
        x, y, z = (lanes.read(each, s.type) for each in s.operands[1:])
        total = x * y + z
    lanes.write(s.operands[0], total)


@instruction("div", f"full approx rn ftz f32 f64 {_INTEGERS}")
def _divide(lanes: Lanes, s: Statement) -> None:
    x, y = (lanes.read(each, s.type) for each in s.operands[1:])
    if not is_float(s.type):
        y = _divisor(lanes, y)
        # NumPy's rounds down, a GPU's to zero.
        quotient = x // y if s.type[0] == "u" else (x - np.fmod(x, y)) // y
        lanes.write(s.operands[0], quotient)
        return
    if "rn" in s.words:
        lanes.write(s.operands[0], _applied(np.divide, [x, y], s.type, s.words))
        return

    def divide(x: Array, y: Array) -> Array:
        exact = x / y
        by_power_of_two = np.frexp(y)[0] == np.copysign(0.5, y)
        # 2 ulp of the result.
        return np.where(by_power_of_two, exact, approximated(x.astype(np.float64) / y, 2.0**-22))

    lanes.write(s.operands[0], _applied(divide, [x, y], s.type, s.words))


@instruction("rem", _INTEGERS)
def _remainder(lanes: Lanes, s: Statement) -> None:
    x, y = (lanes.read(each, s.type) for each in s.operands[1:])
    lanes.write(s.operands[0], np.fmod(x, _divisor(lanes, y)))


def _divisor(lanes: Lanes, y: Array) -> Array:
    y = np.where(lanes.active, y, y.dtype.type(1))
    if (y == 0).any():
        raise Fault("division by 0")
    return y


def _extreme(name: str, plain: Compute, with_nan: Compute) -> None:
    @instruction(name, f"NaN xorsign abs ftz {_INTEGERS} {_FLOATS}")
    def execute(lanes: Lanes, s: Statement) -> None:
        pick = with_nan if "NaN" in s.words or not is_float(s.type) else plain

        def compute(x: Array, y: Array) -> Array:
            if "xorsign" not in s.words:
                return pick(x, y)
            size = pick(np.abs(x), np.abs(y))
            return np.where(np.signbit(x) ^ np.signbit(y), -size, size)

        values = [lanes.read(x, s.type) for x in s.operands[1:]]
        lanes.write(s.operands[0], _applied(compute, values, s.type, s.words))


_extreme("min", np.fmin, np.minimum)
_extreme("max", np.fmax, np.maximum)


def _unary(name: str, compute: Compute, words: str = "approx rn ftz f32") -> None:
    """A function of fp32, computed in fp64: rounded, or approximated within its documented error.
    The function gets the words of the statement."""

    @instruction(name, words)
    def execute(lanes: Lanes, s: Statement) -> None:
        x = lanes.read(s.operands[1], s.type)

        def of_float(x: Array) -> Array:
            return compute(x.astype(np.float64), s.words)

        lanes.write(s.operands[0], _applied(of_float, [x], s.type, s.words))


def _within(bound: float, compute: Compute) -> Compute:
    def computed(x: Array, words: tuple[str, ...]) -> Array:
        exact = compute(x)
        return exact.astype(np.float32) if "rn" in words else approximated(exact, bound)

    return computed


def _log2(x: Array, words: tuple[str, ...]) -> Array:
    # Near 1, where the result is near 0, the error is absolute.
    return approximated(np.log2(x), 2.0**-22, np.where((x > 0.5) & (x < 2), 2.0**-22, 0))


_unary("ex2", _within(2.0**-22.5, np.exp2))
_unary("lg2", _log2)
_unary("sqrt", _within(2.0**-23, np.sqrt))
_unary("rsqrt", _within(2.0**-22.4, lambda x: 1 / np.sqrt(x)))
_unary("rcp", _within(2.0**-23, lambda x: 1 / x))
_unary("tanh", _within(2.0**-11, np.tanh))


@instruction("shl", _BITS)
def _shift_left(lanes: Lanes, s: Statement) -> None:
    x, count = lanes.read(s.operands[1], s.type), lanes.read(s.operands[2], "u32")
    bits = 8 * SIZES[s.type]
    shifted = x << np.minimum(count, bits - 1).astype(x.dtype)
    lanes.write(s.operands[0], np.where(count >= bits, x.dtype.type(0), shifted))


@instruction("shr", f"{_BITS} {_INTEGERS}")
def _shift_right(lanes: Lanes, s: Statement) -> None:
    x, count = lanes.read(s.operands[1], s.type), lanes.read(s.operands[2], "u32")
    bits = 8 * SIZES[s.type]
    shifted = x >> np.minimum(count, bits - 1).astype(x.dtype)
    if s.type[0] != "s":
        shifted = np.where(count >= bits, x.dtype.type(0), shifted)
    lanes.write(s.operands[0], shifted)


@instruction("shf", "l r wrap clamp b32")
def _funnel_shift(lanes: Lanes, s: Statement) -> None:
    lower, upper = (lanes.read(x, "b32").astype(np.uint64) for x in s.operands[1:3])
    count = lanes.read(s.operands[3], "u32").astype(np.uint64)
    count = count & np.uint64(31) if "wrap" in s.words else np.minimum(count, np.uint64(32))
    both = (upper << np.uint64(32)) | lower
    if "l" in s.words:
        shifted = (both << count) >> np.uint64(32)
        # A shift by 0 to 31 keeps the upper word's bits; what left the 64 is not wanted.
        shifted = np.where(count == 32, lower, shifted)
    else:
        shifted = both >> count
    lanes.write(s.operands[0], shifted.astype(np.uint32))


@instruction("bfe", "s32 s64 u32 u64")
def _extract_bits(lanes: Lanes, s: Statement) -> None:
    x = lanes.read(s.operands[1], s.type)
    start, length = (lanes.read(y, "u32").astype(np.int64) & 255 for y in s.operands[2:])
    one = np.int64(1)
    field = (x.astype(np.int64) >> start) & ((one << length) - one)
    if s.type[0] == "s":
        negative = (field >> np.maximum(length - 1, 0)) & 1 == 1
        field = np.where(negative, field - (one << length), field)
    lanes.write(s.operands[0], field.astype(DTYPES[s.type]))


@instruction("bfi", "b32 b64")
def _insert_bits(lanes: Lanes, s: Statement) -> None:
    x, y = (lanes.read(each, s.type).astype(np.uint64) for each in s.operands[1:3])
    start, length = (lanes.read(each, "u32").astype(np.uint64) for each in s.operands[3:])
    one = np.uint64(1)
    field = ((one << length) - one) << start
    lanes.write(s.operands[0], ((y & ~field) | (x << start & field)).astype(DTYPES[s.type]))


@instruction("lop3", "b32")
def _logic_of_three(lanes: Lanes, s: Statement) -> None:
    x, y, z = (lanes.read(each, "b32") for each in s.operands[1:4])
    table = int(lanes.read(s.operands[4], "u32")[0])
    result = np.zeros_like(x)
    for row in range(8):
        if table >> row & 1:
            chosen = [v if row & bit else ~v for v, bit in ((x, 4), (y, 2), (z, 1))]
            result = result | (chosen[0] & chosen[1] & chosen[2])
    lanes.write(s.operands[0], result)


@instruction("prmt", "b32")
def _permute_bytes(lanes: Lanes, s: Statement) -> None:
    x, y, selectors = (lanes.read(each, "b32") for each in s.operands[1:])
    both = x.astype(np.uint64) | y.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(x)
    for i in range(4):
        selector = selectors >> np.uint32(4 * i) & np.uint32(15)
        place = (selector & np.uint32(7)).astype(np.uint64) * np.uint64(8)
        byte = (both >> place & np.uint64(255)).astype(np.uint32)
        sign = np.where(byte & 128, np.uint32(255), np.uint32(0))
        result |= np.where(selector & 8, sign, byte) << np.uint32(8 * i)
    lanes.write(s.operands[0], result)


@instruction("popc", "b32 b64")
def _count_ones(lanes: Lanes, s: Statement) -> None:
    x = lanes.read(s.operands[1], s.type).astype(np.uint64)
    ones = sum((x >> np.uint64(i) & np.uint64(1)).astype(np.uint32) for i in range(64))
    lanes.write(s.operands[0], np.asarray(ones))


@instruction("clz", "b32 b64")
def _count_leading_zeros(lanes: Lanes, s: Statement) -> None:
    bits = 8 * SIZES[s.type]
    zeros = [bits - int(x).bit_length() for x in lanes.read(s.operands[1], s.type)]
    lanes.write(s.operands[0], np.array(zeros, np.uint32))


@instruction("selp", f"{_BITS} {_INTEGERS} f32 f64")
def _select(lanes: Lanes, s: Statement) -> None:
    x, y = (lanes.read(each, s.type) for each in s.operands[1:3])
    lanes.write(s.operands[0], np.where(lanes.read(s.operands[3], "pred"), x, y))


_COMPARISONS: dict[str, Compute] = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal},
    **{"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal},
}
_LOGIC: dict[str, Compute] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _compared(comparison: str, x: Array, y: Array, floats: bool) -> Array:
    if not floats:
        return _COMPARISONS[comparison](x, y)
    unordered = np.isnan(x) | np.isnan(y)
    if comparison in ("num", "nan"):
        return unordered == (comparison == "nan")
    if len(comparison) == 3:  # "ltu": or unordered
        return _COMPARISONS[comparison[:2]](x, y) | unordered
    return _COMPARISONS[comparison](x, y) & ~unordered


@instruction(
    "setp",
    "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan and or xor ftz "
    f"{_BITS} {_INTEGERS} {_FLOATS}",
)
def _compare(lanes: Lanes, s: Statement) -> None:
    comparison, floats = s.words[1], is_float(s.type)
    x, y = (lanes.read(each, s.type) for each in s.operands[1:3])
    results = parts(s.operands[0])
    if s.type.endswith("x2"):
        pairs = zip(results, halves(x), halves(y), strict=True)
        for result, p, q in pairs:
            lanes.write(result, _compared(comparison, widened(p, s.type), widened(q, s.type), True))
        return
    if s.type in ("f16", "bf16"):
        x, y = widened(x, s.type), widened(y, s.type)
    if "ftz" in s.words:
        x, y = flushed(x), flushed(y)
    found = _compared(comparison, x, y, floats)
    logic = [word for word in s.words[2:-1] if word in _LOGIC]
    if logic:
        found = _LOGIC[logic[0]](found, lanes.read(s.operands[3], "pred"))
    lanes.write(results[0], found)
    if isinstance(s.operands[0], Pair):
        lanes.write(results[1], ~found)


_TO_INTEGERS: dict[str, Compute] = {
    **{"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
}


@instruction("cvt", f"rn rni rzi rmi rpi ftz s8 u8 {_INTEGERS} {_FLOATS}")
def _convert(lanes: Lanes, s: Statement) -> None:
    to, origin = s.words[-2:]
    if to.endswith("x2"):
        upper, lower = (narrowed(lanes.read(x, origin), to) for x in s.operands[1:])
        lanes.write(s.operands[0], joined(lower, upper))
        return
    x = lanes.read(s.operands[1], origin)
    if origin in ("f16", "bf16"):
        x = widened(x, origin)
    if "ftz" in s.words and origin == "f32":
        x = flushed(x)
    for word in s.words:
        x = _TO_INTEGERS[word](x) if word in _TO_INTEGERS else x
    if to in ("f16", "bf16"):
        result = narrowed(x.astype(np.float32), to)
    elif is_float(origin) and not is_float(to):
        result = _saturated(x, to)
    else:
        result = x.astype(DTYPES[to])
    lanes.write(s.operands[0], result)


def _saturated(x: Array, to: str) -> Array:
    """A float as the nearest integer that there is, NaN as 0."""
    limits = np.iinfo(DTYPES[to])
    x = np.where(np.isnan(x), 0, x).astype(np.float64)
    inside = np.clip(x, -(2.0**62), 2.0**62).astype(np.int64).astype(DTYPES[to])
    highest, lowest = DTYPES[to](limits.max), DTYPES[to](limits.min)
    return np.where(x >= limits.max, highest, np.where(x <= limits.min, lowest, inside))


@instruction("mov", f"pred {_BITS} {_INTEGERS} f32 f64")
def _move(lanes: Lanes, s: Statement) -> None:
    result, source = s.operands
    if isinstance(source, Vector):
        size = SIZES[s.type] // len(source.parts)
        whole = BITS[SIZES[s.type]]
        packed = np.zeros(lanes.count, whole)
        for i, part in enumerate(source.parts):
            packed |= lanes.read(part, f"b{8 * size}").astype(whole) << whole(8 * size * i)
        lanes.write(result, packed)
    elif isinstance(result, Vector):
        size = SIZES[s.type] // len(result.parts)
        packed = lanes.read(source, s.type)
        for i, part in enumerate(result.parts):
            lanes.write(part, (packed >> packed.dtype.type(8 * size * i)).astype(BITS[size]))
    else:
        lanes.write(result, lanes.read(source, s.type))


@instruction("cvta", "to global shared u32 u64")
def _convert_address(lanes: Lanes, s: Statement) -> None:
    lanes.write(s.operands[0], lanes.read(s.operands[1], s.type))
