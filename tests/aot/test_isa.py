"""What the ahead-of-time gate reads from assembly, intermediate code and resource listings."""

from textwrap import dedent

import pytest

from tests.aot.isa import Operand, parse_amdgcn_usage, parse_assembly, parse_loops, parse_ttgir


def test_unreadable_resource_usage_raises():
    with pytest.raises(ValueError, match=r"no \.vgpr_spill_count"):
        parse_amdgcn_usage("s_endpgm")


@pytest.mark.parametrize(
    "spilled", ["vgpr_spill_count", "private_segment_fixed_size", "sgpr_spill_count"]
)
def test_amdgcn_metadata_reports_spills(spilled):
    counts = {
        "agpr_count": 0, "private_segment_fixed_size": 0, "sgpr_spill_count": 0, "vgpr_count": 64,
        "vgpr_spill_count": 0,
    }  # fmt: skip
    text = "\n".join(f"    .{name}:     {count}" for name, count in counts.items())
    assert parse_amdgcn_usage(text).spills == 0
    assert parse_amdgcn_usage(text).registers == 64
    usage = parse_amdgcn_usage(text.replace(f".{spilled}:     0", f".{spilled}:     3"))
    assert (usage.scalar_spills if spilled == "sgpr_spill_count" else usage.spills) == 3
    assert usage.spills + usage.scalar_spills == 3
    assert usage.spill_detail == f".{spilled}:3"


PTX_WIDTHS = [
    ("ld.global.b16 { %rs1 }, [ %rd1 + 0 ];", "load", 2),
    ("@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];", "load", 16),
    ("@!%p1 ld.global.L1::evict_first.v2.b64 { %rd1, %rd2 }, [ %rd3 + 0 ];", "load", 16),
    ("ld.global.v8.b32 { %r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8 }, [ %rd1 ];", "load", 32),
    ("ld.volatile.global.b8 %rs1, [%rd1];", "load", 1),
    ("ld.global.nc.f32 %f1, [%rd1];", "load", 4),
    ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, 0x10;", "load", 16),
    ("@%p2 st.global.v2.b32 [ %rd1 + 0 ], { %r1, %r2 };", "store", 8),
]
AMDGCN_WIDTHS = [
    ("global_load_dwordx4 v[0:3], v4, s[0:1]", "load", 16),
    ("buffer_load_dwordx2 v[0:1], v2, s[0:3], 0 offen", "load", 8),
    ("buffer_load_dword v0, v2, s[0:3], 0 offen lds", "load", 4),
    ("buffer_load_ushort v0, v2, s[0:3], 0 offen", "load", 2),
    ("global_load_short_d16_hi v0, v2, s[0:1]", "load", 2),
    ("global_load_ubyte v0, v2, s[0:1]", "load", 1),
    ("global_load_b128 v[0:3], v4, s[0:1]", "load", 16),
    ("buffer_store_short_d16_hi v0, v2, s[0:3], 0 offen", "store", 2),
    ("global_store_dwordx4 v4, v[0:3], s[0:1]", "store", 16),
]


@pytest.mark.parametrize(
    ("target", "line", "kind", "width"),
    [("cuda", *row) for row in PTX_WIDTHS] + [("hip", *row) for row in AMDGCN_WIDTHS],
)
def test_access_widths(target, line, kind, width):
    (access,) = parse_assembly(f"\t{line}\n", target)
    assert (access.kind, access.width) == (kind, width)


@pytest.mark.parametrize(
    "line",
    ["ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];", "ld.param.b64 %rd1, [_k_param_0];", "ret;"],
)
def test_ptx_leaves_other_memories_alone(line):
    assert parse_assembly(f"\t{line}\n", "cuda") == []


PTX = dedent("""\
    .visible .entry _k(
    )
    {
        ld.global.b16   %rs1, [%rd1];
    $L__BB0_1:                              // outer loop: a peeled tile, then the main loop
        .loc    1 20 8                          // op.py:20:8
        ld.global.b16   %rs2, [%rd1];
        @%p1 bra    $L__BB0_3;
    $L__BB0_2:
        .loc    1 10 4, function_name $L__info_string0, inlined_at 1 30 2 // op.py:10:4
        // begin inline asm
        mov.u32 %r1, 0x0;
        .loc    1 11 4                          // op.py:11:4
        @%p2 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd2 + 0 ];
        // end inline asm
        @%p3 bra    $L__BB0_2;
    $L__BB0_3:
        st.global.b32   [%rd3], %r5;
        @%p4 bra    $L__BB0_1;
        bra.uni     $L__BB0_4;
    $L__BB0_4:
        ld.global.b8    %rs3, [%rd1];
        ret;
    }
        .file   1 "/somewhere" "op.py"
    """)


def test_only_innermost_loops_count_as_main_loops():
    in_loop = [(access.width, access.loop is not None) for access in parse_assembly(PTX, "cuda")]
    assert in_loop == [(2, False), (2, False), (16, True), (4, False), (1, False)]


def test_inline_assembly_keeps_the_position_of_its_call():
    wide = parse_assembly(PTX, "cuda")[2]
    assert wide.where == (("op.py", 10, 4), ("op.py", 30, 2))


def test_amdgcn_loop_with_a_skipped_body_and_moved_blocks():
    text = dedent("""\
            .file   1 "/somewhere" "op.py"
            s_branch .LBB0_3
        .LBB0_1:
            s_and_saveexec_b64 s[0:1], vcc
            s_cbranch_execz .LBB0_2
            .loc    1 10 4 is_stmt 0                ; op.py:10:4 @[ op.py:30:2 ]
            global_load_dwordx4 v[0:3], v4, s[0:1]
        .LBB0_2:
            s_cbranch_scc0 .LBB0_4
        .LBB0_3:
            s_branch .LBB0_1
        .LBB0_4:
            global_store_dword v0, v1, s[0:1]
            s_endpgm
        """)
    load, store = parse_assembly(text, "hip")
    assert load.loop is not None
    assert load.where == (("op.py", 10, 4), ("op.py", 30, 2))
    assert store.loop is None


TRACED = """\
tt.func @_k(%x_ptr: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("x_ptr"(#loc)), %arg1: !tt.ptr<bf16> loc("y_ptr"(#loc))) {
  %0 = tt.addptr %x_ptr, %row : !tt.ptr<f32>, i64 loc(#loc1)
  %1:2 = scf.for %i = %a to %b step %c iter_args(%m = %cst, %p = %0) -> (f32, !tt.ptr<f32>) {
    %2 = tt.splat %p : !tt.ptr<f32> -> tensor<1024x!tt.ptr<f32>, #b> loc(#loc1)
    %3 = tt.addptr %2, %at : tensor<1024x!tt.ptr<f32>, #b>, tensor<1024xi32, #b> loc(#loc1)
    %4 = tt.load %3, %mask : tensor<1024x!tt.ptr<f32>, #b> loc(#loc1)
    amdg.buffer_store %4, %arg1[%at], %mask : tensor<1024xbf16, #b> loc(#loc1)
    %5 = tt.load %unknown : !tt.ptr<f32> loc(#loc1)
"""  # noqa: E501
NAMED_AGAIN = """\
tt.func @_k(%x_ptr: !tt.ptr<f32> loc("x_ptr"(#loc)), %y_ptr: !tt.ptr<f32> loc("y_ptr"(#loc))) {
  scf.if %c {
    %2 = tt.addptr %x_ptr, %row : !tt.ptr<f32>, i64 loc(#loc1)
    %3 = tt.load %2 : !tt.ptr<f32> loc(#loc1)
  }
  scf.if %d {
    %2 = tt.addptr %y_ptr, %row : !tt.ptr<f32>, i64 loc(#loc1)
    %3 = tt.load %2 : !tt.ptr<f32> loc(#loc1)
  }
  %2 = tt.int_to_ptr %address : i64 -> !tt.ptr<f32> loc(#loc1)
  %3 = tt.load %2 : !tt.ptr<f32> loc(#loc1)
"""


@pytest.mark.parametrize("text", [TRACED, NAMED_AGAIN], ids=["arguments", "names used again"])
def test_ttgir_traces_pointers_to_arguments(text):
    assert [operand.pointer for operand in parse_ttgir(text)] == ["x_ptr", "y_ptr", ""]


def test_ttgir_gives_element_types_and_call_chains():
    operands = parse_ttgir(
        dedent("""\
        #loc1 = loc("/somewhere/op.py":10:4)
        #loc5 = loc("x"(#loc1))
        #loc6 = loc(callsite(#loc5 at #loc2))
          %x = tt.load %p, %m, %c : tensor<2048x!tt.ptr<bf16>, #blocked> loc(#loc6)
          %y = amdg.buffer_load %b[%o], %m : tensor<8x256xf32, #blocked> loc(#loc6)
          %z = tt.load %s : !tt.ptr<i64> loc(#loc2)
          tt.store %q, %v, %m : tensor<2048x!tt.ptr<i8>, #blocked> loc(#loc2)
          %w = tt.reduce %x : tensor<2048xf32, #blocked> loc(#loc2)
        #loc2 = loc("/somewhere/op.py":30:2)
        """)
    )
    chain = (("op.py", 10, 4), ("op.py", 30, 2))
    assert operands == [
        Operand("load", "bf16", 2048, chain),
        Operand("load", "f32", 2048, chain),
        Operand("load", "i64", 0, chain[1:]),
        Operand("store", "i8", 2048, chain[1:]),
    ]
    assert [o.element_bytes for o in operands] == [2, 4, 8, 1]


SASS = """
        /*0000*/                   LDG.E R0, [R2.64] ;
.L_x_0:
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/              @!P1 LDG.E.128 R8, [R2.64+0x10] ;
        /*0030*/                   LDG.E.64 R12, [R2.64+0x20] ;
        /*0040*/                   FADD R0, R0, R13 ;
        /*0050*/                   LDG.E.U16 R16, [R2.64+0x40] ;
        /*0060*/                   FADD R0, R0, R7 ;
        /*0070*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0080*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0090*/               @P0 BRA `(.L_x_1) ;
        /*00a0*/                   STG.E [R2.64], R0 ;
        /*00b0*/                   EXIT ;
.L_x_2:
        /*00c0*/                   BRA `(.L_x_2);
"""


def test_a_loop_of_sass_is_counted_without_what_is_loaded_under_a_condition():
    (loop,) = parse_loops(SASS, "cuda")
    assert (loop.instructions, loop.moved) == (7, 16 + 8 + 2)
    # 16 + 16 + 8 bytes until the fourth instruction uses the 8, then 2 more; the second round adds
    # what nobody has used.
    assert loop.in_flight == 16 + 16 + 8 + 2
    assert loop.instructions_per_byte == 7 / 26


# By what is counted: a target, its code, and of its loop the instructions, the bytes that are moved
# and those in flight; None where another test says it.
LOOPS = {
    # A group of copies into shared memory is waited for, one stays open.
    "copies into shared memory": ("cuda", """
.L_x_0:
        /*0000*/                   DEPBAR.LE SB0, 0x1 ;
        /*0010*/                   LDGSTS.E.BYPASS.128 [R2], desc[UR4][R6.64] ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R2+0x800], desc[UR4][R8.64] ;
        /*0030*/                   LDGDEPBAR ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
""", (None, 32, 64)),
    "a uniform predicate goes on where it is not taken": ("cuda", """
.L_x_0:
        /*0000*/                   LDG.E.128 R4, [R2.64] ;
        /*0010*/                   BRA.U !UP0, `(.L_x_1) ;
        /*0020*/                   FADD R0, R0, R4 ;
        /*0030*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0040*/                   EXIT ;
""", (4, None, None)),
    "a loop of amdgcn": ("hip", """
kernel:
\ts_load_dwordx2 s[0:1], s[2:3], 0x0
.LBB0_1:
\tglobal_load_dwordx4 v[0:3], v4, s[0:1]
\ts_waitcnt vmcnt(0)
\tv_add_f32_e32 v5, v0, v1
\ts_cbranch_scc1 .LBB0_1
\tglobal_store_dword v4, v5, s[0:1]
\ts_endpgm
""", (4, 16, 16)),
    # The first has come as the third is asked for.
    "a wait of amdgcn leaves the latest open": ("hip", """
kernel:
.LBB0_1:
\tglobal_load_dwordx4 v[0:3], v8, s[0:1]
\tglobal_load_dwordx4 v[4:7], v8, s[0:1]
\tglobal_store_dwordx4 v8, v[0:3], s[0:1]
\ts_waitcnt vmcnt(2) lgkmcnt(0)
\tglobal_load_dwordx4 v[0:3], v8, s[0:1]
\ts_waitcnt vmcnt(0)
\ts_cbranch_scc1 .LBB0_1
""", (None, 64, 32)),
}  # fmt: skip


@pytest.mark.parametrize("what", LOOPS)
def test_a_loop_is_counted(what):
    target, text, expected = LOOPS[what]
    (loop,) = parse_loops(text, target)
    found = (loop.instructions, loop.moved, loop.in_flight)
    assert [x for x, y in zip(found, expected, strict=True) if y is not None] == [
        y for y in expected if y is not None
    ]


def test_code_without_a_loop_is_counted_as_a_whole():
    body = "\n".join(line for line in SASS.splitlines() if "BRA" not in line)
    (all_of_it,) = parse_loops(body, "cuda")
    assert (all_of_it.instructions, all_of_it.moved) == (10, 4 + 16 + 8 + 2 + 4)
    assert parse_loops("        /*0000*/                   EXIT ;", "cuda") == []
