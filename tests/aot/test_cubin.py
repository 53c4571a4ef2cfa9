"""What is read from a cubin is what CUDA's own tools print."""

import re
import subprocess
from pathlib import Path

import pytest
import triton

from tests.aot import cubin
from tests.aot.cubin import disassemble, labelled, usage_of
from tests.aot.isa import parse_loops

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
KERNELS = ("_spilling_kernel", "_wide_kernel", "_optional_kernel")


@pytest.fixture
def paths(toy_reports):
    """Cubins of toy kernels for sm_80, in the folder that Triton keeps compiled kernels in."""
    assert toy_reports["sm_80"].rows
    cache = Path(triton.knobs.cache.dir)
    found = [path for name in KERNELS for path in cache.glob(f"*/{name}.cubin")]
    return [path for path in found if b".target sm_80\n" in path.with_suffix(".ptx").read_bytes()]


def printed(tool, path, *options):
    command = [str(TOOLS / tool), *options, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_registers_and_spills_are_those_that_cuobjdump_prints(paths):
    spills = set()
    for path in paths:
        text = printed("cuobjdump", path, "-res-usage")
        said = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
        usage = usage_of(path.read_bytes())
        assert usage.registers == int(said["REG"])
        assert usage.spills == int(said["STACK"]) + int(said["LOCAL"])
        spills.add(usage.spills > 0)
    assert spills == {True, False}


def test_a_cubin_without_a_number_of_registers_raises(paths, monkeypatch):
    monkeypatch.setattr(cubin, "_numbers", lambda info: iter(()))
    with pytest.raises(ValueError, match="no number of registers"):
        usage_of(paths[0].read_bytes())


def test_loops_are_those_of_each_file_by_itself(paths):
    together = disassemble([path.read_bytes() for path in paths], 80)
    for path, text in zip(paths, together, strict=True):
        alone = parse_loops(printed("nvdisasm", path, "-ndf", "-c"), "cuda")
        assert set(parse_loops(text, "cuda")) == set(alone)


def test_instructions_that_were_not_printed_raise(paths, monkeypatch):
    whole = cubin._nvdisasm
    monkeypatch.setattr(
        cubin, "_nvdisasm", lambda *given: "\n".join(whole(*given).splitlines()[:-1])
    )
    with pytest.raises(RuntimeError, match=r"printed \d+ of \d+ instructions"):
        disassemble([paths[0].read_bytes()], 80)


def test_targets_of_branches_become_labels():
    lines = [
        (0x100, "        /*0100*/                   LDG.E R0, [R2] ;"),
        (0x110, "        /*0110*/              @!P0 BRA 0x100 ;"),
        (0x120, "        /*0120*/                   BRA.U !UP0, 0x130 ;"),
        (0x130, "        /*0130*/                   CALL.REL.NOINC 0x400 ;"),
        (0x140, "        /*0140*/                   EXIT ;"),
    ]
    assert labelled(lines).splitlines() == [
        ".L_100:",
        lines[0][1],
        "        /*0110*/              @!P0 BRA `(.L_100) ;",
        "        /*0120*/                   BRA.U !UP0, `(.L_130) ;",
        ".L_130:",
        lines[3][1],
        lines[4][1],
    ]
