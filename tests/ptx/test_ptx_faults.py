"""What a GPU does not forgive, or not do the same way each time, is found."""

import numpy as np
import pytest

from tests.ptx.by_hand import aligned, kernel, run
from tests.ptx.faults import Fault, Race, UnknownInstruction
from tests.together import together

# %rd8: the place of a thread's own number of the first array.
OWN_PLACE = """
	mul.wide.u32 	%rd7, %r30, 4;
	add.s64 	%rd8, %rd0, %rd7;
"""
# %r1: four times the thread.
OWN_SHARED = "	shl.b32 	%r1, %r30, 2;\n"


def test_threads_write_what_is_theirs():
    x = aligned(64)
    run(kernel(OWN_PLACE + "st.global.b32 [%rd8], %r30;"), x)
    np.testing.assert_array_equal(x, np.arange(64))


FAR = "mul.lo.s32 %r1, %r30, 268435456; cvt.s64.s32 %rd7, %r1; add.s64 %rd8, %rd0, %rd7;"
SOME = "setp.lt.u32 %p1, %r30, 40; @%p1 "
TWO_BARRIERS = """
	setp.lt.u32 	%p1, %r30, 32;
	@%p1 bra 	$L_other;
	bar.sync 	0;
	bra 	$L_end;
$L_other:
	bar.sync 	0;
$L_end:
"""
BEYOND = r"by_hand, statement \d+: .*: out of bounds: \d+ lanes"
NEVER = r"bar.sync 0: \d\d threads never come to the barrier"
AT_ONCE = "two warps write different numbers to one place at once"
# By what is wrong: statements, numbers of the array, bytes of shared memory, and what is said.
FAULTS: dict[str, tuple[str, int, int, str]] = {
    "a store beyond an array": (OWN_PLACE + "st.global.b32 [%rd8], %r30;", 56, 0, BEYOND),
    "a load beyond an array": (OWN_PLACE + "ld.global.b32 %r1, [%rd8+32];", 56, 0, BEYOND),
    "a store in the last sector": (OWN_PLACE + "st.global.b32 [%rd8], %r1;", 57, 0, "out of bound"),
    "addresses of 32 bits": (FAR + "ld.global.b32 %r2, [%rd8];", 64, 0, "out of bounds"),
    "a misaligned vector": (
        OWN_PLACE + "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd8];", 128, 0, "misaligned",
    ),
    "a misaligned number": (OWN_PLACE + "ld.global.b32 %r1, [%rd8+2];", 128, 0, "misaligned"),
    "a misaligned vector of shared memory": (
        OWN_SHARED + "st.shared.v2.b32 [%r1], {%r30, %r30};", 1, 512, "misaligned",
    ),
    "the end of shared memory": (
        OWN_SHARED + "st.shared.b32 [%r1], %r30;", 1, 252, "byte 256 of 252 of shared memory",
    ),
    "two warps write": ("st.global.b32 [%rd0], %r30;", 1, 0, AT_ONCE),
    "two warps write shared memory": (
        "mov.b32 %r1, 0; st.shared.b32 [%r1], %r30;", 1, 4, AT_ONCE,
    ),
    "some threads at a barrier": (SOME + "bar.sync 0;", 1, 0, NEVER),
    "some threads that have returned": (SOME + "ret; bar.sync 0;", 1, 0, NEVER),
    "two barriers": (TWO_BARRIERS, 1, 0, "waits at several barriers"),
    "a shuffle with absent lanes": (
        "setp.lt.u32 %p1, %r30, 5; @%p1 shfl.sync.bfly.b32 %r1, %r30, 16, 31, -1;", 1, 0,
        "a lane that has not come to it",
    ),
}  # fmt: skip


@together("what", FAULTS)
def test_a_fault_is_found(what):
    body, count, shared, said = FAULTS[what]
    with pytest.raises(Race if said == AT_ONCE else Fault, match=said):
        run(kernel(body, shared_bytes=shared), aligned(count))


def test_a_load_may_end_with_the_arrays_last_sector():
    run(kernel(OWN_PLACE + "ld.global.b32 %r1, [%rd8];"), aligned(57))


# Each thread reads what the thread of the other warp wrote.
EXCHANGE = (
    OWN_PLACE
    + OWN_SHARED
    + """
	st.shared.b32 	[%r1], %r30;
	{barrier}
	xor.b32 	%r2, %r1, {apart};
	ld.shared.b32 	%r3, [%r2];
	st.global.b32 	[%rd8], %r3;
"""
)


def exchange(apart: int, barrier: str) -> np.ndarray:
    x = aligned(64)
    run(kernel(EXCHANGE.format(apart=4 * apart, barrier=barrier), shared_bytes=256), x)
    return x


def test_warps_exchange_numbers_over_a_barrier():
    np.testing.assert_array_equal(exchange(32, "bar.sync 0;"), np.arange(64) ^ 32)


@pytest.mark.parametrize("barrier", ["", "bar.warp.sync -1;"])
def test_a_race_between_warps_is_found(barrier):
    with pytest.raises(Race, match=r"ld\.shared\.b32.*read after a write by another warp"):
        exchange(32, barrier)


def test_lanes_of_one_warp_need_no_barrier():
    np.testing.assert_array_equal(exchange(1, "bar.warp.sync -1;"), np.arange(64) ^ 1)


def test_a_write_after_another_warps_read_is_a_race():
    body = "ld.global.b32 %r1, [%rd0]; {} setp.eq.b32 %p1, %r30, 0; @%p1 st.global.b32 [%rd0], %r1;"
    run(kernel(body.format("bar.sync 0;")), aligned(1))
    with pytest.raises(Race, match="write after a read by another warp"):
        run(kernel(body.format("")), aligned(1))


def test_warps_may_write_the_same_number_at_once():
    x = aligned(1)
    run(kernel("mov.b32 %r1, 7; st.global.b32 [%rd0], %r1;"), x)
    assert x[0] == 7


def test_a_race_between_programs_is_found():
    body = "setp.eq.b32 %p1, %r30, 0; @%p1 st.global.b32 [%rd0], %r31;"
    run(kernel(body), aligned(1))
    # As many as are run at once, and more.
    for programs in (2, 100):
        with pytest.raises(Race):
            run(kernel(body), aligned(1), programs=programs)


# Programs add 1 to a counter behind what they wrote; the last one reads what all of them wrote.
LAST_SUMS = """
	mul.wide.u32 	%rd7, %r31, 4;
	add.s64 	%rd8, %rd0, %rd7;
	setp.eq.b32 	%p1, %r30, 32;
	@%p1 st.global.b32 	[%rd8], %r31;
	{barrier}
	setp.eq.b32 	%p2, %r30, 0;
	@!%p2 bra 	$L_end;
	atom.global.gpu.{order}.add.u32 	%r1, [%rd1], 1;
	setp.ne.b32 	%p3, %r1, 2;
	@%p3 bra 	$L_end;
	ld.global.v2.b32 	{{%r2, %r3}}, [%rd0];
	ld.global.b32 	%r4, [%rd0+8];
	add.s32 	%r5, %r2, %r3;
	add.s32 	%r6, %r5, %r4;
	st.global.b32 	[%rd1], %r6;
$L_end:
"""


def last_sums(**given: str) -> int:
    numbers, counter = aligned(3), aligned(1)
    run(kernel(LAST_SUMS.format(**given), arrays=2), numbers, counter, programs=3)
    return int(counter[0])


def test_the_last_program_to_arrive_may_read_what_all_wrote():
    assert last_sums(barrier="bar.sync 0;", order="acq_rel") == 0 + 1 + 2


@pytest.mark.parametrize(
    "given",
    [{"barrier": "bar.sync 0;", "order": "relaxed"}, {"barrier": "", "order": "acq_rel"}],
    ids=["nothing is released", "another warp's store is not"],
)
def test_an_arrival_that_orders_nothing_is_a_race(given):
    with pytest.raises(Race, match="read after a write by another program"):
        last_sums(**given)


@pytest.mark.parametrize(
    ("statement", "name"),
    [("frobnicate.b32 %r1, %r2;", "frobnicate"), ("add.sat.s32 %r1, %r2, %r3;", ".sat of add")],
)
def test_an_unknown_instruction_is_named(statement, name):
    with pytest.raises(UnknownInstruction, match=f"knows no {name}"):
        kernel(statement)


def test_a_loop_without_end_is_found(monkeypatch):
    monkeypatch.setattr("tests.ptx.execution.MOST_STEPS", 100)
    with pytest.raises(Fault, match="no end after 100 statements"):
        run(kernel("$L_again:\n\tbra \t$L_again;"), aligned(1))
