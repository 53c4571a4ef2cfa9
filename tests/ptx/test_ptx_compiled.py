"""Triton's kernels on the machine for PTX, and the door."""

from pathlib import Path

import pytest

from tests.ptx import __main__ as door
from tests.ptx.record import Record
from tests.ptx.selection import SELECTION

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.skipif(door.no_triton(), reason="needs triton")
def test_small_kernels_compute_what_torch_does_and_faults_are_found():
    status, record = door.run(["tests/ptx/toy_kernels.py"])
    assert status == 0  # toy_kernels.py has the tests
    assert record.launches["toy_kernels._softmax_kernel"] == 3
    assert record.specialisations == 8
    found = sorted(fault.partition(",")[0] for fault in record.faults)
    assert found == ["_running_sum_kernel", "_total_kernel"]


def finds(monkeypatch: pytest.MonkeyPatch, record: Record, status: int = 0) -> int:
    monkeypatch.setattr(door, "run", lambda tests, processes: (status, record))
    monkeypatch.setattr(door, "defined", lambda package: {"kl._one_kernel", "kl._other_kernel"})
    return door.main(["--selection"])


def test_a_kernel_that_the_selection_does_not_launch_fails_it(monkeypatch, capsys):
    record = Record()
    record.launches.update(["kl._one_kernel"])
    assert finds(monkeypatch, record) == 1
    assert "no test of the selection launches kl._other_kernel" in capsys.readouterr().out
    record.launches.update(["kl._other_kernel"])
    assert finds(monkeypatch, record) == 0


@pytest.mark.parametrize(("status", "faults"), [(1, []), (0, ["f: race: of two"])])
def test_a_failed_test_or_a_fault_fails(monkeypatch, capsys, status, faults):
    record = Record(faults=faults)
    record.launches.update(["kl._one_kernel", "kl._other_kernel"])
    assert finds(monkeypatch, record, status) == 1
    assert f"FAILED: {len(faults)} races" in capsys.readouterr().out


def test_a_record_is_told_to_another_process():
    record = Record(specialisations=2, faults=["a"], compiling=1.5)
    record.launches.update(["a", "a"])
    both = Record.from_json(record.to_json())
    both.add(record)
    assert (both.launches["a"], both.specialisations, both.faults) == (4, 4, ["a", "a"])


def test_the_selection_names_tests_that_there_are():
    for each in SELECTION:
        path, _, test = each.partition("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {test.partition('[')[0]}(" in source, each
