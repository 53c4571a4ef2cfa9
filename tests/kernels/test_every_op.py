"""What every op of elementwise kernels does alike, over the table of `test_compile.CASES`."""

import importlib

import pytest

from tests.kernels.launches import (
    constants,
    floats_arrive_as_double,
    interpreted,
    offset_widths,
    watched,
)
from tests.kernels.test_compile import (
    CASES,
    LEAVES,
    OPERATORS,
    assert_same_bits,
    has_backend,
    inputs,
    op_of,
    outcome,
)

# Heads, samplers and attention have kernels of other forms, and tests of their own.
OTHERS = OPERATORS | {"advance_slots", "decode_attention", "rms_norm", "rotate_and_store", "swiglu"}
PLAIN = [case for case in CASES if op_of(case) not in OTHERS]
ON_TRITON = [case for case in PLAIN if has_backend(case)]
SEVERAL_BLOCKS = 700  # tokens of each of two rows
# By module of kernels, the arguments that each new value of compiles anew: shapes and kinds alone.
COMPILED_IN = {
    "divergence": {"MODE", "BLOCK", "VEC", "PART"},
    "gae": {"ROWS", "STEPS", "CHUNK"},
    "kl": {"KIND", "BLOCK", "ROWS", "STEPS"},
    "lm_head": {"BLOCK", "VEC", "PART", "CUT"},
    "moments": {"BLOCK", "CHUNK", "SHIFT_MEAN", "WHITENED"},
    "ppo_loss": {
        *("DLOGPROBS", "DVALUES", "KL_KIND", "POLICY_LOSS", "KL_APART", "BY_ROWS", "ROW_MEANS"),
        *("ROWS", "STEPS", "WIDE", "BLOCK"),
    },
    "sampling": {
        *("SIZE", "SPAN", "GROUPS", "ALL", "LISTED", "ROOM", "TILE", "VEC", "SAME_BITS"),
    },
}  # fmt: skip


@pytest.mark.parametrize("case", PLAIN)
def test_the_pytorch_path_reads_no_tensor_on_the_host(case):
    """As `test_compile` says of the Triton path of every op."""
    with watched():
        outcome(lambda x: CASES[case](x, "torch"), inputs(6))


@pytest.mark.parametrize("case", ON_TRITON)
def test_runs_give_the_same_bits(backend, case):
    first, second = (
        outcome(lambda x: CASES[case](x, backend), inputs(SEVERAL_BLOCKS)) for _ in range(2)
    )
    assert_same_bits(first, second)


@interpreted
@pytest.mark.parametrize("case", ON_TRITON)
def test_offsets_do_not_wrap_at_two_to_the_31(case):
    x = inputs(20)
    with offset_widths(*x[:LEAVES], x.mask, x.old) as widths:
        outcome(lambda x: CASES[case](x, "triton"), x)
    assert widths == {64}


@interpreted
@pytest.mark.parametrize("case", ON_TRITON)
def test_floats_that_arrive_as_double_change_no_bit(case):
    """As they do from compiled code."""
    plain = outcome(lambda x: CASES[case](x, "triton"), inputs(20))
    with floats_arrive_as_double():
        doubled = outcome(lambda x: CASES[case](x, "triton"), inputs(20))
    assert_same_bits(doubled, plain)


@pytest.mark.parametrize("module", COMPILED_IN)
def test_numbers_compile_once(module):
    kernels = importlib.import_module(f"fastrl_kernels._triton.{module}")
    assert constants(kernels) == COMPILED_IN[module]
