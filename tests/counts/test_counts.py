"""Each goal of a count is a gate."""

import re
from pathlib import Path

import pytest

from tests.counts import of_processes
from tests.counts.all import COUNTS
from tests.counts.of_python import MOST, calls_of_functions
from tests.counts.record import Count
from tests.kernels.launches import interpreted
from tests.processes.traffic import SAMPLES


@interpreted
@pytest.mark.parametrize("count", [c for c in COUNTS if c.exact], ids=lambda c: c.what)
def test_a_goal_is_kept(count: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTRL_KERNELS_BACKEND", "auto")
    found = count.take()
    assert 0 < found <= count.goal, f"{found:g} {count.unit}"


def test_the_documents_say_what_processes_exchange() -> None:
    text = (Path(__file__).parents[2] / "docs" / "processes.md").read_text()
    said = re.search(r"(\d+) bytes per token, on (\d+) × (\d+) samples", text)
    assert said is not None
    counted, *shape = map(int, said.groups())
    assert shape == [of_processes.PROCESSES, SAMPLES // of_processes.PROCESSES]
    assert abs(counted - of_processes.received()) <= 1


def test_every_call_that_is_counted_in_python_has_a_goal() -> None:
    assert calls_of_functions().keys() == MOST.keys()
