"""The ahead-of-time gate can fail: on planted accesses, and on real kernels with known faults."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.ops import Expect
from tests.aot import __main__ as aot
from tests.aot import versions, worker
from tests.aot.bounds import Need
from tests.aot.conftest import TOY_TARGETS
from tests.aot.isa import Access, Loop, Operand
from tests.aot.judge import Widths, judge
from tests.aot.worker import (
    ABSENT,
    TARGETS,
    CaseError,
    Report,
    Row,
    blocks_per_processor,
    covering,
    extremes,
    main_loops,
    over_limits,
)

HERE = (("op.py", 10, 4),)


def _verdict(
    widths, element="bf16", elements=2048, loop=0, demand=16, kind="load", any_tile=False, exempt=""
):
    accesses = [Access(kind, width, 1, "", HERE, loop) for width in widths]
    operand = Operand(kind, element, elements, HERE, "x_ptr")
    expect = Expect(demand, demand, any_tile, frozenset({exempt}))
    return judge(accesses, [operand], 128, expect)


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_narrow_access_in_a_loop_fails(kind):
    assert not _verdict([16, 16], kind=kind).faults
    verdict = _verdict([16, 2], kind=kind)
    assert verdict.faults == (f"2-byte {kind}s in the main loop (x_ptr, op.py:10)",)
    assert len(verdict.lines) == 1


def test_widths_wider_than_demanded_pass():
    assert _verdict([32]).loads == Widths(32, 32)
    assert not _verdict([32]).faults


def test_a_body_without_loops_is_judged_whole():
    assert _verdict([4], element="f32", loop=None).faults


def test_small_tiles_may_be_narrow_beside_wide_ones():
    wide = Access("load", 16, 1, "", HERE, 0)
    per_row = Access("load", 4, 2, "", (("op.py", 11, 4),), 0)
    operands = [Operand("load", "bf16", 2048, HERE), Operand("load", "f32", 16, per_row.where)]
    assert not judge([wide, per_row], operands, 128, Expect()).faults
    assert judge([per_row], operands, 128, Expect()).faults, "nothing in the loop is wide"


def test_masks_and_integers_are_not_judged():
    assert _verdict([1], element="i1").loads is None
    assert not _verdict([1], element="i1").faults


def test_accesses_outside_of_the_loop_do_not_excuse_those_inside():
    accesses = [Access("load", 16, 1, "", HERE, None), Access("load", 2, 2, "", HERE, 0)]
    assert judge(accesses, [Operand("load", "bf16", 2048, HERE)], 128, Expect()).faults


def test_scalar_loads_in_a_loop_fail_where_nothing_else_is_loaded():
    assert _verdict([4], element="f32", elements=0).faults


def test_an_access_without_line_information_is_judged():
    untraced = Access("load", 2, 1, "", (), 0)
    assert judge([untraced], [], 128, Expect()).faults


def test_an_access_without_line_information_passes_where_every_tile_is_exempt():
    chains = [(("op.py", row, 4),) for row in (10, 11)]
    a, b = (
        Operand("load", "f32", 512, chain, name) for chain, name in zip(chains, "ab", strict=True)
    )
    of_a, of_b = (Access("load", 16, row, "", chain, 0) for row, chain in enumerate(chains))
    untraced = Access("load", 4, 2, "", (), 0)
    expect = Expect(any_tile=True, exempt=frozenset({"a"}))
    assert not judge([of_a, untraced], [a], 128, expect).faults
    assert judge([of_a, of_b, untraced], [a, b], 128, expect).faults, "it may be one of b's"


def test_one_helper_inlined_for_several_operands_is_told_apart_by_its_callers():
    chains = [HERE + (("op.py", row, 2),) for row in (30, 31)]
    operands = [Operand("load", "bf16", 2048, chains[0]), Operand("load", "i1", 2048, chains[1])]
    accesses = [Access("load", 16, 1, "", chains[0], 0), Access("load", 2, 2, "", chains[1], 0)]
    assert not judge(accesses, operands, 128, Expect()).faults


def test_small_tiles_are_let_pass_where_the_case_leaves_their_size_open():
    # 4 elements of 2 bytes for each of 128 threads
    assert _verdict([8], elements=512).faults
    assert not _verdict([8], elements=512, any_tile=True).faults
    assert _verdict([4], elements=512, any_tile=True).faults, "half of what the tile holds"


def test_exempt_pointers_are_not_judged():
    assert _verdict([2], exempt="x_ptr", any_tile=True).loads is None
    assert not _verdict([2], exempt="x_ptr", any_tile=True).faults
    assert _verdict([2], exempt="y_ptr", any_tile=True).faults


def test_exempt_helpers_must_leave_a_main_loop_to_judge():
    end = Operand("load", "bf16", 2048, (("rows.py", 55, 4), *HERE))
    main = Operand("load", "bf16", 2048, (("op.py", 12, 4),))
    narrow, wide = Access("load", 2, 1, "", end.where, 0), Access("load", 16, 2, "", main.where, 1)
    expect = Expect(exempt=frozenset({"load_end"}))
    spans = {"load_end": ("rows.py", range(50, 60)), "other": ("op.py", range(1, 99))}
    assert not judge([narrow, wide], [end, main], 128, expect, spans).faults
    alone = judge([narrow], [end, main], 128, expect, spans)
    assert alone.faults == ("no loads but those of load_end",)


def test_merged_scalars_without_a_line_are_matched_with_what_is_left():
    tile = Operand("load", "f32", 1024, HERE)
    scalars = [Operand("load", "f32", 1, (("op.py", row, 4),)) for row in (20, 21, 22)]
    wide, merged = Access("load", 16, 1, "", HERE), Access("load", 12, 2, "", (("op.py", 0, 0),))
    assert not judge([wide, merged], [tile, *scalars], 128, Expect()).faults
    assert judge([wide, merged], [tile], 128, Expect()).faults, "nothing else it could be"


def test_no_demand_reports_widths_and_passes():
    verdict = _verdict([2], demand=0)
    assert (str(verdict.loads), verdict.faults) == ("2", ())


@pytest.mark.parametrize("target", TOY_TARGETS)
def test_toy_kernels_are_told_apart(toy_reports, target):
    report = toy_reports[target]
    rows = {row.op: row for row in report.rows}
    assert set(rows) == {"wide", "narrow", "spilling", "tuned", "busy", "optional"}, report.errors

    assert rows["wide"].faults == ()
    assert (rows["wide"].loads, rows["wide"].stores, rows["wide"].spills) == ("16", "16", 0)
    assert rows["wide"].registers > 0

    assert [fault.split(" (")[0] for fault in rows["narrow"].faults][:2] == [
        "2-byte loads in the main loop",
        "2-byte stores in the main loop",
    ]
    assert "toy_kernels.py" in rows["narrow"].lines[0]

    assert rows["spilling"].spills > 0
    assert rows["spilling"].faults[0].startswith("spills (")


def test_a_loop_of_many_instructions_per_byte_is_marked(toy_reports):
    rows = {row.op: row for row in toy_reports["gfx942"].rows}
    assert rows["busy"].per_byte.endswith("!")
    assert 16 < float(rows["busy"].per_byte[:-1]) < 32  # 64 exponentials for 4 bytes, and the rest
    assert not rows["wide"].per_byte.endswith("!")


@pytest.mark.parametrize(("target", "warps", "registers", "shared", "blocks"), [
    ("sm_90", 4, 64, 0, 8),  # 8 · 128 threads of 64 registers are all 65536
    ("sm_90", 4, 65, 0, 7),
    ("sm_90", 1, 32, 0, 32),
    ("sm_90", 4, 32, 100 * 1024, 2),
    ("sm_80", 4, 32, 100 * 1024, 1),
    ("gfx942", 2, 112, 4096, 8),  # 4 wavefronts on each of 4 units
    ("gfx942", 2, 32, 40 * 1024, 1),
])  # fmt: skip
def test_blocks_of_a_multiprocessor(target, warps, registers, shared, blocks):
    assert blocks_per_processor(TARGETS[target], warps, registers, shared) == blocks


def test_a_kernel_beyond_its_limits_fails(monkeypatch):
    target, kib = TARGETS["gfx942"], 1024
    assert over_limits(target, "op._op_kernel", 64 * kib, [8.9], 0) == []
    (shared,) = over_limits(target, "op._op_kernel", 64 * kib + 1, [], 0)
    assert shared == "65537 bytes of shared memory, gfx942 has 65536"
    assert over_limits(TARGETS["sm_80"], "op._op_kernel", 163 * kib, [], 0) == []
    assert over_limits(TARGETS["sm_80"], "op._op_kernel", 163 * kib + 1, [], 0)
    monkeypatch.setitem(worker.MOST_PER_BYTE, "op._op_kernel", 3.0)
    assert over_limits(target, "op._op_kernel", 0, [2.0, 3.0], 0) == []
    (busy,) = over_limits(target, "op._op_kernel", 0, [2.0, 3.1], 0)
    assert busy.startswith("3.1 instructions per byte in the main loop, above its bound, 3.0")


def test_a_main_loop_moves_the_most_bytes_or_has_the_most_instructions(monkeypatch):
    tokens, merge = Loop(340, 128, 256), Loop(134, 160, 40)
    assert main_loops([tokens, merge], "op._op_kernel") == [merge]
    monkeypatch.setattr(worker, "BY_INSTRUCTIONS", {"op._op_kernel"})
    assert main_loops([tokens, merge], "op._op_kernel") == [tokens]
    assert main_loops([], "op._op_kernel") == []


def test_a_kernel_whose_roof_is_the_memory_fails_where_it_is_not(monkeypatch):
    target, kernel, cases = TARGETS["sm_90"], "op._op_kernel", ("op[bf16 V=503 softcap]",)
    need = Need(kernel, "read once", ("sm_90",), 32 * 1024, without=("softcap",))
    monkeypatch.setattr(worker, "NEEDS", (need,))
    kib = 1024
    assert over_limits(target, kernel, 0, [6.9], 32 * kib, ("op[bf16]",)) == []
    assert over_limits(TARGETS["sm_100"], kernel, 0, [6.9], 32 * kib, ("op[bf16]",)) == []
    amd = TARGETS["gfx942"]  # of whose memory a processor has a smaller share
    assert over_limits(amd, kernel, 0, [6.9], 22 * kib, ("op[bf16]",)) == []
    assert over_limits(amd, kernel, 0, [6.9], 21 * kib, ("op[bf16]",))
    bound, idle = over_limits(target, kernel, 0, [7.0], 31 * kib, ("op[bf16]",))
    assert bound.startswith("7.0 instructions per byte in the main loop, and the memory, not they,")
    assert idle == "31 KiB in flight per multiprocessor, at least 32: read once"
    assert over_limits(target, kernel, 0, [7.0], 31 * kib, cases) == []
    assert over_limits(target, kernel, 0, [7.0], 31 * kib, (*cases, "op[bf16]")), "it serves both"
    assert over_limits(target, "op._other_kernel", 0, [7.0], 31 * kib, ("op[bf16]",)) == []


@pytest.mark.parametrize("target", TOY_TARGETS)
def test_every_candidate_of_an_autotuned_kernel_is_compiled(toy_reports, target):
    rows = [row for row in toy_reports[target].rows if row.op == "tuned"]
    assert sorted(row.constants["BLOCK"] for row in rows) == [1024, 2048]


@pytest.mark.parametrize(("target", "count"), [("sm_80", 4), ("gfx942", 3)])
def test_one_target_compiles_everything_and_others_what_covers_it(toy_reports, target, count):
    found = {row.cases for row in toy_reports[target].rows if row.op == "optional"}
    every = [("optional[]",), ("optional[mask]",), ("optional[scale]",), ("optional[mask scale]",)]
    assert found == set(every[-count:])


@pytest.mark.parametrize("target", TOY_TARGETS)
def test_errors_and_forgotten_kernels_fail_the_gate(toy_reports, target):
    report = toy_reports[target]
    assert {error.case: error.message for error in report.errors} == {
        "raising[]": "ZeroDivisionError: division by zero",
        "idle[]": "RuntimeError: the call launched no Triton kernel",
    }
    assert report.missing == ["toy_kernels._forgotten_kernel"]
    assert not report.passed


def test_a_worker_that_dies_is_a_failure():
    (report,) = aot.run_targets(["sm_90"], "benchmarks.no_such_cases")
    assert not report.passed
    assert "no_such_cases" in report.errors[0].message


def test_a_covering_has_every_shape_with_the_most_options_and_every_value_of_an_option():
    def known(dtype, mask=ABSENT, entropy=ABSENT):
        return {"x": dtype, "mask": mask, "entropy": entropy}

    found = {
        "plain": known("*bf16"),
        "mask": known("*bf16", mask="*u1"),
        "entropy": known("*bf16", entropy="*fp32"),
        "half entropy": known("*bf16", entropy="*bf16"),
        "all": known("*bf16", mask="*u1", entropy="*fp32"),
        "fp32": known("*fp32"),
        "fp32 mask": known("*fp32", mask="*u1"),
    }
    assert covering(found) == {"all", "mask", "entropy", "half entropy", "fp32 mask"}
    assert extremes(found) == {"all", "fp32 mask", "plain"}


def _row(**changes):
    fields = dict(
        target="sm_90", kernel="op._op_fwd_kernel", op="op", cases=("op[bf16]",), constants={},
        warps=4, registers=32, shared=0, spills=0, loads="16", stores="-",
    )  # fmt: skip
    return Row(**{**fields, **changes})


@pytest.mark.parametrize(("report", "code", "said"), [
    (Report("sm_90", rows=[_row()]), 0, f"triton {versions.installed()}: 1 spec"),
    (Report("sm_90", rows=[_row(faults=("spills (STACK:8 LOCAL:0)",))]), 1, "STACK:8"),
    (Report("sm_90", rows=[_row()], missing=["op._new_kernel"]), 1, "no call compiled it"),
    (Report("sm_90", [_row()], [CaseError("op[x]", "E: why", "")]), 1, "op[x]: E: why"),
    (Report("sm_90"), 1, "no kernel was compiled"),
])  # fmt: skip
def test_exit_code_and_json_follow_the_reports(report, code, said, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(aot, "run_targets", lambda *_: [report])
    path = tmp_path / "new" / "aot.json"
    assert aot.main(["--target", "sm_90", "--json", str(path)]) == code
    assert said in capsys.readouterr().out
    (saved,) = json.loads(path.read_text())
    assert (saved["target"], len(saved["rows"])) == ("sm_90", len(report.rows))


def test_each_version_asked_for_compiles_from_its_own_folder(monkeypatch, capsys):
    folders = {"3.7.0": Path("old"), versions.installed(): None}
    monkeypatch.setattr(versions, "folder_of", folders.__getitem__)
    seen = []

    def run(*given):
        seen.append(given[-1])
        return [Report("sm_90", rows=[_row()] if given[-1] else [])]

    monkeypatch.setattr(aot, "run_targets", run)
    asked = [f"--triton={version}" for version in folders]
    assert aot.main(asked) == 1, "of one of them"
    assert seen == list(folders.values())
    said = capsys.readouterr().out
    assert "passed with triton 3.7.0" in said
    assert f"FAILED with triton {versions.installed()}" in said


@pytest.mark.parametrize(("told", "error"), [
    ("(from versions: 3.7.0, 3.7.1)", versions.Unavailable),
    ("(from versions: none)", RuntimeError),
    ("no route to host", RuntimeError),
])  # fmt: skip
def test_a_version_without_a_wheel_is_told_from_an_index_that_does_not_answer(
    told, error, monkeypatch, tmp_path
):
    done = subprocess.CompletedProcess([], 1, "", f"ERROR: Could not find a version {told}")
    monkeypatch.setattr(versions.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(versions.sys, "prefix", str(tmp_path))
    with pytest.raises(error) as raised:
        versions.folder_of("3.0.0")
    assert raised.type is error
    assert not list(tmp_path.iterdir())


def test_reports_survive_json():
    report = Report("sm_90", [_row()], [CaseError("c", "m", "t")], ["k"], 1.0)
    text = json.dumps(aot.asdict(report))
    again = Report.from_json(json.loads(text))
    assert again == report
