"""PTX's types of numbers in NumPy's, where there is no bf16, and what a GPU approximates."""

from typing import Any

import numpy as np

Array = Any  # np.ndarray of one number per lane

# What a register or a place in memory of so many bytes holds.
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
# Two halves in a register, and bf16, are handled as bits.
DTYPES: dict[str, Any] = {
    "pred": np.bool_,
    **{f"{kind}{8 * size}": bits for size, bits in BITS.items() for kind in "bu"},
    **{f"s{8 * size}": signed for size, signed in _SIGNED.items()},
    **{"f16": np.float16, "f32": np.float32, "f64": np.float64},
    **{"bf16": np.uint16, "f16x2": np.uint32, "bf16x2": np.uint32},
}
SIZES = {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()}
SMALLEST_NORMAL = np.float32(2.0**-126)


def is_float(name: str) -> bool:
    return name.startswith(("f", "bf"))


def widened(bits: Array, name: str) -> Array:
    """Numbers of 16 bits as fp32."""
    if name.startswith("bf16"):
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def narrowed(values: Array, name: str) -> Array:
    """fp32 rounded to the nearest of 16 bits, ties to even; as bits."""
    if not name.startswith("bf16"):
        return values.astype(np.float16).view(np.uint16)
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    nearest = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), nearest)


def halves(bits: Array) -> tuple[Array, Array]:
    """A register's lower and upper 16 bits."""
    return (bits & np.uint32(0xFFFF)).astype(np.uint16), (bits >> np.uint32(16)).astype(np.uint16)


def joined(lower: Array, upper: Array) -> Array:
    return lower.astype(np.uint32) | (upper.astype(np.uint32) << np.uint32(16))


def flushed(x: Array) -> Array:
    """Subnormal numbers as zeros of their signs."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def as_stored(values: Array, size: int) -> Array:
    """Numbers as the bits of a register of ``size`` bytes: signed ones keep their value."""
    if values.dtype.itemsize != size:
        if values.dtype.kind == "i":
            values = values.astype(_SIGNED[size])
        else:
            values = values.view(BITS[values.dtype.itemsize]).astype(BITS[size])
    return np.ascontiguousarray(values).view(BITS[size])


def approximated(exact: Array, bound: float, absolute: Array | None = None) -> Array:
    """Numbers of fp64 in fp32, off by at most ``bound`` of each, and by ``absolute`` besides.

    How far is drawn from the number's bits, so that equal numbers stay equal. A power of two is
    what it is: a GPU has no doubt about those, and kernels rely on exp2(0) = 1.
    """
    exact = np.asarray(exact, np.float64)
    bits = exact.astype(np.float32).view(np.uint32)
    drawn = ((bits * np.uint32(2654435761)) >> np.uint32(8)).astype(np.float64) / 2**23 - 1
    off = exact * drawn * bound
    if absolute is not None:
        off = np.where(absolute > 0, drawn * absolute, off)
    # frexp's mantissas begin at a half.
    certain = ~np.isfinite(exact) | (exact == 0) | (np.abs(np.frexp(exact)[0]) == 0.5)
    return np.where(certain, exact, exact + off).astype(np.float32)
