"""Single instructions against NumPy, or numbers by hand."""

import numpy as np
import pytest
import torch

from tests.ptx.by_hand import aligned, kernel, run
from tests.ptx.formats import approximated, narrowed, widened

PLACES = """
	mul.wide.u32 	%rd7, %r30, 4;
	add.s64 	%rd3, %rd0, %rd7;
	add.s64 	%rd4, %rd1, %rd7;
	add.s64 	%rd5, %rd2, %rd7;
	ld.global.b32 	%r1, [%rd3];
	ld.global.b32 	%r2, [%rd4];
	{statement}
	st.global.b32 	[%rd5], %r3;
"""


def of_two(statement: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """What a statement makes of ``%r1`` and ``%r2`` in ``%r3``."""
    arrays = [aligned(64, x.dtype.type), aligned(64, y.dtype.type), aligned(64)]
    arrays[0][:], arrays[1][:] = x, y
    run(kernel(PLACES.format(statement=statement), arrays=3), *arrays)
    return arrays[2]


@pytest.fixture
def integers() -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(0).integers(-(2**31), 2**31, (2, 64)).astype(np.int32)
    drawn[:, :4] = [[0, -1, 2**31 - 1, -(2**31)], [1, -1, 7, 3]]
    return drawn[0], drawn[1]


@pytest.fixture
def floats() -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    drawn[:, :5] = [[np.nan, 1, np.inf, -np.inf, 0.0], [1, np.nan, -np.inf, -np.inf, -0.0]]
    return drawn[0], drawn[1]


INTEGERS = {
    "add.s32 %r3, %r1, %r2;": lambda x, y: x + y,
    "mul.lo.s32 %r3, %r1, %r2;": lambda x, y: x * y,
    "mul.hi.u32 %r3, %r1, %r2;": lambda x, y: x.view("u4").astype("u8") * y.view("u4") >> 32,
    "mul.hi.s32 %r3, %r1, %r2;": lambda x, y: x.astype("i8") * y >> 32,
    "mad.lo.s32 %r3, %r1, %r2, 5;": lambda x, y: x * y + np.int32(5),
    "div.s32 %r3, %r1, %r2;": lambda x, y: np.trunc(x / y.astype("f8")),
    "rem.s32 %r3, %r1, %r2;": lambda x, y: x - np.trunc(x / y.astype("f8")) * y,
    "min.u32 %r3, %r1, %r2;": lambda x, y: np.minimum(x.view("u4"), y.view("u4")),
    "shl.b32 %r3, %r1, 33;": lambda x, y: x * 0,
    "shr.s32 %r3, %r1, 40;": lambda x, y: x >> 31,
    "shr.u32 %r3, %r1, 9;": lambda x, y: x.view("u4") >> 9,
    "bfe.u32 %r3, %r1, 5, 9;": lambda x, y: x.view("u4") >> 5 & 511,
    "bfe.s32 %r3, %r1, 23, 9;": lambda x, y: x >> 23,
    "bfi.b32 %r3, %r1, %r2, 8, 8;": lambda x, y: y & ~0xFF00 | (x & 255) << 8,
    "lop3.b32 %r3, %r1, %r2, %r30, 0x96;": lambda x, y: x ^ y ^ np.arange(64),
    "prmt.b32 %r3, %r1, %r2, 0x3210;": lambda x, y: x,
    "prmt.b32 %r3, %r1, %r2, 0x5410;": lambda x, y: x & 0xFFFF | (y & 0xFFFF) << 16,
    "shf.l.wrap.b32 %r3, %r1, %r1, 7;": lambda x, y: x.view("u4") << 7 | x.view("u4") >> 25,
    "popc.b32 %r3, %r1;": lambda x, y: [bin(p).count("1") for p in x.view("u4")],
    "clz.b32 %r3, %r1;": lambda x, y: [32 - int(p).bit_length() for p in x.view("u4")],
    "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r3, %r1, %r2, %p1;": np.minimum,
    "cvt.rn.f32.s32 %r3, %r1;": lambda x, y: x.astype("f4").view("i4"),
}  # fmt: skip


@pytest.mark.parametrize("statement", INTEGERS)
def test_integers(statement, integers):
    x, y = integers
    expected = np.asarray(INTEGERS[statement](x, y)).astype(np.int64)
    np.testing.assert_array_equal(of_two(statement, x, y), (expected % 2**32).astype(np.uint32))


FLOATS = {
    "add.f32 %r3, %r1, %r2;": np.add,
    "fma.rn.f32 %r3, %r1, %r2, 0f3F800000;": lambda x, y: x.astype("f8") * y + 1,
    "min.f32 %r3, %r1, %r2;": np.fmin,
    "max.NaN.f32 %r3, %r1, %r2;": np.maximum,
    "div.rn.f32 %r3, %r1, %r2;": np.divide,
    "abs.f32 %r3, %r1;": lambda x, y: np.abs(x),
    "sqrt.rn.f32 %r3, %r1;": lambda x, y: np.sqrt(x),
    "cvt.rmi.f32.f32 %r3, %r1;": lambda x, y: np.floor(x),
    "setp.neu.f32 %p1, %r1, %r2; selp.f32 %r3, %r1, 0f00000000, %p1;": (
        lambda x, y: np.where((x != y) | np.isnan(x + y), x, 0)
    ),
    "setp.gt.f32 %p1, %r1, %r2; selp.f32 %r3, %r1, 0f00000000, %p1;": (
        lambda x, y: np.where(x > y, x, 0)
    ),
    "cvt.rn.bf16x2.f32 %r3, %r1, %r2; shl.b32 %r3, %r3, 16;": (
        lambda x, y: torch.tensor(y).bfloat16().float().numpy()
    ),
}


@pytest.mark.parametrize("statement", FLOATS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which expects
def test_floats(statement, floats):
    expected = np.asarray(FLOATS[statement](*floats)).astype(np.float32)
    np.testing.assert_array_equal(of_two(statement, *floats).view(np.float32), expected)


@pytest.mark.parametrize(("statement", "exact", "bound"), [
    ("ex2.approx.ftz.f32 %r3, %r1;", lambda x, y: np.exp2(x), 2**-22.5),
    ("div.full.f32 %r3, %r1, %r2;", lambda x, y: x / y, 2**-22),
    ("sqrt.approx.f32 %r3, %r2;", lambda x, y: np.sqrt(y), 2**-23),
    ("lg2.approx.f32 %r3, %r2;", lambda x, y: np.log2(y), 2**-22),
])  # fmt: skip
def test_approximations_are_off_and_within_their_bounds(statement, exact, bound):
    x, y = np.random.default_rng(0).uniform(2, 9, (2, 64)).astype(np.float32)
    found = of_two(statement, x, y).view(np.float32)
    expected = exact(x.astype(np.float64), y.astype(np.float64))
    off = np.abs(found / expected - 1)
    # Each result is rounded besides.
    assert bound / 2 < off.max() <= bound + 2.0**-24


def test_a_logarithm_near_1_is_off_by_an_absolute_error():
    x = np.random.default_rng(0).uniform(0.99, 1.01, 64).astype(np.float32)
    found = of_two("lg2.approx.f32 %r3, %r1;", x, x).view(np.float32)
    off = np.abs(found - np.log2(x.astype(np.float64)))
    assert 2.0**-23 < off.max() <= 2.0**-22 + 2.0**-30


def test_powers_of_two_are_not_off():
    exact = np.array([1.0, 0.5, 8.0, 0.0, np.inf])
    np.testing.assert_array_equal(approximated(exact, 0.1), exact)


def test_16_bits_are_rounded_as_torch_rounds():
    values = torch.randn(999, generator=torch.Generator().manual_seed(0)) * 100
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        expected = values.to(dtype).float().numpy()
        np.testing.assert_array_equal(widened(narrowed(values.numpy(), name), name), expected)


def test_lanes_that_part_come_together_again():
    body = """
	mov.b32 	%r3, 0;
	and.b32 	%r4, %r30, 7;
$L_loop:
	add.s32 	%r3, %r3, 1;
	setp.lt.u32 	%p1, %r3, %r4;
	@%p1 bra 	$L_loop;
	bar.sync 	0;
	setp.gt.u32 	%p2, %r4, 3;
	@%p2 bra 	$L_high;
	add.s32 	%r3, %r3, 100;
	bra 	$L_end;
$L_high:
	add.s32 	%r3, %r3, 200;
$L_end:
	redux.sync.add.s32 	%r5, %r30, -1;
"""
    thread = np.arange(64)
    low = thread % 8
    found = of_two(body, thread.astype(np.int32), thread.astype(np.int32))
    np.testing.assert_array_equal(found, np.maximum(low, 1) + np.where(low > 3, 200, 100))


@pytest.mark.parametrize(("kind", "source"), [
    ("bfly.b32 %r3, %r1, 5, 31", lambda lane: lane ^ 5),
    ("up.b32 %r3, %r1, 3, 0", lambda lane: np.where(lane % 32 < 3, lane, lane - 3)),
    ("down.b32 %r3, %r1, 3, 31", lambda lane: np.where(lane % 32 > 28, lane, lane + 3)),
    ("idx.b32 %r3, %r1, 9, 31", lambda lane: lane // 32 * 32 + 9),
])  # fmt: skip
def test_shuffles(kind, source):
    lane = np.arange(64)
    found = of_two(f"shfl.sync.{kind}, -1;", lane.astype(np.int32), lane.astype(np.int32))
    np.testing.assert_array_equal(found, source(lane))
